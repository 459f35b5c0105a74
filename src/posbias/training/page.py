"""A training in tables and a figure: how members ended, losses by step, last losses over the grid."""

from collections import defaultdict
from dataclasses import replace

import numpy as np

from posbias.results.page import Report
from posbias.results.tables import Table
from posbias.statistics import MISSING, mean_of
from posbias.training.running import ENDED_WELL, StudyRun


def training_report(run: StudyRun) -> Report:
    """How members ended, their losses by step, and their last losses over the grid."""
    trained, last = run.trained, defaultdict[tuple[str, ...], list[float]](list)  # NaN: it did not end well
    for outcome in trained.members:
        point = tuple(str(outcome.member.coordinates[axis]) for axis in run.axes)
        last[point].append(float(outcome.losses[-1]) if outcome.status in ENDED_WELL else np.nan)
    header = [*(axis.removeprefix("model.") for axis in run.axes), "seeds", "loss"]
    title = f"{run.title}: mean loss at the end (nats) with its 95 % interval over seeds"
    rows = []
    for point, of_seeds in last.items():
        losses = np.array([loss for loss in of_seeds if not np.isnan(loss)])
        mean = mean_of(losses).interval(least=0.0).text(".4f") if losses.size else MISSING
        rows.append([*point, f"{losses.size} of {len(of_seeds)}", mean])
    counts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in trained.counts().items())
    stacks = f"{trained.n_stacks} stack{'' if trained.n_stacks == 1 else 's'}"
    shown = run.shown()
    drawn = sum(curve.drawn for curve in shown.curves)
    first = f" (the first {drawn} of {len(shown.curves)} points of the grid)" if drawn < len(shown.curves) else ""
    losses_title = f"Training loss, mean over seeds; a member that has ended keeps its last loss{first}"
    said = [f"{len(trained.members)} members in {stacks}: {counts}."]
    ended = [row for row in rows if row[-1] != MISSING]
    if len(ended) > 1:  # the points of the grid with the least and the largest loss
        extremes = (end(ended, key=lambda row: float(row[-1].split()[0])) for end in (min, max))
        least, most = (f"{row[-1]} nats with {', '.join(row[:-2])}" for row in extremes)
        said.append(f"Loss at the end: from {least} to {most}.")
    return Report(
        kicker="posbias · small models, trained at once",
        verdict=said,
        picture=[replace(shown.figure(), slug="losses", title=losses_title)] if drawn else [],
        summary=[Table(title, header, rows)],
        statements=[f"{name}: {ended}" for name, ended in shown.facts.items()],
    )
