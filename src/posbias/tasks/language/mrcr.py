"""Similar requests in one conversation, of whose replies one is asked for again (MRCR).

A conversation asks several times for the same piece of writing ("write a poem about tapirs"), among other requests, and
gets another reply each time. At the end one of these is asked for by its number, behind a random beginning: "Prepend
aYooSG8CQg to the 2nd (1 indexed) poem about tapirs." The position is which of them that is: the conversation is the
same at all positions, and nothing moves.

A file holds the columns of openai/mrcr, one JSON object a line, as pandas writes them from the published parquet
(`to_json(path, orient="records", lines=True)`): `prompt` (JSON of messages), `answer`, `random_string_to_prepend`, and
`desired_msg_index`, the request whose reply is right. At that position the prompt is as published; at others it asks
for another of these replies.
"""

import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Len
from pydantic import Json

from posbias.checks import Count, CountOrZero, FileName
from posbias.errors import UsageError
from posbias.prompts.tokens import Message
from posbias.tasks.language.base import LANGUAGE_TASKS, Draft, LanguageTask, Line, line_of, published_lines
from posbias.tasks.language.calls import read_messages

BEGINNING = 10
"""Characters of the random beginning, as published."""
NUMBER = re.compile(r"(?<= to the )\d+(?:st|nd|rd|th)\b")
ASKED = "Prepend {} to the 1st (1 indexed) {}. Do not include any other text in your response."
FORMS = ("poem", "riddle", "song", "letter", "short story", "news report")
TOPICS = ("tapirs", "rocks", "clocks", "rivers", "bridges", "owls", "lanterns", "trains", "gardens", "kites")
QUALITIES = ("quiet", "golden", "old", "restless", "tiny", "patient", "bright", "hidden", "lonely", "proud")
DEEDS = ("rest", "wander", "gather", "wait", "sing", "dream", "tremble", "shine", "hide", "linger")
PLACES = ("at dawn", "by the sea", "in the rain", "near the mill", "under the moon", "on the hill", "in the snow")
LINES = 4


class MrcrLine(Line):
    """A line of a file, as openai/mrcr has them."""

    prompt: Annotated[Json[list[Any]], Len(3)]
    answer: str
    random_string_to_prepend: Annotated[str, Len(BEGINNING, BEGINNING)]
    desired_msg_index: Annotated[int, Ge(0)]


@dataclass(frozen=True)
class Rounds:
    """A sample: a conversation with similar requests, and how one of them is asked for."""

    messages: tuple[Message, ...]
    """All but the last one."""
    replies: tuple[int, ...]
    """Indices of the replies to the similar requests."""
    beginning: str
    asking: str
    """The last message, with any number."""


@LANGUAGE_TASKS.register("mrcr")
@dataclass(frozen=True)
class Mrcr(LanguageTask):
    """Repeat one of several replies to the same request in a conversation, behind a random beginning.

    Scores are shares, as published: how alike the text is to the reply, 0 without the beginning.

    Source: openai/mrcr; Vodrahalli et al. 2024, arXiv 2409.12640.
    """

    needles: Annotated[Count, Ge(2)] = 4
    """Times that the same is requested, >= 2; each is a position."""
    others: CountOrZero | None = None
    """Other requests in a generated conversation, spread evenly; None: 12."""
    file: FileName | None = None
    """A .jsonl or .jsonl.gz file with the columns of openai/mrcr; None: generated."""

    scoring: ClassVar[str] = f"similar(after={BEGINNING})"
    max_tokens: ClassVar[int] = 128
    counted: ClassVar[str] = "others"
    stands_alone: ClassVar[bool] = False
    by_template: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.file is not None:
            object.__setattr__(self, "max_tokens", 2048)  # published replies are essays
            if self.others is not None:
                raise UsageError(f"{self.name}: others is for generated conversations, got a file, too")
        elif self.others is None:
            object.__setattr__(self, "others", 12)

    @property
    def n_items(self) -> int:
        """One position for each of the similar requests."""
        return self.needles

    def draw(self, tokenizer: Any, *, count: int, seed: int) -> Iterator[Rounds]:
        """Conversations with their similar requests."""
        if self.file is None:
            return (self._drawn(random.Random(f"mrcr {seed} {index}")) for index in range(count))
        return iter([self._read(where, record) for where, record in published_lines(self.file, count)])

    def _drawn(self, source: random.Random) -> Rounds:
        asked, *rest = source.sample([(form, topic) for form in FORMS for topic in TOPICS], len(FORMS) * len(TOPICS))
        total = self.needles + (self.others or 0)
        places = [int((number + 0.5) * total / self.needles) for number in range(self.needles)]
        messages: list[Message] = []
        for index in range(total):
            form, topic = asked if index in places else source.choice(rest)
            drawn = [[source.choice(words) for words in (QUALITIES, DEEDS, PLACES)] for _ in range(LINES)]
            reply = "\n".join(f"The {quality} {topic} {deed} {place}." for quality, deed, place in drawn)
            messages.append({"role": "user", "content": f"write a {form} about {topic}"})
            messages.append({"role": "assistant", "content": reply})
        beginning = "".join(source.choices(string.ascii_letters + string.digits, k=BEGINNING))
        asking = ASKED.format(beginning, " about ".join(asked))
        return Rounds(tuple(messages), tuple(2 * place + 1 for place in places), beginning, asking)

    def _read(self, where: str, record: dict[str, Any]) -> Rounds:
        """A line, with the replies to all requests that say the same as the one it asks about."""
        line = line_of(MrcrLine, record, where)
        *messages, last = read_messages(line.prompt, f"{where}, field 'prompt'")
        wanted, beginning = line.desired_msg_index, line.random_string_to_prepend
        request, reply = [*messages, {}, {}][min(wanted, len(messages)) :][:2]
        requests = [index for index, message in enumerate(messages[:-1]) if message == request]
        number = _ordinal(requests.index(wanted)) if wanted in requests else ""
        if line.answer != f"{beginning}{reply.get('content')}" or NUMBER.findall(str(last["content"])) != [number]:
            raise UsageError(
                f"{where}: 'answer' must be 'random_string_to_prepend' and the message behind that of "
                f"'desired_msg_index', for whose number the last message asks, got {line.answer!r:.80}"
            )
        if len(requests) != self.needles:
            raise UsageError(f"{where}: needles={len(requests)} are there, {self.needles} are asked")
        return Rounds(tuple(messages), tuple(index + 1 for index in requests), beginning, str(last["content"]))

    def draft(self, sample: Rounds, position: int) -> Draft:
        """The conversation, and the question for one of the replies."""
        place = sample.replies[position]
        reply = str(sample.messages[place]["content"])
        asked = {"role": "user", "content": NUMBER.sub(_ordinal(position), sample.asking)}
        messages, answers = (*sample.messages, asked), (sample.beginning + reply,)
        return Draft(reply, answers, (0, len(reply)), messages=messages, moved_message=place)


def _ordinal(index: int) -> str:
    """Number of an index from 0: 1st, 2nd, 3rd, 4th ..."""
    number = index + 1
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number // 10 % 10 == 1 else ending}"
