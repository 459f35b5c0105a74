"""The samples that `EvaluateOptions` ask for become requests, and the results of each arrays to keep.

A sample (the same items, the same question) is requested once per position. It is the unit that is stored, resumed
from and resampled. What does not fit into the model's context is NaN with its reason; nothing is truncated.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from posbias.errors import UsageError
from posbias.evaluation.curve import CLUSTER, Scores
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders.base import CUT_OFF, REFUSED, UNFINISHED, Reply, Request, Responder
from posbias.files import json_object, read_whole
from posbias.models.loading import load_tokenizer
from posbias.progress import report
from posbias.prompts.tokens import described_tools, text_of
from posbias.tasks.language import LANGUAGE_TASKS, Example, LanguageTask, RulesAtTurns, file_sha256
from posbias.tasks.language.calls import calls_in

HISTORIES = "replies/histories.json"
"""Replies of a model to all turns but the last, by conversation and rule, below the run's directory."""


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
    if task.own_code is not None and not options.allow_code:
        raise UsageError(
            f"{task.name}: answers would be judged by code of one's own, {task.own_code!r}, which allow_code=True "
            "(--allow-code) permits"
        )
    positions, count = options.positions_of(task), options.skip + options.count_of(task)
    examples = task.examples(tokenizer, count=count, positions=positions, seed=options.seed)
    examples = itertools.islice(examples, options.skip * len(positions), None)
    for name, group in itertools.groupby(examples, key=lambda example: example.sample):
        yield Sample(name, tuple(group))


def stripped_samples(task: LanguageTask, tokenizer: Any, options: EvaluateOptions) -> Iterator[Sample]:
    """Every sample with two prompts, of the moved item alone and without it (`LanguageTask.stripped_examples`)."""
    count = options.skip + options.count_of(task)
    pairs = task.stripped_examples(tokenizer, count=count, seed=options.seed)
    for alone, bare in itertools.islice(pairs, options.skip, None):
        yield Sample(f"{alone.sample}-stripped", (alone, bare))


def notices_of(task: LanguageTask, samples: Sequence[Sample], replies: Sequence[Reply]) -> dict[str, Any]:
    """Oddities of samples and their answers by `NOTICES`: numbers (from 0) of the samples with them, and what they
    spell: control tokens, and tools that were not offered."""
    notices: dict[str, Any] = {}
    rest = iter(replies if task.answer_rule.name == "call" else ())
    for sample in samples:
        answered = zip(sample.examples, rest, strict=False)
        called = Counter(name for each in answered if (name := _not_offered(*each)) is not None)
        spelled = {"control_tokens": sample.examples[0].control_tokens, "call_not_offered": called}
        for name in [*sample.examples[0].notices, *(name for name, found in spelled.items() if found)]:
            notice = notices.setdefault(name, {"samples": []})
            notice["samples"].append(int(sample.name.rpartition("-")[2]))
            if name in spelled:
                notice["tokens"] = dict(Counter(notice.get("tokens", {})) + Counter(spelled[name]))
    return notices


def _not_offered(example: Example, reply: Reply) -> str | None:
    """The tool that an answer calls although its prompt offers others; None if there is none."""
    tools = [] if isinstance(example.prompt, str) else described_tools(example.prompt)[0]
    offered = {tool.get("function", tool).get("name") for tool in tools}
    calls = calls_in(reply.response.text) if offered and reply.response is not None else []
    return calls[0].name if calls and calls[0].name not in offered else None


def requests_of(samples: Sequence[Sample], task: LanguageTask, options: EvaluateOptions) -> list[Request]:
    """One request for each example of each sample, in order.

    Raises:
        UsageError: a sample without a right answer.
    """
    for sample in samples:
        sample.examples[0].check_answers()
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
    response, score, rule = reply.response, reply.score, task.answer_rule
    told = {} if response is None else vars(response)
    skipped, text = told.get("skipped"), None if told.get("skipped") is not None else told.get("text")
    answer, right, cut, unjudged = text, None, None, None
    if text is not None:
        settled = rule.settled(text, example.answers)
        if task.lead_in and told["continues"]:
            line, ended, _ = text.lstrip().partition("\n")
            answer = f"{task.lead_in} {line}"
            settled = bool(ended) or rule.settled(answer, example.answers)
        right = rule.right(answer or "", example.answers)
        cut = told["finish"] == CUT_OFF and right < 1 and not settled
        reasons = {
            "unfinished": told["thinking"] == UNFINISHED,
            "cut_off": cut,
            "empty": not text.strip(),
            "unread": not rule.readable(answer or ""),
        }
        unjudged = next((reason for reason, holds in reasons.items() if holds), None)
    elif skipped is not None:
        unjudged = "refused" if told["finish"] == REFUSED else "too_long"
    numbers: dict[str, float | None] = {
        "correct": right,
        "cut": cut,
        "logprob": None if score is None else score.logprob,
        "answer_tokens": None if score is None else score.n_tokens,
        "first_rank": None if score is None else score.ranks[0],
        "gold_token": example.gold_token,
        "prompt_tokens": told.get("prompt_tokens") if example.n_tokens is None else example.n_tokens,
        "too_long": skipped is not None and told["finish"] != REFUSED,
        **task.noted(answer),
    }
    if example.cluster:
        numbers[CLUSTER] = int(hashlib.sha256(example.cluster.encode()).hexdigest()[:12], 16)  # exact in a double
    file, _, line = example.origin.rpartition(", line ")
    return numbers, {
        "sample": example.sample,
        "position": example.gold_position,
        "condition": example.condition,
        **({"file": file, "line": int(line)} if line else {}),
        "prompt_sha256": prompt_sha256(example),
        "question": example.question or text_of(example.prompt),
        "answers": list(example.answers),
        "text": text,
        **{name: told.get(name) for name in ("thoughts", "thinking", "finish", "skipped")},
        "judged": None if right is None else rule.name,
        "correct": right,
        "unjudged": unjudged,
    }


def row_of(rows: Sequence[Mapping[str, Any]], *, sample: int | None, position: int | None) -> Mapping[str, Any]:
    """The row of outputs of a sample, by its number, at a position; of those left open the first that is wrong."""
    numbers: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "sample": lambda row: int(row["sample"].partition("-")[2]),
        "position": itemgetter("position"),
    }
    for name, wanted in (("sample", sample), ("position", position)):
        there = list(dict.fromkeys(map(numbers[name], rows)))
        if wanted not in (None, *there):
            allowed = f"{there[0]} ... {there[-1]}" if name == "sample" else ", ".join(map(str, there))
            raise UsageError(f"--{name} {wanted}: allowed: {allowed}")
        rows = [row for row in rows if wanted in (None, numbers[name](row))]
    return next((row for row in rows if row["correct"] is not None and row["correct"] < 1), rows[0])


def asked_again(
    evaluation: Evaluation, row: Mapping[str, Any], directory: Path, *, task: str | None, tokenizer: str | None
) -> Request:
    """The request of a row of an evaluation's outputs, made again as it was asked.

    A task whose files lie elsewhere, and a tokenizer, stand for those on record; replies of a model to earlier turns
    are those beside the run's directory.

    Raises:
        UsageError: a file or tokenizer is not there, or they make another prompt than was asked.
    """
    made, recorded = LANGUAGE_TASKS.parse(task or evaluation.task), evaluation.record.arguments.get("tokenizer")
    if isinstance(made, RulesAtTurns) and (told := directory.parent / HISTORIES).is_file():
        made = replace(made, histories=json_object(read_whole(told, "replies"), HISTORIES))
    counting = load_tokenizer(tokenizer or recorded or evaluation.source or "") if made.by_tokens else None
    seed, number = map(int, row["sample"].split("-"))
    positions = [row["position"]] if made.n_items > 1 else None  # of one place, some tell where that lies
    examples = made.examples(counting, count=number + 1, positions=positions, seed=seed)
    example = next(itertools.islice(examples, number, None))
    if prompt_sha256(example) != row["prompt_sha256"]:
        changed = "its file has changed" if file_sha256(made) != evaluation.file_sha256 else "--task takes its files"
        raise UsageError(
            f"sample {number} of {made} makes another prompt than the run has asked: the same files, tokenizer and "
            f"posbias are needed ({changed})"
        )
    return requests_of([Sample(example.sample, (example,))], made, EvaluateOptions())[0]


def prompt_sha256(example: Example) -> str:
    """Hash by which a prompt that is made again is known to be the one that was asked."""
    return hashlib.sha256(json.dumps(example.prompt).encode()).hexdigest()
