"""Closing the loop: does a theory's influence profile predict which positions are learnt, and how fast?

Per architecture and seed, predicted influence of every position beside what was learnt there: Spearman over positions,
and the slope of the outcome on log influence. Seeds are resampled per architecture, architectures for all together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison.metrics import spearman
from posbias.display.figures import BLUE, FAINT, GREEN, ORANGE, PURPLE, VERMILION, Curve, Figure, Stroke
from posbias.report.tables import Table
from posbias.statistics import MISSING
from posbias_papers.findings import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Difference, difference

FLOOR = 1e-6
"""Least influence a regression on its logarithm tells from zero."""
CONSTANT = 1e-9
"""Ranges below this are rounding: a profile or outcome without order."""
STROKES = {
    "uniform_rollout": Stroke(VERMILION, "dash"),
    "rollout": Stroke(BLUE, "solid"),
    "power_rollout": Stroke(PURPLE, "solid"),
    "mean_field": Stroke(GREEN, "solid"),
    "jacobian": Stroke(ORANGE, "dashdot"),
    "control": Stroke(FAINT, "longdash"),
}
NAMES = {
    "uniform_rollout": "rollout of the architecture",
    "rollout": "rollout of its attention",
    "power_rollout": "power rollout",
    "mean_field": "mean field",
    "jacobian": "measured Jacobian",
    "control": "control 1/(j + 1)",
}
CONTROL = ("control", "initial")
"""Knows neither depth, encoding nor weights: a theory that predicts no better has said nothing but "early"."""

Rows = Float64[np.ndarray, "n_seeds n_places"]


@dataclass(frozen=True, eq=False)
class Loop:
    """One architecture: what theories said of its places, and what was learnt there."""

    architecture: str
    predicted: Mapping[tuple[str, str], Rows]
    """Influence per seed and place by (theory, moment); moments are `initial` and `trained`."""
    outcomes: Mapping[str, Rows]
    """Success per seed and place by name: a larger number is learnt better or sooner."""


@dataclass(frozen=True)
class Agreement:
    """How well a theory at a moment predicts an outcome of one architecture, or of all."""

    architecture: str
    theory: str
    moment: str
    outcome: str
    correlation: Difference | None
    """Mean Spearman over places; None if theory or outcome has no order in any seed."""
    slope: Difference | None
    """Outcome per factor e of influence."""
    variance: float
    """Share of the variance over places that the regression explains, mean over seeds; NaN without order."""

    def row(self) -> dict[str, Any]:
        """Plain values for a record."""
        intervals = {name: getattr(self, name) for name in ("correlation", "slope")}
        stored = {name: None if value is None else value.as_record() for name, value in intervals.items()}
        variance = None if np.isnan(self.variance) else self.variance
        words = {name: getattr(self, name) for name in ("architecture", "theory", "moment", "outcome")}
        return {"sort": "loop", **words, **stored, "variance": variance}

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> "list[Agreement]":
        """All that `row` turned into plain values."""
        agreements = []
        for row in rows:
            if row["sort"] == "loop":
                names = {name: row[name] for name in ("architecture", "theory", "moment", "outcome")}
                correlation, slope = (
                    row[name] and Difference.of_record(row[name]) for name in ("correlation", "slope")
                )
                variance = np.nan if row["variance"] is None else row["variance"]
                agreements.append(cls(**names, correlation=correlation, slope=slope, variance=variance))
        return agreements


POOLED = "all architectures"
ANSWERS = {
    REPRODUCED: "predicts",
    NOT_REPRODUCED: "predicts the reverse",
    UNDECIDED: "not shown to predict",
}
"""By what the interval of the pooled rank correlation supports; fewer than six architectures show nothing."""


def with_control(predicted: Mapping[tuple[str, str], Rows]) -> dict[tuple[str, str], Rows]:
    """The predictions of an architecture, and the control over the same places."""
    seeds, places = next(iter(predicted.values())).shape
    falling = np.tile(1 / np.arange(1.0, places + 1), (seeds, 1))
    return {**predicted, CONTROL: falling}


def agreements(loops: Sequence[Loop]) -> list[Agreement]:
    """Every theory, moment and outcome, per architecture and pooled over architectures."""
    results = []
    for key in dict.fromkeys(key for loop in loops for key in loop.predicted):
        for outcome in dict.fromkeys(name for loop in loops for name in loop.outcomes):
            units = []
            for loop in loops:
                if key in loop.predicted and outcome in loop.outcomes:
                    measures = unit_measures(loop.predicted[key], loop.outcomes[outcome])
                    units.append(measures)
                    results.append(_agreement(loop.architecture, key, outcome, measures))
            if len(units) > 1:
                means = np.array([np.nanmean(unit, axis=0) for unit in units if not np.isnan(unit).all()])
                if len(means):
                    results.append(_agreement(POOLED, key, outcome, means))
    return results


def unit_measures(predicted: Rows, outcome: Rows) -> Float64[np.ndarray, "n_seeds 3"]:
    """Per seed: Spearman over places, slope on log influence, share of variance explained; NaN without order."""
    measures, correlations = np.full((len(predicted), 3), np.nan), spearman(predicted, outcome)
    for seed, (influence, learnt) in enumerate(zip(predicted, outcome, strict=True)):
        logs = np.log(np.maximum(influence, FLOOR))
        if np.ptp(logs) > CONSTANT and np.ptp(learnt) > CONSTANT:
            centred, lifted = logs - logs.mean(), learnt - learnt.mean()
            slope = centred @ lifted / (centred @ centred)
            explained = slope**2 * (centred @ centred) / (lifted @ lifted)
            measures[seed] = (correlations[seed], slope, explained)
    return measures


def _agreement(
    architecture: str, key: tuple[str, str], outcome: str, measures: Float64[np.ndarray, "n_units 3"]
) -> Agreement:
    ordered = measures[~np.isnan(measures).any(axis=1)]
    if not len(ordered):
        return Agreement(architecture, *key, outcome, None, None, float("nan"))
    correlation, slope = (difference(ordered[:, column]) for column in (0, 1))
    return Agreement(architecture, *key, outcome, correlation, slope, float(ordered[:, 2].mean()))


def loop_arrays(loops: Sequence[Loop]) -> dict[str, Float64[np.ndarray, "n_seeds n_places"]]:
    """Compared arrays for the record: `loop/ARCHITECTURE/THEORY/MOMENT` and `loop/ARCHITECTURE/OUTCOME`."""
    arrays: dict[str, Float64[np.ndarray, "n_seeds n_places"]] = {}
    for loop in loops:
        arrays |= {f"loop/{loop.architecture}/{'/'.join(key)}": rows for key, rows in loop.predicted.items()}
        arrays |= {f"loop/{loop.architecture}/{name}": rows for name, rows in loop.outcomes.items()}
    return arrays


def _over_control(results: Sequence[Agreement], pooled: Agreement) -> str:
    """Rank correlation minus the control's, architecture by architecture."""
    correlations = {
        (entry.architecture, entry.theory, entry.moment): entry.correlation.interval.value
        for entry in results
        if entry.outcome == pooled.outcome and entry.architecture != POOLED and entry.correlation is not None
    }
    theory = (pooled.theory, pooled.moment)
    shared = [name for name, *key in correlations if tuple(key) == theory and (name, *CONTROL) in correlations]
    if theory == CONTROL or not shared:
        return MISSING
    return str(difference(np.array([correlations[name, *theory] - correlations[name, *CONTROL] for name in shared])))


def loop_table(results: Sequence[Agreement]) -> Table:
    """All of them, pooled rows last of each: those say what follows, and how much more than from the control."""
    header = ["architecture", "theory", "moment", "outcome", "rank [95 %]", "slope [95 %]", "variance", "seeds"]
    header += ["verdict", "minus the control's"]
    cells = []
    for agreement in results:
        known, pooled = agreement.correlation, agreement.architecture == POOLED
        cells.append(
            [
                agreement.architecture,
                NAMES[agreement.theory],
                agreement.moment,
                agreement.outcome,
                "no order" if known is None else str(known),
                MISSING if agreement.slope is None else str(agreement.slope),
                MISSING if np.isnan(agreement.variance) else f"{agreement.variance:.2f}",
                "0" if known is None else str(known.n_seeds),
                ANSWERS[known.supports()] if pooled and known is not None else MISSING,
                _over_control(results, agreement) if pooled else MISSING,
            ]
        )
    return Table("Closing the loop: influence against what is learnt, over places", header, cells)


def loop_figure(slug: str, results: Sequence[Agreement], outcome: str) -> Figure | None:
    """Rank correlation per architecture, one curve per theory and moment; None if nothing was compared."""
    architectures = list(dict.fromkeys(entry.architecture for entry in results if entry.architecture != POOLED))
    by_curve = {
        (e.architecture, e.theory, e.moment): e for e in results if e.outcome == outcome and e.correlation is not None
    }
    curves = []
    for theory, moment in dict.fromkeys((entry.theory, entry.moment) for entry in results):
        at = [n for n, name in enumerate(architectures) if (name, theory, moment) in by_curve]
        intervals = [by_curve[architectures[n], theory, moment].correlation for n in at]
        if not at:
            continue
        rows = np.array([[i.interval.value, i.interval.low, i.interval.high] for i in intervals if i is not None]).T
        bounded = bool(np.isfinite(rows).all())
        dash = STROKES[theory].dash if moment == "initial" else "dot"
        stroke = Stroke(STROKES[theory].colour, dash)
        x = np.array(at, dtype=np.float64) + 1
        ends = (rows[1], rows[2]) if bounded else (None, None)
        curves.append(Curve(f"{NAMES[theory]}, {moment}", x, rows[0], stroke, *ends))
    if not curves:
        return None
    title, label = f"Does influence predict {outcome}?", "rank correlation over places"
    return Figure(slug, title, "architecture", label, tuple(curves), rows=tuple(architectures))
