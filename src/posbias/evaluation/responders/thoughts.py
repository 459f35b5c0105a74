"""The thoughts in a generated text told from its answer, by the marks that models put around them.

Known are tags such as `<think>`, the marks of Magistral, Kimi, Command A, OpenThinker, Apertus and MedGemma, and the
channels of gpt-oss, also where a server has taken its special tokens out. Where the chat template opens the thoughts,
only the closing mark is generated. Thoughts that do not end hold no answer.
"""

import re
from dataclasses import dataclass

from posbias.tasks.language.readings import search_own

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
"""How thoughts are opened and closed; each mark is one group. What fits several is the first."""
_BEFORE_ALONE = 0
"""Index of the convention whose marks stand around an explanation, which is no thought behind an answer."""
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
        """The answer up to the first stop text behind its first character that is no white space."""
        begin = len(self.answer) - len(self.answer.lstrip())
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
        if convention == _BEFORE_ALONE and inside is None and (explained or "".join([*answers, part]).strip()):
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
