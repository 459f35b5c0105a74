"""`Record`, which a run leaves behind: a directory with `record.json` and `arrays.safetensors`, saved and loaded here.

The arrays file is the point of commitment: it carries the whole record in its header and is renamed into place
first; `record.json` is the readable copy, renamed second. A run killed between the two is completed by the next
load, so a directory always holds either the old or the new run. No pickle anywhere.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.files import write_atomically, write_file
from posbias.results.showing import Showing, Shown
from posbias.version import __version__

FORMAT_VERSION = 1
RECORD_FILE = "record.json"
ARRAYS_FILE = "arrays.safetensors"
REPORT_FILE = "report.html"

ABSOLUTE_PATH = re.compile(
    r"(?P<before>^|[\s'\"`(=:,]|\[(?=[^\]\[]*[\\/][^\]\[]*[\\/]))(?:file://)?(?:~|[A-Za-z]:(?=[\\/])|(?=/))(?:[\\/][^\s'\"`()\[\]<>:,;/\\]+)*"
    r"[\\/](?P<last>[^\s'\"`()\[\]<>:,;/\\]+)[\\/]?"
)
"""A file name from the root or the home directory, with what stands before it; a URL's path belongs to no machine, and
`</s>` and `[/b]` are no files."""
QUOTED_PATH = re.compile(
    r"(?P<before>['\"`])(?:~|[A-Za-z]:)?[\\/](?:(?!(?P=before)).)*[\\/](?P<last>[^'\"`\\/]+)(?P=before)"
)
"""A file name in quotation marks, between which spaces belong to it."""

MEASURED_PART = "measured"
"""The part of an array's name that tells a measurement from a prediction."""
Status = Literal["done", "failed"]
adapter = cache(TypeAdapter)
"""Validation of a class, built once."""


@dataclass(eq=False, repr=False)
class Record(Showing):
    """One run: what was asked, what that resolved to, what came out."""

    verb: str
    """The command that made it: "predict", "measure", "compare", "audit" ..."""
    arguments: dict[str, Any]
    """Arguments as the user passed them, plain JSON; absolute paths are reduced to their last part."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """Arguments with every default and derived value filled in, and paths reduced likewise."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """Results that are numbers, texts or small tables (nested dictionaries and lists of plain values)."""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Results that are arrays, by slash-separated name such as `measured/jacobian/influence`."""
    seeds: dict[str, int] = field(default_factory=dict)
    status: Status = "done"
    error: str | None = None
    environment: dict[str, Any] = field(default_factory=lambda: describe_environment())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    format_version: int = FORMAT_VERSION
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    def __post_init__(self) -> None:
        self.arguments, self.resolved = portable(self.arguments), portable(self.resolved)

    def shown(self) -> Shown:
        """The run in one line, when it was made, and why it failed."""
        return Shown(self.line, facts={"made": self.created} | ({"failed": self.error} if self.error else {}))

    @property
    def line(self) -> str:
        """The run in one line."""
        about = f" of {self.resolved['title']}" if self.resolved.get("title") else ""
        return f"{self.verb}{about}, {self.status}, {len(self.arrays)} arrays, run_id={self.run_id!r}"

    @property
    def model(self) -> Mapping[str, Any] | None:
        """The model's description of itself; None if there is none, or if there are several."""
        model = self.resolved.get("model")
        return model if isinstance(model, Mapping) else None

    @property
    def prompts(self) -> Mapping[str, Any] | None:
        """The prompts' description of themselves; None if none were read."""
        prompts = self.resolved.get("prompts")
        return prompts if isinstance(prompts, Mapping) else None

    @property
    def title(self) -> str:
        """The subject of the run in a few words: its title, or the model, or the theory, or the verb."""
        asked, model = self.arguments, (self.model or {}).get("source")
        return str(self.resolved.get("title") or model or asked.get("model") or asked.get("theory") or self.verb)

    @property
    def command(self) -> str:
        """The command that repeats the run: the shell line if it was recorded, otherwise the same call in Python."""
        if self.resolved.get("command"):
            return str(self.resolved["command"])
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items() if value is not None)
        return f"posbias.{self.verb}({arguments})"

    def as_json(self) -> dict[str, Any]:
        """Everything but the numbers of the arrays as one JSON document."""
        cut = {"arguments": portable(self.arguments), "resolved": portable(self.resolved)}
        document = {name: plain(value) for name, value in {**vars(self), **cut}.items() if name != "arrays"}
        document["arrays"] = {name: [str(array.dtype), list(array.shape)] for name, array in self.arrays.items()}
        return document

    def as_run(self) -> "Record":
        """The record itself."""
        return self

    def save(self, directory: str | Path, *, overwrite: bool = False) -> Path:
        """Write the record into `directory` atomically, whatever its name, replacing an unfinished one and its report.

        Raises:
            UsageError: another finished run is there, and not to be replaced (`overwrite`).
            RunError: the directory cannot be written or the disk is full; nothing half-written stays.
        """
        directory = Path(directory)
        there = None if overwrite else record_in(directory, done=True)
        if there is not None and there.run_id != self.run_id:
            raise UsageError(
                f"{str(directory)!r} holds a finished run of posbias {there.verb} ({there.created}); overwrite=True "
                "replaces it, or choose another directory"
            )
        text = json.dumps(self.as_json(), indent=1, allow_nan=False)
        write_arrays(directory / ARRAYS_FILE, self.arrays, {"record": text, "sha256": _checksum(text, self.arrays)})
        (directory / REPORT_FILE).unlink(missing_ok=True)
        write_file(directory / RECORD_FILE, text.encode())
        return directory


@checked
def read_record(directory: str | Path) -> Record:
    """Read a run directory written by `Record.save`.

    Raises:
        UsageError: no record there, an unknown format version, or a damaged file.
    """
    directory = Path(directory)
    path = directory / ARRAYS_FILE
    if not path.is_file():
        raise UsageError(f"{str(directory)!r} holds no posbias run (no {ARRAYS_FILE} in it)")
    try:
        metadata, arrays = read_arrays(path)
        if metadata.get("sha256") != _checksum(metadata["record"], arrays):
            raise ValueError("its content is not what posbias wrote")
        document = json.loads(metadata["record"])
    except (KeyError, ValueError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is damaged or not a posbias run: {error}") from None
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{str(directory)!r} has record format {version}; posbias {__version__} reads format {FORMAT_VERSION}"
        )
    try:
        record: Record = adapter(Record).validate_python({**document, "arrays": arrays})
    except (ValidationError, RecursionError) as error:
        where = "nested too deep"
        if isinstance(error, ValidationError):
            where = f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
        told = f"{str(path)!r} is damaged or from another posbias than {__version__}: {where}; run it again"
        raise UsageError(told) from None
    # A run may have been killed before its readable copy was written; whatever else lies there need not be a text.
    readable, written = directory / RECORD_FILE, metadata["record"].encode()
    with suppress(OSError):  # a directory that can only be read is read as it is
        if not readable.exists() or readable.read_bytes() != written:
            (directory / REPORT_FILE).unlink(missing_ok=True)
            write_atomically(readable, written)
    return record


def _checksum(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """Hash of a record's document and of its arrays with their names, types and shapes."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass"))
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write arrays and texts beside them as safetensors, whole or not at all; RunError if that fails."""
    from safetensors.numpy import save

    write_file(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata=metadata))


def read_arrays(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Texts and arrays of a file in safetensors; ValueError: it is damaged, or cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return dict(file.metadata() or {}), arrays
    except (SafetensorError, TypeError, OSError) as error:
        raise ValueError(str(error)) from None


def record_in(directory: str | Path, *, done: bool = False) -> Record | None:
    """The record that a directory holds, if it is of a finished run (`done`); None if it has none that can be read."""
    with suppress(UsageError):
        record = read_record(directory)
        return record if record.status == "done" or not done else None
    return None


def remove_record(directory: Path) -> None:
    """Take the record out of a directory whose contents are about to be another run's: it must not speak of those."""
    for name in (ARRAYS_FILE, RECORD_FILE, REPORT_FILE):
        (directory / name).unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """`value` as JSON knows it: NumPy numbers and tuples made plain, infinities and NaN written as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    if isinstance(value, np.integer | np.bool_):
        return value.item()
    if isinstance(value, str | int | bool | None):
        return value
    return str(value)


def without_paths(text: str) -> str:
    """The text with every absolute path cut down to its last part: other libraries' errors name files by them."""
    quoted = QUOTED_PATH.sub(r"\g<before>\g<last>\g<before>", text)
    return ABSOLUTE_PATH.sub(r"\g<before>\g<last>", quoted)


def portable(value: Any) -> Any:
    """Plain values as a record holds them: every absolute path, which belongs to one machine, cut to its last part."""
    if isinstance(value, Mapping):
        return {name: portable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, Path):
        return portable(str(value))
    if not isinstance(value, str):
        return value
    # A whole value in quotation marks: spaces belong to a path that it is.
    quote = next((mark for mark in "'\"`" if mark not in value), "")
    whole = quote and value[:1] in ("/", "~") and not any(mark in value for mark in "\n,")
    return without_paths(f"{quote}{value}{quote}")[1:-1] if whole else without_paths(value)


def describe_environment() -> dict[str, Any]:
    """Versions and hardware that a number may depend on; no paths, no host names, no secrets."""
    return {
        "posbias": __version__,
        "commit": commit_of(Path(__file__).resolve().parents[3]),  # of the source checkout; None for a wheel
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "processors": os.cpu_count(),
        "packages": {**_versions()},
    }


@cache
def _versions() -> dict[str, str | None]:
    """Versions of packages, read once: their metadata is large."""
    versions: dict[str, str | None] = dict.fromkeys(("torch", "transformers", "numpy", "scipy", "numba"))
    for name in versions:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@cache
def commit_of(checkout: Path) -> str | None:
    """The commit that a git checkout is at, asked once; None if there is none, or no git."""
    if not (checkout / ".git").exists():
        return None
    try:
        asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None
