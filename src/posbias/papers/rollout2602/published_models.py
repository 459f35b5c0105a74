"""What arXiv 2602.16837 published about five models: measured mixing and content, its Table 2, one measured curve.

The files under `data/` are the authors' measurements (MIT licence), each with its source written inside.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import published_alibi_slopes
from posbias.profiles import Profile

TABLE_2 = {
    "falcon-rw-7b": (0.63, 0.19, 0.16),
    "mpt-7b": (0.62, 0.09, 0.10),
    "mpt-30b": (0.61, 0.16, 0.05),
    "bloom-7b1": (0.63, 0.04, 0.18),
    "bloom": (0.65, 0.08, 0.01),
}
"""W1 to the measured influence, FineWeb-Edu, 256 positions: (a) attention only, (b) with residual, (c) with content."""
TABLE_DIGIT = 0.005
"""Half a unit of the table's last digit."""
TITLES = {"bloom": "bloom-176b", "bloom-7b1": "bloom-7b"}
"""The paper's names, where they differ from the files'."""
SCALED_BIAS = frozenset({"falcon-rw-7b"})
"""Models whose attention divides the ALiBi bias, too, by sqrt(head_dim)."""


@dataclass(frozen=True, eq=False)
class PublishedModel:
    """One model as the paper's rollout sees it."""

    name: str
    """As in the paper's tables."""
    depth: int
    heads: int
    head_dim: int
    n_positions: int
    mixing: Float64[np.ndarray, "depth"]
    """Mean over tokens of |a| / (|x| + |a|) per layer (the authors' code; the paper has Frobenius norms)."""
    content_unscaled: Float64[np.ndarray, "depth heads"]
    """Mean diagonal minus mean strictly-lower q.k, not divided by sqrt(head_dim)."""
    slopes_published: tuple[float, ...]
    """2^(-8h/H) for any head count, as the authors' rollout has it."""
    table: tuple[float, float, float]
    """Published W1 of variants a, b, c."""
    source: str
    scales_bias: bool

    @property
    def content_scaled(self) -> Float64[np.ndarray, "depth heads"]:
        """The offset the model really adds to its diagonal logits."""
        return np.asarray(self.content_unscaled / np.sqrt(self.head_dim))

    @property
    def slopes_real(self) -> tuple[float, ...]:
        """The slopes the model really uses: the power-of-two scheme, divided where its logits scale the bias."""
        divisor = self.head_dim**0.5 if self.scales_bias else 1.0
        return tuple(float(slope) / divisor for slope in published_alibi_slopes(self.heads))


@cache
def published_models() -> tuple[PublishedModel, ...]:
    """The five models, in the order of the paper's table."""
    return tuple(_model(name) for name in TABLE_2)


@cache
def bloom_influence() -> Profile:
    """The measured influence of BLOOM-176B, |dp(argmax)/dx_j|, the only measured curve that is published as numbers."""
    return Profile.normalised(np.array(read_data("influence_bloom")["influence"], dtype=np.float64))


def read_data(name: str) -> dict[str, Any]:
    """One file of the package's data, `measured_<model>` or `influence_bloom`."""
    text = (resources.files("posbias.papers.rollout2602") / "data" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _model(name: str) -> PublishedModel:
    measured = read_data(f"measured_{name}")
    return PublishedModel(
        name=TITLES.get(name, name),
        depth=measured["depth"],
        heads=measured["heads"],
        head_dim=measured["head_dim"],
        n_positions=measured["length"],
        mixing=np.array(measured["mixing"], dtype=np.float64),
        content_unscaled=np.array(measured["content_diagonal_unscaled"], dtype=np.float64),
        slopes_published=tuple(measured["slopes_as_published"]),
        table=TABLE_2[name],
        source=measured["source"],
        scales_bias=name in SCALED_BIAS,
    )
