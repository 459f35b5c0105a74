"""Integrated gradients: the score's change from a baseline to the prompt, shared out among positions.

A check on the gradient kinds that is not local: it sums the gradient along the straight path from an input that says
nothing, so that a saturated prediction, whose gradient vanishes at the prompt itself, still gets its due.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import check_size
from posbias.errors import RunError, UsageError
from posbias.limits import REPEATS
from posbias.measurement.finiteness import first_in_backward, first_in_forward
from posbias.measurement.kinds import KINDS, Experiment, scored_tokens
from posbias.measurement.outputs import Reading
from posbias.measurement.path_integral import PathIntegral, integrate_path
from posbias.measurement.question import Influence, Question
from posbias.models.model import Model, Outputs

SCORES = ("logprob", "logit", "probability")
BASELINES = ("zero", "mean")
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

    Source: Sundararajan, Taly & Yan, ICML 2017; the adaptive rule for their Riemann sum is ours.
    """

    steps: int = 512
    """Gradients along the path at most, >= 1; 1 is the one half-way."""
    tolerance: float = 0.02
    """Stop when `path_error` is this share of `attributed` or less, >= 0; 0 uses all steps."""
    baseline: str = "mean"
    """"mean": the mean of all token embeddings, at every position; or "zero", near which networks that normalise their
    input change so abruptly that hundreds of steps may not suffice."""
    score: str = "logprob"
    """What is shared out: "logprob", "logit" or "probability" of the predicted token or the target."""

    def __post_init__(self) -> None:
        check_size("integrated_gradients: steps", self.steps, REPEATS)
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise UsageError(f"integrated_gradients: tolerance must be a number >= 0, got {self.tolerance!r}")
        if self.baseline not in BASELINES:
            raise UsageError(
                f"integrated_gradients: baseline must be one of {', '.join(BASELINES)}, got {self.baseline!r}"
            )
        if self.score not in SCORES:
            raise UsageError(f"integrated_gradients: score must be one of {', '.join(SCORES)}, got {self.score!r}")

    def measure(self, question: Question) -> Influence:
        """Absolute attributions; `details` hold their gap and the scores at both ends."""
        end = question.embeddings
        start = self._baseline(question)
        with torch.no_grad():
            output = question.outputs(end)
            tokens = scored_tokens(output, question.reading)
            reached = float(self._score(output, question.reading, tokens))
            left = float(self._score(question.outputs(start), question.reading, tokens))
        if not np.isfinite(reached):
            where = first_in_forward(question.model, end)
            raise RunError(f"{self.name}: the output on prompt {question.key[1]} is not finite{where}")
        if not np.isfinite(left):
            raise RunError(
                f"{self.name}: the score at the baseline {self.baseline!r} is {left} on prompt {question.key[1]}; "
                "the other baseline, or float32, may be finite"
            )
        path = self._integrate(question, start, tokens, (left, reached))
        signed = path.values[: question.reading.n_positions]
        if not np.all(np.isfinite(signed)):
            raise RunError(
                f"{self.name}: the gradient on prompt {question.key[1]} is not finite{self._fault(question, tokens)}"
            )
        details = {
            "path_error": path.error,
            "path_gap": path.gap,
            "attributed": float(np.abs(signed).sum()),
            "completeness_gap": float(signed.sum()) - (reached - left),
            "score": reached,
            "baseline_score": left,
            "steps": float(path.steps),
        }
        return Influence(np.abs(signed), None, details, self._missed(path.error, details["attributed"]))

    def _missed(self, error: float, attributed: float) -> tuple[str, ...]:
        """A sentence where the path did not converge."""
        if self.tolerance == 0 or error <= self.tolerance * attributed:
            return ()
        return (
            f"{self.name}: on some prompts the path did not converge; do not use the profile where path_error is large",
        )

    def _integrate(
        self,
        question: Question,
        start: Float[Tensor, "one n_inputs feature"],
        tokens: Int64[Tensor, "outputs"],
        ends: tuple[float, float],
    ) -> PathIntegral:
        """Signed, by position; as many places per pass as the question has rows."""
        line = question.embeddings - start

        def evaluate(places: list[float]) -> tuple[Float64[np.ndarray, "place"], Float64[np.ndarray, "place n_inputs"]]:
            inputs = (start + start.new_tensor(places)[:, None, None] * line).requires_grad_()
            scores = self._score(question.outputs(inputs), question.reading, tokens)
            gradient = torch.autograd.grad(scores.sum(), inputs)[0]
            slopes = (gradient.double() * line.double()).sum(dim=2)
            return scores.detach().cpu().numpy(), slopes.cpu().numpy()

        return integrate_path(evaluate, ends, steps=self.steps, tolerance=self.tolerance, at_once=question.rows)

    def _score(self, output: Outputs, reading: Reading, tokens: Int64[Tensor, "outputs"]) -> Float64[Tensor, "batch"]:
        """f, in float64."""
        logits = output.logits.double()
        values = logits if self.score == "logit" else logits.log_softmax(dim=-1)
        own = values.gather(2, tokens.to(values.device).expand(len(values), -1)[..., None])[..., 0]
        if self.score != "probability":
            return reading.share * own.sum(dim=1)
        if reading.targets is not None:
            return (reading.share * own.sum(dim=1)).exp()
        return reading.share * own.exp().sum(dim=1)

    def _baseline(self, question: Question) -> Float[Tensor, "one n_inputs feature"]:
        start = question.embeddings.clone()
        prompt = start[:, : question.reading.n_positions]
        prompt[:] = 0 if self.baseline == "zero" else mean_embedding(question.model).to(start)
        return start

    def _fault(self, question: Question, tokens: Int64[Tensor, "outputs"]) -> str:
        with first_in_backward(question.model.network) as answer:
            self._integrate(question, self._baseline(question), tokens, (0.0, 0.0))
        return answer()


@torch.no_grad()
def mean_embedding(model: Model) -> Float64[Tensor, "feature"]:
    """The mean of the vectors that the vocabulary's tokens enter the network with."""
    total = torch.zeros(model.width, dtype=torch.float64)
    for start in range(0, model.vocabulary_size, VOCABULARY_CHUNK):
        tokens = range(start, min(start + VOCABULARY_CHUNK, model.vocabulary_size))
        total += model.embed(model.token_tensor([list(tokens)]))[0].double().sum(dim=0).cpu()
    return total / model.vocabulary_size
