"""An evaluation in words, tables and figures: scores by position, beside influence if that was measured; at
several lengths, accuracy by length and depth, and the effective length."""

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posbias.evaluation.curve import PositionCurve
from posbias.evaluation.evaluation import LEFT_OUT, MEASURES, OUTPUTS_FILE, UNJUDGED, Evaluation, Verdicts
from posbias.evaluation.finished_page import (
    CORRELATION_CAVEAT,
    axis_of,
    correlation_tables,
    correlation_verdict,
    notice_sentences,
)
from posbias.evaluation.lengths import LengthEvaluation
from posbias.evaluation.levels import EFFECTIVE_LENGTH, RequirementCheck
from posbias.evaluation.recovery import Recovery
from posbias.results.figures import Figure, HeatMap
from posbias.results.naming import label
from posbias.results.page import Report
from posbias.results.tables import Table, capital, number_text
from posbias.statistics import CONFIDENCE, MISSING

NOTE = (
    "One sample is requested once per position; only the item that holds the answer moves. Shaded bands are 95 % "
    "intervals over samples, position by position; statements about differences rest on the same samples at all "
    "positions and are corrected for the number of comparisons. A position that is missing was too long for the "
    "model, or refused."
)
SHAPES = {
    "u": "It loses answers in the middle",
    "inverted_u": "It uses the middle better than either end",
    "rising": "It uses later positions better",
    "falling": "It uses earlier positions better",
    "unclear": "The position matters, but in no clear pattern",
    "flat": "No dependence on position is established",
}
"""Answer of a curve's shape to a reader."""
REMEDIES = {
    "unfinished": "--thinking-tokens allows more thoughts, --template-options 'enable_thinking=False' none",
    "cut_off": "--max-tokens allows longer answers",
}
"""What makes answers that cannot be judged fewer, by the reason in `UNJUDGED`."""


def evaluation_report(evaluation: Evaluation) -> Report:
    """Scores by position, differences to the best one, and the correlation with influence if it was measured."""
    figures, tables = _figures(evaluation), tables_of(evaluation)
    first = 2 if evaluation.recovery and evaluation.recovery.by_position else 1
    return Report(
        kicker="posbias · behaviour by position",
        notices=notices_of(evaluation),
        verdict=verdict_of(evaluation),
        picture=figures[:1],
        summary=tables[:first],
        statements=statements_of(evaluation),
        caveats=_caveats(evaluation),
        figures=figures[1:],
        note=NOTE,
        tables=tables[first:],
        left_out=_reasons(evaluation),
    )


def notices_of(evaluation: Evaluation) -> list[str]:
    """Notices about the answers that a reader needs before any number."""
    notices, responder, reading = [], evaluation.responder, evaluation.reading
    if responder.get("own_temperature"):
        notices.append(
            "The model takes no temperature: its answers were drawn at the server's own, and may be others next time."
        )
    if refused := evaluation.refused:
        # Without an item that holds the answer there is one position, which has no number.
        counted = sorted(Counter(each.position for each in refused).items(), key=lambda entry: entry[0] or 0)
        at = ", ".join(f"{'no position' if place is None else f'position {place}'}: {n}" for place, n in counted)
        first = refused[0]
        notices.append(
            f"{len(refused)} of {evaluation.examples} prompts were refused by the server and are left out of every "
            f"curve ({at}). Comparisons rest on the samples that were answered at all positions. The first: sample "
            f"{first.sample}, position {first.position}: {first.detail}"
        )
    if reading.thought:
        scored = "logprob" in evaluation.curves
        notices.append(
            f"{reading.thought} of {reading.answers} answers came with thoughts, which were taken out."
            + scored * " The right answer was scored without thoughts before it, not as the model would give it."
        )
    if evaluation.moved_blanks:
        notices.append(
            f"{evaluation.moved_blanks} of {evaluation.examples} prompts ended in blanks. They now end before them, "
            "and the right answer begins with the blanks, as its tokens do."
        )
    here = responder.get("kind") == "local"
    return [*notices, *notice_sentences(evaluation.notices, count=evaluation.count, here=here)]


def verdict_of(evaluation: Evaluation) -> list[str]:
    """Sentences on whether the item's position matters, by the first two measures, and on what is left of its gain;
    and remedies, or the influence on the same prompts."""
    curves, withheld = evaluation.curves, _withheld(evaluation)
    if not curves or evaluation.verdicts:
        return statements_of(evaluation)[:2]
    sentences = [*withheld, *(_shape_sentence(name, curve) for name, curve in list(curves.items())[:2])]
    if (found := evaluation.recovery) is not None and found.undefined:
        sentences.append(f"Recovery is not defined: {found.undefined}.")
    elif found is not None:
        left = dict(zip(evaluation.positions, found.by_position, strict=True))
        worst, best = (choose(left, key=lambda place: left[place].value) for choose in (min, max))
        numbers = f"{found.worst.text('.2f')} is left at position {worst}, {left[best].text('.2f')} at position {best}"
        sentences.append(f"Recovery: of what the item gains alone {numbers}.")
    if not withheld and (correlated := correlation_verdict(evaluation.series)):
        sentences.append(correlated)
    elif not withheld and any(curve.shape is not None and curve.shape.label != "flat" for curve in curves.values()):
        tries = []
        if evaluation.responder.get("kind") == "local":  # a server does not give a model's weights
            model, task = (shlex.quote(text) for text in (str(evaluation.source), evaluation.task))
            places = evaluation.positions
            three = ",".join(map(str, sorted({places[0], places[len(places) // 2], places[-1]})))
            tries.append(f"`posbias mitigate {model} --task {task} --positions {three}` tries methods")
        if evaluation.task.startswith("documents"):  # calls in a conversation are in no order to choose
            tries.append("`posbias place` finds the best passage order")
        if tries:
            sentences.append(f"What to do: {'; '.join(tries)}.")
    return sentences


def measure_words(measure: str) -> str:
    """A measure as sentences call it."""
    return {"logprob": "log-probability per token", "reciprocal_rank": "1 / rank"}.get(measure, measure)


def _shape_sentence(measure: str, curve: PositionCurve) -> str:
    """The established shape of a curve in plain words, its best and worst position, and the samples that would decide
    if no dependence on position is established."""
    words = measure_words(measure)
    means = {place: mean for place, mean in zip(curve.positions, curve.means, strict=True) if not np.isnan(mean.value)}
    if curve.shape is None or not means:
        return f"{capital(words)}: {curve.findings[0]}."
    values = {mean.value for mean in means.values()}

    def at(value: float) -> str:
        alike = [place for place, mean in means.items() if mean.value == value]
        places = f"position{'s' if len(alike) > 1 else ''} {', '.join(map(str, alike))}"
        places = places if len(alike) < 4 else f"{len(alike)} positions"
        return f"{means[alike[0]].text('.2f')} at {places}"

    numbers = f"{words} {at(max(values))}, {at(min(values))}"
    if len(values) == 1:
        numbers = f"{words} is {next(iter(means.values())).text('.2f')} at every position"
    sentence = f"{SHAPES[curve.shape.label]}: {numbers}."
    if curve.deciding is not None and curve.deciding[1] > curve.n_complete:
        difference, samples = curve.deciding
        between = "the ends and the middle" if len(curve.positions) > 2 else "the two"
        found = f"a difference of {difference:.2f} between {between}"
        sentence += f" About {samples:,} samples (more lines, or --count) would find {found}."
    return sentence


def tables_of(evaluation: Evaluation) -> list[Table]:
    """Scores by position, what is left of the item's gain, differences to the best position, and the correlation."""
    rows = []
    tokens = evaluation.tables.get("gold_token", np.full((1, len(evaluation.positions)), np.nan)).mean(axis=0)
    for column, place in enumerate(evaluation.positions if evaluation.curves else ()):
        samples = str(next(iter(evaluation.curves.values())).counts[column])
        row = {"position": str(place), "answer's token": number_text(float(tokens[column]), 0), "samples": samples}
        means = {label(MEASURES, name): curve.means[column].text() for name, curve in evaluation.curves.items()}
        rows.append(row | means)
    scores = Table.of(f"{evaluation.task}: by position of the answer (0 ... {evaluation.n_items - 1})", rows)
    found = evaluation.recovery or Recovery()
    title = f"Recovery: share of the item's gain alone, {found.gain.text('.2f')} nats, that is left among the others"
    recovered = zip(evaluation.positions, found.by_position, strict=False)  # none if not measured, or not defined
    rows = [{"position": str(place), "recovery": each.text()} for place, each in recovered]
    tables = [scores, Table.of(title, rows)]
    tables += [_difference_table(name, curve) for name, curve in evaluation.curves.items()]
    tables += correlation_tables(evaluation.series)
    return [table for table in tables if table.cells]


def statements_of(evaluation: Evaluation) -> list[str]:
    """Sentences that the intervals support."""
    withheld = _withheld(evaluation)
    statements = list(withheld)
    if evaluation.verdicts and not withheld:
        statements = [f"Verdicts: {finding}." for finding in _judge_findings(evaluation.verdicts)]
    for name, curve in evaluation.curves.items():
        statements += [f"{label(MEASURES, name)}: {finding}." for finding in curve.findings]
    statements = statements or ["No example was answered or scored, so there is no curve."]
    if "cluster" in evaluation.tables:
        statements.append(
            f"{evaluation.count} samples form {len(evaluation.right)} groups, each of which counts as one."
        )
    return statements


def _answered(evaluation: Evaluation) -> int:
    """Examples that were answered: neither too long nor refused."""
    return evaluation.examples - sum(evaluation.skipped.values()) - len(evaluation.refused)


def _caveats(evaluation: Evaluation) -> list[str]:
    """Answers that may not be what the model would say, and what a correlation with influence may mean."""
    caveats, total = [], _answered(evaluation)
    if evaluation.cut_off:
        most = f"--max-tokens {evaluation.max_tokens}"
        caveats.append(f"{evaluation.cut_off} of {total} generated answers ended at {most}, not by themselves.")
    if wrong := [entry.reason for entry in evaluation.unjudged if entry.reason not in LEFT_OUT]:
        reasons = "; ".join(f"{count} {UNJUDGED[reason]}" for reason, count in Counter(wrong).items())
        marks = Counter(str(entry.detail) for entry in evaluation.unjudged if entry.reason == "unread" and entry.detail)
        reasons += "".join(f"; {count} with {mark}, a form of calls that is not read" for mark, count in marks.items())
        caveats.append(
            f"{len(wrong)} of {total} answers count as wrong because nothing in them can be judged: {reasons}."
        )
    return [*caveats, *([CORRELATION_CAVEAT] if evaluation.series else [])]


def _reasons(evaluation: Evaluation) -> list[str]:
    """Reasons why something was left out."""
    responder = evaluation.responder
    reasons = []
    if too_long := evaluation.skipped:
        places = ", ".join(f"position {place}: {count}" for place, count in too_long.items())
        reasons.append(
            f"{sum(too_long.values())} of {evaluation.examples} prompts are {UNJUDGED['too_long']} ({places})"
        )
    if responder.get("no_scores_because") and evaluation.record.arguments.get("score", True):
        reasons.append(f"the right answers were not scored: {responder['no_scores_because']}")
    elif evaluation.unscored:
        reasons.append(
            f"{evaluation.unscored} of {_answered(evaluation)} right answers were not scored: the server's tokens do "
            "not tell where they begin"
        )
    if responder.get("together") == "nothing":
        reasons.append(
            "no prompts were answered together, which takes longer: in a batch the logits would have been others"
        )
    if apart := responder.get("answers_apart"):
        reasons.append(
            f"{apart} right answers were scored as separate tokens, although joined to their prompts they form others"
        )
    return reasons


def _withheld(evaluation: Evaluation) -> list[str]:
    """Why nothing is concluded from the generated answers, and what to do; none if enough of them could be judged."""
    reading = evaluation.reading
    if not reading.withheld:
        return []
    remedies = [words for reason, words in REMEDIES.items() if reason in reading.unjudged]
    if evaluation.verdicts and "unread" in reading.unjudged:
        remedies.append("the task's pattern='...' reads another form")
    told = ", ".join([f"{OUTPUTS_FILE} has them", *remedies])
    return [f"No conclusion from the generated answers: {reading.withheld}.", f"{told}."]


def _difference_table(name: str, curve: PositionCurve) -> Table:
    """Every position against the best one; no rows if there is no comparison."""
    title, found = f"{label(MEASURES, name)}: against the best position", curve.comparison
    if found is None:
        return Table(title, [], [])
    header = ["position", f"difference to position {curve.positions[found.best]}", "p, all pairs"]
    cells = []
    for each in found.differences:
        p = MISSING if np.isnan(each.adjusted_p) else f"{each.adjusted_p:.2g}"
        cells.append([str(curve.positions[each.position]), each.interval.text(), p])
    return Table(title, header, cells)


def _figures(evaluation: Evaluation) -> list[Figure]:
    """One figure per measure."""
    figures = []
    for name, curve in evaluation.curves.items():
        shown = curve.shown()
        title = f"{evaluation.record.title}, {shown.quantity}: {curve.findings[0]}"
        slug, where = f"behaviour-{name.replace('_', '-')}", axis_of(evaluation.n_items)
        figures.append(replace(shown.figure(), slug=slug, title=title, x_label=where))
    return [figure for figure in figures if figure.curves]


def requirement_text(check: RequirementCheck) -> str:
    """Whether a requirement is met, and the number that it bounds, or why answers decide nothing."""
    verb = "is met" if check.met else "is not met"
    of = ", ".join(filter(None, (label(MEASURES, check.measure), check.arm)))
    told = f"{check.interval} ({of})"
    if check.withheld:
        told = f"{check.withheld} ({check.arm})" if check.arm else check.withheld
    elif check.measure == EFFECTIVE_LENGTH:
        told = f"at least {check.low or 0:.0f} tokens are established, {check.value:.0f} tokens estimated"
    return f"Required {check.text} {verb}: {told}."


def answer_lines(row: Mapping[str, Any], prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[str]:
    """A row of outputs with the prompts that were asked for it: messages, thoughts, answer, and how it was judged."""
    parts: list[tuple[str, str]] = []
    for prompt in prompts:
        for message in [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt:
            rest = {name: value for name, value in message.items() if name not in ("role", "content")}
            text = "\n".join(filter(None, [message.get("content"), json.dumps(rest) if rest else ""]))
            parts.append((message["role"], text))
    words = {1.0: "right", 0.0: "wrong", None: row["skipped"] or "no answer was generated"}
    judged = str(words.get(row["correct"], row["correct"])) + (f" (rule: {row['judged']})" if row["judged"] else "")
    parts += [("thoughts", row["thoughts"])] if row["thoughts"] else []
    parts += [(f"answer ({row['finish']})", row["text"] or "")] if row["text"] is not None else []
    parts += [("expected", "\n".join(row["answers"])), ("judged", judged)]
    parts += [("not to be judged", UNJUDGED[row["unjudged"]])] if row["unjudged"] else []
    return [line for name, text in parts for line in (f"--- {name}", *text.split("\n"))]


def _judge_findings(verdicts: Verdicts) -> list[str]:
    """Findings that the intervals of a judge's verdicts support."""
    first = verdicts.first_pick
    if not first.known:
        return ["no question has a response named in both orders, so nothing can be said about the slot"]
    leaning = "no preference for a slot is established"
    if first.excludes(0.5):
        leaning = f"the {'first' if first.value > 0.5 else 'second'} slot is preferred"
    return [
        f"right in {verdicts.accuracy} of the verdicts",
        f"the preferred response changes with the order in {verdicts.flip_rate} of {verdicts.n_both} questions",
        f"the first response is picked in {first}: {leaning}",
        *([f"a tie is called in {verdicts.tie_rate} of the verdicts"] if verdicts.ties else []),
    ]


LENGTHS_NOTE = (
    "One sample is requested once per depth; only the item that holds the answer moves. Each cell has a 95 % interval "
    "over samples. The effective length rests on the low ends, and claims too much in at most 5 % of runs; that a "
    "length fails rests on high ends that hold for all cells at once, which are a little wider than a cell's own."
)


def length_report(evaluation: LengthEvaluation) -> Report:
    """A heat map of accuracy, a curve for every length, and the effective length with what decides it."""
    cut = evaluation.cut_off
    cut_off = [f"{cut} of {evaluation.examples} generated answers were cut off, not ended by themselves."] * bool(cut)
    heat_map = HeatMap(
        "accuracy-by-length",
        f"{evaluation.record.title}: accuracy by length and depth",
        "depth of the answer (0 begin, 1 end)",
        "tokens",
        "accuracy",
        {"": np.array([[cell.value for cell in level.cells] for level in evaluation.levels])},
        (evaluation.depths[0], evaluation.depths[-1]),
        (1, len(evaluation.levels)),
        (0.0, 1.0),
        rows=tuple(map(str, evaluation.lengths)),
    )
    return Report(
        kicker="posbias · behaviour by length and depth",
        notices=list(evaluation.notices),
        verdict=length_verdict(evaluation),
        picture=[heat_map],
        summary=[_cell_table(evaluation)],
        caveats=cut_off,
        note=LENGTHS_NOTE,
        left_out=[f"too long at {tokens} tokens: {lost} samples" for tokens, lost in evaluation.too_long.items()],
    )


def length_verdict(evaluation: LengthEvaluation) -> list[str]:
    """The effective length as a bound, and what keeps it from being longer."""
    effective = evaluation.effective_length
    wanted = f"{effective.threshold:g} accuracy at every depth"
    first = f"No length is shown to reach {wanted}."
    if effective.at_least:
        first = f"Effective length: at least {effective.at_least} tokens with {wanted} ({CONFIDENCE:.0%} confidence)."
    length = effective.below or effective.undecided
    if length is None:
        limit = [length for length in evaluation.not_evaluated if length in evaluation.too_long]
        why = f"{limit[0]} tokens are too long for the model" if limit else "No longer length was evaluated"
        return [first, f"{why}; all of {', '.join(map(str, evaluation.lengths))} reach it."]
    level = next(level for level in evaluation.levels if level.length == length)
    numbers = f"{level.worst} at depth {level.worst_depth:.2g}, the worst"
    samples = max(level.deciding(effective.threshold), level.n_complete + 1)
    why = f"{length} tokens are not decided: accuracy {numbers}; about {samples:,} samples (`--count`) would decide."
    if level.withheld:
        why = f"{length} tokens are not decided: {level.withheld}."
    elif effective.below is not None:
        why = f"At {length} tokens accuracy is lower: {numbers}."
    return [first, why]


def _cell_table(evaluation: LengthEvaluation) -> Table:
    threshold, words = evaluation.threshold, {True: "yes", False: "no", None: "not decided"}
    depths = [f"depth {depth:.2g}" for depth in evaluation.depths]
    recovered = any(level.recovery for level in evaluation.levels)
    header = ["tokens", "samples", f"{threshold:g} at every depth", *depths, "mean", "worst"]
    header += ["recovery at worst"] * recovered
    cells = []
    for level in evaluation.levels:
        reached = words[level.reaches(threshold)]
        means = [cell.text() for cell in (*level.cells, level.mean, level.worst)]
        means += [(level.recovery or Recovery()).worst.text()] * recovered
        cells.append([str(level.length), str(level.n_complete), reached, *means])
    return Table(f"{evaluation.task}: accuracy by length and depth of the answer", header, cells)
