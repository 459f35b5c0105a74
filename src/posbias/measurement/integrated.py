"""Integrated gradients: the score's change from a baseline to the prompt, shared out among positions.

A check on the gradient kinds that is not local: it sums the gradient along the straight path from an input that says
nothing, so that a saturated prediction, whose gradient vanishes at the prompt itself, still gets its due.

The gradient's integral over a piece of the path must be the change of the score over the piece, which costs nothing to
know; what the piece misses of it is its gap. A gap may be small by chance while the shares are wrong, since it sees
their sum alone. So the error of a piece is the larger of its gap and what halving last changed in the shares there, and
the worst pieces are halved until the rest is small.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import Count, NonNegative, OneOf
from posbias.errors import RunError
from posbias.measurement.blocks import WIDER, first_in_forward
from posbias.measurement.kinds import KINDS, Experiment, scored_tokens
from posbias.measurement.outputs import Influence, Question, Reading
from posbias.models.devices import in_float64
from posbias.models.model import Model, Outputs

FINEST = 2.0**-20
"""Width from which on no piece is halved: float32 embeddings move in steps of 2^-24. A jump of the score, where other
experts are chosen, is narrowed down to this and stays in the gap."""

Inputs = Float[Tensor, "one n_inputs feature"]
Evaluate = Callable[[list[float]], tuple[Float64[np.ndarray, "place"], Float64[np.ndarray, "place n"]]]
"""Places in (0, 1] to the scores there and the slopes d score / d place, shared out among n inputs."""


@dataclass(frozen=True, eq=False)
class PathIntegral:
    """The score's change between the ends of a path, shared out among the inputs."""

    values: Float64[np.ndarray, "n"]
    """Signed shares."""
    gap: float
    """Sum over the pieces of |what the values miss of the score's change there|."""
    error: float
    """Sum over the pieces of their gap or, if it is larger, of the shares that the last halving changed there; the sum
    of all shares if the path was never halved."""
    steps: int


@dataclass(frozen=True, eq=False)
class _Piece:
    low: float
    high: float
    values: Float64[np.ndarray, "n"]
    gap: float
    change: float
    """Half of what the halving that made this piece changed, summed over |shares|."""

    @property
    def error(self) -> float:
        return max(self.gap, self.change)

    @property
    def halves(self) -> tuple[tuple[float, float], tuple[float, float]]:
        middle = (self.low + self.high) / 2
        return (self.low, middle), (middle, self.high)


def integrate_path(
    evaluate: Evaluate, ends: tuple[float, float], *, steps: int, tolerance: float, at_once: int = 1
) -> PathIntegral:
    """Simpson's rule on pieces of [0, 1], the midpoint rule on the first: networks may have no gradient at 0 itself.

    `ends` are the scores at 0 and 1. At most `steps` places are evaluated (>= 1; 1 is the midpoint of the whole path),
    at most `at_once` per call, until the error of what can still be halved is at most `tolerance` (>= 0) of the sum of
    |values|.
    """
    scores, slopes = dict(zip((0.0, 1.0), ends, strict=True)), dict[float, Float64[np.ndarray, "n"]]()

    def visit(places: set[float]) -> None:
        ascending = sorted(places)
        for begin in range(0, len(ascending), at_once):
            chunk = ascending[begin : begin + at_once]
            found, rows = evaluate(chunk)
            scores.update(zip(chunk, found.tolist(), strict=True))
            slopes.update(zip(chunk, rows, strict=True))

    def piece(low: float, high: float) -> _Piece:
        middle = slopes[(low + high) / 2]
        values = high * middle
        if low > 0:
            values = (high - low) / 6 * (slopes[low] + 4 * middle + slopes[high])
        return _Piece(low, high, values, abs(float(values.sum()) - (scores[high] - scores[low])), 0.0)

    def halved(whole: _Piece) -> list[_Piece]:
        first, second = (piece(*half) for half in whole.halves)
        change = float(np.abs(first.values + second.values - whole.values).sum()) / 2
        return [replace(first, change=change), replace(second, change=change)]

    visit({0.5})
    whole = piece(0.0, 1.0)
    pieces = [replace(whole, change=float(np.abs(whole.values).sum()))]
    while True:
        values = np.sum([part.values for part in pieces], axis=0)
        halvable = sorted((part for part in pieces if part.high - part.low > FINEST), key=lambda part: part.error)
        open_error = sum(part.error for part in halvable)
        if not np.isfinite(open_error) or open_error <= tolerance * np.abs(values).sum():
            break
        alike = [part for part in halvable if part.error >= halvable[-1].error / 2]
        chosen = alike[-max(1, (steps - len(slopes)) // 2) :]
        halves = [half for part in chosen for half in part.halves]
        needed = {place for low, high in halves for place in ((low + high) / 2, *((low, high) if low > 0 else ()))}
        if len(slopes | dict.fromkeys(needed)) > steps:
            break
        visit(needed - slopes.keys())
        pieces = [part for part in pieces if part not in chosen] + [half for part in chosen for half in halved(part)]
    gap, error = (float(np.sum([getattr(part, name) for part in pieces])) for name in ("gap", "error"))
    return PathIntegral(values, gap, error, len(slopes))


VOCABULARY_CHUNK = 4096
"""Tokens embedded at once for the mean embedding."""


@KINDS.register("integrated_gradients")
@dataclass(frozen=True)
class IntegratedGradients(Experiment):
    """|(x_j - x0_j) . integral_0^1 df/dx_j (x0 + a (x - x0)) da|, f the score of the token, x0 the baseline.

    The signed values sum to f(x) - f(x0), on every piece of the path as on the whole. The path is halved where the
    gradient misses the score's change most, or the last halving changed the shares most, until these errors sum to
    `tolerance` of what is shared out or `steps` are used; scores of trained models are rough along it, and evenly
    spaced steps pass over whole cliffs. In the details: `path_error`, the errors' sum (read this one), `path_gap`, that
    of the misses, which see the sum over positions alone, `attributed`, the sum of absolute values that both are
    compared with, `completeness_gap`, where misses cancel, `score`, `baseline_score` and the `steps` used. Jumps of the
    score (mixtures of experts) cannot be shared out and stay in both. A target's own tokens stay as they are all along.

    Cost: at most `steps` forward and backward passes, and two forward passes.

    Source: Sundararajan, Taly & Yan 2017, arXiv 1703.01365; the adaptive rule for their Riemann sum is ours.
    """

    steps: Count = 512
    """Gradients along the path at most, >= 1; 1 is the one half-way."""
    tolerance: NonNegative = 0.02
    """Stop when `path_error` is this share of `attributed` or less, >= 0; 0 uses all steps."""
    baseline: Annotated[str, OneOf("zero", "mean")] = "mean"
    """"mean": the mean of all token embeddings, at every position; or "zero", near which networks that normalise their
    input change so abruptly that hundreds of steps may not suffice."""
    score: Annotated[str, OneOf("logprob", "logit", "probability")] = "logprob"
    """Score that is shared out: "logprob", "logit" or "probability" of the predicted token or the target."""

    def measure(self, question: Question) -> Influence:
        """Absolute attributions; their gap and the scores at both ends stand in `details`."""
        end = question.embeddings
        start = self._baseline(question)
        with torch.no_grad():
            output = question.outputs(end)
            tokens = scored_tokens(output, question.reading)
            reached = float(self._score(output, question.reading, tokens))
            at_start = float(self._score(question.outputs(start), question.reading, tokens))
        if not np.isfinite(reached):
            where = first_in_forward(question.model, end)
            raise RunError(f"{self.name}: the output on prompt {question.key[1]} is not finite{where}")
        if not np.isfinite(at_start):
            raise RunError(
                f"{self.name}: the score at the baseline {self.baseline!r} is {at_start} on prompt {question.key[1]}; "
                "the other baseline, or float32, may be finite"
            )
        path = self._integrate(question, start, tokens, (at_start, reached))
        signed = path.values[: question.reading.n_positions]
        if not np.all(np.isfinite(signed)):
            raise RunError(f"{self.name}: the gradient on prompt {question.key[1]} is not finite{WIDER}")
        details = {
            "path_error": path.error,
            "path_gap": path.gap,
            "attributed": float(np.abs(signed).sum()),
            "completeness_gap": float(signed.sum()) - (reached - at_start),
            "score": reached,
            "baseline_score": at_start,
            "steps": float(path.steps),
        }
        missed = (
            f"{self.name}: on some prompts the path did not converge; do not use the profile where path_error is large"
        )
        converged = self.tolerance == 0 or path.error <= self.tolerance * details["attributed"]
        return Influence(np.abs(signed), None, details, () if converged else (missed,))

    def _integrate(
        self, question: Question, start: Inputs, tokens: Int64[Tensor, "one outputs"], ends: tuple[float, float]
    ) -> PathIntegral:
        """Signed attributions by position, from as many places per pass as the question has rows."""
        line = question.embeddings - start

        def evaluate(places: list[float]) -> tuple[Float64[np.ndarray, "place"], Float64[np.ndarray, "place n_inputs"]]:
            inputs = (
                start + torch.tensor(places, dtype=torch.float64).to(start)[:, None, None] * line
            ).requires_grad_()
            scores = self._score(question.outputs(inputs), question.reading, tokens)
            gradient = torch.autograd.grad(scores.sum(), inputs)[0]
            slopes = (in_float64(gradient) * in_float64(line)).sum(dim=2)
            return scores.detach().cpu().numpy(), slopes.cpu().numpy()

        return integrate_path(evaluate, ends, steps=self.steps, tolerance=self.tolerance, at_once=question.rows)

    def _score(
        self, output: Outputs, reading: Reading, tokens: Int64[Tensor, "one outputs"]
    ) -> Float64[Tensor, "batch"]:
        """The score f of every row, in float64."""
        logits = in_float64(output.logits)
        values = logits if self.score == "logit" else logits.log_softmax(dim=-1)
        of_tokens = values.gather(2, tokens.expand(len(values), -1)[..., None])[..., 0]
        if self.score != "probability":
            return reading.share * of_tokens.sum(dim=1)
        if reading.targets is not None:
            return (reading.share * of_tokens.sum(dim=1)).exp()
        return reading.share * of_tokens.exp().sum(dim=1)

    def _baseline(self, question: Question) -> Inputs:
        start = question.embeddings.clone()
        prompt = start[:, : question.reading.n_positions]
        prompt[:] = 0 if self.baseline == "zero" else mean_embedding(question.model).to(start)
        return start


@torch.no_grad()
def mean_embedding(model: Model) -> Float64[Tensor, "feature"]:
    """The mean of the vectors that the vocabulary's tokens enter the network with."""
    total = torch.zeros(model.width, dtype=torch.float64)
    for start in range(0, model.vocabulary_size, VOCABULARY_CHUNK):
        tokens = range(start, min(start + VOCABULARY_CHUNK, model.vocabulary_size))
        total += in_float64(model.embed(model.token_tensor([list(tokens)]))[0]).sum(dim=0).cpu()
    return total / model.vocabulary_size
