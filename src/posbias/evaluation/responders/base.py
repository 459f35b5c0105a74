"""Requests to a model, and what comes back: generated texts, teacher-forced scores.

A `Responder` answers: a local model (`local.py`) or any OpenAI-compatible server (`server.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posbias.checks import Steps, checked_value
from posbias.errors import UsageError
from posbias.tasks.language import Span
from posbias.tasks.language.locating import text_of

STOPPED, CUT_OFF = "stop", "length"
"""Ends of a response: an end token or a stop text, or the most tokens that it may have."""
SKIPPED, REFUSED = "skipped", "refused"
"""Ends of a missing response: the prompt does not fit into the context, or the server refuses it."""
Messages = Sequence[Mapping[str, Any]]
"""A conversation: messages in order, each with a `role` and a `content`."""


@dataclass(frozen=True)
class Request:
    """One prompt, what its answer should be, and how much may be generated."""

    prompt: str | Messages
    """Text that the model continues, or a conversation that it answers."""
    answer: str | None = None
    """Answer to score by teacher forcing, as it would follow the prompt (a leading space included); None: no score."""
    max_tokens: int = 32
    """Generated at most (tokens, >= 1)."""
    group: str = ""
    """Requests of one group say the same in another order: they share beginnings, and are best sent together."""
    stop: tuple[str, ...] = ()
    """Generation ends where one of these texts begins behind the answer's first word; the text before it is the answer.
    Within thoughts, and in blank lines before the answer, they mean nothing."""
    answer_pattern: str | None = None
    """A regular expression with one group that holds the answer, all else being thoughts; None: thoughts are told by
    the marks that models put around them (`thoughts.py`)."""
    passages: tuple[Span, ...] = ()
    """Begin and end, in characters of `text`, of every passage in it, in order; see `Example.passages`."""
    fixed_order: bool = False
    """True if the right answer depends on which passage stands where, so that they must not be rearranged."""
    own_control: bool = False
    """Control tokens in the prompt are meant as such, see `Example.own_control`."""
    schema: Mapping[str, Any] | None = None
    """JSON schema of the answer, which servers with `structured` keep to; None: it is any text."""

    def __post_init__(self) -> None:
        checked_value("max_tokens", self.max_tokens, Steps)
        if isinstance(self.prompt, Mapping) or not self.prompt:
            raise UsageError(f"a prompt must be a text or a list of messages and not empty, got {self.prompt!r}")
        if self.answer is not None and not self.answer:
            raise UsageError("an answer to score must not be empty; None is allowed: nothing is scored then")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError(f"stop must be a tuple of texts that are not empty, got {self.stop!r}")
        reached = 0
        for begin, end in self.passages:
            if not reached <= begin < end <= len(self.text):
                raise UsageError(
                    f"passages must follow one another within the {len(self.text)} characters of the prompt's text, "
                    f"none empty, got {(begin, end)}"
                )
            reached = end

    @property
    def text(self) -> str:
        """The prompt's text; of a conversation, its last message's."""
        return text_of(self.prompt)

    def reworded(self, text: str, passages: tuple[Span, ...]) -> "Request":
        """The request with another `text` and its passages; earlier messages of a conversation stay."""
        if isinstance(self.prompt, str):
            return replace(self, prompt=text, passages=passages)
        return replace(self, prompt=(*self.prompt[:-1], {**self.prompt[-1], "content": text}), passages=passages)

    def rearranged(self, order: Sequence[int]) -> "Request":
        """The request with passage `order[slot]` in each slot; what stands between the slots stays.

        Raises:
            UsageError: `order` does not name every passage once, or their order is fixed.
        """
        if sorted(order) != list(range(len(self.passages))):
            raise UsageError(f"an order must name each of {len(self.passages)} passages once, got {list(order)}")
        if self.fixed_order:
            raise UsageError("the right answer depends on the order of these passages, so they cannot be rearranged")
        text, passages, copied = "", [], 0
        for slot, (begin, end) in enumerate(self.passages):
            moved = slice(*self.passages[order[slot]])
            text += self.text[copied:begin]
            passages.append((len(text), len(text) + moved.stop - moved.start))
            text, copied = text + self.text[moved], end
        return self.reworded(text + self.text[copied:], tuple(passages))


@dataclass(frozen=True)
class Response:
    """Text that a model generated greedily, or the reason why the request was not put to it."""

    text: str
    """The answer, without prompt, special tokens and thoughts; cut where a stop text begins."""
    finish: str
    """STOPPED, CUT_OFF, SKIPPED, REFUSED, or a server's own."""
    prompt_tokens: int | None = None
    """Tokens of the prompt as the model read it; None if a server does not say."""
    tokens: int | None = None
    """Generated tokens, an end token included; None if a server does not say."""
    skipped: str | None = None
    """Why there is nothing: the request does not fit into the context (nothing is ever truncated), or is refused."""
    token_ids: tuple[int, ...] | None = None
    """The generated tokens, local models only."""
    continues: bool = False
    """True if the text goes on where the prompt ends, rather than being a message that answers it."""
    thoughts: str | None = None
    """Marked thoughts without the marks; None if nothing was marked."""
    thinking: str | None = None
    """How thoughts were told apart (`thoughts.Told`); UNFINISHED: they did not end, so that there is no answer."""


@dataclass(frozen=True)
class AnswerScore:
    """How probable an answer is, given the prompt and the answer's own earlier tokens."""

    logprobs: tuple[float, ...]
    """Natural log-probability of each answer token, <= 0."""
    ranks: tuple[int | None, ...]
    """1 + how many tokens are more probable, per answer token; None if a server lists too few of them."""

    @property
    def logprob(self) -> float:
        """Log-probability of the whole answer: the sum over its tokens."""
        return sum(self.logprobs)

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer, >= 1."""
        return len(self.logprobs)

    @property
    def first_rank(self) -> int | None:
        """Rank of the first answer token; 1 is the model's own choice."""
        return self.ranks[0]

    @property
    def greedy(self) -> bool | None:
        """True if greedy decoding gives exactly this answer; None if a rank that decides it is unknown."""
        if any(rank is not None and rank > 1 for rank in self.ranks):
            return False
        return None if None in self.ranks else True


@dataclass(frozen=True)
class Reply:
    """Both things that may come of one request."""

    response: Response | None
    """Generated text, or why the request was skipped or refused; None if nothing was to be generated."""
    score: AnswerScore | None
    """Score of the answer; None if nothing is scored, the request is skipped or refused, or the server cannot."""


class Responder(ABC):
    """A model that answers requests. The order of what comes back is that of the requests."""

    tokenizer: Any = None
    """The model's own, or None if it is on a server."""
    max_positions: int | None = None
    """Longest context in tokens, the answer included; None if unknown or unbounded."""

    @abstractmethod
    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Generated texts, scores of the answers (if requests have one), or both, with as little work as both need.

        Raises:
            UsageError: a request that this responder cannot put to its model.
            RunError: the model fails or cannot be reached; what was finished before is kept if it can be.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain values for a record: the model, how requests are put to it, what they took so far. Never a key."""

    def counts(self) -> dict[str, float]:
        """Costs of the requests so far, as numbers that add up over the sittings of a run; also part of `describe`."""
        return {}

    def learnt(self) -> dict[str, Any]:
        """Facts that only requests show, such as whether there are scores; also part of `describe`."""
        return {}
