"""`EvaluateOptions` says which samples of a task are requested, at which positions, and how answers are read; here they
become requests, and the results of each arrays to keep.

A sample (the same items, the same question) is requested once per position. It is the unit that is stored, resumed
from and resampled. What does not fit into the model's context is NaN with its reason; nothing is truncated.
"""

import hashlib
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from jaxtyping import Float64

from posbias.checks import Count, CountOrZero, Natural, Steps, StepsOrZero, checked, checked_value
from posbias.errors import UsageError
from posbias.evaluation.curve import Scores
from posbias.evaluation.levels import EFFECTIVE_LENGTH, LEVELS, Requirement
from posbias.evaluation.responders.base import CUT_OFF, REFUSED, Reply, Request, Responder
from posbias.progress import report
from posbias.registry import parse_literal_call, split_literals, split_numbers
from posbias.tasks.language import Example, LanguageTask, share_found
from posbias.tasks.language.readings import check_own
from posbias.tasks.language.rules import Python, starts_with

SPREAD_POSITIONS = 9
"""Positions that are requested by default: enough to see a bend, few enough to be quick."""
USUAL_SAMPLES = 50
"""Samples that are requested by default."""
CALIBRATED = 12
"""Samples that a trial of methods takes for fitting by default."""
LEAST_THRESHOLD = 0.4
"""Smallest threshold of an effective length: below it the low end of so skewed a share claims too much."""


def calibrating(there: int) -> int:
    """Samples for fitting by default, of a file that holds so many: at most a third."""
    return min(CALIBRATED, there // 3)


@checked
@dataclass(frozen=True)
class EvaluateOptions:
    """Settings of `evaluate`: the samples that are requested, and the folder of finished ones."""

    count: Count | None = None
    """Samples, each requested at every position; None: USUAL_SAMPLES, or all of a file with fewer."""
    skip: CountOrZero = 0
    """Samples of the task to skip before the first one."""
    positions: str | Sequence[int] = "spread"
    """Positions at which the moved item is put: a list such as (0, 4, 9) or its spelling "0,4,9"; "all"; "spread(5)":
    at most 5 positions, evenly spread, both ends among them; "spread": at most SPREAD_POSITIONS."""
    lengths: Annotated[Sequence[Steps], split_numbers] = ()
    """Lengths of prompts in tokens, ascending, such as "1024,4096", each evaluated at as many positions; empty: the
    task's own length."""
    threshold: Annotated[float, Interval(ge=LEAST_THRESHOLD, lt=1)] = 0.8
    """Accuracy that the effective length asks for at every position."""
    require: Requirement | None = None
    """A bound that must hold, such as `Requirement.parse("worst>=0.8")`."""
    methods: Annotated[Sequence[Any], split_literals] = ()
    """Methods against position bias under which the first of a list of subjects is evaluated, too: spellings, paths of
    recipes that `mitigate` wrote, or objects."""
    seed: Natural = 0
    """Seed of samples and folds."""
    generate: bool = True
    """Generate answers and judge them by the task's published rule."""
    score: bool = True
    """Score the right answer by teacher forcing, which also ranks models too weak to generate it."""
    max_tokens: Steps | None = None
    """Tokens generated at most; None: the task's own."""
    thinking_tokens: StepsOrZero = 0
    """Additional tokens for thoughts before the answer; without them a thinking model may not reach its
    answer."""
    answer_pattern: str | None = None
    """A regular expression whose one group matches the answer; other generated text counts as thoughts. None: thoughts
    are recognised by the marks that models put around them."""
    allow_code: bool = False
    """Permit a task to judge answers with Python code that it names."""
    together: Count = 8
    """Samples requested at a time; an interruption loses at most these."""
    directory: Path | None = None
    """Run directory in which finished samples are kept until the record is saved; None keeps nothing."""
    resume: bool = False
    """Continue from the samples that are there."""
    overwrite: bool = False
    """Replace finished work in the directory; it is refused otherwise."""

    def __post_init__(self) -> None:
        check_own("evaluate: answer_pattern", self.answer_pattern, groups=1)
        if list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(f"evaluate: lengths must ascend, each once, got {list(self.lengths)}")
        if self.lengths and not self.generate:
            raise UsageError("evaluate: several lengths are compared by accuracy, which takes generated answers")
        if self.require is not None:
            self.check_requirement(self.require)
        if not (self.generate or self.score):
            raise UsageError("nothing to do: answers are neither generated nor scored; allow at least one of the two")

    def check_plain(self, owner: str) -> None:
        """Refuse what only `evaluate` itself can do."""
        for name in ("lengths", "methods"):
            if value := getattr(self, name):
                raise UsageError(f"{owner}: {name} is for evaluate alone, got {value!r}")

    def check_requirement(self, require: Requirement) -> None:
        """Refuse a bound that no result of these settings has a number for."""
        allowed = ("worst", EFFECTIVE_LENGTH) if self.lengths else LEVELS
        if require.what not in allowed:
            lengths = "several lengths" if self.lengths else "one length (--lengths 1024,4096 asks for several)"
            raise UsageError(f"require {require}: allowed: {', '.join(allowed)}, with {lengths}")
        require.check_possible(generated=self.generate)

    def following(self, task: LanguageTask) -> "EvaluateOptions":
        """These settings with the count for one task, whose file, if it has one, is read and checked without a model.

        Raises:
            UsageError: a wrong line, fewer samples than are asked for, or positions that the task lacks.
        """
        count = self.count_of(task)
        if getattr(task, "file", None) is not None:
            task.draw(None, count=self.skip + count, seed=self.seed)
        if not self.lengths:
            self.positions_of(task)
        return replace(self, count=count)

    def count_of(self, task: LanguageTask, *, usual: int = USUAL_SAMPLES) -> int:
        """Samples of a task: if none are given `usual`, or all of a file with fewer."""
        if self.count is not None:
            return self.count
        there = task.samples_there
        return usual if there is None else min(usual, max(1, there - self.skip))

    def positions_of(self, task: LanguageTask) -> tuple[int, ...]:
        """Positions of the moved item, ascending; all of them must be the task's."""
        if not isinstance(self.positions, str):
            return task.positions(list(self.positions))
        text = self.positions.strip()
        if text == "all":
            return task.positions()
        if text.startswith("spread"):
            name, values, keywords = parse_literal_call(text, "positions")
            if name == "spread" and not keywords and len(values) <= 1:
                most = values[0] if values else SPREAD_POSITIONS
                most = checked_value("positions: spread", most, Count)
                spread = np.rint(np.linspace(0, task.n_items - 1, min(most, task.n_items)))
                return tuple(sorted({int(position) for position in spread}))
        try:
            chosen = [int(part) for part in text.split(",")]
        except ValueError:
            raise UsageError(
                f"positions {self.positions!r}: allowed: all, spread, spread(5), or some such as 0,4,9"
            ) from None
        return task.positions(chosen)

    def tokens_of(self, task: LanguageTask) -> int:
        """Tokens that are generated at most, thoughts included; 0 if none are."""
        return (self.max_tokens or task.max_tokens) + self.thinking_tokens if self.generate else 0


LINE_END = "\n"
CLUSTER = "cluster"
"""Name of the table that tells which samples are not independent: they share a number."""


@dataclass(frozen=True)
class Sample:
    """The examples of one sample, one for each position."""

    name: str
    examples: tuple[Example, ...]

    @property
    def piece(self) -> str:
        """Name of its stored piece: changes with every prompt and answer."""
        text = json.dumps([[str(example.prompt), list(example.answers), example.target] for example in self.examples])
        return f"sample-{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def task_for(responder: Responder, task: LanguageTask) -> LanguageTask:
    """The task as a responder is asked it: through the chat template of a local model (`LanguageTask.asked_of`)."""
    asked = task.asked_of(responder.tokenizer) if responder.renders else task
    if asked is not task:
        report("prompts go through the model's chat template (chat=False in the task: as text)")
    return asked


def samples_of(task: LanguageTask, tokenizer: Any, options: EvaluateOptions) -> Iterator[Sample]:
    """The samples of a task, each with its examples at all positions, lazily."""
    rule = task.answer_rule
    if isinstance(rule, Python) and not options.allow_code:
        raise UsageError(
            f"{task.name}: answers would be judged by code of one's own, {rule.function!r}, which allow_code=True "
            "(--allow-code) permits"
        )
    positions, count = options.positions_of(task), options.skip + options.count_of(task)
    examples = task.examples(tokenizer, count=count, positions=positions, seed=options.seed)
    examples = itertools.islice(examples, options.skip * len(positions), None)
    for name, group in itertools.groupby(examples, key=lambda example: example.sample):
        sample = Sample(name, tuple(group))
        if (count := len(sample.examples)) != len(positions):
            raise UsageError(f"{task}: sample {name} has {count} examples for {len(positions)} positions")
        yield sample


def notices_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Oddities of samples by `NOTICES`: numbers (from 0) of the samples with them, and control tokens they spell."""
    notices: dict[str, Any] = {}
    for sample in samples:
        example = sample.examples[0]
        names = [*example.notices, *(["control_tokens"] if example.control_tokens else [])]
        for name in names:
            notices.setdefault(name, {"samples": []})["samples"].append(int(sample.name.rpartition("-")[2]))
        for token in example.control_tokens:
            tokens = notices["control_tokens"].setdefault("tokens", {})
            tokens[token] = tokens.get(token, 0) + 1
    return notices


def requests_of(samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions) -> list[Request]:
    """One request for each example of each sample, in order."""
    return [
        Request(
            prompt=example.prompt,
            answer=(example.target or None) if options.score else None,
            max_tokens=max(1, options.tokens_of(task)),
            answer_pattern=options.answer_pattern,
            group=example.sample,
            stop=task.stop,
            passages=example.passages,
            fixed_order=task.fixed_order,
            own_control=example.own_control,
            schema=task.answer_rule.schema,
        )
        for sample in samples
        for example in sample.examples
    ]


def tables_of(
    task: LanguageTask, samples: Sequence[Sample], replies: Sequence[Reply]
) -> tuple[dict[str, Scores], list[dict[str, Any]]]:
    """Numbers of all examples, by table [n_samples n_positions], NaN if there is none; and their outputs."""
    examples = [example for sample in samples for example in sample.examples]
    rows, outputs = zip(*(_row(task, *pair) for pair in zip(examples, replies, strict=True)), strict=True)
    columns = {name: [np.nan if row[name] is None else row[name] for row in rows] for name in rows[0]}
    tables = {name: np.array(column, np.float64).reshape(len(samples), -1) for name, column in columns.items()}
    return tables, list(outputs)


def _row(task: LanguageTask, example: Example, reply: Reply) -> tuple[dict[str, float | None], dict[str, Any]]:
    """The numbers of one example by table, None if there is none; and its output."""
    response, score = reply.response, reply.score
    skipped = None if response is None else response.skipped
    text = None if response is None or skipped is not None else response.text
    answer, right, cut, rule = text, None, None, task.answer_rule
    if text is not None and response is not None:
        settled = rule.settled(text)
        if task.lead_in and response.continues:
            line, ended, _ = text.lstrip().partition(LINE_END)
            answer = f"{task.lead_in} {line}"
            settled = bool(ended) or rule.settled(answer)
        right = rule.right(answer or "", example.answers)
        cut = response.finish == CUT_OFF and right < 1 and not settled
    cluster = hashlib.sha256(example.cluster.encode()).hexdigest()
    values, tokens = [example.answers[0], *example.companions], example.n_tokens
    numbers = {
        "correct": right,
        "starts": None if text is None or not rule.begins else starts_with(text, example.answers, goes_on=bool(cut)),
        "cut": cut,
        # Only if a prompt asks for several.
        "found": None if text is None or not example.companions else share_found(text, values),
        "logprob": None if score is None else score.logprob,
        "answer_tokens": None if score is None else score.n_tokens,
        "first_rank": None if score is None else score.first_rank,
        "greedy": None if score is None else score.greedy,
        "gold_token": example.gold_token,
        "prompt_tokens": response.prompt_tokens if tokens is None and response is not None else tokens,
        "too_long": response is not None and skipped is not None and response.finish != REFUSED,
        **task.noted(answer),
        **({CLUSTER: float(int(cluster[:12], 16))} if example.cluster else {}),  # exact in double precision
    }
    return numbers, {
        "sample": example.sample,
        "position": example.gold_position,
        "condition": example.condition,
        "answers": list(example.answers),
        "text": text,
        "thoughts": None if response is None else response.thoughts,
        "thinking": None if response is None else response.thinking,
        "finish": None if response is None else response.finish,
        "skipped": skipped,
        "read": None if answer is None else rule.readable(answer),
        "cut": cut,
    }


def independent(
    table: Float64[np.ndarray, "n_samples _"], tables: Mapping[str, Scores]
) -> Float64[np.ndarray, "n_independent _"]:
    """A table with the mean of every cluster of samples in a row of its own; the table itself if there are none."""
    if CLUSTER not in tables:
        return table
    _, first, members = np.unique(tables[CLUSTER][:, 0], return_index=True, return_inverse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the mean of nothing is NaN
        return np.stack([np.nanmean(table[members == cluster], axis=0) for cluster in np.argsort(first)])
