"""arXiv 2603.10123, "Lost in the Middle at Birth": its theory and its claims against the Jacobian of untrained models.

Distances with intervals over births, beside the flat line and the split-half noise. docs/theory, sections 2 and 4.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.comparison import STATISTICS, compare_with_prompts, summarise
from posbias.comparison.metrics import METRICS, wasserstein
from posbias.comparison.sampling import split_half_noise
from posbias.errors import UsageError
from posbias.papers.birth2603.cases import MODELS, Measured, measure_cases, ones_probe_share
from posbias.papers.birth2603.models import TOKENS, BirthSettings
from posbias.papers.birth2603.statements import birth_statements
from posbias.papers.reproduction import Reproduction
from posbias.profiles import Profile, uniform_profile
from posbias.report.figures import BLUE, GREEN, PURPLE, SKY, VERMILION, Figure, Stroke, profiles_figure
from posbias.report.tables import Table, interval_text, number_text
from posbias.statistics import jackknife, leave_one_out

PAPER = "arXiv 2603.10123, Lost in the Middle at Birth: An Exact Theory of Transformer Position Bias"
COMPARED = {"wasserstein": (0.0, 1.0), "spearman": (-1.0, 1.0), "log_error": (0.0, np.inf)}
"""Metrics with an interval, and the range of each."""
LABELS = {
    "continuous": "published density, mean mixing",
    "continuous_fitted": "published density, mixing fitted",
    "finite": "exact at finite N, mean mixing",
    "closed_form": "exact at finite N, measured mixing",
    "rollout": "residual rollout, measured mixing",
    "mean_field": "mean field, nothing fitted",
    "reciprocal": "1/(j + 1), no theory",
    "flat": "flat line",
}
_DRAWN = {
    "continuous": Stroke(SKY, "dashdot"),
    "continuous_fitted": Stroke(BLUE, "dash"),
    "closed_form": Stroke(VERMILION, "dash"),
    "mean_field": Stroke(GREEN, "solid"),
    "reciprocal": Stroke(PURPLE, "dot"),
}


def reproduce_birth(settings: object = None) -> Reproduction:
    """The position bias of untrained Qwen2- and GPT-2-shaped models, and what of the paper's claims survives.

    Args:
        settings: `BirthSettings`, or None for its defaults.

    Raises:
        UsageError: settings of another kind, or a length beyond the models' positions.
        RunError: a gradient is not finite.
    """
    chosen = BirthSettings() if settings is None else settings
    if not isinstance(chosen, BirthSettings):
        raise UsageError(f"birth-2603.10123 takes BirthSettings, got {type(chosen).__name__}")
    cases = measure_cases(chosen)
    generator = np.random.default_rng(chosen.seed)
    rows = [row for measured in cases for row in theory_rows(measured, generator)]
    shapes = [shape_row(measured, generator) for measured in cases]
    contrasts = rope_rows(cases, generator)
    probe = ones_probe_share(chosen)
    return Reproduction(
        paper=PAPER,
        title=f"Position bias at birth: {chosen.births} initialisations, {chosen.n_positions} positions, "
        f"size {chosen.size}",
        statements=birth_statements(rows, shapes, contrasts, probe),
        rows=[*rows, *shapes, *contrasts, *({"sort": "probe", "model": name, "share": probe[name]} for name in probe)],
        tables=[_distance_table(rows), _shape_table(shapes), _rope_table(contrasts)],
        figures=[_figure(measured) for measured in cases],
        arrays=_arrays(cases),
        settings=chosen.describe(),
        seeds={"seed": chosen.seed},
    )


def theory_rows(measured: Measured, generator: np.random.Generator) -> list[dict[str, Any]]:
    """One row per theory, the flat line last: distances with intervals over births, noise, interior recency."""
    seed = int(generator.integers(2**63))
    sample = measured.sample
    noise = split_half_noise(sample, generator=np.random.default_rng(seed))
    flat = uniform_profile(sample.units.shape[1])
    rows = []
    for name, theory in {**measured.theories, "flat": flat}.items():
        pair = compare_with_prompts(theory, sample, generator=np.random.default_rng(seed))
        rows.append(
            {
                "sort": "theory",
                "model": measured.case.model,
                "tokens": measured.case.tokens,
                "theory": name,
                **_distances(theory, measured, seed),
                "flat_wasserstein": pair.flat.as_record(),
                "noise": vars(noise),
                "than_flat": None if name == "flat" else pair.decides,
                "interior_recency": float(STATISTICS["interior_recency"](theory.influence)),
                "minimum_position": float(STATISTICS["minimum_position"](theory.influence)),
            }
        )
    return rows


def shape_row(measured: Measured, generator: np.random.Generator) -> dict[str, Any]:
    """The measured profile's shares with intervals, and what the published theory says of its middle and its end."""
    n_positions = measured.sample.units.shape[1]
    average = measured.sample.average
    shares = {name: value.as_record() for name, value in summarise(measured.sample, generator=generator).items()}
    return {
        "sort": "shape",
        "model": measured.case.model,
        "tokens": measured.case.tokens,
        **shares,
        "flat_interior_recency": float(STATISTICS["interior_recency"](uniform_profile(n_positions).influence)),
        "middle_over_flat": float(n_positions * average[n_positions // 2]),
        "least_over_flat": float(n_positions * average.min()),
        "last_over_flat": float(n_positions * average[-1]),
        "atom": float(np.prod(1 - measured.mixing)),
        "dead_zone": float(np.prod(1 / np.arange(1.0, len(measured.mixing)))),
        "layers": len(measured.mixing),
        "mixing": float(measured.mixing.mean()),
        "fitted_mixing": measured.fitted_mixing,
        "births": len(measured.sample.units),
    }


def rope_rows(cases: Sequence[Measured], generator: np.random.Generator) -> list[dict[str, Any]]:
    """With against without RoPE, births paired: W1 and log error between the profiles, beside the split-half noise."""
    known = {(measured.case.model, measured.case.tokens): measured for measured in cases}
    rows = []
    for models in MODELS.values():
        for other in models[1:]:
            for tokens in TOKENS:
                first, second = known[models[0], tokens].sample, known[other, tokens].sample
                weights = leave_one_out(len(first.units))
                row: dict[str, Any] = {"sort": "rope", "model": models[0], "without": other, "tokens": tokens}
                for name, (least, most) in COMPARED.items():
                    values = METRICS[name](weights @ first.units, weights @ second.units)
                    row[name] = jackknife(values).interval(least=least, most=most).as_record()
                row["noise"] = vars(split_half_noise(first, generator=generator))
                row["flat_wasserstein"] = float(
                    wasserstein(uniform_profile(first.units.shape[1]).influence, first.average)
                )
                rows.append(row)
    return rows


def _distances(theory: Profile, measured: Measured, seed: int) -> dict[str, dict[str, float | None]]:
    """Each compared metric with its interval; all theories see the same resampled births."""
    units = measured.sample.units
    weights = leave_one_out(len(units))
    found = {}
    for name, (least, most) in COMPARED.items():
        found[name] = (
            jackknife(METRICS[name](theory.influence, weights @ units)).interval(least=least, most=most).as_record()
        )
    return found


def _arrays(cases: Sequence[Measured]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for measured in cases:
        stem = f"{measured.case.model}/{measured.case.tokens}"
        arrays[f"{stem}/per_birth"] = measured.sample.units
        arrays[f"{stem}/mixing"] = measured.mixing
        arrays.update({f"{stem}/theories/{name}": theory.influence for name, theory in measured.theories.items()})
    return arrays


def _figure(measured: Measured) -> Figure:
    theories: Mapping[str, tuple[Profile, Stroke]] = {
        LABELS[name]: (measured.theories[name], stroke) for name, stroke in _DRAWN.items()
    }
    average = measured.sample.average
    minimum = float(STATISTICS["minimum_position"](average))
    shares = [100 * float(STATISTICS[name](average)) for name in ("first_tenth", "interior_recency", "last_token")]
    title = (
        f"{measured.case} at birth: {shares[0]:.0f} % on the first tenth, {shares[1]:.1f} % on the last without the "
        f"last position, {shares[2]:.0f} % on the last position; minimum at {minimum:.0f}"
    )
    slug = f"birth-{measured.case.model}-{measured.case.tokens}".lower().replace(" ", "-")
    banded = Profile.mean_of(measured.sample.units)
    return profiles_figure(slug, title, theories, measured={"measured Jacobian": banded})


def _distance_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ["model", "tokens", "theory", "W1 [95 %]", "flat line", "noise", "rank", "log error [95 %]"]
    header.append("interior recency")
    cells = [
        [
            row["model"],
            row["tokens"],
            LABELS[row["theory"]],
            interval_text(row["wasserstein"], 4),
            number_text(row["flat_wasserstein"]["value"], 4),
            number_text(row["noise"]["mean"], 4),
            number_text(row["spearman"]["value"], 3),
            interval_text(row["log_error"], 2),
            number_text(row["interior_recency"], 4),
        ]
        for row in rows
    ]
    return Table("Every theory against the measured Jacobian", header, cells)


def _shape_table(shapes: Sequence[Mapping[str, Any]]) -> Table:
    header = ["model", "tokens", "first tenth", "interior recency", "flat", "last minus middle tenth", "last position"]
    header += ["minimum at", "middle / flat", "mixing", "fitted"]
    names = (("first_tenth", 3), ("interior_recency", 4))
    cells = []
    for row in shapes:
        texts = [interval_text(row[name], digits) for name, digits in names]
        texts += [number_text(row["flat_interior_recency"], 4), interval_text(row["last_over_middle"], 4)]
        texts += [
            interval_text(row["last_token"], 3),
            interval_text(row["minimum_position"], 0),
        ]
        texts += [number_text(row[name]) for name in ("middle_over_flat", "mixing", "fitted_mixing")]
        cells.append([row["model"], row["tokens"], *texts])
    return Table("The measured shape (interior recency: last tenth without the last position)", header, cells)


def _rope_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    header = ["model", "tokens", "W1 [95 %]", "noise", "flat line", "rank", "log error [95 %]"]
    cells = [
        [
            row["model"],
            row["tokens"],
            interval_text(row["wasserstein"], 5),
            number_text(row["noise"]["mean"], 4),
            number_text(row["flat_wasserstein"], 4),
            number_text(row["spearman"]["value"], 4),
            interval_text(row["log_error"], 4),
        ]
        for row in rows
    ]
    return Table("With against without RoPE, the same weights and prompts", header, cells)
