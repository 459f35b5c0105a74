"""One task in several forms: the places of a rule in a conversation, compared on the same samples, with their prices.

Each form is an evaluation of its own. A form costs the tokens that it adds to a prompt, and what it takes from a prefix
cache: a prompt shares its beginning with the one that was sent before it, and only what follows has to be read.

The model's replies in a conversation are made once, with the rule at the first place, and serve every form, so that
forms differ in nothing but where the rule stands. A rule that is broken even when it has just been told says nothing of
turns or places, and is left out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from posbias.errors import RunError
from posbias.evaluation.comparison import EvaluationComparison, Lasting, Price, compare_evaluations
from posbias.evaluation.curve import (
    ALPHA,
    DECIDING,
    SAMPLES_FOR_CLAIM,
    complete_samples,
    independent,
    position_curve,
)
from posbias.evaluation.evaluation import SCORES, Evaluation
from posbias.evaluation.lengths import LengthLevel, effective_length
from posbias.evaluation.levels import MEAN, levels_of, samples_for
from posbias.evaluation.reading import Reading
from posbias.results.result import as_stored
from posbias.tasks.language import encode
from posbias.tasks.language.adherence import RulesAtTurns, Told

PRICED = 8
"""Samples from which the price of a form is taken."""
KEPT_WHEN_TOLD = 0.5
"""Share of replies that must keep a rule which they have just been told, for it to say anything of turns."""


def compare_forms(
    found: Mapping[str, Evaluation],
    just_told: Evaluation,
    task: RulesAtTurns,
    told: Sequence[Told],
    *,
    threshold: float,
    tokenizer: Any,
) -> EvaluationComparison:
    """Evaluations of all placements on the same samples, each less the first, with prices and how long rules last.

    Args:
        found: The evaluation of each placement; the first is the one that the others are compared to.
        just_told: The same samples, a question alone with the rule behind it.
        task: With the replies of all conversations.
        told: The samples.
        threshold: Share of replies that must keep a rule.
        tokenizer: The model's own; None: prices are in characters.

    Raises:
        RunError: no rule is kept even when it has just been told.
    """
    rules = np.array([sample.say for sample in told])
    fresh = just_told.tables["correct"][:, 0]
    left_out = [say for say in dict.fromkeys(rules) if not np.nanmean(fresh[rules == say]) >= KEPT_WHEN_TOLD]
    rows = ~np.isin(rules, left_out)
    if not rows.any():
        raise RunError(f"the model keeps none of {len(left_out)} rules even when just told, so none is judged by turn")
    judged = {name: _of_rows(evaluation, np.flatnonzero(rows)) for name, evaluation in found.items()}
    comparison = compare_evaluations(list(judged.values()), names=list(judged))
    turns = comparison.positions
    prices = {name: price_of(replace(task, placements=(name,)), told, turns, tokenizer) for name in found}
    lasting = {name: _lasting(evaluation, turns, threshold) for name, evaluation in judged.items()}
    record = comparison.record
    record.resolved["title"] = f"{next(iter(found.values())).source or 'model'}: are rules kept, by turn and place?"
    record.resolved["task"] = str(task)
    record.scalars |= {
        "prices": as_stored(prices),
        "lasting": as_stored(lasting),
        "left_out": left_out,
        "deciding": _deciding(comparison),
        "by_rule": _by_rule(judged, rules[rows]),
    }
    return replace(EvaluationComparison.from_record(record), evaluations=found)


def _of_rows(evaluation: Evaluation, rows: np.ndarray) -> Evaluation:
    """The answers to some of the samples alone, and how many of them cannot be judged."""
    chosen = {int(row) + evaluation.record.resolved.get("skip", 0) for row in rows}
    reasons = Counter(
        each.reason
        for each in evaluation.unjudged
        if each.reason != "too_long" and int(each.sample.rpartition("-")[2]) in chosen
    )
    reading = Reading(len(rows) * len(evaluation.positions), dict(reasons))
    tables = {name: table[rows] for name, table in evaluation.tables.items()}
    judged = {} if reading.withheld else {"accuracy": independent(tables["correct"], tables)}
    curves = {name: position_curve(table, positions=evaluation.positions) for name, table in judged.items()}
    return replace(evaluation, tables=tables, reading=reading, curves=curves)


def _lasting(evaluation: Evaluation, turns: Sequence[int], threshold: float) -> Lasting:
    """The share of replies that keep their rule at every turn, and until when it is at least the threshold.

    As with an effective length, low ends need no correction, and high ones hold for all turns at once.
    """
    levels = []
    for column, turn in enumerate(turns):
        replies = complete_samples(evaluation.right[:, [column]], n_positions=1)
        if len(replies) < SAMPLES_FOR_CLAIM:
            continue
        found = levels_of(replies, curves=len(turns))
        levels.append(LengthLevel(turn, len(replies), found.worst, 0.0, found.mean, evaluation.withheld))
    kept = effective_length(levels, threshold).at_least
    lost = next((level.length for level in levels if level.reaches(threshold) is False), None)
    return Lasting({level.length: level.mean for level in levels}, threshold, kept, lost)


def _deciding(comparison: EvaluationComparison) -> tuple[float, int] | None:
    """A rise of the mean over turns, and about how many samples find it, if no placement is shown to be better."""
    baseline, *others = comparison.compared
    better = [entry for entry in others if entry.changes and entry.changes[MEAN].value.value > 0]
    if not better or any(entry.p[MEAN] < ALPHA for entry in better):
        return None
    best = max(better, key=lambda entry: entry.changes[MEAN].value.value)
    tables = comparison.record.arrays
    before, after = (tables[f"{SCORES}{comparison.compared.index(entry)}"] for entry in (baseline, best))
    return samples_for(before, after, max(DECIDING, best.changes[MEAN].value.value), len(others))


def _by_rule(judged: Mapping[str, Evaluation], rules: np.ndarray) -> dict[str, dict[str, float]]:
    """The share of replies at the last turn that keep each rule, by placement."""
    return {
        say: {
            name: float(np.nanmean(evaluation.tables["correct"][rules == say, -1]))
            for name, evaluation in judged.items()
        }
        for say in dict.fromkeys(rules.tolist())
    }


def price_of(task: RulesAtTurns, told: Sequence[Told], turns: Sequence[int], tokenizer: Any) -> Price:
    """The price of a task's first placement, over the turns of a few samples."""
    bare, read, kept = [], [], []
    for sample in told[:PRICED]:
        for turn in turns:
            prompt = _units(task.draft(sample, turn).messages, tokenizer)
            read.append(len(prompt))
            bare.append(len(_units(task.bare(sample, turn), tokenizer)))
            if turn > 1:
                before = _units(task.draft(sample, turn - 1).messages, tokenizer)
                same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before, strict=False))
                kept.append(sum(1 for _ in same) / len(prompt))
    added = float(np.mean(read) - np.mean(bare))
    unit = "characters" if tokenizer is None else "tokens"
    return Price(float(np.mean(read)), added, float(np.mean(kept)) if kept else np.nan, unit)


def _units(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> Sequence[Any]:
    """A conversation as tokens, or as characters if there is no tokenizer."""
    if tokenizer is None:
        return "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
    return encode(messages, tokenizer).token_ids
