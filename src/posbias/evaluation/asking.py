"""One content of a task put to a model at every position: the requests, and what came of them as arrays to keep.

A content is the unit that is stored, resumed from and resampled. What could not be asked (too long for the model) is
NaN with its reason; nothing is truncated.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.evaluation.responders.base import Reply, Request, Responder
from posbias.evaluation.scoring import SCORERS, share_found
from posbias.tasks.language import Example, LanguageTask, fit

TEXTS = "texts"
"""Name of the array that holds a content's outputs, as UTF-8 bytes of JSON."""

Pieces = dict[str, np.ndarray]
Row = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class Asking:
    """How every content is asked."""

    task: LanguageTask
    places: tuple[int, ...]
    """Positions of the moved item, ascending."""
    max_tokens: int
    """Generated at most, >= 1."""
    generate: bool
    """Whether answers are generated."""
    score: bool
    """Whether the right answer is scored by teacher forcing."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Where a generated answer may end early without a change of its score: rules that read the first line."""
        return ("\n",) if self.task.scoring == "best_subspan_em" else ()


@dataclass(frozen=True)
class Content:
    """The examples of one content, one for each place."""

    name: str
    examples: tuple[Example, ...]

    @property
    def piece(self) -> str:
        """Name of its stored piece: changes with every prompt and answer."""
        text = json.dumps([[str(example.prompt), list(example.answers), example.target] for example in self.examples])
        return f"content-{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def contents_of(asking: Asking, tokenizer: Any, *, count: int, seed: int) -> Iterator[Content]:
    """The contents of a task, each with its examples at all places, lazily."""
    drawn = asking.task.examples(tokenizer, count=count, positions=asking.places, seed=seed)
    for name, examples in itertools.groupby(drawn, key=lambda example: example.content):
        yield Content(name, tuple(examples))


def ask(contents: Sequence[Content], asking: Asking, responder: Responder) -> list[Pieces]:
    """Everything about some contents, asked together.

    Raises:
        UsageError: a request that the model cannot take, such as a conversation without a chat template.
        RunError: the model fails, or its server cannot be reached.
    """
    limit = responder.max_positions
    reserve = asking.max_tokens if asking.generate else 0
    fitting = {
        id(example)
        for content in contents
        for example in (
            fit(content.examples, limit, reserve=reserve).examples if responder.tokenizer else content.examples
        )
    }
    asked = [example for content in contents for example in content.examples if id(example) in fitting]
    requests = [
        Request(
            prompt=example.prompt,
            answer=example.target if asking.score else None,
            max_tokens=asking.max_tokens,
            group=example.content,
            stop=asking.stop,
        )
        for example in asked
    ]
    replies = responder.respond(requests, generate=asking.generate, score=asking.score)
    by_example = {id(example): reply for example, reply in zip(asked, replies, strict=True)}
    return [
        _piece(content, asking, [by_example.get(id(example)) for example in content.examples]) for content in contents
    ]


def as_bytes(document: Any) -> np.ndarray:
    """Plain values as an array that a piece can hold."""
    return np.frombuffer(json.dumps(document).encode(), dtype=np.uint8)


def read_json(piece: Pieces, name: str) -> Any:
    """The plain values that an array of a piece holds, such as the outputs, one for each place."""
    return json.loads(piece[name].tobytes().decode())


def _piece(content: Content, asking: Asking, replies: Sequence[Reply | None]) -> Pieces:
    if len(content.examples) != len(asking.places):
        raise UsageError(
            f"{asking.task}: content {content.name} has {len(content.examples)} examples for "
            f"{len(asking.places)} positions"
        )
    pairs = list(zip(content.examples, replies, strict=True))
    texts = [_output(example, reply) for example, reply in pairs]
    scores = [None if reply is None else reply.score for reply in replies]
    return {
        "correct": _row(_correct(asking, example, reply) for example, reply in pairs),
        "found": _row(_found(example, reply) for example, reply in pairs),
        "logprob": _row(None if score is None else score.logprob for score in scores),
        "answer_tokens": _row(None if score is None else score.n_tokens for score in scores),
        "first_rank": _row(None if score is None else score.first_rank for score in scores),
        "greedy": _row(None if score is None else score.greedy for score in scores),
        "gold_token": _row(example.gold_token for example in content.examples),
        "prompt_tokens": _row(_prompt_tokens(example, reply) for example, reply in pairs),
        "too_long": _row(float(_is_skipped(reply)) for reply in replies),
        TEXTS: as_bytes(texts),
    }


def _row(values: Iterator[float | None] | Any) -> Row:
    """Numbers, NaN where there is none."""
    return np.array([np.nan if value is None else float(value) for value in values])


def _is_skipped(reply: Reply | None) -> bool:
    return reply is None or (reply.response is not None and reply.response.skipped is not None)


def _correct(asking: Asking, example: Example, reply: Reply | None) -> float | None:
    if reply is None or reply.response is None or reply.response.skipped is not None:
        return None
    verdict: float = SCORERS[asking.task.scoring](reply.response.text, example.answers)
    return verdict


def _found(example: Example, reply: Reply | None) -> float | None:
    """Share of all asked values that were named; only where a prompt asks for several."""
    if not example.companions or reply is None or reply.response is None or reply.response.skipped is not None:
        return None
    return share_found(reply.response.text, [example.answers[0], *example.companions])


def _prompt_tokens(example: Example, reply: Reply | None) -> int | None:
    if example.n_tokens is not None or reply is None or reply.response is None:
        return example.n_tokens
    return reply.response.prompt_tokens


def _output(example: Example, reply: Reply | None) -> dict[str, Any]:
    response = None if reply is None else reply.response
    skipped = "longer than the model's context" if reply is None else None if response is None else response.skipped
    return {
        "content": example.content,
        "position": example.gold_position,
        "condition": example.condition,
        "answers": list(example.answers),
        "text": None if response is None or response.skipped else response.text,
        "finish": "skipped" if skipped else None if response is None else response.finish,
        "skipped": skipped,
    }
