"""Kinds of influence: what of the output is differentiated, or how else it is probed (docs/theory, section 6).

A `Pullback` is a set of covectors c at the hidden states or logits that are read. Each is pulled back to the input
positions, g_j = c' d(output)/dx_j, and the influence of position j is the root of the sum (or, for random covectors,
of the mean) of ||g_j||^2. The covectors are written down here in closed form; no such kind needs a forward pass of its
own. An `Experiment` runs its own passes: integrated gradients and perturbation, checks on all the others.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import Count, NonNegative, OneOf
from posbias.errors import RunError, UsageError
from posbias.measurement.outputs import WIDER, Influence, Output, Question, Reading, first_in_forward, over_draws
from posbias.models.devices import float64_device, in_float64
from posbias.models.hugging_face import HuggingFaceModel, looks_ahead
from posbias.models.model import Outputs
from posbias.registry import Registry, Spelled, split_literals

KINDS: Registry["Kind"] = Registry(
    "influence kind", left={"fisher": "probability, logprob and logit look at the predicted token"}
)

Site = Literal["hidden", "logits"]
Covectors = Float64[Tensor, "prompts passes outputs features"]


class Kind(Spelled, ABC):
    """One definition of influence."""

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


class Pullback(Kind):
    """A kind made of covectors; all of them share one forward pass."""

    site: ClassVar[Site]
    """The place of the covectors: at the hidden states after the final norm, or at the logits."""

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
    probe: Annotated[str, OneOf("rademacher", "ones")] = "rademacher"
    """Law of the probes: random signs ("rademacher"), or "ones" (see the warning above)."""
    exact: bool = False
    """All `width` unit covectors in place of probes: no sampling error, `width` vector-Jacobian products."""

    site: ClassVar[Site] = "hidden"
    takes_targets: ClassVar[bool] = False

    @property
    def sampled(self) -> bool:
        """True with random probes."""
        return not self.exact and self.probe != "ones"

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
        return torch.randint(0, 2, (self.probes, width), generator=generator).double() * 2 - 1


@KINDS.register("probability")
@dataclass(frozen=True)
class Probability(Pullback):
    """||d p(t)/dx_j||, p the softmax: the gradient of arXiv 2602.16837's code. d p_t/dz = p_t (e_t - p).

    t is the predicted token, the argmax of the logits; of a target, p is the product over its tokens.
    """

    site: ClassVar[Site] = "logits"

    def covectors(self, output: Outputs, reading: Reading, generators: Sequence[torch.Generator]) -> Covectors:
        """p_t (e_t - p); for a target, exp(share sum_i log p(t_i)) (e_t - p)."""
        probabilities = in_float64(output.logits.detach()).softmax(dim=-1)
        tokens = scored_tokens(output, reading)
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
        probabilities = in_float64(output.logits.detach()).softmax(dim=-1)
        return _surprise(probabilities, scored_tokens(output, reading))[:, None]


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


def _surprise(
    probabilities: Float64[Tensor, "prompts outputs vocabulary"], tokens: Int64[Tensor, "prompts outputs"]
) -> Float64[Tensor, "prompts outputs vocabulary"]:
    """e_t - p, the entry 1 - p_t formed from the other tokens' mass: a sure prediction keeps its digits."""
    gradient = (-probabilities).scatter(2, tokens[..., None], 0)
    return gradient.scatter(2, tokens[..., None], -gradient.sum(dim=2, keepdim=True))


FINEST = 2.0**-20
"""Width from which on no piece is halved: float32 embeddings move in steps of 2^-24. A jump of the score, where other
experts are chosen, is narrowed down to this and stays in the error."""

Evaluate = Callable[[float], tuple[float, Float64[np.ndarray, "n"]]]
"""A place in (0, 1] to the score there and the slope d score / d place, shared out among n inputs."""


def integrate_path(
    evaluate: Evaluate, ends: tuple[float, float], *, steps: int, tolerance: float
) -> tuple[Float64[np.ndarray, "n"], float, int]:
    """Simpson's rule on pieces of [0, 1], the midpoint rule on the first: networks may have no gradient at 0 itself.

    `ends` are the scores at 0 and 1. At most `steps` places are evaluated (>= 1; 1 is the midpoint of the whole path),
    until the error of what can still be halved is at most `tolerance` (>= 0) of the sum of |values|.

    Returns:
        Signed shares of the score's change; their error, summed over pieces: what a piece's shares miss of the score's
        change there or, if it is larger, what the last halving changed of |shares|, or all of a path that was never
        halved; the number of places.
    """
    scores, slopes = {0.0: ends[0], 1.0: ends[1]}, dict[float, Float64[np.ndarray, "n"]]()

    def slope(place: float) -> Float64[np.ndarray, "n"]:
        if place not in slopes:
            scores[place], slopes[place] = evaluate(place)
        return slopes[place]

    def shares(low: float, high: float) -> Float64[np.ndarray, "n"]:
        middle = slope((low + high) / 2)
        return (high - low) / 6 * (slope(low) + 4 * middle + slope(high)) if low > 0 else high * middle

    def error(run: tuple[float, float], change: float) -> float:
        return float(np.maximum(abs(pieces[run].sum() - (scores[run[1]] - scores[run[0]])), change))

    pieces = {(0.0, 1.0): shares(0.0, 1.0)}
    errors = {(0.0, 1.0): error((0.0, 1.0), float(np.abs(pieces[0.0, 1.0]).sum()))}
    while True:
        values = np.sum(list(pieces.values()), axis=0)
        halvable = {run: found for run, found in errors.items() if run[1] - run[0] > FINEST}
        needed = 3 if len(pieces) == 1 else 2  # two middles, and at first the end of the path
        if not sum(halvable.values()) > tolerance * np.abs(values).sum() or steps - len(slopes) < needed:
            return values, sum(errors.values()), len(slopes)
        low, high = max(halvable, key=halvable.__getitem__)
        before, _ = pieces.pop((low, high)), errors.pop((low, high))
        halves = ((low, (low + high) / 2), ((low + high) / 2, high))
        pieces |= {run: shares(*run) for run in halves}
        change = float(np.abs(pieces[halves[0]] + pieces[halves[1]] - before).sum()) / 2
        errors |= {run: error(run, change) for run in halves}


@KINDS.register("integrated_gradients")
@dataclass(frozen=True)
class IntegratedGradients(Experiment):
    """|(x_j - x0_j) . integral_0^1 df/dx_j (x0 + a (x - x0)) da|, f the log-probability of the token, x0 the baseline:
    the mean of all token embeddings, at every position. Near zero vectors networks that normalise their input change so
    abruptly that hundreds of steps may not suffice.

    The signed values sum to f(x) - f(x0), on every piece of the path as on the whole. The path is halved where the
    gradient misses the score's change most, or the last halving changed the shares most, until these errors sum to
    `tolerance` of what is shared out or `steps` are used; scores of trained models are rough along it, and evenly
    spaced steps pass over whole cliffs. In the details: `path_error`, the errors' sum (read this one), `attributed`,
    the sum of absolute values that it is compared with, `completeness_gap`, where misses cancel, `score`,
    `baseline_score` and the `steps` used. Jumps of the score (mixtures of experts) cannot be shared out and stay in the
    error. A target's own tokens stay as they are all along.

    Cost: at most `steps` forward and backward passes, and two forward passes.

    Source: Sundararajan, Taly & Yan 2017, arXiv 1703.01365; the adaptive rule for their Riemann sum is ours.
    """

    steps: Count = 512
    """Gradients along the path at most, >= 1; 1 is the one half-way."""
    tolerance: NonNegative = 0.02
    """Stop when `path_error` is this share of `attributed` or less, >= 0; 0 uses all steps."""

    def measure(self, question: Question) -> Influence:
        """Absolute attributions; their gap and the scores at both ends stand in `details`."""
        reading, end = question.reading, question.embeddings
        start = end.clone()
        prompt = start[:, : reading.n_positions]  # a target's own tokens stay
        model = question.model
        total = torch.zeros(model.width, dtype=torch.float64)
        with torch.no_grad():
            for tokens in torch.split(torch.arange(model.vocabulary_size), 4096):
                total += in_float64(model.embed(model.token_tensor([tokens.tolist()]))[0]).sum(dim=0).cpu()
            prompt[:] = (total / model.vocabulary_size).to(start)
            output = question.outputs(end)
            tokens = scored_tokens(output, reading)
            reached = float(_score(output, reading, tokens))
            at_start = float(_score(question.outputs(start), reading, tokens))
        if not np.isfinite(reached):
            where = first_in_forward(model, end)
            raise RunError(f"{self.name}: the output on prompt {question.key[1]} is not finite{where}")
        if not np.isfinite(at_start):
            raise RunError(
                f"{self.name}: the score at the mean embedding is {at_start} on prompt {question.key[1]}; in float32 "
                "it may be finite"
            )
        line = end - start

        def evaluate(place: float) -> tuple[float, Float64[np.ndarray, "n_inputs"]]:
            inputs = (start + place * line).requires_grad_()
            score = _score(question.outputs(inputs), reading, tokens)
            gradient = torch.autograd.grad(score.sum(), inputs)[0]
            slopes = (in_float64(gradient) * in_float64(line)).sum(dim=2)
            return float(score.detach()), slopes[0].cpu().numpy()

        ends = (at_start, reached)
        shares, error, used = integrate_path(evaluate, ends, steps=self.steps, tolerance=self.tolerance)
        signed = shares[: reading.n_positions]
        if not np.all(np.isfinite(signed)):
            raise RunError(f"{self.name}: the gradient on prompt {question.key[1]} is not finite{WIDER}")
        details = {
            "path_error": error,
            "attributed": float(np.abs(signed).sum()),
            "completeness_gap": float(signed.sum()) - (reached - at_start),
            "score": reached,
            "baseline_score": at_start,
            "steps": float(used),
        }
        missed = (
            f"{self.name}: on some prompts the path did not converge; do not use the profile where path_error is large"
        )
        converged = self.tolerance == 0 or error <= self.tolerance * details["attributed"]
        return Influence(np.abs(signed), None, details, () if converged else (missed,))


def _score(output: Outputs, reading: Reading, tokens: Int64[Tensor, "one outputs"]) -> Float64[Tensor, "one"]:
    """The log-probability of the predicted token or the target, combined over the outputs, in float64."""
    of_tokens = in_float64(output.logits).log_softmax(dim=-1).gather(2, tokens[..., None])[..., 0]
    return reading.share * of_tokens.sum(dim=1)


@KINDS.register("perturbation")
@dataclass(frozen=True)
class Perturbation(Experiment):
    """KL(p || p') of the next-token distribution, token j replaced by a random other one, in nats (mean over draws).

    KL is of second order in a small change, so that it gathers on few positions; `root` takes the square root of the
    mean, which is comparable with the gradient kinds. For the mean of several outputs, KL is averaged over them.

    Cost: `draws` forward passes of the prompt for every position.
    """

    draws: Count = 2
    """Other tokens tried at each position, uniform over the vocabulary, >= 1."""
    root: bool = False
    """Take the root of KL, which is linear in a small change, as gradients are."""

    takes_targets: ClassVar[bool] = False

    @property
    def sampled(self) -> bool:
        """Always."""
        return True

    @torch.no_grad()
    def measure(self, question: Question) -> Influence:
        """Mean KL with its standard error over draws."""
        generator = question.generator(self.name)
        size = question.reading.n_positions
        alternatives = question.model.vocabulary_size - 1
        if alternatives < 1:
            raise UsageError("perturbation needs a vocabulary of at least 2 tokens")
        # Uniform over all tokens except the one that stands there.
        tokens = torch.randint(alternatives, (size, self.draws), generator=generator).numpy()
        tokens = tokens + (tokens >= question.reading.token_ids[:, None])
        model, changed, replacements = question.model, np.repeat(np.arange(size), self.draws), tokens.ravel()
        causal = isinstance(model, HuggingFaceModel) and not looks_ahead(model, question.embeddings)
        # Sixteen changed prompts in a forward pass, beside the unchanged one.
        chunks = (slice(start, start + 16) for start in range(0, tokens.size, 16))
        moved = [_moved(question, changed[chunk], replacements[chunk], causal=causal) for chunk in chunks]
        divergence = np.concatenate(moved).reshape(tokens.shape)
        if not np.all(np.isfinite(divergence)):
            where = first_in_forward(question.model, question.embeddings)
            raise RunError(f"{self.name}: the output on prompt {question.key[1]} is not finite{where}")
        return over_draws(divergence.T, root=self.root)


def _moved(
    question: Question, places: Int64[np.ndarray, "copies"], tokens: Int64[np.ndarray, "copies"], *, causal: bool
) -> Float64[np.ndarray, "copies"]:
    """KL from the prompt's own outputs, in nats, of copies with one token replaced each."""
    reading, model = question.reading, question.model
    # The unchanged prompt runs in the same batch, so that rounding cancels.
    token_ids = np.tile(reading.token_ids, (len(places) + 1, 1))
    token_ids[np.arange(1, len(token_ids)), places] = tokens
    embeddings = model.embed(model.token_tensor(token_ids.tolist()))
    moved = divergences(model.outputs(embeddings, list(reading.positions)).logits)
    if causal:  # rows of a batch are rounded in ways of their own
        moved[places[:, None] > np.array(reading.positions)] = 0
    return np.asarray(reading.share * moved.sum(axis=1))


def divergences(logits: Float[Tensor, "copies outputs vocabulary"]) -> Float64[np.ndarray, "changed outputs"]:
    """KL(p || p') of the first row from every other one in nats, by terms that are all >= 0: sum p (e^u - 1 - u)."""
    unchanged, rows = in_float64(logits[0]).log_softmax(dim=-1), []
    for changed in logits[1:]:
        change = in_float64(changed).log_softmax(dim=-1) - unchanged
        terms = unchanged.exp() * (torch.expm1(change) - change)
        # A token that the model rules out (logit -inf) adds nothing.
        rows.append(terms.masked_fill(unchanged == -torch.inf, 0).sum(dim=-1))
    return torch.stack(rows).numpy(force=True)
