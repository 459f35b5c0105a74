"""arXiv 2603.10123, "Lost in the Middle at Birth": its theory and its claims against the Jacobian of untrained models.

Distances with intervals over initialisations, beside the flat line and the split-half noise; what survives of the
paper, as sentences made from the rows, none without a number. docs/theory, sections 2 and 4.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.comparison import STATISTICS, UNITS_FOR_CLAIM, compare_with_prompts, summarise
from posbias.comparison.distance_intervals import split_half_noise
from posbias.comparison.metrics import METRICS, wasserstein
from posbias.display.figures import BLUE, GREEN, PURPLE, SKY, VERMILION, Figure, Stroke, profiles_figure
from posbias.papers.birth2603.models import MODELS, TOKENS, BirthSettings, Measured, measure_cases, ones_probe_share
from posbias.papers.reproduction import Experiment, Reproduction
from posbias.profiles import Profile
from posbias.report.reproduce import PAPERS, Facts, Rows
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


@PAPERS.register("birth-2603.10123")
class Birth(Experiment):
    """The position bias of untrained Qwen2- and GPT-2-shaped models, and the paper's claims that survive."""

    paper = PAPER
    settings = BirthSettings

    def run(self, settings: BirthSettings) -> Reproduction:
        """Measure all models over initialisations and compare every theory with them.

        Raises:
            UsageError: a length beyond the models' positions.
            RunError: a gradient is not finite.
        """
        cases = measure_cases(settings)
        generator = np.random.default_rng(settings.seed)
        rows = [row for measured in cases for row in theory_rows(measured, generator)]
        shapes = [shape_row(measured, generator) for measured in cases]
        contrasts = rope_rows(cases, generator)
        probe = ones_probe_share(settings).items()
        probes = [{"sort": "probe", "model": name, "share": share} for name, share in probe]
        return Reproduction(
            experiment=self.name,
            title=f"Position bias at initialisation: {settings.initialisations} initialisations, "
            f"{settings.n_positions} positions, size {settings.size}",
            rows=[*rows, *shapes, *contrasts, *probes],
            tables=[],
            figures=[_figure(measured) for measured in cases],
            arrays=_arrays(cases),
            settings=settings.describe(),
            seeds={"seed": settings.seed},
        )

    def statements(self, rows: Rows, facts: Facts) -> list[str]:
        """Rank correlation, W1 (real and fitted mixing), finite N, mean field, dead zone, anchor, RoPE, the probe."""
        theories, shapes, contrasts, probes = (_sorted(rows, sort) for sort in SORTS)
        initialisations = min(int(row["initialisations"]) for row in shapes)
        few = f"With {initialisations} initialisations no interval here supports a claim; {UNITS_FOR_CLAIM} would."
        return [
            _rank(theories),
            _distance(theories),
            _fitted(theories, shapes),
            _finite(theories),
            _mean_field(theories),
            _shape(shapes),
            _dead_zone(shapes),
            _anchor(shapes),
            _rope(contrasts),
            _probe({row["model"]: row["share"] for row in probes}),
            *([few] if initialisations < UNITS_FOR_CLAIM else []),
        ]

    def tables(self, rows: Rows, stored: Sequence[Table]) -> list[Table]:
        """Distances, shapes, and what RoPE changes."""
        theories, shapes, contrasts, _ = (_sorted(rows, sort) for sort in SORTS)
        return [_distance_table(theories), _shape_table(shapes), _rope_table(contrasts)]


SORTS = ("theory", "shape", "rope", "probe")
"""Of rows."""


def _sorted(rows: Rows, sort: str) -> Rows:
    return [row for row in rows if row["sort"] == sort]


def theory_rows(measured: Measured, generator: np.random.Generator) -> list[dict[str, Any]]:
    """One row per theory, the flat line last: distances over initialisations, noise, interior recency."""
    seed = int(generator.integers(2**63))
    sample = measured.sample
    noise = split_half_noise(sample, generator=np.random.default_rng(seed))
    flat = Profile.uniform(sample.units.shape[1])
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
        "flat_interior_recency": float(STATISTICS["interior_recency"](Profile.uniform(n_positions).influence)),
        "middle_over_flat": float(n_positions * average[n_positions // 2]),
        "least_over_flat": float(n_positions * average.min()),
        "last_over_flat": float(n_positions * average[-1]),
        "atom": float(np.prod(1 - measured.mixing)),
        "dead_zone": float(np.prod(1 / np.arange(1.0, len(measured.mixing)))),
        "layers": len(measured.mixing),
        "mixing": float(measured.mixing.mean()),
        "fitted_mixing": measured.fitted_mixing,
        "initialisations": len(measured.sample.units),
    }


def rope_rows(cases: Sequence[Measured], generator: np.random.Generator) -> list[dict[str, Any]]:
    """Profiles with against without RoPE, initialisations paired: W1 and log error beside split-half noise."""
    by_case = {(measured.case.model, measured.case.tokens): measured for measured in cases}
    rows = []
    for models in MODELS.values():
        for without in models[1:]:
            for tokens in TOKENS:
                first, second = by_case[models[0], tokens].sample, by_case[without, tokens].sample
                weights = leave_one_out(len(first.units))
                row: dict[str, Any] = {"sort": "rope", "model": models[0], "without": without, "tokens": tokens}
                for name, (least, most) in COMPARED.items():
                    values = METRICS[name](weights @ first.units, weights @ second.units)
                    row[name] = jackknife(values).interval(least=least, most=most).as_record()
                row["noise"] = vars(split_half_noise(first, generator=generator))
                row["flat_wasserstein"] = float(
                    wasserstein(Profile.uniform(first.units.shape[1]).influence, first.average)
                )
                rows.append(row)
    return rows


def _distances(theory: Profile, measured: Measured, seed: int) -> dict[str, dict[str, float | None]]:
    """Each compared metric with its interval; all theories see the same resampled initialisations."""
    units = measured.sample.units
    weights = leave_one_out(len(units))
    distances = {}
    for name, (least, most) in COMPARED.items():
        distances[name] = (
            jackknife(METRICS[name](theory.influence, weights @ units)).interval(least=least, most=most).as_record()
        )
    return distances


def _arrays(cases: Sequence[Measured]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for measured in cases:
        stem = f"{measured.case.model}/{measured.case.tokens}"
        arrays[f"{stem}/per_initialisation"] = measured.sample.units
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
        f"{measured.case} at initialisation: {shares[0]:.0f} % on the first tenth, {shares[1]:.1f} % on the last "
        f"without the last position, {shares[2]:.0f} % on the last position; minimum at {minimum:.0f}"
    )
    slug = f"initialisation-{measured.case.model}-{measured.case.tokens}".lower().replace(" ", "-")
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
            interval_text(row["wasserstein"], ".4f"),
            number_text(row["flat_wasserstein"]["value"], 4),
            number_text(row["noise"]["mean"], 4),
            number_text(row["spearman"]["value"], 3),
            interval_text(row["log_error"], ".2f"),
            number_text(row["interior_recency"], 4),
        ]
        for row in rows
    ]
    return Table("Every theory against the measured Jacobian", header, cells)


def _shape_table(shapes: Sequence[Mapping[str, Any]]) -> Table:
    header = ["model", "tokens", "first tenth", "interior recency", "flat", "interior recency minus middle tenth"]
    header += ["last position", "minimum at", "middle / flat", "mixing", "fitted"]
    names = (("first_tenth", 3), ("interior_recency", 4))
    cells = []
    for row in shapes:
        texts = [interval_text(row[name], f".{digits}f") for name, digits in names]
        texts += [number_text(row["flat_interior_recency"], 4), interval_text(row["last_over_middle"], ".4f")]
        texts += [
            interval_text(row["last_token"], ".3f"),
            interval_text(row["minimum_position"], ".0f"),
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
            interval_text(row["wasserstein"], ".5f"),
            number_text(row["noise"]["mean"], 4),
            number_text(row["flat_wasserstein"], 4),
            number_text(row["spearman"]["value"], 4),
            interval_text(row["log_error"], ".4f"),
        ]
        for row in rows
    ]
    return Table("With against without RoPE, the same weights and prompts", header, cells)


Row = Mapping[str, Any]

CLAIMED_RANK = 0.99
CLAIMED_W1 = 0.02
CLAIM_DIGIT = 0.005
"""Half a unit of the claims' last digit."""
TEN = 10
"""Within this factor of the promised value influence is "of that order"."""
NULL_PROBE = 1e-6
"""Below this share, in float64, a probe's gradient is round-off."""


def _rank(rows: Sequence[Row]) -> str:
    published = [_value(row, "spearman") for row in _of(rows, "continuous")]
    mean_field = [_value(row, "spearman") for row in _of(rows, "mean_field")]
    control = [_value(row, "spearman") for row in _of(rows, "reciprocal")]
    far, near = ([_value(row, "wasserstein") for row in _of(rows, name)] for name in ("continuous", "mean_field"))
    reached = sum(value >= CLAIMED_RANK - CLAIM_DIGIT for value in published)
    gap = max(abs(first - second) for first, second in zip(published, mean_field, strict=True))
    ratios = [first / second for first, second in zip(far, near, strict=True)]
    return (
        f"Rank correlation {CLAIMED_RANK}: the published density reaches it in {reached} of {len(published)} cases "
        f"({_span(published, 3)}), and it decides nothing: mean field's ranks are within {gap:.3f} of the density's, "
        f"whose W1 is {_span(ratios, 1)} times mean field's; 1/(j + 1), which knows neither depth nor residuals, has "
        f"{_span(control, 3)}."
    )


def _distance(rows: Sequence[Row]) -> str:
    literal = [_value(row, "wasserstein") for row in _of(rows, "continuous")]
    flat = [_value(row, "wasserstein") for row in _of(rows, "flat")]
    within = sum(value <= CLAIMED_W1 + CLAIM_DIGIT for value in literal)
    verdict = "survives" if within == len(literal) else "does not survive" if not within else "survives in part"
    return (
        f"W1 {CLAIMED_W1}, with the mixing that the models really have (mean over layers): the published density is "
        f"{_span(literal, 3)} away (flat line {_span(flat, 3)}), {within} of {len(literal)} cases within the claim: "
        f"it {verdict}."
    )


def _fitted(rows: Sequence[Row], shapes: Sequence[Row]) -> str:
    fitted = [_value(row, "wasserstein") for row in _of(rows, "continuous_fitted")]
    errors = [_value(row, "log_error") for row in _of(rows, "continuous_fitted")]
    within = sum(value <= CLAIMED_W1 + CLAIM_DIGIT for value in fitted)
    pairs = ", ".join(f"{row['mixing']:.3f} to {row['fitted_mixing']:.3f}" for row in shapes)
    return (
        f"W1 {CLAIMED_W1}, with one constant mixing fitted to the very curve that is to be predicted: "
        f"{_span(fitted, 3)}, {within} of {len(fitted)} cases within the claim, the typical position off by a factor "
        f"{_span(_factors(errors), 2)}. The fit moves the mixing, case by case, from {pairs}."
    )


def _finite(rows: Sequence[Row]) -> str:
    limit, constant, exact, rollout = (
        [_value(row, "wasserstein") for row in _of(rows, name)]
        for name in ("continuous", "finite", "closed_form", "rollout")
    )
    disagreement = max(abs(first - second) for first, second in zip(exact, rollout, strict=True))
    change = max(abs(first - second) for first, second in zip(exact, limit, strict=True))
    return (
        f"Exact at finite N instead of the limit: W1 {_span(constant, 3)} with mean mixing, {_span(exact, 3)} with "
        f"every layer's measured one; the step moves W1 by at most {change:.3f}. The residual rollout is the same "
        f"theory (W1 differs by at most {disagreement:.0e}): for uniform causal attention the exact form is its last "
        "row."
    )


def _mean_field(rows: Sequence[Row]) -> str:
    distances = [_value(row, "wasserstein") for row in _of(rows, "mean_field")]
    errors = [_value(row, "log_error") for row in _of(rows, "mean_field")]
    noise = [float(row["noise"]["mean"]) for row in _of(rows, "mean_field")]
    exact = [_value(row, "wasserstein") for row in _of(rows, "closed_form")]
    gains = [second / first for first, second in zip(distances, exact, strict=True)]
    closer = sum(gain > 1 for gain in gains)
    return (
        f"Mean field, where paths add in squares and nothing is fitted: W1 {_span(distances, 4)} (split-half noise "
        f"{_span(noise, 4)}), the typical position off by a factor {_span(_factors(errors), 2)}; closer than the exact "
        f"form with measured mixing in {closer} of {len(gains)} cases (its W1 is {_span(gains, 1)} times mean field's)."
    )


def _shape(shapes: Sequence[Row]) -> str:
    bends = [row["last_over_middle"] for row in shapes]
    rising = sum(bend["low"] is not None and bend["low"] > 0 for bend in bends)
    falling = sum(bend["high"] is not None and bend["high"] < 0 for bend in bends)
    first, middle, last, alone, interior, minima = (
        [_value(row, name) for row in shapes]
        for name in ("first_tenth", "middle_tenth", "last_tenth", "last_token", "interior_recency", "minimum_position")
    )
    bounds = [(row["middle_tenth"]["high"], row["first_tenth"]["low"], row["last_tenth"]["low"]) for row in shapes]
    ends = sum(None not in bound and bound[0] < min(bound[1:]) for bound in bounds)
    flat = float(shapes[0]["flat_interior_recency"])
    verdict = "an L before the last position, no U"
    if rising:
        verdict = f"a U, spike apart, in {rising} of {len(shapes)}"
    elif falling < len(shapes):
        verdict = "no U shown"
    return (
        f"U-shape at initialisation: first, middle and last tenth hold {_span(first, 2)}, {_span(middle, 3)} and "
        f"{_span(last, 3)} of the influence (flat line 0.10), the last position alone {_span(alone, 3)} (flat line "
        f"{0.1 - flat:.4f}); both ends exceed the middle in {ends} of {len(shapes)} cases, intervals apart. "
        f"Apart from the last position the last tenth holds {_span(interior, 4)} (flat line {flat:.4f}); it lies below "
        f"the middle tenth in {falling} of {len(shapes)} cases and above it in {rising}, intervals excluding zero; the "
        f"interior minimum is at position {_span(minima, 0)}: {verdict}."
    )


def _dead_zone(shapes: Sequence[Row]) -> str:
    middle = [float(row["middle_over_flat"]) for row in shapes]
    least = [float(row["least_over_flat"]) for row in shapes]
    layers, dead = int(shapes[0]["layers"]), float(shapes[0]["dead_zone"])
    verdict = "there is no such zone" if min(least) > TEN * dead else "of that order"
    return (
        f"Factorial dead zone, 1/({layers}-1)! = {dead:.0e}: the middle position has {_span(middle, 2)} times the flat "
        f"line's influence, the least of all positions {_span(least, 2)} times: {verdict}."
    )


def _anchor(shapes: Sequence[Row]) -> str:
    pairs = ", ".join(f"{_value(row, 'last_token'):.3f} ({row['atom']:.3f})" for row in shapes)
    return (
        f"Recency anchor: the last position's share, and in parentheses the atom prod(1 - m_l) that the published "
        f"theory gives for the measured mixing: {pairs}."
    )


def _rope(contrasts: Sequence[Row]) -> str:
    gaps = [_value(row, "wasserstein") for row in contrasts]
    noise = [float(row["noise"]["mean"]) for row in contrasts]
    errors = [100 * _value(row, "log_error") for row in contrasts]
    below = sum(gap <= level for gap, level in zip(gaps, noise, strict=True))
    verdict = "holds to within that noise" if below == len(gaps) else "does not hold as stated at this size"
    return (
        f"RoPE or not: with the same weights and prompts the two profiles are W1 {_span(gaps, 5)} apart (split-half "
        f"noise {_span(noise, 4)}), the typical position by {_span(errors, 2)} %: the claim {verdict}. (In theory "
        f"because logits are small at initialisation; their variance grows with the square of the width.)"
    )


def _probe(probe: Mapping[str, float]) -> str:
    parts = []
    for model, share in probe.items():
        verdict = "identically zero but for round-off, it measures nothing" if share < NULL_PROBE else "one noisy probe"
        parts.append(f"on {model} {share:.2g} of a random probe's ({verdict})")
    return (
        f"The one-pass scalar probe (gradient of the summed last hidden state, float64) is {'; '.join(parts)}. The "
        f"all-ones vector lies in the null space of an untrained LayerNorm, not of an RMS norm."
    )


def _of(rows: Sequence[Row], theory: str) -> list[Row]:
    return [row for row in rows if row["theory"] == theory]


def _value(row: Row, name: str) -> float:
    value = row[name]["value"]
    return float("nan") if value is None else float(value)


def _factors(errors: Sequence[float]) -> list[float]:
    """Logarithmic errors as factors."""
    return [math.exp(error) for error in errors]


def _span(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
