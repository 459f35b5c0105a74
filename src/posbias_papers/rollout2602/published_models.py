"""Five ALiBi models as arXiv 2602.16837 published them: measured mixing and content, and one measured curve.

The files under `data/` are the authors' measurements (MIT licence), each with its source written inside.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture.encodings import published_alibi_slopes
from posbias.profiles import Profile

DATA_FILES = {
    "falcon-rw-7b": "falcon-rw-7b",
    "mpt-7b": "mpt-7b",
    "mpt-30b": "mpt-30b",
    "bloom-7b": "bloom-7b1",
    "bloom-176b": "bloom",
}
"""Names of the data files by the paper's names of the models, in the order of its table."""
SCALED_BIAS = frozenset({"falcon-rw-7b"})
"""Models whose attention divides the ALiBi bias by sqrt(head_dim) as it does the logits."""


@dataclass(frozen=True, eq=False)
class PublishedModel:
    """One published model in the terms of the paper's rollout."""

    name: str
    """The model's name in the paper's tables."""
    depth: int
    heads: int
    head_dim: int
    n_positions: int
    mixing: Float64[np.ndarray, "depth"]
    """Mean over tokens of |a| / (|x| + |a|) per layer (the authors' code; the paper has Frobenius norms)."""
    content_unscaled: Float64[np.ndarray, "depth heads"]
    """Mean diagonal minus mean strictly-lower q.k, not divided by sqrt(head_dim)."""
    slopes_published: tuple[float, ...]
    """The slopes of the authors' rollout, 2^(-8h/H) for any head count."""
    source: str
    """Origin of the measurements."""
    scales_bias: bool
    """True if its attention divides the ALiBi bias by sqrt(head_dim)."""

    @property
    def content_scaled(self) -> Float64[np.ndarray, "depth heads"]:
        """The offset the model really adds to its diagonal logits."""
        return np.asarray(self.content_unscaled / np.sqrt(self.head_dim))

    @property
    def slopes_real(self) -> tuple[float, ...]:
        """The slopes the model really uses: the power-of-two scheme, divided if its logits scale the bias."""
        divisor = self.head_dim**0.5 if self.scales_bias else 1.0
        return tuple(float(slope) / divisor for slope in published_alibi_slopes(self.heads))


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """The five models, in the order of the paper's table."""
    return tuple(_read_model(name) for name in DATA_FILES)


@cache
def bloom_influence() -> Profile:
    """The measured influence of BLOOM-176B, |dp(argmax)/dx_j|, the only measured curve that is published as numbers."""
    return Profile.normalised(np.array(read_data("influence_bloom")["influence"], dtype=np.float64))


def read_data(name: str) -> dict[str, Any]:
    """One file of the package's data, `measured_<model>` or `influence_bloom`."""
    text = (resources.files("posbias_papers.rollout2602") / "data" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _read_model(name: str) -> PublishedModel:
    measured = read_data(f"measured_{DATA_FILES[name]}")
    return PublishedModel(
        name=name,
        depth=measured["depth"],
        heads=measured["heads"],
        head_dim=measured["head_dim"],
        n_positions=measured["length"],
        mixing=np.array(measured["mixing"], dtype=np.float64),
        content_unscaled=np.array(measured["content_diagonal_unscaled"], dtype=np.float64),
        slopes_published=tuple(measured["slopes_as_published"]),
        source=measured["source"],
        scales_bias=name in SCALED_BIAS,
    )
