"""A design in pictures: target, before and after, and how it carries to other lengths."""

import math
from collections.abc import Mapping

from posbias.designing.result import TOLERANCE, Design
from posbias.profiles import Profile
from posbias.results.figures import (
    BLUE,
    MEASURED,
    ORANGE,
    VERMILION,
    Figure,
    Stroke,
    profile_curve,
    profile_figure,
)
from posbias.results.page import Report
from posbias.results.tables import Table
from posbias.statistics import MISSING

BEFORE, AFTER, TARGET = Stroke(VERMILION, "dashdot"), Stroke(BLUE, "solid"), Stroke(ORANGE, "dash")
APART = ", the last position left out, since the residual stream alone decides what it keeps"
NOTE = (
    "W1: Wasserstein distance between the shapes of two profiles with the context scaled to [0, 1]{apart}. "
    "Brackets are 95 % intervals over initialisations."
)
EQUAL = 1e-9
"""A distance to the target below this is none: the target is the flat line."""


def design_report(run: Design) -> Report:
    """What was aimed at, what was found, and what it does at other lengths."""
    statements, tables = _statements(run), _tables(run)
    return Report(
        f"Design: {run.record.resolved['title']}",
        kicker="posbias · an architecture with a chosen position bias",
        verdict=[*statements[:1], *statements[-1:]] if run.measured else statements[:2],
        picture=[_figure(run)],
        summary=tables[:1],
        statements=statements,
        note=NOTE.format(apart="" if run.target.whole else APART),
        tables=tables[1:],
        record=run.record,
    )


def _statements(run: Design) -> list[str]:
    said = _met(run)
    carried = [f"{after:.2g} at {n}" for n, (after, _) in run.distances.items() if n not in run.lengths]
    if carried:
        said.append(f"At other lengths: W1 {', '.join(carried)}.")
    for name, (count, of) in run.at_ends.items():
        said.append(
            f"Of the {of} values of {name}, {count} ended at an end of the searched range; what lies beyond was not "
            "tried."
        )
    if run.range_nats:
        said.append(f"The key biases of a layer span at most {run.range_nats:.3g} nats.")
    if run.theory == "rollout":
        said.append(f"The residual stream alone leaves {run.residual:.3g} on the last position; no design goes below.")
    said += [
        f"Measured at {networks.n_positions} positions on {len(networks.designed)} fresh initialisations: W1 to the "
        f"target {networks.distance.text('.4f')}, before {networks.before.text('.4f')}; between halves "
        f"{networks.noise:.4f}."
        for networks in run.measured
    ]
    return said


def _met(run: Design) -> list[str]:
    """Whether the target is met at every length that was asked for, and what would meet it if it is not."""
    theory = "the residual rollout" if run.theory == "rollout" else "the mean field"
    asked, last = {n: run.distances[n][0] for n in run.lengths}, run.lengths[-1]
    left = f"W1 {_at_lengths(asked)} positions; before, {_at_lengths({last: run.distances[last][1]}, '.3f')}"
    if run.met:
        how = "exactly, by a closed form" if run.exact else f"to within W1 {TOLERANCE:g}, by search"
        flat = {n: run.flat[n] for n in run.lengths if EQUAL < run.flat[n] <= TOLERANCE}
        also = [f"So does a flat line: W1 {_at_lengths(flat)} positions."] if flat else []
        return [f"Under {theory} the profile meets the target {how}: {left}.", *also]
    near = all(after <= TOLERANCE for after in asked.values())
    reached = [f"The target is not met to W1 {TOLERANCE:g}: {theory} leaves {left}."]
    others = ["Its attention is off: the search set every mixing to its lower bound."] if near else []
    if run.theory == "rollout" and len(run.lengths) == 1:
        others.append("On causal layers without content a key bias meets any target at one length: --over key_bias.")
    elif run.theory == "rollout":
        others.append("Other mixings come nearer at several lengths: --over gamma_key,mixing.")
    return reached + others


def _at_lengths(distances: Mapping[int, float], spec: str = ".2g") -> str:
    """The distances at several lengths in words; at more than two the largest, which the table has all."""
    if len(distances) > 2 and not any(map(math.isnan, distances.values())):
        return f"at most {max(distances.values()):{spec}} at {min(distances)} to {max(distances)}"
    return ", ".join(
        f"{'undefined' if math.isnan(distance) else format(distance, spec)} at {n}" for n, distance in distances.items()
    )


def _tables(run: Design) -> list[Table]:
    rows = [
        [str(n), *(_cell(value, spec) for value, spec in zip((*ends, run.flat[n]), (".3g", ".3f", ".3f"), strict=True))]
        for n, ends in run.distances.items()
    ]
    tables = [Table("W1 to the target, by length", ["positions", "designed", "as it was", "flat line"], rows)]
    for name, values in run.parameters.items():
        if len(values) <= 128:
            cells = [[str(index), f"{value:.6g}"] for index, value in enumerate(values)]
            tables.append(Table(f"{name} (layer 0 is nearest the input; alibi: by head)", ["", name], cells))
    return tables


def _cell(distance: float, spec: str) -> str:
    return MISSING if math.isnan(distance) else format(distance, spec)


def _figure(run: Design) -> Figure:
    length = max(run.lengths)
    curves = [
        profile_curve("as it was", run.before[length], BEFORE),
        profile_curve("designed", run.profiles[length], AFTER, emphasis=True),
        *(
            profile_curve("designed, measured at initialisation", networks.profile, MEASURED)
            for networks in run.measured
            if networks.n_positions == length
        ),
        profile_curve("target", Profile.normalised(run.targets[length]), TARGET),  # on top of what meets it
    ]
    return profile_figure("design", f"Influence at {length} positions: target, as it was, designed", curves)
