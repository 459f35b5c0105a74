"""One task in several forms, compared on the same samples, with their prices: the places of a rule in a conversation,
or the orders of retrieved passages.

Each form is an evaluation of its own. A form costs the tokens that it adds to a prompt, and what it takes from a prefix
cache: a prompt shares its beginning with the one that was sent before it, and only what follows has to be read.

The model's replies in a conversation are made once, with the rule at the first place, and serve every form, so that
forms differ in nothing but where the rule stands. A rule that is broken even when it has just been told says nothing of
turns or places, and is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from posbias.errors import RunError, UsageError
from posbias.evaluation.comparison import EvaluationComparison, compare_evaluations
from posbias.evaluation.curve import ALPHA, DECIDING, SAMPLES_FOR_CLAIM, complete_samples
from posbias.evaluation.evaluation import SCORES, Evaluation
from posbias.evaluation.lengths import LengthLevel, effective_length
from posbias.evaluation.levels import MEAN, levels_of, samples_for
from posbias.evaluation.options import EvaluateOptions
from posbias.registry import parse_literal_call
from posbias.results.records import Record
from posbias.results.result import RESULTS, as_stored
from posbias.statistics import StoredInterval, StoredNumber, holm_over
from posbias.tasks.language import Example, LanguageTask, encode
from posbias.tasks.language.adherence import RulesAtTurns, Told
from posbias.tasks.language.base import ORDERS, SHUFFLED, Order

PRICED = 8
"""Samples from which the price of a place in a conversation is taken."""
KEPT_WHEN_TOLD = 0.5
"""Share of replies that must keep a rule which they have just been told, for it to say anything of turns."""

Units = Sequence[Any]
"""A prompt as tokens, or as characters if the model's tokenizer is not known."""


@dataclass(frozen=True)
class Price:
    """What one form of a task costs a prompt, mean over prompts."""

    read: float
    """Tokens of a prompt; characters if the model's tokenizer is not known."""
    added: float
    """Those that the form adds: to a conversation without the rule, or to the first order."""
    kept: StoredNumber
    """Share of a prompt, 0 ... 1, that a prefix cache keeps from the one before: of the turn before, or of the sample
    before in the same order; NaN if there is none."""
    unit: str = "tokens"
    reported: float | None = None
    """Share of the tokens read that the server said it had kept, of all its requests; None if it says nothing."""
    money: float | None = None
    """Price of reading 1,000 prompts; None without prices."""


@dataclass(frozen=True)
class Lasting:
    """How long rules are kept in one form of a task."""

    level: Mapping[int, StoredInterval]
    """Share of replies that keep their rule, by turn; turns with too few samples are missing."""
    threshold: float
    """Share of replies that must keep their rule."""
    kept_until: int
    """The last turn up to which all of them are shown to reach it; 0 if none is."""
    lost_by: int | None
    """The first turn that is shown not to reach it."""


@dataclass(frozen=True, eq=False, repr=False)
class FormsEvaluation(EvaluationComparison):
    """Evaluations of one task in several forms, each less the first."""

    prices: Mapping[str, Price] = field(default_factory=dict)
    """What each form costs."""
    deciding: tuple[float, int] | None = None
    """A rise, and about how many samples would find it, if no form is shown to be better than the first."""


@RESULTS.register("evaluate_turns")
@dataclass(frozen=True, eq=False, repr=False)
class TurnsEvaluation(FormsEvaluation):
    """Whether rules are kept at turns of conversations, by where they stand."""

    drawn_by: ClassVar = "posbias.evaluation.finished_page:turns_report"
    lasting: Mapping[str, Lasting] = field(default_factory=dict)
    """How long rules are kept in each form."""
    left_out: tuple[str, ...] = ()
    """Rules that are broken even when just told."""
    by_rule: Mapping[str, Mapping[str, StoredNumber]] = field(default_factory=dict)
    """Share of replies at the last turn that keep each rule, by form."""


@RESULTS.register("evaluate_orders")
@dataclass(frozen=True, eq=False, repr=False)
class OrdersEvaluation(FormsEvaluation):
    """How well answers are found in passages that stand in several orders, and what each costs."""

    drawn_by: ClassVar = "posbias.evaluation.finished_page:orders_report"


def orders_of(task: LanguageTask, names: Sequence[str]) -> dict[str, LanguageTask]:
    """The task with its passages in each order; `measured('RUN')` is the one that `place` gives.

    Raises:
        UsageError: an order that is none, or that a run does not show to be better; or a task without passages.
    """
    from posbias.evaluation.place import REORDER, place  # of measured orders alone

    if getattr(task, "order", "") is not None:
        raise UsageError(
            f"evaluate: orders are of documents(...) or items(...), without an order of their own, got {task}"
        )
    ordered = {}
    for name in names:
        order: Order = name
        if name not in ORDERS and name != SHUFFLED:
            called, runs, named = parse_literal_call(name, "order")
            if called != "measured" or len(runs) != 1 or named:
                allowed = ", ".join((*ORDERS, SHUFFLED))
                raise UsageError(f"evaluate: order {name!r}; allowed: {allowed}, measured('RUN')")
            placed = place(list(range(task.n_items, 0, -1)), Path(runs[0]))  # the file has the most relevant first
            if placed.advice != REORDER:
                raise UsageError(
                    f"order {name}: the run shows no order to be better than the one given; leave it out, or see "
                    "`posbias place`"
                )
            order = placed.order
        ordered[name] = replace(task, order=order)  # type: ignore[call-arg]
    return ordered


def compare_orders(
    found: Mapping[str, Evaluation],
    sent: Mapping[str, Sequence[Example]],
    *,
    tokenizer: Any,
    prices: Sequence[float],
) -> OrdersEvaluation:
    """Evaluations of the passages in all orders, on the same samples, each less the first, with prices.

    Args:
        found: The evaluation of each order; the first is the one that the others are compared to.
        sent: The prompts of each, in the order in which they are sent.
        tokenizer: The model's own; None: prices are in characters.
        prices: Of a million tokens, read and kept; empty: no money.
    """
    units = {name: [_units(each.prompt, tokenizer, each.own_control) for each in sent[name]] for name in found}
    first = next(iter(units.values()))
    costs = {}
    for name, prompts in units.items():
        costs[name] = _price(list(zip(prompts, [None, *prompts[:-1]], strict=True)), first, tokenizer, prices)
        work = found[name].responder
        if work.get("cached_tokens"):
            costs[name] = replace(costs[name], reported=work["cached_tokens"] / work["prompt_tokens"])
    record = _beside_first(found)
    source = next(iter(found.values())).source or "model"
    record.verb, record.resolved["title"] = "evaluate_orders", f"{source}: what an order of passages costs, and gains"
    record.scalars["prices"] = as_stored(costs)
    return OrdersEvaluation.from_record(record)


def compare_turns(
    judged: Mapping[str, Evaluation],
    left_out: Sequence[str],
    task: RulesAtTurns,
    told: Sequence[Told],
    *,
    options: EvaluateOptions,
    tokenizer: Any,
) -> TurnsEvaluation:
    """Evaluations of all placements on the same samples, with prices and how long rules last; at the last turn each is
    less the first, so that turns at which no rule is lost yet do not water down the difference.

    Args:
        judged: The evaluation of each placement; the first is the one that the others are compared to.
        left_out: Rules that are not asked, as `broken_when_told` finds them.
        task: With the replies of all conversations.
        told: The samples.
        options: Threshold, turns and prices.
        tokenizer: The model's own; None: prices are in characters.
    """
    kept = [sample for sample in told if sample.say not in left_out]
    rules = np.array([sample.say for sample in kept])
    record, first = _beside_first(judged), next(iter(judged.values()))
    shares = {
        say: {name: float(np.nanmean(each.tables["correct"][rules == say, -1])) for name, each in judged.items()}
        for say in dict.fromkeys(rules.tolist())
    }
    if (deciding := record.scalars["deciding"]) is not None:  # in samples, of which some are of rules that are left out
        deciding = deciding[0], math.ceil(deciding[1] * len(told) / record.scalars["n_samples"])
    prices = {
        name: _price_at_turns(replace(task, placements=(name,)), kept, first.positions, tokenizer, options.prices)
        for name in judged
    }
    record.verb = "evaluate_turns"
    record.resolved |= {"title": f"{first.source or 'model'}: are rules kept, by turn and place?", "task": str(task)}
    record.scalars |= {
        "prices": as_stored(prices),
        "lasting": {name: as_stored(_lasting(each, options.threshold)) for name, each in judged.items()},
        "left_out": list(left_out),
        "deciding": deciding,
        "by_rule": shares,
    }
    return TurnsEvaluation.from_record(record)


def broken_when_told(just_told: Evaluation, told: Sequence[Told]) -> list[str]:
    """Rules that less than half of the replies to a question keep behind which they have just been told.

    Args:
        just_told: A question alone with the rule behind it, of every sample.
        told: The samples.

    Raises:
        RunError: no rule is kept even then.
    """
    rules, right = np.array([sample.say for sample in told]), just_told.tables["correct"][:, 0]
    shares = {say: float(np.nanmean(right[rules == say])) for say in dict.fromkeys(rules.tolist())}
    left_out = [say for say, share in shares.items() if not share >= KEPT_WHEN_TOLD]
    if len(left_out) == len(shares):
        raise RunError(
            f"none of {len(shares)} rules is kept by half of the replies even when it has just been told, so none is "
            f"judged by turn; the best: {max(shares.values()):.2f} (its replies: just-told/outputs.jsonl of the run)"
        )
    return left_out


def _beside_first(found: Mapping[str, Evaluation]) -> Record:
    """The record of all forms beside the first, on the same samples. Each differs by as much as at the last turn, or,
    of orders, at the one place; and if none is shown to be better, nor all to be worse, what would decide.
    """
    comparison = compare_evaluations(list(found.values()), names=list(found))
    record, tables = comparison.record, comparison.record.arrays
    last = [{MEAN: entry.differences[-1]} if entry.differences else {} for entry in comparison.compared]
    corrected = holm_over([{name: change.p for name, change in of.items()} for of in last])
    compared = [
        replace(entry, changes=of, p=p) for entry, of, p in zip(comparison.compared, last, corrected, strict=True)
    ]
    deciding, tested = None, [number for number, of in enumerate(last) if of]
    rises = {number: last[number][MEAN].value.value for number in tested}
    best = max(rises, key=rises.__getitem__, default=0)
    if best and not any(corrected[number][MEAN] < ALPHA for number in tested if number == best or rises[number] > 0):
        before, after = (tables[f"{SCORES}{number}"][:, -1:] for number in (0, best))
        deciding = samples_for(before, after, max(DECIDING, rises[best]), len(found) - 1)
    record.scalars |= {"compared": as_stored(compared), "deciding": deciding}
    return record


def _lasting(evaluation: Evaluation, threshold: float) -> Lasting:
    """The share of replies that keep their rule at every turn, and until when it is at least the threshold.

    As with an effective length, low ends need no correction, and high ones hold for all turns at once.
    """
    levels, turns = [], evaluation.positions
    for column, turn in enumerate(turns):
        replies = complete_samples(evaluation.right[:, [column]])
        if len(replies) < SAMPLES_FOR_CLAIM:
            continue
        found = levels_of(replies, curves=len(turns))
        levels.append(LengthLevel(turn, len(replies), found.worst, 0.0, found.mean, evaluation.withheld))
    kept = effective_length(levels, threshold).at_least
    lost = next((level.length for level in levels if level.reaches(threshold) is False), None)
    return Lasting({level.length: level.mean for level in levels}, threshold, kept, lost)


def _price_at_turns(
    task: RulesAtTurns, told: Sequence[Told], turns: Sequence[int], tokenizer: Any, prices: Sequence[float]
) -> Price:
    """The price of a task's first placement, over the turns of a few samples."""
    bare, sent = [], []
    for sample in told[:PRICED]:
        for turn in turns:
            bare.append(_units(task.bare(sample, turn), tokenizer))
            before = _units(task.draft(sample, turn - 1).messages, tokenizer) if turn > 1 else None
            sent.append((_units(task.draft(sample, turn).messages, tokenizer), before))
    return _price(sent, bare, tokenizer, prices)


def _price(
    sent: Sequence[tuple[Units, Units | None]], bare: Sequence[Units], tokenizer: Any, prices: Sequence[float]
) -> Price:
    """The price of prompts, each with the one sent before it, beside others that a form adds to."""
    read = [len(prompt) for prompt, _ in sent]
    kept = []
    for prompt, before in sent:
        if before is not None:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, before, strict=False))
            kept.append(sum(1 for _ in same) / len(prompt))
    mean, share = float(np.mean(read)), float(np.mean(kept)) if kept else np.nan
    price = Price(mean, mean - float(np.mean([len(prompt) for prompt in bare])), share)
    if tokenizer is None:
        return replace(price, unit="characters")
    again = mean * float(np.nan_to_num(share))
    # Of 1,000 prompts; prices are of a million tokens.
    return replace(price, money=((mean - again) * prices[0] + again * prices[1]) / 1000 if prices else None)


def _units(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any, own_control: bool = False) -> Units:
    """A prompt as tokens, or as characters if there is no tokenizer."""
    if tokenizer is not None:
        return encode(prompt, tokenizer, own_control=own_control).token_ids
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{message['role']}\n{message['content']}\n" for message in prompt)
