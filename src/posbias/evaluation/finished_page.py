"""Pages of what stands on finished evaluations: correlations with influence, evaluations side by side, placements.

Influence beside behaviour is of one run or of several; evaluations differ from the first, paired over samples; an order
of passages has its worth, and the curve of the model that it follows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.evaluation.comparison import Compared, EvaluationComparison
from posbias.evaluation.correlate import InfluenceCorrelation
from posbias.evaluation.curve import change_text
from posbias.evaluation.evaluation import MEASURES, InfluenceSeries
from posbias.evaluation.forms import FormsEvaluation, OrdersEvaluation, Price, TurnsEvaluation
from posbias.evaluation.levels import MEAN, SPREAD, WORST
from posbias.evaluation.place import LEAVE, REORDER, SAMPLES_TO_CONFIRM, Placement
from posbias.results.naming import KINDS, THEORIES, label
from posbias.results.page import Report, first_of
from posbias.results.tables import Table
from posbias.statistics import MISSING
from posbias.tasks.language.base import NOTICES, SHUFFLED

NOTE = (
    "Ranks are formed within each measurement (one model, one task at one length), 0 for the least and 1 for the "
    "most, and correlated over the positions of all of them. Bootstrap draws take the samples of each anew, those "
    "that several share together; permutations move positions within each."
)
CORRELATION_CAVEAT = (
    "A rank correlation over positions is nearly automatic if both curves fall or bend alike; the partial ones hold "
    "position, distance to the nearer end, or both fixed. Their intervals resample samples at the chosen positions; "
    "p counts permutations of the positions, corrected (Holm) for the number of series and measures."
)
WHAT = {
    "gold": "answer's item",
    "place": "place, another item",
}
"""Item that a series of influence is about."""
CONTROLLED = ("plain", "position held fixed", "distance to the nearer end held fixed", "both held fixed")
"""Correlations, in the order of `CONTROLS`."""
NOTICED = {
    "gold_without_answer": "a model that reads only that passage cannot be right there",
    "gold_repeated": "at every position the answer can be had elsewhere, too, so less depends on the position",
    "answer_elsewhere": "a right answer need not come from the passage that moves, so less depends on the position",
    "control_tokens": "they were read as ordinary text, never as the tokens",
    "thoughts_left_out": "it answers without having read them",
    "call_not_offered": "it counts as wrong",
}
"""What follows from a notice (`NOTICES` says what it is)."""


def correlation_report(result: InfluenceCorrelation) -> Report:
    """What is correlated, and the correlations over all measurements."""
    groups = result.groups
    measured = [
        {"measurement": group.title, "samples": str(group.n_samples), "positions": " ".join(map(str, group.positions))}
        for group in groups
    ]
    tables = correlation_tables(result.pooled, "" if len(groups) == 1 else ", all measurements pooled")
    notices = [f"No conclusion from the generated answers of {reason}." for reason in result.withheld]
    for group in groups:
        notices += notice_sentences(group.notices, count=group.n_samples, here=True, of=f"{group.title}: ")
    nothing = "Nothing to compare: samples in common, at 3 positions at least, are needed of influence and behaviour."
    left_out = []
    for series in result.pooled:
        for measure, there in series.groups.items():
            about = f"{series_name(series)} and {label(MEASURES, measure)}"
            if missing := [group.title for group in groups if group.title not in there]:
                left_out.append(f"{about}: without {', '.join(missing)} (one of the two is missing)")
            if series.correlations[measure].n_samples == 1:  # from which nothing can be resampled
                left_out.append(f"{about}: no interval, since a measurement has a single sample")
    return Report(
        kicker="posbias · what weighs, and what is used, over several measurements",
        verdict=[correlation_verdict(result.pooled) or nothing],
        summary=[Table.of("What is correlated", measured), *tables[:1]],
        notices=notices,
        caveats=[CORRELATION_CAVEAT],
        note=NOTE,
        tables=tables[1:],
        left_out=left_out,
    )


def series_name(series: InfluenceSeries) -> str:
    """Name of a series of influence in words."""
    kind = label(KINDS, str(series.kind))
    name = f"influence ({kind})" if series.source == "measured" else label(THEORIES, series.source)
    return f"{name}: {WHAT[series.what]}"


def correlation_tables(series: Sequence[InfluenceSeries], over: str = "") -> list[Table]:
    """A table for each measure, with a row for each series that is correlated with it."""
    rows: dict[str, list[dict[str, str]]] = {}
    for entry in series:
        for measure, found in entry.correlations.items():
            row = {"influence": series_name(entry)}
            for name, each in zip(CONTROLLED, found.correlations, strict=True):
                told = f"{each.value} p {each.p_value:.2g}{', established' * each.established}"
                row[name] = MISSING if np.isnan(each.value.value) else told
            rows.setdefault(measure, []).append({**row, "positions": str(found.n_positions)})
    title = "Influence and {} over positions" + over
    return [Table.of(title.format(label(MEASURES, measure)), of_measure) for measure, of_measure in rows.items()]


def correlation_verdict(series: Sequence[InfluenceSeries]) -> str | None:
    """Whether more influence goes with better answers: the first measured series that has a correlation."""
    for entry in filter(lambda entry: entry.source == "measured", series):
        for correlations in entry.correlations.values():
            plain, partial = correlations.of("nothing"), correlations.of("position_and_ends")
            if np.isnan(plain.value.value):
                continue
            deciding = partial if partial.established else plain
            numbers = f"rank correlation {deciding.value} over {correlations.n_positions} positions"
            if not deciding.established:
                return f"It is not established that positions with more influence are answered better: {numbers}."
            better = "better" if deciding.value.value > 0 else "worse"
            limit = "beyond position and ends" if partial.established else "though position alone may explain it"
            return f"Positions with more influence are answered {better}, {limit}: {numbers}."
    return None


PAIRED_NOTE = (
    "All evaluations asked the same samples; differences are paired over those answered at every position in all of "
    "them. p-values are corrected (Holm) over all evaluations: of mean, worst position and spread together, and of "
    "the positions together."
)
RISES = {
    MEAN: ("better on average", "worse on average"),
    WORST: ("better at worst", "worse at worst"),
    SPREAD: ("position matters more", "position matters less"),
}
"""A change of each endpoint in words, upwards and downwards."""


def evaluation_comparison_report(comparison: EvaluationComparison) -> Report:
    """Every evaluation less the first: one sentence each, the curves, and the differences by position."""
    baseline, *others = comparison.compared
    changes = [
        {"run": entry.name, "of": name, "difference": str(change), "p": f"{entry.p[name]:.2g}"}
        for entry in others
        for name, change in entry.changes.items()
    ]
    by_position = [
        [entry.name, str(place), str(old), str(new), change_text(less.value), f"{p:.2g}"]
        for entry in others
        for place, old, new, less, p in zip(
            comparison.positions, baseline.means, entry.means, entry.differences, entry.difference_p, strict=False
        )
    ]
    places = ["mean", *map(str, comparison.positions)]
    recovered = [
        {"run": entry.name, **{place: each.text() for place, each in zip(places, entry.recovery, strict=True)}}
        for entry in others
        if entry.recovery
    ]
    figure = replace(comparison.shown().figure(), slug="evaluations", x_label=axis_of(comparison.n_items))
    return Report(
        kicker="posbias · evaluations compared",
        verdict=[
            *(f"No conclusion from the {told}." for told in _withheld(comparison, "generated answers of {}")),
            *(_sentence(comparison, entry) for entry in others),
            *(_recovery_sentence(baseline, entry) for entry in others if entry.recovery or entry.no_recovery),
        ],
        picture=[figure],
        summary=[
            Table.of(f"Less {baseline.name}, {comparison.n_samples} samples", changes),
            Table.of(f"Recovery less that of {baseline.name}", recovered),
        ],
        tables=[Table("By position", ["run", "position", baseline.name, "its mean", "difference", "p"], by_position)],
        note=PAIRED_NOTE,
    )


def _recovery_sentence(baseline: Compared, entry: Compared) -> str:
    """Whether one evaluation keeps more of what the item gains, or less, than the first."""
    if entry.no_recovery:
        return f"Recovery of {entry.name} and {baseline.name} is not compared: {entry.no_recovery}."
    less, *_ = entry.recovery
    found = "more" if less.value > 0 else "less"
    told = f"{entry.name} keeps {found} of it than" if less.excludes(0.0) else "no difference is established to"
    return f"Recovery, mean over positions: {told} {baseline.name} ({change_text(less)})."


PLACED = {
    "system": "in the system message alone",
    "first": "before the first question",
    "both": "in the system message and behind the last question",
    "last": "behind the last question alone",
}
TURNS_NOTE = (
    "Every placement is judged on the same conversations and the same earlier replies; the model's own were made with "
    "the rule at the first placement. Intervals are over conversations; p is corrected (Holm) for the number of "
    "placements. A prefix cache keeps the beginning that a prompt shares with that of the turn before; tokens are "
    "means over the turns."
)


def turns_report(comparison: TurnsEvaluation) -> Report:
    """The share of replies that keep their rule by turn, for each placement, and its price."""
    turns, baseline = comparison.positions, comparison.compared[0]
    levels = [
        [placed(name), *(lasting.level[turn].text() if turn in lasting.level else MISSING for turn in turns)]
        for name, lasting in comparison.lasting.items()
    ]
    less = f"at turn {turns[-1]}, less {baseline.name}"
    prices = [
        {"the rule stands": placed(entry.name), **_gain_and_price(comparison, entry, less)}
        for entry in comparison.compared
    ]
    by_rule = [
        {"rule": say, **{name: f"{share:.2f}" for name, share in shares.items()}}
        for say, shares in comparison.by_rule.items()
    ]
    title = "Share of replies that keep the rule, by its place"
    figure = replace(comparison.shown().figure(), slug="turns", title=title, x_label="turn", y_label="share of replies")
    return Report(
        kicker="posbias · rules at turns",
        verdict=turns_verdict(comparison),
        picture=[figure],
        summary=[
            Table(
                "Share of replies that keep the rule", ["the rule stands", *(f"turn {turn}" for turn in turns)], levels
            ),
            Table.of("What each place costs, and gains", prices),
        ],
        tables=[Table.of(f"Every rule at turn {turns[-1]}", by_rule)],
        left_out=[f"broken even when just told, and not judged: {say}" for say in comparison.left_out],
        note=TURNS_NOTE,
    )


def turns_verdict(comparison: TurnsEvaluation) -> list[str]:
    """Until when rules are kept at the first placement, and the cheapest placement that keeps them better."""
    baseline, *others = comparison.compared
    if withheld := _withheld(comparison, "replies with the rule {}", placed):
        return [f"No conclusion from the {told} (--max-tokens)." for told in withheld]
    turns, lasting = comparison.positions, comparison.lasting[baseline.name]
    if turns[-1] not in lasting.level:
        return [
            f"Too few conversations for a claim: {comparison.n_samples} under a rule that is kept when just told, "
            f"{comparison.samples_needed} are needed (--count)."
        ]
    last = turns[-1]
    share = f"in {lasting.level[last].text('.2f')} of replies at turn {last}"
    if len(turns) > 1:
        share += f", in {lasting.level[turns[0]].text('.2f')} at turn {turns[0]}"
    lost = f"Kept until turn {lasting.kept_until} at least" if lasting.kept_until else "Not decided by so few samples"
    if lasting.lost_by is not None:
        lost = (
            f"Lost by turn {lasting.lost_by}" if lasting.lost_by > turns[0] else f"Not kept at turn {turns[0]} already"
        )
    elif lasting.kept_until == last:
        lost = f"Kept through turn {last}"
    said = [f"{lost}: with the rule {placed(baseline.name)} it holds {share} (asked: {lasting.threshold:g})."]
    if better := [entry for entry in others if entry.rises.get(MEAN)]:
        cheapest = min(better, key=lambda entry: comparison.prices[entry.name].added)
        price, before = comparison.prices[cheapest.name], comparison.prices[baseline.name]
        held = comparison.lasting[cheapest.name].level[last].text(".2f")
        said.append(
            f"Cheapest place that keeps it better: {placed(cheapest.name)}, in {held} at turn {last}, for "
            f"{price.added:.0f} {price.unit} a prompt, not {before.added:.0f}{_cached(price, before, 'it')}."
        )
    elif lasting.kept_until == last:
        said.append("No other place is needed.")
    elif others:
        said.append(f"No other place is shown to keep it better.{_to_decide(comparison, f' at turn {last}')}")
    if comparison.left_out:
        rules = "; ".join(f'"{say}"' for say in comparison.left_out)
        said.append(f"Left out, since broken even when just told: {rules}")
    return said


def _withheld(comparison: EvaluationComparison, of: str, called: Callable[[str], str] = str) -> list[str]:
    """Why answers decide nothing, of each evaluation of which they do not; `of` says what they are of its name."""
    return [f"{of.format(called(each.name))}: {each.withheld}" for each in comparison.compared if each.withheld]


def _to_decide(comparison: FormsEvaluation, at: str = "") -> str:
    """How many samples would show a form to be better, in words, if that is known."""
    if comparison.deciding is None:
        return ""
    rise, samples = comparison.deciding
    return f" About {samples:,} samples (--count) would show a rise of {rise:.2g}{at}."


def _gain_and_price(comparison: FormsEvaluation, entry: Compared, less: str) -> dict[str, str]:
    """The change of a form's mean, and what it costs, for a table."""
    change, price = entry.changes.get(MEAN), comparison.prices[entry.name]
    told = {
        less: str(change or MISSING),
        "p": MISSING if change is None else f"{entry.p[MEAN]:.2g}",
        f"{price.unit} a prompt": f"{price.read:,.0f}",
        "of these added": f"{price.added:.1f}",
        "a prefix cache keeps": MISSING if price.kept != price.kept else f"{price.kept:.0%}",
    }
    if price.reported is not None:
        told["the server says it kept"] = f"{price.reported:.0%}"
    if price.money is not None:
        told["price of 1,000 prompts"] = f"{price.money:.4g}"
    return told


def placed(placement: str) -> str:
    """Where a rule stands, in words."""
    often = placement[6:-1]
    return PLACED.get(placement, "behind every question" if often == "1" else f"behind one question in {often}")


ORDERS_NOTE = (
    "All orders are of the same samples; differences are paired over those answered in all of them, and corrected "
    "(Holm) for the number of orders. A prefix cache keeps the beginning that a prompt shares with that of the sample "
    "before it, in the order of the file."
)


def orders_report(comparison: OrdersEvaluation) -> Report:
    """Every order less the first, with its price."""
    baseline, measure = comparison.compared[0], label(MEASURES, comparison.measure)
    rows = [
        {
            "order": entry.name,
            measure: entry.means[0].text() if entry.means else MISSING,
            **_gain_and_price(comparison, entry, f"less {baseline.name}"),
        }
        for entry in comparison.compared
    ]
    return Report(
        kicker="posbias · orders of passages",
        verdict=orders_verdict(comparison),
        summary=[Table.of(f"What each order gains, and costs, {comparison.n_samples} samples", rows)],
        note=ORDERS_NOTE,
    )


def orders_verdict(comparison: OrdersEvaluation) -> list[str]:
    """Which order to take, what it gains and costs; or that none is shown to be better, and what would decide."""
    baseline, *others = comparison.compared
    if withheld := _withheld(comparison, "answers in the order {}"):
        return [f"No conclusion from the {told} (--max-tokens)." for told in withheld]
    if not all(entry.changes for entry in others):
        return [f"Too few samples for a claim: {comparison.n_samples}, {comparison.samples_needed} are needed."]
    said = []
    if better := [entry for entry in others if entry.rises.get(MEAN)]:
        best = max(better, key=lambda entry: entry.changes[MEAN].value.value)
        price, first = comparison.prices[best.name], comparison.prices[baseline.name]
        said.append(
            f"Take the order {best.name}: {label(MEASURES, comparison.measure)} {best.means[0]}, less {baseline.name} "
            f"{best.changes[MEAN]}; it reads {price.read:,.0f} {price.unit} a prompt, {price.added:+.0f}"
            f"{_cached(price, first, 'them')}."
        )
    else:
        said.append(f"Leave the order {baseline.name}: none is shown to be better.{_to_decide(comparison)}")
    if worse := [f"{entry.name} ({entry.changes[MEAN]})" for entry in others if entry.rises.get(MEAN) is False]:
        said.append(f"Worse than {baseline.name}: {', '.join(worse)}.")
    return said


def _cached(price: Price, first: Price, of: str) -> str:
    """The share of a prompt that a prefix cache keeps beside that of the first form, in words, if it is known."""
    return "" if price.kept != price.kept else f"; a prefix cache keeps {price.kept:.0%} of {of}, not {first.kept:.0%}"


def notice_sentences(notices: Mapping[str, Any], *, count: int | None, here: bool, of: str = "") -> list[str]:
    """Oddities of samples of a file, one sentence each; the layout is that of `samples.notices_of`.

    Args:
        notices: By name, the numbers of samples.
        count: Number of all samples; None: not known.
        here: True if the model ran in this process, which reads control tokens in texts as ordinary text.
        of: The run, if a record is made of several.
    """
    sentences = []
    for name, entry in notices.items():
        samples = entry["samples"]
        counts = entry.get("tokens", {}).items()
        spelled = [f"{token!r} {times} times" if times > 1 else repr(token) for token, times in counts]
        tokens = f" ({first_of(spelled)})" if spelled else ""
        after = NOTICED[name]
        if name == "control_tokens" and not here:
            after = "it is not known whether whatever runs the model reads them as ordinary text"
        total = "" if count is None else f" of {count}"
        numbers = f"number {first_of(samples)}"
        sentences.append(f"{of}In {len(samples)}{total} samples ({numbers}) {NOTICES[name]}{tokens}: {after}.")
    return sentences


def axis_of(n_items: int) -> str:
    """Label of the axis of positions."""
    return f"position of the answer among {n_items} (0 is the first)"


def _sentence(comparison: EvaluationComparison, entry: Compared) -> str:
    """What is established of one evaluation less the first."""
    baseline, measure = comparison.compared[0].name, label(MEASURES, comparison.measure)
    if not entry.changes:
        if comparison.n_samples >= comparison.samples_needed:
            return f"{entry.name} and {baseline} are not compared by {measure}."
        return (
            f"{entry.name} and {baseline} are not compared: {comparison.n_samples} samples are complete in all "
            f"evaluations, {comparison.samples_needed} are needed."
        )
    if not entry.rises:
        ends = f"mean {measure} {entry.changes[MEAN]}, worst position {entry.changes[WORST]}"
        return f"No difference between {entry.name} and {baseline} is established: {ends}."
    clauses = [f"{RISES[name][not rises]} ({entry.changes[name]})" for name, rises in entry.rises.items()]
    return f"{entry.name} compared with {baseline}, {measure}: {'; '.join(clauses)}."


USUAL = {
    "best_first": "best first",
    "reversed": "best last",
    "ends": "best at both ends",
    SHUFFLED: "shuffled ones",
}
PLACED_BY = {"accuracy": "accuracy", "logprob": "probability", "reciprocal_rank": "reciprocal rank"}
"""Quantity that an order by each measure raises."""


def placement_report(placement: Placement) -> Report:
    """The order, what it is worth against the usual ones, why, and what the data do not decide."""
    measure, curve = PLACED_BY[placement.measure], np.array(placement.curve)
    said = [f"Best order of the passages, first to last (0 is the first given): {_order(placement.order)}."]
    if placement.advice != REORDER:
        kept = "Leave the order" if placement.advice == LEAVE else "Best first, by the scores given"
        said = [
            f"{kept}: none is shown to be better than both best first and shuffled ones.",
            f"That is best first (0 is the first given): {_order(placement.order)}.",
        ]
        if placement.estimated != placement.order:
            said.append(f"Estimated as best, but not shown to be: {_order(placement.estimated)}.")
    gains = [gain for gain in placement.gains if gain.order != placement.estimated]  # shuffled ones have no order
    judged = "held-out samples" if placement.decided else "all samples"
    if raised := [USUAL[gain.over] for gain in gains if gain.raises]:
        said.append(f"On {judged} {measure} rises, over {', '.join(raised)}.")
    if undecided := [USUAL[gain.over] for gain in gains if not gain.raises]:
        said.append(f"No gain in {measure} is shown over {', '.join(undecided)}.")
    title = "No difference between the places is shown"
    if placement.decided:
        kept = f"{100 * placement.kept:.0f} % of the measured differences are kept as signal, the rest is noise"
        said.append(f"Over {placement.n_samples} samples {kept}.")
        used, best, worst = "Place {} is used {} and holds passage {}", int(curve.argmax()), int(curve.argmin())
        ends = (used.format(at, how, placement.order[at]) for at, how in ((best, "best"), (worst, "worst")))
        title = "; ".join(ends).replace("; P", "; p")
    else:
        samples = f"{placement.n_samples} samples do not show that the places differ"
        said.append(f"Why: {samples}, so best first is kept.")
    if placement.n_samples < SAMPLES_TO_CONFIRM:
        said.append(f"A gain is shown by at least {SAMPLES_TO_CONFIRM} samples.")
    if placement.withheld:
        said.append(f"By {measure}, since accuracy decides nothing: {placement.withheld}.")
    if placement.method:
        said.append(f"Measured under {placement.method}: an order for the model with that method.")
    if placement.interpolated:
        said.append("Not every place was measured itself: the curve is interpolated between those that were.")
    rows = [
        {
            "against": USUAL[gain.over],
            "its order": _order(gain.order) or MISSING,
            "gain": gain.gain.text("+.3f") if gain in gains else "0",
            "judged on": judged if gain in gains else MISSING,
            "raises it": ("yes" if gain.raises else "not shown") if gain in gains else "the same order",
        }
        for gain in placement.gains
    ]
    places = f"place among {curve.size} (0 is the first)"
    figure = replace(placement.shown().figure(), slug="placement", title=title, x_label=places)
    return Report(
        kicker="posbias · where relevant passages should stand",
        verdict=said,
        picture=[replace(figure, y_label=f"expected {measure}")],
        summary=[Table.of(f"Gain in {measure} of the order estimated as best, per unit of relevance", rows)],
    )


def _order(order: Sequence[int]) -> str:
    return ",".join(map(str, order))
