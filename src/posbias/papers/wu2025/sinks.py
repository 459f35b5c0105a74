"""Which positions trained members' attention sinks into: the sink score of every key, from attention maps.

Source: Gu et al. 2025 as used by Wu et al., arXiv 2502.01951, appendix K.4.
"""

import numpy as np
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.errors import UsageError

THRESHOLD = 0.2
"""tau of the published figures: attention above it counts."""

Maps = Float[Tensor, "layer member batch head query key"]


def sink_scores(
    maps: Maps, visible: Bool[np.ndarray, "mask_query mask_key"], *, threshold: float = THRESHOLD
) -> Float64[np.ndarray, "member key"]:
    """Share of the queries that see a key whose attention to it exceeds the threshold.

    score_j = mean over layers, heads and sequences of (1 / sum_i M_ij) sum_i 1{A_ij > tau}.

    Args:
        maps: Attention of every member; rows sum to 1 over the visible keys.
        visible: The mask M, query by key, as `Mask.visible` gives it; every key is seen by some query.
        threshold: tau in [0, 1).

    Returns:
        In [0, 1]; NaN for a member whose attention is not finite.

    Raises:
        UsageError: the threshold is outside [0, 1), the mask has another size, or a key is seen by no query.
    """
    if not 0 <= threshold < 1:
        raise UsageError(f"the sink threshold must lie in [0, 1), got {threshold}")
    if visible.shape != tuple(maps.shape[-2:]):
        raise UsageError(f"the mask is {visible.shape}, the attention maps {tuple(maps.shape[-2:])}; they must agree")
    seen = visible.sum(0)
    if not seen.all():
        raise UsageError(f"no query sees key {int(np.argmin(seen))}, so it has no sink score")
    share = (maps > threshold).double().mean(dim=(0, 2, 3)).sum(1).cpu().numpy() / seen
    finite = maps.isfinite().all(0).flatten(1).all(1).cpu().numpy()
    return np.where(finite[:, None], share, np.nan)
