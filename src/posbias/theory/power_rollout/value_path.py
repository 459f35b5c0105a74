"""How much of the exact Jacobian passes by the attention weights: the share of the score path.

J_value is the Jacobian with every attention weight held constant, so that influence passes by values alone; what is
missing, J - J_value, passes at least once by a query or key. Both are pulled with the same random probes
(docs/theory, section 5).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import RunError
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.statistics import Interval, mean_ends, mean_of
from posbias.theory.power_rollout.probes import check_draws, check_request, covectors, generators
from posbias.theory.power_rollout.prompt_trace import trace_model
from posbias.theory.power_rollout.walk import BACK_PROPAGATION, Walk

PROBES_AT_ONCE = 4
"""Probes that share one recomputation of attention; more would need more memory."""
CONSTANT_ATTENTION = Walk(power=1, key=False)
"""Signed maps along values alone."""


@dataclass(frozen=True, eq=False)
class ValuePathShare:
    """The exact Jacobian, its value-path part, and what separates them, for a set of prompts."""

    squares: Float64[np.ndarray, "count probes n_positions quantity"]
    """Of every probe v, by quantity: ||v'J_j||^2, ||v'J_value_j||^2 and ||v'(J - J_value)_j||^2. A score's gradient is
    one exact probe."""
    share: Float64[np.ndarray, "count n_positions"]
    """||(J - J_value)_j||_F / ||J_j||_F of each prompt; above 1 where the two parts cancel."""
    share_error: Float64[np.ndarray, "count n_positions"]
    """Standard error of `share` over probes (jackknife); 0 for a score, whose gradient is exact."""
    total: Float64[np.ndarray, "count"]
    """The same ratio with squares summed over all positions first."""
    total_error: Float64[np.ndarray, "count"]
    """Standard error of `total` over probes (jackknife)."""
    mean_total: Interval
    """Mean of `total` over prompts, with an interval over prompts."""
    mean_share: Float64[np.ndarray, "n_positions"]
    """Mean of `share` over prompts."""
    low: Float64[np.ndarray, "n_positions"]
    """Lower end of the pointwise interval of `mean_share` over prompts."""
    high: Float64[np.ndarray, "n_positions"]
    target: str
    seed: int

    @property
    def norms(self) -> Float64[np.ndarray, "count n_positions quantity"]:
        """||J_j||_F, ||J_value_j||_F and ||(J - J_value)_j||_F of each prompt."""
        return np.asarray(np.sqrt(self.squares.mean(1)))


@checked
def value_path_share(
    model: Model, prompts: Prompts, *, probes: int = 8, seed: int = 0, target: str = "jacobian"
) -> ValuePathShare:
    """Compare the exact Jacobian with the one that holds attention weights constant.

    Args:
        model: A Hugging Face model of any described family, or a reference model.
        prompts: Equally long prompts.
        probes: Random probes of the final state per prompt, at least 2; a score's gradient needs none.
        seed: Of the probes; prompts draw independently of each other.
        target: One of TARGETS.

    Returns:
        Shares per prompt and position and in total, with standard errors over probes and intervals over prompts.

    Raises:
        UsageError: undescribed family, unknown target, fewer than 2 probes, prompts too long for the model.
        RunError: activations or gradients are not finite.

    Source: docs/theory, section 5.
    """
    check_request(model, prompts, target=target)
    check_draws("probes", probes, seed)
    sources = generators(seed, len(prompts.token_ids), model.device)
    squares = np.stack(
        [
            _prompt_squares(model, ids, source, probes=probes if target == "jacobian" else 1, target=target)
            for ids, source in zip(track(prompts.token_ids, "value path"), sources, strict=True)
        ]
    )
    (share, share_error), (total, total_error) = _ratio(squares), _ratio(squares.sum(2, keepdims=True))
    low, high = mean_ends(share, least=0.0)
    return ValuePathShare(
        squares=squares,
        share=share,
        share_error=share_error,
        total=total[:, 0],
        total_error=total_error[:, 0],
        mean_total=mean_of(total[:, 0]).interval(least=0.0),
        mean_share=share.mean(0),
        low=low,
        high=high,
        target=target,
        seed=seed,
    )


@torch.no_grad()
def _prompt_squares(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    generator: torch.Generator,
    *,
    probes: int,
    target: str,
) -> Float64[np.ndarray, "probes n_positions quantity"]:
    """Squared norms of one prompt's gradients, probe by probe."""
    trace = trace_model(model, token_ids, target=target)
    rows = []
    for start in range(0, probes, PROBES_AT_ONCE):
        vectors = covectors(trace, min(PROBES_AT_ONCE, probes - start), generator)
        whole, value = (trace.pull(vectors, walk).double() for walk in (BACK_PROPAGATION, CONSTANT_ATTENTION))
        rows.append(torch.stack([part.square().sum(-1) for part in (whole, value, whole - value)], -1).cpu().numpy())
    squares = np.concatenate(rows)
    if not np.all(np.isfinite(squares)):
        raise RunError("gradients of the value path are not finite; load it in a wider type (float32, float64)")
    return squares


def _ratio(
    squares: Float64[np.ndarray, "count probes places quantity"],
) -> tuple[Float64[np.ndarray, "count places"], Float64[np.ndarray, "count places"]]:
    """sqrt(sum over probes of the difference / of the whole), 0 where both vanish, and its jackknife error."""

    def share(sums: Float64[np.ndarray, "*rows quantity"]) -> Float64[np.ndarray, "*rows"]:
        whole, difference = sums[..., 0], sums[..., 2]
        ratio = np.divide(difference, whole, out=np.zeros_like(whole), where=whole > 0)
        return np.asarray(np.sqrt(ratio))

    total = squares.sum(1)
    probes = squares.shape[1]
    without = share(total[:, None] - squares) if probes > 1 else share(squares)
    spread = np.square(without - without.mean(1, keepdims=True)).sum(1)
    return share(total), np.sqrt((probes - 1) / probes * spread)
