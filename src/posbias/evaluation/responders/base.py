"""Requests to a model, and what comes back: generated texts with thoughts told from answers, teacher-forced scores.

A `Responder` answers: a local model (`local.py`) or any OpenAI-compatible server (`server.py`).

Thoughts are told by the marks that models put around them: tags such as `<think>`, the marks of Magistral, Kimi,
Command A, OpenThinker, Apertus and MedGemma, and the channels of gpt-oss, also where a server has taken its special
tokens out. Where the chat template opens the thoughts, only the closing mark is generated. Thoughts without end hold
no answer.
"""

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posbias.checks import Steps, checked_value
from posbias.errors import UsageError
from posbias.prompts.tokens import text_of
from posbias.tasks.language import Span
from posbias.tasks.language.readings import search_own
from posbias.tasks.language.rules import unfenced

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
    the marks that models put around them (`told_apart`)."""
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
    """The generated tokens, an end token included, which a fit teaches; local models only."""
    continues: bool = False
    """True if the text goes on where the prompt ends, rather than being a message that answers it."""
    thoughts: str | None = None
    """Marked thoughts without the marks; None if nothing was marked."""
    thinking: str | None = None
    """How thoughts were told apart (`Told`); UNFINISHED: they did not end, so that there is no answer."""


@dataclass(frozen=True)
class AnswerScore:
    """How probable an answer is, given the prompt and the answer's own earlier tokens."""

    logprobs: tuple[float, ...]
    """Natural log-probability of each answer token, <= 0."""
    ranks: tuple[int | None, ...]
    """1 + how many tokens are more probable, per answer token (1: the model's choice); None: a server lists too few."""

    @property
    def logprob(self) -> float:
        """Log-probability of the whole answer: the sum over its tokens."""
        return sum(self.logprobs)

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer, >= 1."""
        return len(self.logprobs)


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
    renders: bool = False
    """True if conversations are rendered here, by the chat template of a model in this process."""

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

    def learnt(self) -> dict[str, Any]:
        """Facts that only requests show, such as whether there are scores; `describe`, which takes longer, has them."""
        return {}

    def counts(self) -> dict[str, float]:
        """Costs of the requests so far, as numbers that add up over the sittings of a run; also part of `describe`."""
        return {}


class PlantedResponder(Responder):
    """A stand-in without a model, whose bias is known: for `posbias demo`, and to test what is found of a bias.

    An answer at relative place u of the passages is right with chance curve(u), linearly between the curve's points;
    the luck of a request is that of its sample, place and seed. A scored answer is one token with this chance.
    """

    def __init__(self, curve: Sequence[float], *, seed: int = 0, method: str = "") -> None:
        self.curve, self.seed, self.method = tuple(curve), seed, method
        self.requests = 0
        """Answered so far."""

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """As `Responder.respond`; requests have passages and an answer that one of them holds."""
        replies = []
        for request in requests:
            self.requests += 1
            answer = str(request.answer).strip()
            held = [answer in request.text[begin:end] for begin, end in request.passages]
            if True not in held:
                raise UsageError(f"a planted responder needs passages, one with the answer, got {len(held)} without")
            place = held.index(True) / max(1, len(held) - 1)
            chance = float(np.clip(np.interp(place, np.linspace(0, 1, len(self.curve)), self.curve), 1e-6, 1.0))
            digest = hashlib.sha256(f"{self.seed} {request.group} {place:.6f}".encode()).digest()
            right = int.from_bytes(digest[:8]) / 2**64 < chance
            told = AnswerScore((math.log(chance),), (1 if right else 2,)) if score else None
            replies.append(Reply(Response(answer if right else "unknown", STOPPED) if generate else None, told))
        return replies

    def describe(self) -> dict[str, Any]:
        """Curve and seed."""
        model = {"source": "planted", "curve": list(self.curve), "seed": self.seed}
        return {"kind": "planted", "model": model, "method": self.method}


_NAME = r"(?:[\w:.-]*(?:think|thought)[\w:.-]*|scratchpad|in(?:ner|ternal)_monologue)"
_EXPLANATION = r"(?:reason(?:ing)?|analysis|reflection)"
_MARKS = (
    (rf"(<{_EXPLANATION}>)", rf"(</{_EXPLANATION}>)"),
    (r"(\[THINK\])", r"(\[/THINK\])"),
    (r"(◁think▷)", r"(◁/think▷)"),
    (r"(<\|(?:start|begin(?:_of)?)_(?:think|thought)\w*\|>)", r"(<\|end(?:_of)?_(?:think|thought)\w*\|>)"),
    (r"(<\|(?:think|thought)\w*_(?:start|begin)\|>)", r"(<\|(?:think|thought)\w*_end\|>)"),
    (r"(<\|inner_prefix\|>)", r"(<\|inner_suffix\|>)"),
    (r"(<unused94>thought)", r"(<unused95>)"),
    (r"(<\|channel>thought)", r"(<channel\|>)"),
    (rf"(<\|?\s*{_NAME}(?:\s[^<>|]{{0,60}})?\|?>)", rf"(<\|?\s*\\?/\s*{_NAME}\s*\|?>)"),
)
"""How thoughts are opened and closed; each mark is one group. What fits several is the first. Marks of the first pair
stand around an explanation, which is no thought behind an answer."""
_MARK = re.compile("|".join(mark for pair in _MARKS for mark in pair), re.IGNORECASE)
_WRAPPED = re.compile(r"</?answer>|<\|(?:begin|end)_of_solution\|>|<\|(?:START|END)_RESPONSE\|>")
"""What stands around an answer behind thoughts."""
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant\s+to=\S+?\s*)?<\|channel\|>\s*(\w+)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
_CHANNEL_ENDS = re.compile(r"<\|(?:end|return|call|start)\|>")
_BARE_CHANNELS = re.compile(
    r"\s*analysis(?=[^\s\w]|[A-Z0-9])(?:(.*)assistant(?:final|(?=(?:commentary)? to=functions\.)))?(.*)", re.DOTALL
)
"""Channels of gpt-oss without their special tokens: "analysisWe look ...assistantfinalParis"."""
_ANY = -1
"""Thoughts that any closing mark closes, since the prompt has opened them."""
MARKED, CLOSED, UNFINISHED = "marked", "closed", "unfinished"
"""How thoughts were told: by marks; by a closing mark alone, as behind a prompt that opens them; they do not end."""


@dataclass(frozen=True)
class Told:
    """A generated text with its thoughts told from its answer."""

    answer: str
    """The answer; empty if the thoughts do not end."""
    thoughts: str | None = None
    """The thoughts without their marks; None if there are none."""
    thinking: str | None = None
    """MARKED, CLOSED or UNFINISHED; None if nothing is marked."""
    stopped: bool = False
    """True if the answer was cut where a stop text begins."""

    def cut(self, stop: tuple[str, ...]) -> "Told":
        """The answer up to the first stop text behind its first character that is no white space nor a fence."""
        begin = len(self.answer) - len(unfenced(self.answer))
        cuts = [place for text in stop if (place := self.answer.find(text, begin)) >= 0]
        if not cuts:
            return self
        return Told(self.answer[: min(cuts)], self.thoughts, self.thinking, stopped=True)


def opens_thoughts(prompt: str) -> bool:
    """True if a prompt, as the model reads it, ends with an opening mark."""
    end = prompt.rstrip()[-64:]
    channels, marks = list(_CHANNEL.finditer(end)), list(_MARK.finditer(end))
    if channels and channels[-1].end() == len(end):
        return channels[-1][1] == "analysis"
    return bool(marks) and marks[-1].end() == len(end) and _convention(marks[-1])[1] is False


def told_apart(text: str, *, opened: bool = False, pattern: str | None = None) -> Told:
    """A generated text with its thoughts told from its answer.

    Args:
        text: What was generated, special tokens included where they are known.
        opened: Whether the prompt ends within thoughts (`opens_thoughts`).
        pattern: A regular expression of one's own with one group that holds the answer, in place of the known marks;
            its last match counts, and all else is thoughts.

    Raises:
        UsageError: searching for the pattern takes too long.
    """
    if pattern is not None:
        matches = search_own(pattern, text)
        return Told(matches[-1], text, MARKED) if matches else Told("", text, UNFINISHED)
    channels = list(_CHANNEL.finditer(text))
    if channels:
        if "to=functions." in channels[-1][0]:  # a call, whose header names the tool
            return Told(text[channels[-1].start() :], text[: channels[-1].start()], MARKED)
        if channels[-1][1] != "final":
            return Told("", text, UNFINISHED)
        answer = _CHANNEL_ENDS.split(text[channels[-1].end() :], maxsplit=1)[0]
        return Told(answer, text[: channels[-1].start()], MARKED)
    bare = _BARE_CHANNELS.fullmatch(text)
    if bare:
        return Told("", bare[2], UNFINISHED) if bare[1] is None else Told(bare[2], bare[1], MARKED)
    return _between_marks(text, opened)


def _between_marks(text: str, opened: bool) -> Told:
    """The text outside of marked thoughts; within them, other marks are words like any."""
    inside = _ANY if opened else None
    answers: list[str] = []
    thoughts: list[str] = []
    explained = False  # behind an answer
    read_to, thinking = 0, MARKED if opened else None
    for mark in _MARK.finditer(text):
        convention, closing = _convention(mark)
        part = text[read_to : mark.start()]
        if convention == 0 and inside is None and (explained or "".join([*answers, part]).strip()):
            explained = explained or not closing
            if explained:
                continue
        if closing and inside is None:  # the prompt has opened them, or they spoke of the mark: all before is thoughts
            thoughts, answers, thinking = [text[: mark.start()]], [], thinking or CLOSED
        elif closing and inside in (_ANY, convention):
            thoughts.append(part)
            inside = None
        elif not closing and inside is None:
            answers.append(part)
            inside, thinking = convention, MARKED
        else:
            continue
        read_to = mark.end()
    if thinking is None:
        return Told(text)
    if inside is not None:
        return Told("", "".join([*thoughts, text[read_to:]]), UNFINISHED)
    answer = _WRAPPED.sub("", "".join([*answers, text[read_to:]]))
    return Told(answer, "".join(thoughts), thinking)


def _convention(mark: "re.Match[str]") -> tuple[int, bool]:
    """Number of the convention that a mark is of, and whether the mark closes."""
    assert mark.lastindex is not None  # every mark is a group
    return (mark.lastindex - 1) // 2, mark.lastindex % 2 == 0
