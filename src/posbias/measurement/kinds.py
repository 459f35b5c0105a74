"""Kinds of influence: what of the output is differentiated, or how else it is probed (docs/theory, section 6).

A `Pullback` is a set of covectors c at the hidden states or logits that are read. Each is pulled back to the input
positions, g_j = c' d(output)/dx_j, and the influence of position j is the root of the sum (or, for random covectors,
of the mean) of ||g_j||^2. The covectors are written down here in closed form; no such kind needs a forward pass of its
own. An `Experiment` runs its own passes (integrated.py, perturbation.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from posbias.checks import Count, OneOf
from posbias.errors import UsageError
from posbias.measurement.outputs import Influence, Output, Question, Reading
from posbias.models.devices import float64_device, in_float64
from posbias.models.model import Outputs
from posbias.registry import Registry, split_literals

KINDS: Registry["Kind"] = Registry(
    "influence kind", left={"fisher": "probability, logprob and logit look at the predicted token"}
)

Site = Literal["hidden", "logits"]
Covectors = Float64[Tensor, "prompts passes outputs features"]


class Kind(ABC):
    """One definition of influence."""

    name: ClassVar[str]
    takes_targets: ClassVar[bool] = True
    """True if the kind looks at tokens, so that the output may be a given continuation."""

    @property
    def sampled(self) -> bool:
        """True if anything is drawn at random, so that the result is an estimate with a standard error."""
        return False

    def check_output(self, output: Output) -> None:
        """Refuse an output that this kind cannot be measured on."""
        if output.targeted and not self.takes_targets:
            able = ", ".join(name for name in KINDS if KINDS[name].takes_targets)
            raise UsageError(f"{self.name} looks at no given tokens; output {output} takes the kinds {able}")

    def __str__(self) -> str:
        return KINDS.spell(self)


class Pullback(Kind):
    """A kind made of covectors; all of them share one forward pass."""

    site: ClassVar[Site]
    """The place of the covectors: at the hidden states after the final norm, or at the logits."""

    def passes(self, width: int) -> int:
        """Number of covectors, hence vector-Jacobian products, that a model with `width` features needs."""
        return 1

    @abstractmethod
    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """The covectors of every prompt of a batch, on the output's device, before the outputs' share.

        All prompts are read alike; each has a generator of its own on the CPU, for random covectors.
        """


class Experiment(Kind):
    """A kind with passes of its own."""

    @abstractmethod
    def measure(self, question: Question) -> Influence:
        """The influence of every position of one prompt.

        Raises:
            RunError: a value is not finite.
        """


@KINDS.register("jacobian")
@dataclass(frozen=True)
class Jacobian(Pullback):
    """||dh/dx_j||_F, h the hidden state read, after the final norm: by random probes v, or exactly.

    E||v'J_j||^2 = ||J_j||_F^2. For the mean of several hidden states the same v is pulled back from all of them.

    `probe="ones"` is the surrogate of published code, one fixed all-ones vector. It is a trap: the vector lies in
    LayerNorm's null space (weight 1, bias 0), so on an untrained GPT-2 it measures round-off and nothing else.
    """

    probes: Count = 4
    """Random probes per prompt, >= 1; not used by `exact` and `probe="ones"`."""
    probe: Annotated[str, OneOf("rademacher", "gaussian", "ones")] = "rademacher"
    """Law of the probes: "rademacher" (less noise), "gaussian", or "ones" (see the warning above)."""
    exact: bool = False
    """All `width` unit covectors in place of probes: no sampling error, `width` vector-Jacobian products."""

    site: ClassVar[Site] = "hidden"
    takes_targets: ClassVar[bool] = False

    @property
    def sampled(self) -> bool:
        """True with random probes."""
        return not self.exact and self.probe != "ones"

    def passes(self, width: int) -> int:
        """`probes`, or `width` when exact, or 1 for the fixed vector."""
        if self.exact:
            return width
        return self.probes if self.sampled else 1

    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """Unit vectors, random probes, or the all-ones vector; the same at every output, so that it acts on the sum."""
        _, outputs, width = output.hidden.shape
        drawn = [self.vectors(width, generator) for generator in (generators if self.sampled else generators[:1])]
        vectors = (torch.stack(drawn) if len(drawn) > 1 else drawn[0][None]).to(float64_device(output.hidden.device))
        return vectors[:, :, None].expand(len(generators), -1, outputs, -1)

    def vectors(self, width: int, generator: torch.Generator) -> Float64[Tensor, "passes features"]:
        """The covectors at one hidden state."""
        if self.exact:
            return torch.eye(width, dtype=torch.float64)
        if self.probe == "ones":
            return torch.ones(1, width, dtype=torch.float64)
        shape = (self.probes, width)
        if self.probe == "gaussian":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


@KINDS.register("probability")
@dataclass(frozen=True)
class Probability(Pullback):
    """||d p(t)/dx_j||, p the softmax: the gradient of arXiv 2602.16837's code. d p_t/dz = p_t (e_t - p).

    t is the predicted token, the argmax of the logits; of a target, p is the product over its tokens.
    """

    site: ClassVar[Site] = "logits"

    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """p_t (e_t - p); for a target, exp(share sum_i log p(t_i)) (e_t - p)."""
        probabilities, tokens = _probabilities(output), scored_tokens(output, reading)
        factor = probabilities.gather(2, tokens[..., None])
        if reading.targets is not None:
            factor = (reading.share * factor.log().sum(dim=1, keepdim=True)).exp()
        return (factor * _surprise(probabilities, tokens))[:, None]


@KINDS.register("logprob")
@dataclass(frozen=True)
class LogProbability(Pullback):
    """||d log p(t)/dx_j||, t the predicted token or the target's. d log p_t/dz = e_t - p."""

    site: ClassVar[Site] = "logits"

    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """e_t - p."""
        return _surprise(_probabilities(output), scored_tokens(output, reading))[:, None]


@KINDS.register("logit")
@dataclass(frozen=True)
class Logit(Pullback):
    """||d z_t/dx_j||, z the logits, t the predicted token or the target's."""

    site: ClassVar[Site] = "logits"

    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """e_t."""
        tokens = scored_tokens(output, reading)
        gradient = torch.zeros(output.logits.shape, dtype=torch.float64, device=tokens.device)
        return gradient.scatter_(2, tokens[..., None], 1)[:, None]


def resolve_kinds(kinds: Sequence[str | Kind] | str | Kind) -> tuple[Kind, ...]:
    """Kinds from literal spellings such as `"jacobian(probes=8),logit"`, from objects, or both."""
    listed = split_literals(kinds) if isinstance(kinds, str) else [kinds] if isinstance(kinds, Kind) else list(kinds)
    resolved = tuple(KINDS.parse(kind) if isinstance(kind, str) else kind for kind in listed)
    if not resolved:
        raise UsageError(f"no influence kind given; known: {', '.join(KINDS)}")
    names = [kind.name for kind in resolved]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"influence kind {name!r} is given {names.count(name)} times; give each kind once")
    return resolved


def scored_tokens(output: Outputs, reading: Reading) -> Int64[Tensor, "prompts outputs"]:
    """The token whose score is read at every output: the target's, otherwise the predicted one; beside float64."""
    device = float64_device(output.logits.device)
    if reading.targets is not None:
        return torch.tensor(reading.targets, device=device).expand(len(output.logits), -1)
    return output.logits.detach().argmax(dim=-1).to(device)


def _probabilities(output: Outputs) -> Float64[Tensor, "prompts outputs vocabulary"]:
    return in_float64(output.logits.detach()).softmax(dim=-1)


def _surprise(
    probabilities: Float64[Tensor, "prompts outputs vocabulary"], tokens: Int64[Tensor, "prompts outputs"]
) -> Float64[Tensor, "prompts outputs vocabulary"]:
    """e_t - p, the entry 1 - p_t formed from the other tokens' mass: a sure prediction keeps its digits."""
    gradient = (-probabilities).scatter(2, tokens[..., None], 0)
    return gradient.scatter(2, tokens[..., None], -gradient.sum(dim=2, keepdim=True))
