"""A design in pictures: target, before and after, and how it carries to other lengths."""

import math
from collections.abc import Mapping

from posbias.designing.result import TOLERANCE, Design
from posbias.profiles import Profile
from posbias.results.figures import BLUE, MEASURED, ORANGE, VERMILION, Stroke, profile_figure
from posbias.results.page import Report
from posbias.results.tables import Table
from posbias.statistics import MISSING

BEFORE, AFTER, TARGET = Stroke(VERMILION, "dashdot"), Stroke(BLUE, "solid"), Stroke(ORANGE, "dash")
APART = ", the last position left out, since the residual stream alone decides what it keeps"
NOTE = (
    "W1: Wasserstein distance between the shapes of two profiles with the context scaled to [0, 1]{apart}. "
    "Brackets are 95 % intervals over initialisations."
)
MOST_ROWS = 128
"""Values of a parameter that are listed."""
EQUAL = 1e-9
"""A distance to the target below this is none: the target is the flat line."""


def design_report(run: Design) -> Report:
    """What was aimed at, what was found, and what it does at other lengths."""
    statements = _statements(run)
    distances = [
        [str(n), _cell(after, ".3g"), _cell(before), _cell(run.flat[n])] for n, (after, before) in run.distances.items()
    ]
    length = max(run.lengths)
    curves = [
        run.before[length].curve("as it was", BEFORE),
        run.profiles[length].curve("designed", AFTER),
        *(
            networks.profile.curve("designed, measured at initialisation", MEASURED)
            for networks in run.measured
            if networks.n_positions == length
        ),
        Profile.normalised(run.targets[length]).curve("target", TARGET),  # on top of what meets it
    ]
    picture = profile_figure("design", f"Influence at {length} positions: target, as it was, designed", curves)
    title = f"{run.over} (layer 0 is nearest the input)"
    values = [{"": str(index), run.over: f"{value:.6g}"} for index, value in enumerate(run.parameters)]
    return Report(
        f"Design: {run.record.resolved['title']}",
        kicker="posbias · an architecture with a chosen position bias",
        verdict=[*statements[:1], *statements[-1:]] if run.measured else statements[:2],
        picture=[picture],
        summary=[Table("W1 to the target, by length", ["positions", "designed", "as it was", "flat line"], distances)],
        statements=statements,
        note=NOTE.format(apart="" if run.target.whole else APART),
        tables=[Table.of(title, values)] if len(values) <= MOST_ROWS else [],
    )


def _statements(run: Design) -> list[str]:
    """Whether the target is met at every length that was asked for, and what would meet it; then what else holds."""
    theory = "the residual rollout" if run.theory == "rollout" else "the mean field"
    asked, last = {n: run.distances[n][0] for n in run.lengths}, run.lengths[-1]
    left = f"W1 {_at(asked)} positions; before, {_cell(run.distances[last][1])} at {last}"
    if run.met:
        how = "exactly, by a closed form" if run.exact else f"to within W1 {TOLERANCE:g}, by search"
        said = [f"Under {theory} the profile meets the target {how}: {left}."]
        if flat := {n: run.flat[n] for n in run.lengths if EQUAL < run.flat[n] <= TOLERANCE}:
            said.append(f"So does a flat line: W1 {_at(flat)} positions.")
    else:
        said = [f"The target is not met to W1 {TOLERANCE:g}: {theory} leaves {left}."]
        if run.theory == "rollout" and len(run.lengths) == 1:
            said.append("On causal layers without content a key bias meets any target at one length: --over key_bias.")
        elif run.theory == "rollout":
            said.append("Another mixing may come nearer at several lengths: --mixing.")
    if carried := {n: after for n, (after, _) in run.distances.items() if n not in run.lengths}:
        said.append(f"At other lengths: W1 {_at(carried)}.")
    if run.at_ends:
        ends = f"{run.at_ends} ended at an end of the searched range; what lies beyond was not tried"
        said.append(f"Of the {len(run.parameters)} values of {run.over}, {ends}.")
    if run.range_nats:
        said.append(f"The key biases of a layer span at most {run.range_nats:.3g} nats.")
    if run.theory == "rollout":
        said.append(f"The residual stream alone leaves {run.residual:.3g} on the last position; no design goes below.")
    return said + [
        f"Measured at {networks.n_positions} positions on {len(networks.networks)} fresh initialisations: W1 to the "
        f"target {networks.distance.text('.4f')}, before {networks.before.text('.4f')}; between halves "
        f"{networks.noise:.4f}."
        for networks in run.measured
    ]


def _at(distances: Mapping[int, float]) -> str:
    """The distances at several lengths in words; at more than two the largest, which the table has all."""
    if len(distances) > 2 and not any(map(math.isnan, distances.values())):
        return f"at most {max(distances.values()):.2g} at {min(distances)} to {max(distances)}"
    return ", ".join(f"{_cell(distance, '.2g')} at {n}" for n, distance in distances.items())


def _cell(distance: float, spec: str = ".3f") -> str:
    return MISSING if math.isnan(distance) else format(distance, spec)
