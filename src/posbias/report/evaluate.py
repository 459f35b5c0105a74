"""A record of behaviour by position in words, tables and figures.

Everything comes from the record (layout: posbias/evaluation/record.py and, where influence was measured on the same
prompts, posbias/auditing/behaviour.py). A stored series of influence: {source, kind, what, means, correlations:
{measure: `Correlations.as_record` with adjusted_p}}.
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posbias.display.figures import (
    GREEN,
    MEASURED,
    RUNS,
    SKY,
    YELLOW,
    Curve,
    Figure,
    Stroke,
    interval_curves,
    theory_strokes,
)
from posbias.evaluation.evaluation import MEASURES
from posbias.report.layout import caveats_of, sample_notices, title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text
from posbias.report.wording import KINDS, THEORIES, label
from posbias.runs.records import Record
from posbias.statistics import MISSING

NOTE = (
    "One sample is requested once per position; only the item that holds the answer moves. Shaded bands are 95 % "
    "intervals over samples, position by position; statements about differences rest on the same samples at all "
    "positions and are corrected for the number of comparisons. A position that is missing was too long for the "
    "model, or refused."
)
CORRELATION_CAVEAT = (
    "A rank correlation over positions is nearly automatic where both curves fall or bend alike; the partial ones hold "
    "position, distance to the nearer end, or both fixed. Their intervals resample samples at the chosen positions; "
    "p counts permutations of the positions, corrected (Holm) for the number of series and measures."
)
VERDICTS = {
    "accuracy": "right verdicts",
    "flip_rate": "verdict follows the slot (preference flips with the order)",
    "first_pick": "first response picked (1/2 without position bias)",
    "tie_rate": "tie called",
}
WHAT = {
    "gold": "answer's item",
    "place": "place, another item",
}
"""What a series of influence is about."""
CONTROLLED = {
    "nothing": "plain",
    "position": "position held fixed",
    "ends": "distance to the nearer end held fixed",
    "position_and_ends": "both held fixed",
}
SHAPES = {
    "u": "Yes, it loses answers in the middle",
    "inverted_u": "It uses the middle best and loses answers at both ends",
    "rising": "It uses later positions better than earlier ones, and no loss of the middle alone is established",
    "falling": "It uses earlier positions better than later ones, and no loss of the middle alone is established",
    "unclear": "Where the answer stands matters, but neither a loss of the middle nor a trend is established",
    "flat": "No dependence on where the answer stands is established",
}
"""What the shape of a curve says to a reader."""
INFLUENCES = tuple(Stroke(colour, "solid") for colour in (GREEN, YELLOW, SKY))
"""Strokes of measured kinds, none a theory's."""
MITIGATED, CALIBRATED = 20, 12
"""Samples for a first trial of methods, of a small model half an hour, and before them for fits, as is the default."""
TIE_RANGE = (0.02, 20.0)
"""Multiples of the mean shown on the logarithmic axis; theories fall far below."""
ON_ONE_SCALE = {"accuracy": MEASURED, "reciprocal_rank": Stroke(MEASURED.colour, "dash")}
"""Measures that can be drawn as multiples of their mean: none is negative."""

Stored = Mapping[str, Any]


@REPORTS.register("evaluate")
def behaviour_report(record: Record) -> Report:
    """Scores by position, differences to the best one, and the correlation with influence where it was measured."""
    figures, tables = _figures(record), tables_of(record)
    return Report(
        title_of(record),
        kicker="posbias · behaviour by position",
        notices=notices_of(record),
        verdict=verdict_of(record),
        picture=figures[:1],
        summary=tables[:1],
        statements=statements_of(record),
        caveats=[*caveats_of(record), *_counted_as_wrong(record), *_influence_caveat(record)],
        figures=figures[1:],
        note=NOTE,
        tables=tables[1:],
        left_out=_reasons(record),
        record=record,
    )


def notices_of(record: Record) -> list[str]:
    """What must be known of the answers before any number is read."""
    moved = record.scalars.get("moved_blanks", 0)
    joined = [
        f"{moved} of {record.scalars['examples']} prompts ended in blanks. They end before them now, and the right "
        "answer begins with them, as its tokens do."
    ]
    return [*_key(record), *_refused(record), *_thoughts(record), *(joined if moved else []), *sample_notices(record)]


def _key(record: Record) -> list[str]:
    """That a key went unencrypted."""
    responder = record.resolved["responder"]
    if not responder.get("key_in_clear"):
        return []
    variable, address = responder["key_variable"], responder["address"]
    return [f"The key in {variable} was sent unencrypted to {address}, where others can read it."]


def _thoughts(record: Record) -> list[str]:
    """How many answers never came out of the model's thoughts, and what is scored without thoughts."""
    reading, notices = record.scalars.get("reading", {}), []
    if reading.get("unfinished"):
        most = f"--max-tokens {record.resolved['max_tokens']}, --thinking-tokens {record.resolved['thinking_tokens']}"
        notices.append(
            f"{reading['unfinished']} of {reading['answers']} answers never came out of the model's thoughts ({most}) "
            "and count as wrong. More --thinking-tokens let thoughts end; --template-options 'enable_thinking=False' "
            "turns them off in chat templates that know it."
        )
    if reading.get("thought"):
        scored = "logprob" in record.scalars["curves"]
        notices.append(
            f"{reading['thought']} of {reading['answers']} answers came with thoughts, which were taken out."
            + scored * " The right answer was scored without any before it, so not as the model would give it."
        )
    return notices


def _refused(record: Record) -> list[str]:
    """What is missing from every curve because a server refused it: how much, where, and the first in its words."""
    refused = record.scalars.get("refused")
    if not refused:
        return []
    # Without an item that holds the answer there is one position, which has no number.
    counted = sorted(Counter(entry["position"] for entry in refused).items(), key=lambda each: each[0] or 0)
    places = ", ".join(
        f"{'no position' if place is None else f'position {place}'}: {count}" for place, count in counted
    )
    first, total = refused[0], record.scalars["examples"]
    return [
        f"{len(refused)} of {total} prompts were refused by the server and are left out of every curve ({places}). "
        f"Comparisons rest on the samples that were answered at all positions. The first: sample {first['sample']}, "
        f"position {first['position']}: {first['reason']}",
    ]


def verdict_of(record: Record) -> list[str]:
    """Whether answers depend on where the item stands, in the first two measures; and what can be done, or what was
    found of influence on the same prompts."""
    curves = record.scalars["curves"]
    if not curves or "verdicts" in record.scalars:
        return statements_of(record)[:2]
    if withheld := _withheld(record):
        return [*withheld, *(_shape_sentence(label(MEASURES, name), curve) for name, curve in curves.items())][:3]
    found = [_shape_sentence(label(MEASURES, name), curve) for name, curve in list(curves.items())[:2]]
    (lead, *_), *others = (sentence.partition(": ") for sentence in found)
    found[1:] = [f"{'The same' if lead == other else other}: {rest}" for other, _, rest in others]
    series = _series(record)
    tied = [text for measure in tied_measures(series) for text in correlation_statements(series, measure)]
    if tied:
        return [*found, f"What weighs, and what is used: {tied[0]}"]
    if all(curve["shape"] is None or curve["shape"]["label"] == "flat" for curve in curves.values()):
        return found
    return [*found, f"What can be done: {_tries(record)}`posbias place` puts relevant passages where it uses them."]


def _tries(record: Record) -> str:
    """The command that tries methods on the model, whose weights a server does not give."""
    responder = record.resolved["responder"]
    if responder.get("kind") != "local":
        return ""
    model, task = (shlex.quote(text) for text in (responder["model"]["source"], record.resolved["task"]))
    positions, count = record.resolved["positions"], MITIGATED
    three = sorted({positions[0], positions[len(positions) // 2], positions[-1]})
    fitted = ""
    if record.resolved.get("file_sha256"):  # at least so many samples are in the file, and some go to fits
        fewer = min(CALIBRATED, record.resolved["count"] // 3)
        count = min(count, record.resolved["count"] - fewer)
        fitted = f" --calibration {fewer}" if fewer < CALIBRATED else ""
    limits = f"--positions {','.join(map(str, three))} --count {count}{fitted}"
    return f"`posbias mitigate {model} --task {task} {limits}` tries methods and says which helps; "


def _shape_sentence(measure: str, curve: Stored) -> str:
    """The established shape of a curve in plain words, and its ends: the best and the worst position."""
    shape = curve["shape"]
    known = [
        (mean, place)
        for mean, place in zip(curve["means"], curve["positions"], strict=True)
        if mean["value"] is not None
    ]
    if shape is None or not known:
        return f"By {measure} nothing is decided: {curve['findings'][0]}."
    values = [mean["value"] for mean, _ in known]
    numbers = f"{measure} is highest {_at(known, max(values))} and lowest {_at(known, min(values))}"
    if max(values) == min(values):
        numbers = f"{measure} is the same at every position, {interval_text(known[0][0], '.2f')}"
    return f"{SHAPES[shape['label']]}: {numbers} (p for a trend or bend {shape['p_flat']:.2g})."


def _at(known: Sequence[tuple[Stored, int]], value: float) -> str:
    """The positions that have a mean, all of them where several share it."""
    alike = [(mean, place) for mean, place in known if mean["value"] == value]
    places = " and ".join(f"{place}{'' if place else ' (the first)'}" for _, place in alike)
    return f"at position{'s' if len(alike) > 1 else ''} {places} with {interval_text(alike[0][0], '.2f')}"


def tables_of(record: Record) -> list[Table]:
    """Scores by position, differences to the best one, and the correlation where it was measured."""
    curves, series = record.scalars["curves"], _series(record)
    tables = [*_verdict_tables(record), _score_table(record)]
    tables += [_difference_table(name, curve) for name, curve in curves.items() if curve["comparison"] is not None]
    tables += [
        correlation_table(f"Influence and {label(MEASURES, measure)} over positions", series, measure)
        for measure in tied_measures(series)
    ]
    return [table for table in tables if table.cells]


def statements_of(record: Record) -> list[str]:
    """What the intervals support, sentence by sentence."""
    found = [
        f"{label(MEASURES, name)}: {finding}."
        for name, curve in record.scalars["curves"].items()
        for finding in curve["findings"]
    ]
    judged, withheld = record.scalars.get("verdicts"), _withheld(record)
    if judged and not withheld:
        found = [f"Verdicts: {finding}." for finding in judged["findings"]] + found
    found = withheld + found
    if not found:
        found = ["No example was answered or scored, so there is no curve."]
    endings = record.scalars.get("endings", {})
    if endings.get("starts") is not None and endings["starts"] != endings["contains"]:
        found.append(
            f"{endings['contains']:.0%} of the generated answers are right by the task's rule; {endings['starts']:.0%} "
            "begin with the right one."
        )
    for measure in tied_measures(_series(record)):
        found += correlation_statements(_series(record), measure)
    return found


def _influence_caveat(record: Record) -> list[str]:
    return [CORRELATION_CAVEAT] if "influence" in record.scalars else []


def _counted_as_wrong(record: Record) -> list[str]:
    """Answers that may not be what the model would say; none of them was left out."""
    found = []
    cut, total = record.scalars["cut_off"], answered(record)
    if cut:
        tokens = record.resolved["max_tokens"]
        within = record.scalars.get("endings", {}).get("open")
        first = f"; {within} of them in their first line and not right, which they might have become" if within else ""
        found.append(f"{cut} of {total} generated answers ended at --max-tokens {tokens}, not by themselves{first}.")
    if empty := record.scalars.get("empty", 0):
        found.append(f"{empty} of {total} generated answers are empty; they count as wrong.")
    judged = record.scalars.get("verdicts", {})
    if unread := judged.get("unread", judged.get("undecided", 0)):
        found.append(f"{unread} of {total} answers hold no verdict that can be read; they count as wrong.")
    return found


def answered(record: Record) -> int:
    """Examples of an evaluation that were answered: neither too long nor refused."""
    missing = sum(record.scalars["skipped"].values()) + len(record.scalars.get("refused", ()))
    return int(record.scalars["examples"] - missing)


def _reasons(record: Record) -> list[str]:
    """What was left out, and why."""
    reasons = [
        f"{count} examples with the answer at position {place} are longer than the model's context and were skipped"
        for place, count in record.scalars["skipped"].items()
    ]
    unscored = record.resolved["responder"].get("no_scores_because")
    if unscored and record.arguments.get("score", True):
        reasons.append(f"the right answers were not scored: {unscored}")
    elif missing := record.scalars.get("unscored"):
        reasons.append(
            f"{missing} of {answered(record)} right answers were not scored: the server's tokens do not tell where "
            "they begin"
        )
    if apart := record.resolved["responder"].get("answers_apart"):
        reasons.append(
            f"{apart} right answers were scored as tokens of their own, though behind their prompts they form others"
        )
    return [*reasons, *record.scalars.get("influence", {}).get("left_out", [])]


def _withheld(record: Record) -> list[str]:
    """Why nothing is concluded from the generated answers, in a sentence; none where enough of them could be read."""
    reading = record.scalars.get("reading", {})
    if not reading.get("withheld"):
        return []
    judged = "verdicts" in record.scalars
    if judged and reading["unread"] > reading["unfinished"]:
        why = "hold no verdict that can be read"
        remedy = "pairwise(pattern='...') reads a form of its own, --max-tokens allows longer answers"
    else:
        why = "never came out of the model's thoughts"
        remedy = "--thinking-tokens allows more thoughts"
    return [
        f"No conclusion from the generated answers: {reading['unread']} of {reading['answers']} {why}, more than "
        f"{reading['most_unread']:.0%}. outputs.jsonl has them; {remedy}."
    ]


def _series(record: Record) -> list[Stored]:
    """The series of influence that were measured on the same prompts."""
    found: list[Stored] = record.scalars.get("influence", {}).get("series", [])
    return found


def _score_table(record: Record) -> Table:
    curves = record.scalars["curves"]
    header = ["position", "answer's token", "samples", *(label(MEASURES, name) for name in curves)]
    cells = []
    for column, place in enumerate(record.resolved["positions"] if curves else ()):
        first = next(iter(curves.values()))
        token = MISSING if first["gold_tokens"] is None else f"{first['gold_tokens'][column]:.0f}"
        means = [interval_text(curve["means"][column]) for curve in curves.values()]
        cells.append([str(place), token, str(first["counts"][column]), *means])
    last = record.scalars["n_items"] - 1
    return Table(f"{record.resolved['task']}: by position of the answer (0 ... {last})", header, cells)


def _verdict_tables(record: Record) -> list[Table]:
    """Rates of a judge that was asked in both orders."""
    judged = record.scalars.get("verdicts")
    if not judged or _withheld(record):
        return []
    cells = [[name, interval_text(judged[rate])] for rate, name in VERDICTS.items() if rate in judged]
    title = f"{judged['n_pairs']} pairs in both orders, {judged['n_both']} with a response named in both"
    return [Table(title, ["rate", "value"], cells)]


def _difference_table(name: str, curve: Stored) -> Table:
    comparison, places = curve["comparison"], curve["positions"]
    best = places[comparison["best"]]
    header = ["position", f"difference to position {best}", "chosen on other samples", "p, all pairs"]
    cells = [
        [
            str(places[entry["position"]]),
            interval_text(entry.get("interval") or entry["bootstrap"]),
            f"{entry['cross_fitted']:+.3f}",
            MISSING if entry["adjusted_p"] is None else f"{entry['adjusted_p']:.2g}",
        ]
        for entry in comparison["differences"]
    ]
    return Table(f"{label(MEASURES, name)}: against the best position", header, cells)


def tied_measures(series: Sequence[Stored]) -> list[str]:
    """Measures that any of the series is correlated with."""
    return list(dict.fromkeys(measure for entry in series for measure in entry["correlations"]))


def series_name(series: Stored) -> str:
    """What a series of influence is called."""
    source, kind = series["source"], series["kind"]
    name = f"influence ({label(KINDS, kind)})" if source == "measured" else label(THEORIES, source)
    return f"{name}: {WHAT[series['what']]}"


def correlation_table(title: str, series: Sequence[Stored], measure: str) -> Table:
    """A row for each series that is correlated with the measure."""
    cells = []
    for entry in series:
        if measure in entry["correlations"]:
            found = entry["correlations"][measure]
            texts = [
                MISSING if each["value"] is None else f"{interval_text(each)} p {each.get('adjusted_p', each['p']):.2g}"
                for each in found["correlations"]
            ]
            cells.append([series_name(entry), *texts, interval_text(found["within"])])
    return Table(title, ["influence", *CONTROLLED.values(), "within positions and samples"], cells)


def correlation_statements(series: Sequence[Stored], measure: str, *, where: str = "") -> list[str]:
    """A sentence for every measured series, and for every theory of which anything is established."""
    statements = []
    for entry in series:
        found = entry["correlations"].get(measure)
        if found is None or not (
            entry["source"] == "measured" or any(each["established"] for each in found["correlations"])
        ):
            continue
        by_name = {each["controlled"]: each for each in found["correlations"]}
        plain, held = by_name["nothing"], by_name["position_and_ends"]
        about = f"{series_name(entry)} and {label(MEASURES, measure)}"
        if plain["value"] is None:
            statements.append(f"{about}: one of the curves is constant, so there is no correlation.")
            continue
        rest = "and nothing is left of a curve once position and ends are held fixed"
        if held["value"] is not None:
            rest = f"with position and ends held fixed {interval_text(held)} ({_established(held)})"
        statements.append(
            f"{about} over {found['n_positions']} positions{where}: rank correlation {interval_text(plain)} "
            f"({_established(plain)}), {rest}."
        )
    return statements


def _established(correlation: Stored) -> str:
    return "established" if correlation["established"] else "not established"


def _figures(record: Record) -> list[Figure]:
    """Where influence was measured on the same prompts, everything on one scale; then one figure per measure."""
    figures = [_score_figure(record, name, curve) for name, curve in record.scalars["curves"].items()]
    if _series(record):
        group = {
            "positions": record.resolved["positions"],
            **{name: record.scalars[name] for name in ("n_items", "curves")},
            "series": _series(record),
        }
        figures.insert(0, influence_figure("behaviour-influence", record.resolved["title"], group))
    return [figure for figure in figures if figure.curves]


def _score_figure(record: Record, name: str, curve: Stored) -> Figure:
    stroke = MEASURED if name == "accuracy" else RUNS[0]
    finding = curve["findings"][0] if curve["findings"] else ""
    return Figure(
        f"behaviour-{name.replace('_', '-')}",
        f"{record.resolved['title']}, {label(MEASURES, name)}: {finding}",
        _axis(record.scalars["n_items"]),
        label(MEASURES, name),
        interval_curves(label(MEASURES, name), curve["positions"], curve["means"], stroke),
        markers=True,
    )


def influence_figure(slug: str, title: str, group: Stored) -> Figure:
    """Accuracy, influence and theories of one model, each as a multiple of its mean over positions.

    `group`: `positions`, `n_items`, `curves` {measure: {means}} and `series` [{source, kind, what, means}].
    """
    drawn = [
        (label(MEASURES, name), group["curves"][name]["means"], stroke)
        for name, stroke in ON_ONE_SCALE.items()
        if name in group["curves"]
    ]
    theories = theory_strokes([series["source"] for series in group["series"] if series["source"] != "measured"])
    kinds = list(dict.fromkeys(series["kind"] for series in group["series"] if series["source"] == "measured"))
    for series in group["series"]:
        measured = series["source"] == "measured"
        stroke = INFLUENCES[kinds.index(series["kind"]) % len(INFLUENCES)] if measured else theories[series["source"]]
        if series["what"] == "place" and any(  # beside the answer's item of the same source
            other["what"] == "gold" and (other["source"], other["kind"]) == (series["source"], series["kind"])
            for other in group["series"]
        ):
            stroke = Stroke(stroke.colour, "dot")
        drawn.append((series_name(series), series["means"], stroke))
    curves: list[Curve] = []
    for name, means, stroke in drawn:
        values = [entry["value"] for entry in means if entry["value"] is not None]
        if values and np.mean(values) > 0:
            curves += interval_curves(name, group["positions"], means, stroke, unit=float(np.mean(values)))
    return Figure(
        slug,
        f"{title}: what weighs, and what is used, by position (each as a multiple of its mean)",
        _axis(group["n_items"]),
        "multiple of the mean over positions",
        tuple(curves),
        markers=True,
        log_range=TIE_RANGE,
        linear_range=(0.0, 4.0),
    )


def _axis(n_items: int) -> str:
    return f"position of the answer among {n_items} (0 is the first)"
