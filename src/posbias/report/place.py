"""An order of passages in words, a table and a figure: what it is worth, and the curve of the model that it follows."""

from collections.abc import Iterable, Sequence

import numpy as np

from posbias.display.figures import MEASURED, Curve, Figure
from posbias.evaluation.place import LEAVE, REORDER, SHUFFLED, Placement
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table
from posbias.statistics import MISSING

ORDERS = {
    "best_first": "best first",
    "best_last": "best last",
    "alternating": "best at both ends",
    SHUFFLED: "shuffled ones",
}
PLACED_BY = {"accuracy": "accuracy", "logprob": "probability", "reciprocal_rank": "reciprocal rank"}
"""Quantity that an order by each measure raises."""


@REPORTS.register("place")
def placement_report(placement: Placement) -> Report:
    """The order, what it is worth against the usual ones, why, and what the data do not decide."""
    samples = placement.n_samples
    p_flat = f"p {placement.p_flat:.2g}"
    why = f"{samples} samples do not show that the places differ ({p_flat}), so best first is kept."
    if placement.decided:
        signal = f"{100 * placement.kept:.0f} % of the measured differences are kept as signal, the rest is noise."
        why = f"over {samples} samples the places differ ({p_flat}); {signal}"
    statements = [f"Best order of the passages, first to last (0 is the first given): {_order(placement.order)}."]
    if placement.advice != REORDER:
        kept = "Leave the order" if placement.advice == LEAVE else "Best first, by the scores given"
        statements = [
            f"{kept}: none is shown to be better than both best first and shuffled ones.",
            f"That is best first (0 is the first given): {_order(placement.order)}.",
            f"Estimated as best, but not shown to be: {_order(placement.estimated)}.",
        ][: 2 + (placement.estimated != placement.order)]
    statements += [*_worth(placement), f"Why: {why}"]
    if placement.method:
        statements.append(f"Measured under {placement.method}: an order for the model with that method.")
    if placement.interpolated:
        statements.append("Not every place was measured itself: the curve is interpolated between those that were.")
    cells = []
    for gain in placement.gains:
        worth = ["0", MISSING, "the same order"]  # the gain, what it was judged on, whether it is shown to be one
        if gain.order != placement.estimated:  # shuffled ones have none
            judged = "held-out samples" if placement.decided else "all samples"
            worth = [gain.gain.text("+.3f"), judged, "yes" if gain.raises else "not shown"]
        cells.append([ORDERS[gain.over], _order(gain.order) or MISSING, *worth])
    title = f"Gain in {PLACED_BY[placement.measure]}, per unit of relevance"
    return Report(
        placement.record.title,
        kicker="posbias · where relevant passages should stand",
        verdict=statements,
        picture=[_placement_figure(placement)],
        summary=[Table(title, ["against", "its order", "gain", "judged on", "raises it"], cells)],
        record=placement.record,
    )


def _worth(placement: Placement) -> list[str]:
    """The usual orders over which the chosen one is shown to gain, with the least gain, and those over which it is not.

    Shuffled ones stand for their mean; the table has every gain.
    """
    measure = PLACED_BY[placement.measure]
    gains = [gain for gain in placement.gains if gain.order != placement.estimated]
    raised = sorted((gain for gain in gains if gain.raises), key=lambda gain: gain.gain.value)
    undecided = sorted((gain for gain in gains if not gain.raises), key=lambda gain: -gain.gain.value)
    if not gains:
        return ["This is the usual order, best first."]
    said = []
    if raised:
        over = _listed(ORDERS[gain.over] for gain in raised)
        said = [f"On held-out samples {measure} rises, over {over}: by at least {raised[0].gain.text('+.2f')}."]
    if undecided:
        over, most = _listed(ORDERS[gain.over] for gain in undecided), undecided[0].gain.text("+.2f")
        said.append(f"No gain in {measure} is shown over {over}: {'at most ' * (len(undecided) > 1)}{most}.")
    return said


def _placement_figure(placement: Placement) -> Figure:
    """The curve by which the passages were ordered."""
    curve = np.array(placement.curve)
    best, worst, places = int(curve.argmax()), int(curve.argmin()), f"place among {curve.size} (0 is the first)"
    title = "No difference between the places is shown"
    if placement.decided:
        title = (
            f"Place {best} is used best and holds passage {placement.order[best]}; "
            f"place {worst} is used worst and holds passage {placement.order[worst]}"
        )
    curves = (Curve("the curve that the order follows", np.arange(float(curve.size)), curve, MEASURED),)
    return Figure("placement", title, places, f"expected {PLACED_BY[placement.measure]}", curves, markers=True)


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _order(order: Sequence[int]) -> str:
    return ",".join(map(str, order))
