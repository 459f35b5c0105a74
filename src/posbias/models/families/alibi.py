"""ALiBi slopes of real models as our encoding."""

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Alibi, Encoding, published_alibi_slopes


def alibi_encoding(slopes: Float64[np.ndarray, "heads"]) -> Encoding:
    """`Alibi()` where the slopes are the published ones (the short spelling), else `Alibi(slopes=...)`."""
    if np.allclose(slopes, published_alibi_slopes(len(slopes)), rtol=1e-12, atol=0):
        return Alibi()
    return Alibi(slopes=tuple(slopes.tolist()))
