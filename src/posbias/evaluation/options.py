"""Settings of `evaluate`, of the local models that answer it, and of `place` and `correlate`, which read its results.

`EvaluateOptions` says which samples of a task are requested, at which positions, and how answers are read. Nothing
heavy is imported here: the command line makes its flags from these fields.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval, Len

from posbias.checks import Count, CountOrZero, Flag, Later, Natural, Steps, StepsOrZero, checked, checked_value
from posbias.errors import UsageError
from posbias.registry import split_literals, split_numbers

if TYPE_CHECKING:
    from posbias.evaluation.levels import Requirement
    from posbias.tasks.language import LanguageTask
else:
    Requirement = Annotated[Any, Later("posbias.evaluation.levels:Requirement")]

SPREAD_POSITIONS = 9
"""Positions that are requested by default: enough to see a bend, few enough to be quick."""
USUAL_SAMPLES = 50
"""Samples that are requested by default."""
CALIBRATED = 12
"""Samples that a trial of methods takes for fitting by default; of a file at most a third of them."""
LEAST_THRESHOLD = 0.4
"""Smallest threshold of an effective length: below it the low end of so skewed a share claims too much."""


OF_EVALUATE_ALONE = ("lengths", "turns", "orders", "prices", "recovery", "threshold", "require")
"""Settings that other verbs which ask samples do not take."""


@checked
@dataclass(frozen=True)
class EvaluateOptions:
    """Settings of `evaluate`: the samples that are requested, and the folder of finished ones."""

    count: Count | None = None
    """Samples, each requested at every position; by default 50 (to judge methods 40), or all of a file with fewer."""
    skip: Annotated[CountOrZero, Flag(None)] = 0
    """Samples of the task to skip before the first one."""
    positions: str | Sequence[int] = "spread"
    """Positions at which the moved item is put: all, some such as 0,4,9, or spread(5): at most 5, evenly spread, both
    ends among them; spread: at most 9."""
    lengths: Annotated[Sequence[Steps], split_numbers] = ()
    """Lengths of prompts in tokens, ascending, such as 1024,4096, each evaluated at as many positions; by default the
    task's own length alone."""
    turns: Annotated[Sequence[Count], split_numbers] = ()
    """Turns of conversations at which rules are judged, such as 1,5,10,20; by default at most 9, evenly spread."""
    orders: Annotated[Sequence[str], split_literals] = ()
    """Orders of retrieved passages, compared with the first: given (as in the file), question_first (it stands behind
    them, too), ends (the most relevant at both), reversed, shuffled, or measured('RUN'), as `place` orders them."""
    prices: Annotated[Sequence[Annotated[float, Ge(0)]], Len(0, 2), partial(split_numbers, sort=float)] = ()
    """Of a million tokens of prompts, and of a million that a prefix cache keeps, such as 2.5,0.25."""
    threshold: Annotated[float, Interval(ge=LEAST_THRESHOLD, lt=1)] = 0.8
    """Accuracy that the effective length asks for at every position, and share of replies that must keep a rule."""
    require: Requirement | None = None
    """A bound for pipelines: the whole interval must meet it (exit code 3 if not), such as worst>=0.8, mean>=0.7,
    spread<=0.2, recovery>=0.8 (with recovery), or at several lengths effective_length>=4096."""
    seed: Natural = 0
    """Seed of samples and folds."""
    generate: bool = True
    """Generate answers and judge them by the task's published rule."""
    score: bool = True
    """Score the right answer by teacher forcing, which also ranks models too weak to generate it."""
    recovery: bool = False
    """Score the right answer with the moved item alone and without it, too: how much of the item's gain is left among
    the others, by position (1: all of it, 0: none)."""
    max_tokens: Steps | None = None
    """Tokens generated at most; by default the task's own number."""
    thinking_tokens: StepsOrZero = 0
    """Additional tokens for thoughts before the answer; without them a thinking model may not reach its
    answer."""
    answer_pattern: str | None = None
    """A regular expression whose one group matches the answer; other generated text counts as thoughts. By default
    thoughts are recognised by the marks that models put around them, such as <think>."""
    allow_code: bool = False
    """Permit a task to judge answers with Python code that it names."""
    together: Annotated[Count, Flag(None)] = 8
    """Samples requested at a time; an interruption loses at most these."""
    directory: Annotated[Path | None, Flag(None)] = None
    """Run directory in which finished samples are kept until the record is saved; None keeps nothing."""
    resume: bool = False
    """Continue from the samples that are there."""
    overwrite: bool = False
    """Replace finished work in the directory; it is refused otherwise."""

    def __post_init__(self) -> None:
        if self.answer_pattern is not None:
            from posbias.tasks.language.readings import check_own

            check_own("evaluate: answer_pattern", self.answer_pattern, groups=1)
        if list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"evaluate: lengths must ascend, each once, got {list(self.lengths)}")
        if self.lengths and not self.generate:
            raise UsageError("evaluate: several lengths are compared by accuracy, which takes generated answers")
        if self.prices and not ((self.orders or self.turns) and len(self.prices) == 2):
            raise UsageError(f"evaluate: prices are two numbers and go with orders or turns, got {list(self.prices)}")
        if self.turns and self.positions != "spread":
            raise UsageError(f"evaluate: turns stand for positions, got both, positions {self.positions!r}")
        if self.orders and (len({*self.orders}) < max(2, len(self.orders)) or self.lengths or self.turns):
            raise UsageError(
                f"evaluate: orders are at least 2, each once, without lengths and turns, got {list(self.orders)}"
            )
        if self.require is not None:
            self.require.check_possible(
                generated=self.generate, several_lengths=bool(self.lengths), recovery=self.recovery
            )
        if self.recovery and not self.score:
            raise UsageError("evaluate: recovery is of the right answer's log-probability, and score=False takes none")
        if not (self.generate or self.score):
            raise UsageError("nothing to do: answers are neither generated nor scored; allow at least one of the two")

    def check_plain(self, owner: str) -> None:
        """Refuse what only `evaluate` itself can do."""
        for name in ("lengths", "turns", "orders", "recovery"):
            if value := getattr(self, name):
                raise UsageError(f"{owner}: {name} is for evaluate alone, got {value!r}")

    def following(self, task: "LanguageTask") -> "EvaluateOptions":
        """These settings with the count for one task, whose file, if it has one, is read and checked without a model.

        Raises:
            UsageError: a wrong line, fewer samples than are asked for, or positions that the task lacks.
        """
        count = self.count_of(task)
        if self.recovery and not task.stands_alone:
            raise UsageError(f"{task.name}: recovery needs the moved item alone with the same answer, which it lacks")
        if getattr(task, "file", None) is not None:
            task.draw(None, count=self.skip + count, seed=self.seed)
        if not self.lengths:
            self.positions_of(task)
        return replace(self, count=count)

    def count_of(self, task: "LanguageTask", *, usual: int = USUAL_SAMPLES) -> int:
        """Samples of a task: if none are given `usual`, or all of a file with fewer."""
        if self.count is not None:
            return self.count
        there = task.samples_there
        return usual if there is None else min(usual, max(1, there - self.skip))

    def positions_of(self, task: "LanguageTask") -> tuple[int, ...]:
        """Positions of the moved item, ascending; all of them must be the task's."""
        import numpy as np

        if self.turns:
            if task.first_position == 0:
                raise UsageError(f"evaluate: turns are of conversations, as of rules(...); {task.name} has positions")
            return task.positions(list(self.turns))
        if not isinstance(self.positions, str):
            return task.positions(list(self.positions))
        text = self.positions.strip()
        if text == "all":
            return task.positions()
        if (spread := re.fullmatch(r"spread(?:\s*\(\s*(\d*)\s*\))?", text)) is not None:
            most = checked_value("positions: spread", int(spread[1] or SPREAD_POSITIONS), Count)
            places = np.rint(np.linspace(task.first_position, task.n_items - 1, min(most, task.n_items)))
            return tuple(sorted({int(place) for place in places}))
        try:
            chosen = [int(part) for part in text.split(",")]
        except ValueError:
            raise UsageError(
                f"positions {self.positions!r}: allowed: all, spread, spread(5), or some such as 0,4,9"
            ) from None
        return task.positions(chosen)

    def tokens_of(self, task: "LanguageTask") -> int:
        """Tokens that are generated at most, thoughts included; 0 if none are."""
        return (self.max_tokens or task.max_tokens) + self.thinking_tokens if self.generate else 0


@checked
@dataclass(frozen=True)
class LocalOptions:
    """Limits on the prompts of a local model that are run together."""

    batch: Count | None = None
    """Most prompts at a time; by default as many as memory takes, at most 256."""


@checked
@dataclass(frozen=True)
class PlaceOptions:
    """Settings of `place`."""

    by: str | None = None
    """Measure of a run to order by, accuracy, logprob or reciprocal_rank; by default the first of them that it has."""
    seed: Natural = 0
    """Seed of resamples and halves, >= 0."""


@checked
@dataclass(frozen=True)
class CorrelateOptions:
    """Settings of `correlate`."""

    seed: Natural = 0
    """Seed of resamples and permutations, >= 0."""
