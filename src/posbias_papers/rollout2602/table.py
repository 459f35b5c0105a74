"""arXiv 2602.16837, Table 2 and its figure: rollouts of five ALiBi models from their measured mixing and content.

Every variant is computed with the authors' settings and with what the models really do: content divided by
sqrt(head_dim), the models' own slopes. Mixing, content and one measured curve are the authors' measurements under
`data/` (MIT licence), each with its source written inside. docs/theory, sections 1, 3 and 6.
"""

import itertools
import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Alibi, Architecture
from posbias.architecture.encodings import published_alibi_slopes
from posbias.comparison.distances import distances
from posbias.comparison.metrics import STATISTICS
from posbias.profiles import Profile
from posbias.progress import track
from posbias.results.figures import BLUE, ORANGE, VERMILION, YELLOW, Figure, Stroke, profile_figure
from posbias.results.records import plain
from posbias.results.tables import number_text
from posbias.theory import predict
from posbias_papers.reproduction import PAPERS, Columns, Experiment, Reproduction, Rows, tabled

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
    files = {name: read_data(f"measured_{file}") for name, file in DATA_FILES.items()}
    return tuple(
        PublishedModel(
            name=name,
            **{field: measured[field] for field in ("depth", "heads", "head_dim", "source")},
            n_positions=measured["length"],
            mixing=np.array(measured["mixing"], dtype=np.float64),
            content_unscaled=np.array(measured["content_diagonal_unscaled"], dtype=np.float64),
            slopes_published=tuple(measured["slopes_as_published"]),
            scales_bias=name in SCALED_BIAS,
        )
        for name, measured in files.items()
    )


@cache
def bloom_influence() -> Profile:
    """The measured influence of BLOOM-176B, |dp(argmax)/dx_j|, the only measured curve that is published as numbers."""
    return Profile.normalised(np.array(read_data("influence_bloom")["influence"], dtype=np.float64))


def read_data(name: str) -> dict[str, Any]:
    """One file of the package's data, `measured_<model>` or `influence_bloom`."""
    text = (resources.files("posbias_papers.rollout2602") / "data" / f"{name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


PAPER = "arXiv 2602.16837, A Structural Theory of Position Bias in Transformers"
TABLE_2 = {
    "falcon-rw-7b": (0.63, 0.19, 0.16),
    "mpt-7b": (0.62, 0.09, 0.10),
    "mpt-30b": (0.61, 0.16, 0.05),
    "bloom-7b": (0.63, 0.04, 0.18),
    "bloom-176b": (0.65, 0.08, 0.01),
}
"""W1 to the measured influence, FineWeb-Edu, 256 positions: (a) attention only, (b) with residual, (c) with content."""
TABLE_DIGIT = 0.005
"""Half a unit of the table's last digit."""
REPRODUCED = 0.01
"""Two units of its last digit."""
MEASURED_MODEL = "bloom-176b"
SLOPES = ("published", "real")
VARIANTS = {
    "attention_only": ("a attention only", "attention_only", 0, Stroke(ORANGE, "dashdot")),
    "residual": ("b residual", "rollout", 1, Stroke(VERMILION, "dash")),
    "content_published": ("c content as published", "rollout_content", 2, Stroke(BLUE, "solid")),
    "content_scaled": ("c content / sqrt(head_dim)", "rollout_content", 2, Stroke(YELLOW, "longdash")),
}
"""a, b, c with content as published, and c as the model adds it: label, theory, column of the table, stroke."""

Profiles = dict[tuple[str, str, str], Profile]
"""By (model, slopes, variant)."""


MEASURED_COLUMNS: Columns = {
    "slopes": lambda row: row["slopes"],
    "variant": lambda row: VARIANTS[row["variant"]][0],
    "W1": lambda row: number_text(row["metrics"]["wasserstein"], 4),
    "published": lambda row: number_text(row["published"], 2),
    "flat line": lambda row: number_text(row["flat"]["wasserstein"], 4),
    "rank": lambda row: number_text(row["metrics"]["spearman"]),
    "log error": lambda row: number_text(row["metrics"]["log_error"]),
    "first token": lambda row: number_text(row["first_token"], 4),
    "last": lambda row: number_text(row["last_token"], 4),
    "minimum": lambda row: number_text(row["minimum_position"], 0),
}
BOUND_COLUMNS: Columns = {
    "model": lambda row: row["model"],
    "slopes": lambda row: row["slopes"],
    "variant": lambda row: VARIANTS[row["variant"]][0],
    "published W1": lambda row: number_text(row["published"], 2),
    "mean position": lambda row: number_text(row["mean_position"]),
    "measured mean": lambda row: f"{row['measured_mean_low']:.3f} to {row['measured_mean_high']:.3f}",
    "W1 at least": lambda row: number_text(row["bound"]) + (" > published" if row["contradicts_table"] else ""),
    "flat line": lambda row: f"at least {row['flat_bound']:.3f}",
}


@PAPERS.register("rollout-2602.16837")
class Rollout(Experiment):
    """Table 2 of arXiv 2602.16837 again, beside the flat line and beside what the models really compute.

    W1 exists for BLOOM-176B alone, the one measured curve that is published as numbers. For every model W1 is bounded
    from below by the difference of mean positions; the measured mean follows from the table itself, because the
    attention-only profile sits on the first token, so that its W1 is the measured mean.
    """

    paper = PAPER

    def run(self, settings: None) -> Reproduction:
        """Roll out all models, with either slopes, in every variant."""
        profiles = rollout_profiles()
        models = published_models()
        rows = [_row(model, slopes, variant, profiles) for model in models for slopes in SLOPES for variant in VARIANTS]
        arrays = {"/".join(key): profile.influence for key, profile in profiles.items()}
        return Reproduction(
            experiment=self.name,
            title="Residual-aware rollout of five ALiBi models, 256 positions",
            rows=rows,
            statements=_statements(rows),
            tables=[
                tabled(
                    "BLOOM-176B: W1 to its measured influence",
                    [row for row in rows if "metrics" in row],
                    MEASURED_COLUMNS,
                ),
                tabled("All models: the least W1 that the table's own measured mean allows", rows, BOUND_COLUMNS),
            ],
            figures=[_figure(model, profiles, rows) for model in models],
            arrays={**arrays, f"{MEASURED_MODEL}/measured": bloom_influence().influence},
            settings={"n_positions": 256, "source": models[0].source},
        )


def _statements(rows: Rows) -> list[str]:
    """Whether the table is reproduced where a measured curve is published, and what content and slopes do to it."""
    w1 = {(row["slopes"], row["variant"]): float(row["metrics"]["wasserstein"]) for row in rows if "metrics" in row}
    printed = dict(zip(VARIANTS, TABLE_2[MEASURED_MODEL], strict=False))
    worst = max(abs(w1["published", variant] - value) for variant, value in printed.items())
    against = [row for row in rows if row["contradicts_table"] and row["slopes"] == "published"]
    models = sorted({row["model"] for row in against if row["variant"] in printed})
    bare, content = w1["real", "residual"], w1["real", "content_scaled"]
    return [
        f"With the authors' settings the table's distances are {'' if worst <= REPRODUCED else 'not '}reproduced "
        f"to {worst:.3f} on {MEASURED_MODEL}; the shipped numbers contradict the table on "
        f"{', '.join(models) or 'no other model'}.",
        f"With its own slopes and q.k divided by sqrt(head_dim), as the model does, content "
        f"{'improves on' if content < bare else 'is no better than'} the residual rollout alone: W1 {content:.4f} "
        f"against {bare:.4f}.",
    ]


def rollout_profiles() -> Profiles:
    """The profile of every model, slope scheme and variant."""
    profiles: Profiles = {}
    for model in track(published_models(), "rollouts"):
        contents = {"content_published": model.content_unscaled, "content_scaled": model.content_scaled}
        encodings = {"published": Alibi(model.slopes_published), "real": Alibi(model.slopes_real)}
        for variant, slopes in itertools.product(VARIANTS, SLOPES):
            architecture = Architecture(
                depth=model.depth,
                heads=model.heads,
                encoding=encodings[slopes],
                mixing=model.mixing,
                content=contents.get(variant, 0.0),
            )
            found = predict(architecture, model.n_positions, theory=VARIANTS[variant][1])
            profiles[model.name, slopes, variant] = found.profile
    return profiles


def _row(model: PublishedModel, slopes: str, variant: str, profiles: Profiles) -> dict[str, Any]:
    profile = profiles[model.name, slopes, variant]
    # The mean position of the measured curve follows from the table's first column: by the triangle inequality through
    # a point mass on position 0, W1(a, measured) differs from it by at most the mean of a, and no W1 to the measured
    # curve is smaller than a mean's distance to this range. The table was made with the published slopes.
    slack = TABLE_DIGIT + _mean(profiles[model.name, "published", "attention_only"])
    low, high = TABLE_2[model.name][0] - slack, TABLE_2[model.name][0] + slack
    published = TABLE_2[model.name][VARIANTS[variant][2]]
    mean, flat = _mean(profile), _mean(Profile.uniform(model.n_positions))
    bound = max(low - mean, mean - high, 0.0)
    row: dict[str, Any] = {
        "model": model.name,
        "slopes": slopes,
        "variant": variant,
        "published": published,
        "mean_position": mean,
        "measured_mean_low": low,
        "measured_mean_high": high,
        "bound": bound,
        "flat_bound": max(low - flat, flat - high, 0.0),
        "contradicts_table": bound > published + TABLE_DIGIT,
        "first_token": float(profile.influence[0]),
        "last_token": float(profile.influence[-1]),
        "minimum_position": float(STATISTICS["minimum_position"](profile.influence)),
    }
    if model.name == MEASURED_MODEL:
        metrics, of_flat = distances(profile, bloom_influence())
        row |= {"metrics": plain(metrics), "flat": plain(of_flat)}
    return row


def _mean(profile: Profile) -> float:
    return float(STATISTICS["mean_position"](profile.influence))


def _figure(model: PublishedModel, profiles: Profiles, rows: list[dict[str, Any]]) -> Figure:
    """The paper's figure: the variants' profiles as published, and c as the model adds its content."""
    by_variant = {row["variant"]: row for row in rows if row["model"] == model.name and row["slopes"] == "published"}
    theories = [
        profiles[model.name, "published", name].curve(label, stroke) for name, (label, _, _, stroke) in VARIANTS.items()
    ]
    means = [by_variant[variant]["mean_position"] for variant in ("residual", "content_published", "content_scaled")]
    title = (
        f"{model.name}: mean position {means[0]:.2f} with residual, {means[1]:.2f} with content as published, "
        f"{means[2]:.2f} with content as the model adds it"
    )
    measured = [bloom_influence().curve("measured")] if model.name == MEASURED_MODEL else []
    return profile_figure(f"rollout-{model.name}", title, theories, measured=measured)
