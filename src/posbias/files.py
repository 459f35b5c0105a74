"""Files that users name, read so that none can block, fill the memory or go on for ever.

Only regular files are opened; lines and whole files are held to `limits.READ_BYTES`; what is not UTF-8 or JSON is
refused in one line that names the place.
"""

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from posbias.errors import UsageError
from posbias.limits import BLANK_LINES, READ_BYTES, Limit

GZIP_MAGIC = b"\x1f\x8b"


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, open for reading bytes; pipes and devices, which may block or never end, are refused.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UsageError(f"cannot read {str(path)!r}: not a regular file")
        return open(handle, "rb")
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except ValueError as error:  # a zero byte, or half a surrogate pair
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"cannot read {str(path)!r}: no file can have this name") from None


def file_exists(path: str | Path) -> bool:
    """Whether something has this name; False for what can be no name (too long, with a zero byte)."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def read_whole(path: str | Path, what: str, limit: Limit = READ_BYTES) -> bytes:
    """The content of a file that is read at once.

    Raises:
        UsageError: it cannot be read, or holds more than the limit.
    """
    with open_file(path) as file:
        content = file.read(limit.most + 1)
    if len(content) > limit.most:
        raise limit.exceeded(f"{what} {str(path)!r} is too long")
    return content


def read_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, plain or gzip, each with its place for messages; blank ones are passed over.

    Raises:
        UsageError: it cannot be read, is no gzip file to its end, or holds too long a line or too many blank ones.
    """
    name = Path(path).name
    blank = 0
    try:
        with open_file(path) as raw:
            packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            number = 0
            while line := read_line(file, name, number + 1):
                number += 1
                if line.strip():
                    blank = 0
                    yield f"{name}, line {number}", line
                elif (blank := blank + 1) > BLANK_LINES.most:
                    raise BLANK_LINES.exceeded(f"{name}, line {number}: nothing but blank lines")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(f"{str(path)!r} is a broken gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None


def read_line(file: IO[bytes], name: str, number: int | None = None) -> bytes:
    """The next line of an open file, empty at its end.

    Raises:
        UsageError: it is longer than READ_BYTES.
    """
    most = READ_BYTES.most
    line = file.readline(most + 1)
    if len(line) > most:
        raise READ_BYTES.exceeded(f"{name}{'' if number is None else f', line {number}'} is too long")
    return line


def decoded(content: bytes, where: str) -> str:
    """UTF-8 as text, without a byte order mark.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None


def parsed_json(content: bytes, where: str) -> Any:
    """A JSON value.

    Raises:
        UsageError: it is not UTF-8, not JSON, nested too deeply, or has a number that Python does not read.
    """
    try:
        return json.loads(decoded(content, where))
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: bad JSON ({error.msg})") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where}: bad JSON (nested too deeply or too long a number)") from None


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        UsageError: as `parsed_json`, or it is another value.
    """
    value = parsed_json(content, where)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: need a JSON object, got {type(value).__name__}")
    return value


def check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair, which is no character and which no tokenizer takes.

    Raises:
        UsageError: there is one; it is named.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: {text[error.start]!a} alone is no character; need Unicode text") from None
