"""A key taken out of texts that leave the process, however a server spells it.

A text is searched as it is, also for a key that lost its first or last characters, and with the escapes of JSON, URLs
and HTML undone up to three times over and blanks left out. Beside the key itself its base64 is searched for, as in a
repeated `Authorization` header, and its hexadecimal.
"""

import base64
import logging
import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from html.entities import html5

SECRET = 12
"""Characters from which a key is one: shorter ones are placeholders, such as `none`, that answers may well hold."""
CUT = 2
"""Characters that may be missing at either end of a key which a text repeats."""
SHOWN = 200
"""Characters of a server's own message that ours repeats."""
MASKED = "***"
ROUNDS = 3
"""How often escapes are undone: one escape may stand inside another."""
LOGGERS = ("httpx2", "httpcore2")
"""Whose log lines repeat headers; their children included."""
_ESCAPE = re.compile(
    r"\\+(?:u(?P<json>[0-9a-f]{4})|u\{0*(?P<braced>[0-9a-f]{1,5})\}|x(?P<python>[0-9a-f]{2})|(?P<octal>[0-7]{2,3})"
    r"|(?P<blank>[nrt])|(?P<bare>.))?"
    r"|%(?:25)*(?:u00)?(?P<url>[0-9a-f]{2})"
    r"|&(?:amp;)*(?:\#0*(?P<decimal>\d{1,6})|\#x0*(?P<hexadecimal>[0-9a-f]{1,5})|(?P<named>[a-z]{1,20}));?"
    r"|[\s\u00ad\u200b-\u200d\u2060\ufeff]+",
    re.IGNORECASE,
)
_BASE = {"octal": 8, "decimal": 10, "json": 16, "braced": 16, "python": 16, "url": 16, "hexadecimal": 16}


class Mask:
    """Takes one key out of texts; without a key, texts stay as they are."""

    def __init__(self, key: str | None) -> None:
        self._in_answers = key is not None and len(key) >= SECRET
        spellings = [] if key is None else [key]
        if key is not None and self._in_answers:
            core = key[CUT:-CUT]
            spellings += [
                spelling for text in (key, core) for spelling in (*_in_base64(text.encode()), text.encode().hex())
            ]
        # Base64 of either alphabet.
        patterns = [re.escape(spelling).replace(r"\+", "[+-]").replace("/", "[/_]") for spelling in spellings]
        if key is not None and self._in_answers:
            patterns.insert(0, _cut(key))
        self._key = re.compile("|".join(patterns), re.IGNORECASE) if patterns else None

    def message(self, text: str) -> str:
        """A text of any source but an answer: a short key is taken out, too."""
        if self._key is None or not _occurs(self._key, text):
            return text
        parts, copied = [], 0
        for begin, end in _found(self._key, text):
            if begin >= copied:
                parts += [text[copied:begin], MASKED]
            copied = max(copied, end)
        return "".join([*parts, text[copied:]])

    def answer(self, text: str) -> str:
        """An answer as it may be kept."""
        return self.message(text) if self._in_answers else text

    def line(self, text: str) -> str:
        """The beginning of a message on one line, of printable characters."""
        printable = "".join(character if character.isprintable() else " " for character in self.message(text))
        return " ".join(printable.split())[:SHOWN]

    @contextmanager
    def in_logs(self) -> Iterator[None]:
        """Meanwhile the client's log lines are masked, should anyone read them."""
        by_name = logging.root.manager.loggerDict
        loggers = [logging.getLogger(name) for name in by_name if name.partition(".")[0] in LOGGERS]
        for logger in loggers:
            logger.addFilter(self._masked)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(self._masked)

    def _masked(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self.message(record.getMessage()), None
        return True


def _cut(key: str) -> str:
    """Matches a key of which up to `CUT` characters are missing at either end."""
    before = after = ""
    for letter in map(re.escape, key[:CUT]):
        before = f"(?:{before}{letter})?"
    for letter in map(re.escape, reversed(key[-CUT:])):
        after = f"(?:{letter}{after})?"
    return before + re.escape(key[CUT:-CUT]) + after


def _occurs(key: re.Pattern[str], text: str) -> bool:
    """True if the key occurs in a text: quicker than `_found`, for the many texts without it."""
    for _ in range(ROUNDS + 1):
        if key.search(text):
            return True
        undone = _ESCAPE.sub(_said, "".join(text.split()))
        if undone == text:
            break
        text = undone
    return False


def _found(key: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    """Places of the key in a text, ascending: in the text itself, and in what it says once escapes are undone."""
    places = []
    layers: list[_Undone] = []
    for _ in range(ROUNDS + 1):
        for match in key.finditer(text):
            begin, end = match.start(), match.end()
            for layer in reversed(layers):
                begin, end = layer.source(begin)[0], layer.source(end - 1)[1]
            places.append((begin, end))
        layers.append(_Undone(text))
        if layers[-1].text == text:
            break
        text = layers[-1].text
    return sorted(places)


class _Undone:
    """A text with one layer of escapes undone, and where its characters came from."""

    def __init__(self, text: str) -> None:
        parts: list[str] = []
        # Pieces of the result: where each begins, where it began in the source, and how wide its characters were there.
        self._begins, self._sources, self._widths = [0], [0], [1]
        copied = length = 0
        for match in _ESCAPE.finditer(text):
            unescaped = _said(match)
            parts += [text[copied : match.start()], unescaped]
            length += match.start() - copied
            self._begins += [length, length + len(unescaped)]
            self._sources += [match.start(), match.end()]
            self._widths += [match.end() - match.start(), 1]
            length += len(unescaped)
            copied = match.end()
        parts.append(text[copied:])
        self.text = "".join(parts)

    def source(self, index: int) -> tuple[int, int]:
        """Begin and end in the source of one character of the result."""
        piece = bisect_right(self._begins, index) - 1
        begin = self._sources[piece] + index - self._begins[piece]
        return begin, begin + self._widths[piece]


def _said(match: re.Match[str]) -> str:
    """The character that an escape stands for; nothing for a blank."""
    kind = match.lastgroup
    if kind in _BASE:
        code = int(match[kind], _BASE[kind])
        return chr(code) if code <= 0x10FFFF else ""
    if kind == "named":
        return html5.get(f"{match['named']};", match[0])
    return match["bare"] or ""


def _in_base64(key: bytes) -> Iterator[str]:
    """Parts of a key in base64 that stay equal whatever stands before and after it."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + key).decode()
        yield encoded[-(-8 * before // 6) : 8 * (before + len(key)) // 6]
