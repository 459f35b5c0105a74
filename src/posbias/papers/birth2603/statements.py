"""What survives of arXiv 2603.10123, as sentences made from the rows; nothing is said without a number."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posbias.comparison import UNITS_FOR_CLAIM

Row = Mapping[str, Any]

CLAIMED_RANK = 0.99
CLAIMED_W1 = 0.02
CLAIM_DIGIT = 0.005
"""Half a unit of the claims' last digit."""
TEN = 10
"""Within this factor of the promised value influence is "of that order"."""
NULL_PROBE = 1e-6
"""Below this share, in float64, a probe's gradient is round-off."""


def birth_statements(
    rows: Sequence[Row], shapes: Sequence[Row], contrasts: Sequence[Row], probe: Mapping[str, float]
) -> list[str]:
    """Rank correlation, W1 (with real and fitted mixing), finite N, mean field, dead zone, anchor, RoPE, the probe."""
    return [
        _rank(rows),
        _distance(rows),
        _fitted(rows, shapes),
        _finite(rows),
        _mean_field(rows),
        _shape(shapes),
        _dead_zone(shapes),
        _anchor(shapes),
        _rope(contrasts),
        _probe(probe),
        *_few(shapes),
    ]


def _rank(rows: Sequence[Row]) -> str:
    published = [_value(row, "spearman") for row in _of(rows, "continuous")]
    other = [_value(row, "spearman") for row in _of(rows, "mean_field")]
    control = [_value(row, "spearman") for row in _of(rows, "reciprocal")]
    far, near = ([_value(row, "wasserstein") for row in _of(rows, name)] for name in ("continuous", "mean_field"))
    reached = sum(value >= CLAIMED_RANK - CLAIM_DIGIT for value in published)
    gap = max(abs(first - second) for first, second in zip(published, other, strict=True))
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
    same = max(abs(first - second) for first, second in zip(exact, rollout, strict=True))
    change = max(abs(first - second) for first, second in zip(exact, limit, strict=True))
    return (
        f"Exact at finite N instead of the limit: W1 {_span(constant, 3)} with mean mixing, {_span(exact, 3)} with "
        f"every layer's measured one; the step moves W1 by at most {change:.3f}. The residual rollout is the same "
        f"theory (W1 differs by at most {same:.0e}): for uniform causal attention the exact form is its last row."
    )


def _mean_field(rows: Sequence[Row]) -> str:
    found = [_value(row, "wasserstein") for row in _of(rows, "mean_field")]
    errors = [_value(row, "log_error") for row in _of(rows, "mean_field")]
    noise = [float(row["noise"]["mean"]) for row in _of(rows, "mean_field")]
    exact = [_value(row, "wasserstein") for row in _of(rows, "closed_form")]
    gains = [second / first for first, second in zip(found, exact, strict=True)]
    closer = sum(gain > 1 for gain in gains)
    return (
        f"Mean field, where paths add in squares and nothing is fitted: W1 {_span(found, 4)} (split-half noise "
        f"{_span(noise, 4)}), the typical position off by a factor {_span(_factors(errors), 2)}; closer than the exact "
        f"form with measured mixing in {closer} of {len(gains)} cases (its W1 is {_span(gains, 1)} times mean field's)."
    )


def _shape(shapes: Sequence[Row]) -> str:
    bends = [row["last_over_middle"] for row in shapes]
    rising = sum(bend["low"] is not None and bend["low"] > 0 for bend in bends)
    falling = sum(bend["high"] is not None and bend["high"] < 0 for bend in bends)
    primacy = [_value(row, "first_tenth") for row in shapes]
    interior = [_value(row, "interior_recency") for row in shapes]
    minima = [_value(row, "minimum_position") for row in shapes]
    flat = float(shapes[0]["flat_interior_recency"])
    verdict = "an L with a spike at the last position, no U"
    if rising:
        verdict = f"a U, spike apart, in {rising} of {len(shapes)}"
    elif falling < len(shapes):
        verdict = "no U shown"
    return (
        f"U-shape at initialisation: the first tenth holds {_span(primacy, 2)} of the influence (flat line 0.10). "
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
    below = sum(gap <= other for gap, other in zip(gaps, noise, strict=True))
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


def _few(shapes: Sequence[Row]) -> list[str]:
    """A warning where there are too few initialisations for claims."""
    initialisations = min(int(row["initialisations"]) for row in shapes)
    if initialisations >= UNITS_FOR_CLAIM:
        return []
    return [f"With {initialisations} initialisations no interval here supports a claim; {UNITS_FOR_CLAIM} would."]


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
