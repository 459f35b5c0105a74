"""Files that users name, read so that none can block, fill the memory or go on for ever.

Only regular files are opened; lines and whole files are held to `READ_BYTES`; anything but UTF-8, JSON or plain
YAML is refused in one line that names the place.
"""

import gzip
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from posbias.errors import RunError, UsageError

TEMPORARY = "posbias.tmp"
"""The ending of temporary file names that only posbias uses."""

GZIP_MAGIC = b"\x1f\x8b"
MOST_LEVELS = 64
"""Deepest nesting of lists and objects of JSON."""
MOST_DIGITS = 40
"""Digits of a whole number in JSON; files of tokenizers write "no limit" as 10^30."""
READ_BYTES = 1 << 25
"""Bytes of a line, or of a file that is read whole: as Python objects they can take twenty times as much memory."""
BLANK_LINES = 100_000
"""Blank lines before the next record of a file; 10 GB of line ends fit into 10 MB of gzip."""
YAML_BYTES = 1_000_000
"""Bytes of a file of YAML; it is read at about 2 MB a second."""
YAML_TAGS = tuple(f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "map"))
"""What YAML calls a text, a list and a mapping without being told."""
SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)
"""The escape of half a character beyond 16 bits."""


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, open for reading bytes; pipes and devices, which may block or never end, are refused."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except ValueError:  # a zero byte, or half a surrogate pair
        raise UsageError(f"cannot read {str(path)!r}: no file can have this name") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UsageError(f"cannot read {str(path)!r}: not a regular file")
    return open(handle, "rb")


def file_exists(path: str | Path) -> bool:
    """True if something has this name; False for a text that can be no name (too long, with a zero byte)."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def read_whole(path: str | Path, sort: str, most: int = READ_BYTES) -> bytes:
    """The content of a file that is read at once; `sort` names it in a message, such as "study file"."""
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UsageError(f"{sort} {str(path)!r} is too long; at most {most:,} bytes are allowed")
    return content


def read_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file, plain or gzip, each with its place for messages; blank ones are passed over."""
    name = Path(path).name
    blank = 0
    try:
        with open_file(path) as raw:
            packed = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            file = cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if packed else raw
            number = 0
            while line := file.readline(READ_BYTES + 1):
                number += 1
                if len(line) > READ_BYTES:
                    raise UsageError(f"{name}, line {number} is too long; at most {READ_BYTES:,} bytes are allowed")
                if line.strip():
                    blank = 0
                    yield f"{name}, line {number}", line
                elif (blank := blank + 1) > BLANK_LINES:
                    raise UsageError(f"{name}, line {number}: more than {BLANK_LINES:,} blank lines in a row")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(f"{str(path)!r} is a broken gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror or error}") from None


def decoded(content: bytes, where: str) -> str:
    """UTF-8 as text, without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None


def parsed_json(content: bytes, where: str) -> Any:
    """A JSON value, held to more than Python's parser asks for, so that later code does not stumble over it.

    Raises:
        UsageError: a number of 400 digits, half a surrogate pair, a thousand brackets, a key twice, or no JSON at all.
    """
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text, parse_int=_whole, parse_float=_real, object_pairs_hook=_unrepeated)
        _check_levels(value)
        if SURROGATE.search(text):  # pairs of escapes were joined by the parser; what is left is half a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        fault = f"is not UTF-8 text ({error.reason} at byte {error.start})"
    except UnicodeEncodeError as error:
        fault = f"holds text with half a character ({error.object[error.start]!r})"
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}" if "\n" in text.strip() else f"character {error.pos + 1}"
        fault = f"is not JSON ({place}: {error.msg})"
    except RecursionError:
        fault = f"is nested deeper than {MOST_LEVELS} levels"
    except ValueError as error:  # of the readers below
        fault = str(error)
    raise UsageError(f"{where}: {fault}")


def json_object(content: bytes, where: str) -> dict[str, Any]:
    """A JSON object."""
    value = parsed_json(content, where)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: need a JSON object, got {type(value).__name__}")
    return value


def read_yaml(path: str | Path, sort: str, read: Callable[[str], Any] = str) -> Any:
    """The single document of a YAML file, as dictionaries, lists and texts; `sort` names the file in a message.

    YAML's own reading would make truth values of on, off, yes and no, and a text of 1e-3. What a text without quotes
    is says `read`; keys keep their text.

    Raises:
        UsageError: no such file, not YAML, a key twice, or anything but plain values in it.
    """
    import yaml  # only for those who have such a file

    content = read_whole(path, sort, YAML_BYTES)
    try:
        node = yaml.compose(content, Loader=yaml.BaseLoader)
        if node is None:
            raise ValueError("it is empty")
        return _plain(node, read, set())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"{sort} {str(path)!r} is not YAML of plain values: {reason:.200}") from None


def _plain(node: Any, read: Callable[[str], Any], seen: set[Any]) -> Any:
    """The values of a node; `seen` are the lists and mappings so far, of which an alias could make thousands."""
    line = node.start_mark.line + 1
    if node.tag not in YAML_TAGS:
        raise ValueError(f"a tag, {node.tag!r}, in line {line}")
    if node.id == "scalar":
        return node.value if node.style else read(node.value)
    if node in seen:
        raise ValueError(f"an alias for a list or mapping; write it out in line {line}")
    seen.add(node)
    if node.id == "sequence":
        return [_plain(item, read, seen) for item in node.value]
    found: dict[str, Any] = {}
    for key, value in node.value:
        if key.id != "scalar":
            raise ValueError(f"a key must be a text or a number, in line {key.start_mark.line + 1}")
        if key.value in found:
            raise ValueError(f"{key.value[:80]!r} is given twice, again in line {key.start_mark.line + 1}")
        found[key.value] = _plain(value, read, seen)
    return found


def check_text(text: str, where: str) -> None:
    """Refuse half of a surrogate pair: it is no character, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{where}: {text[error.start]!a} alone is no character; need Unicode text") from None


def _whole(text: str) -> int:
    if len(text.lstrip("-")) > MOST_DIGITS:
        raise ValueError(f"holds a whole number of {len(text)} digits; at most {MOST_DIGITS} are allowed")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"holds {text[:20]}, which is beyond floating point")
    return value


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"holds the key {next(name for name in names if names.count(name) > 1)[:80]!r} twice")
    return by_name


def _check_levels(value: Any) -> None:
    """Refuse a value nested too deep, level by level: a recursion would end in the same trouble."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        members = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in members for item in items if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(f"is nested deeper than {MOST_LEVELS} levels")


def follow_umask(directory: Path) -> None:
    """Give the files of a directory the mode of any new file: nobody else may read what safetensors writes."""
    mask = os.umask(0)
    os.umask(mask)
    for file in directory.iterdir():
        file.chmod(0o666 & ~mask)


def write_atomically(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush to disk, rename; the temporary file is removed if anything goes wrong."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{TEMPORARY}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: Path, content: bytes) -> Path:
    """Write a user's file whole, into a directory that is made if missing.

    Raises:
        RunError: it cannot be written, or the disk is full; nothing half-written stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    return path
