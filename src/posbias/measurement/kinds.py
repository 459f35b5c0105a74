"""Kinds of influence: what of the last position's output is differentiated (docs/theory, section 6).

Every kind is a set of covectors c at the last position's hidden state or logits. Each is pulled back to the input
positions, g_j = c' d(output)/dx_j, and the influence of position j is the root of the sum (or, for random covectors,
of the mean) of ||g_j||^2. The covectors are written down here in closed form; no kind needs a pass of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from posbias.errors import UsageError
from posbias.models.model import LastOutput
from posbias.registry import Registry

KINDS: Registry["Kind"] = Registry("influence kind")

PROBES = ("rademacher", "gaussian", "ones")
"""Probe vectors of the `jacobian` kind."""

Site = Literal["hidden", "logits"]


class Kind(ABC):
    """One definition of influence."""

    name: ClassVar[str]
    site: ClassVar[Site]
    """Where the covectors live: at the hidden state after the final norm, or at the logits."""

    @property
    def sampled(self) -> bool:
        """Whether the covectors are random, so that the mean over them estimates and has a standard error."""
        return False

    @abstractmethod
    def passes(self, width: int) -> int:
        """How many covectors, hence vector-Jacobian products, a model with `width` features needs."""

    @abstractmethod
    def covectors(self, output: LastOutput, generator: torch.Generator) -> Float64[Tensor, "passes features"]:
        """The covectors for one prompt, on the CPU.

        Args:
            output: The last position's output; only its first row is read.
            generator: CPU generator for the random ones.
        """

    def __str__(self) -> str:
        return KINDS.spell(self)


@KINDS.register("jacobian")
@dataclass(frozen=True)
class Jacobian(Kind):
    """||dh_last/dx_j||_F, h_last after the final norm: by random probes v, E||v'J_j||^2 = ||J_j||_F^2, or exactly.

    `probe="ones"` is the surrogate of published code, one fixed all-ones vector. It is a trap: the vector lies in
    LayerNorm's null space (weight 1, bias 0), so on an untrained GPT-2 it measures round-off and nothing else.
    """

    probes: int = 4
    """Random probes per prompt, >= 1; not used by `exact` and `probe="ones"`."""
    probe: str = "rademacher"
    """Law of the probes: "rademacher" (less noise), "gaussian", or "ones" (see the warning above)."""
    exact: bool = False
    """All `width` unit covectors in place of probes: no sampling error, `width` vector-Jacobian products."""

    site: ClassVar[Site] = "hidden"

    def __post_init__(self) -> None:
        _check_count("jacobian", self.probes)
        if self.probe not in PROBES:
            raise UsageError(f"jacobian: probe must be one of {', '.join(PROBES)}, got {self.probe!r}")
        if not isinstance(self.exact, bool):
            raise UsageError(f"jacobian: exact must be True or False, got {self.exact!r}")

    @property
    def sampled(self) -> bool:
        """True with random probes."""
        return not self.exact and self.probe != "ones"

    def passes(self, width: int) -> int:
        """`probes`, or `width` when exact, or 1 for the fixed vector."""
        if self.exact:
            return width
        return self.probes if self.sampled else 1

    def covectors(self, output: LastOutput, generator: torch.Generator) -> Float64[Tensor, "passes features"]:
        """Unit vectors, random probes, or the all-ones vector."""
        width = output.hidden.shape[1]
        if self.exact:
            return torch.eye(width, dtype=torch.float64)
        if self.probe == "ones":
            return torch.ones(1, width, dtype=torch.float64)
        shape = (self.probes, width)
        if self.probe == "gaussian":
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


class ScoreKind(Kind):
    """A score of the predicted next token t = argmax of the logits: one covector at the logits."""

    site: ClassVar[Site] = "logits"

    def passes(self, width: int) -> int:
        """One."""
        return 1

    def covectors(self, output: LastOutput, generator: torch.Generator) -> Float64[Tensor, "passes features"]:
        """The gradient of the score with respect to the logits."""
        probabilities = _probabilities(output)
        token = int(probabilities.argmax())
        return self.logit_gradient(probabilities, token)[None]

    @abstractmethod
    def logit_gradient(self, probabilities: Float64[Tensor, "vocabulary"], token: int) -> Float64[Tensor, "vocabulary"]:
        """d score / d logits."""


@KINDS.register("probability")
@dataclass(frozen=True)
class Probability(ScoreKind):
    """||d p(t)/dx_j||, p the softmax: the gradient of arXiv 2602.16837's code. d p_t/dz = p_t (e_t - p)."""

    def logit_gradient(self, probabilities: Float64[Tensor, "vocabulary"], token: int) -> Float64[Tensor, "vocabulary"]:
        """p_t (e_t - p)."""
        return probabilities[token] * _surprise(probabilities, token)


@KINDS.register("logprob")
@dataclass(frozen=True)
class LogProbability(ScoreKind):
    """||d log p(t)/dx_j||. d log p_t/dz = e_t - p."""

    def logit_gradient(self, probabilities: Float64[Tensor, "vocabulary"], token: int) -> Float64[Tensor, "vocabulary"]:
        """e_t - p."""
        return _surprise(probabilities, token)


@KINDS.register("logit")
@dataclass(frozen=True)
class Logit(ScoreKind):
    """||d z_t/dx_j||, z the logits."""

    def logit_gradient(self, probabilities: Float64[Tensor, "vocabulary"], token: int) -> Float64[Tensor, "vocabulary"]:
        """e_t."""
        gradient = torch.zeros_like(probabilities)
        gradient[token] = 1
        return gradient


@KINDS.register("fisher")
@dataclass(frozen=True)
class Fisher(Kind):
    """sqrt tr(J_j' F J_j), F = diag(p) - p p' the Fisher information of the next token: how far the prediction moves.

    Tokens t are drawn from the model's own distribution; E[(e_t - p)(e_t - p)'] = F, so E||d log p(t)/dx_j||^2 is
    the trace.
    """

    probes: int = 4
    """Tokens drawn per prompt, >= 1."""

    site: ClassVar[Site] = "logits"

    def __post_init__(self) -> None:
        _check_count("fisher", self.probes)

    @property
    def sampled(self) -> bool:
        """Always."""
        return True

    def passes(self, width: int) -> int:
        """`probes`."""
        return self.probes

    def covectors(self, output: LastOutput, generator: torch.Generator) -> Float64[Tensor, "passes features"]:
        """e_t - p for every drawn token."""
        probabilities = _probabilities(output)
        tokens = torch.multinomial(probabilities, self.probes, replacement=True, generator=generator)
        return torch.stack([_surprise(probabilities, int(token)) for token in tokens])


def resolve_kinds(kinds: Sequence[str | Kind] | str | Kind) -> tuple[Kind, ...]:
    """Kinds from literal spellings such as `"jacobian(probes=8)"`, from objects, or both.

    Raises:
        UsageError: no kind, an unknown one, a parameter out of range, or the same kind twice.
    """
    given = [kinds] if isinstance(kinds, str | Kind) else list(kinds)
    resolved = tuple(KINDS.parse(kind) if isinstance(kind, str) else kind for kind in given)
    if not resolved:
        raise UsageError(f"no influence kind given; known: {', '.join(KINDS)}")
    names = [kind.name for kind in resolved]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"influence kind {name!r} is given {names.count(name)} times; give each kind once")
    return resolved


def _check_count(kind: str, probes: object) -> None:
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise UsageError(f"{kind}: probes must be a whole number >= 1, got {probes!r}")


def _probabilities(output: LastOutput) -> Float64[Tensor, "vocabulary"]:
    """Softmax of the first row's logits in float64, on the CPU."""
    return output.logits[0].detach().double().cpu().softmax(dim=0)


def _surprise(probabilities: Float64[Tensor, "vocabulary"], token: int) -> Float64[Tensor, "vocabulary"]:
    """e_t - p, the entry 1 - p_t formed from the other tokens' mass: a sure prediction keeps its digits."""
    gradient = -probabilities
    gradient[token] = 0
    gradient[token] = -gradient.sum()
    return gradient
