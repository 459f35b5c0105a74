"""Which files hold a checkpoint's weights, decided from what transformers will open; each is looked into before it is.

Weights come from safetensors files (and GGUF) only, which cannot carry code. What transformers opens follows from
`config.json`, the index and the names of files beside them, so that is what is checked: not what else lies there.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from posbias.errors import RunError, UsageError, one_line
from posbias.files import read_json
from posbias.models.sources import Source

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that transformers looks for: all weights in one file, or the list of the files that hold them."""
INDEX_BYTES = 100_000_000
"""The largest index read; those of the largest models have a tenth of that."""
SHARD = re.compile(r"[^/\\\0]{1,240}\.safetensors")
"""The name of a file in the checkpoint's own directory."""
OF_ONE_PROCESS = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")
"""What transformers takes for a checkpoint of a distributed run, in which case it reads all that lies there."""
ADAPTER = "adapter_config.json"
ALLOWED = "allowed: safetensors or gguf"
PICKLED = (b"PK\x03\x04", b"\x80")
"""First bytes of what `torch.save` and `pickle` write."""
POINTER = b"version https://git-lfs"
UNSCALED = ("F8", "F4", "F6", "I", "U", "BOOL")
"""Beginnings of the names of stored types that are packed numbers or indices, and stay what they are."""
Tensors = dict[str, tuple[str, list[int]]]
"""By name: stored type and shape."""


def fetch_weights(source: Source) -> Source:
    """The source as a directory of this machine that holds the files to load; what the hub has of them is fetched."""
    if source.local:
        return source
    first = source.file(WHOLE) or source.file(INDEX) or _converted(source)
    if first is None:
        raise UsageError(f"model {source.name!r} has no {WHOLE} and no {INDEX}; {ALLOWED}")
    revision = first.parent.name
    if first.name == INDEX:
        for name in _names(first, source.name):
            source.file(name, revision)
    return replace(source, location=str(first.parent), local=True)


def loaded_files(source: Source) -> list[Path]:
    """The files of a directory that transformers will load weights from.

    Refused are directories with none, or with one that could carry code, lies elsewhere, is missing or damaged.
    """
    directory = Path(source.location)
    for path in directory.iterdir():
        if path.name == ADAPTER:
            raise UsageError(f"model {source.name!r} has an adapter ({ADAPTER}); allowed: one merged into the weights")
        if OF_ONE_PROCESS.match(path.name):
            raise UsageError(f"model {source.name!r} is in the parts of a distributed run ({path.name}); merge them")
    if (directory / WHOLE).is_file():
        return [directory / WHOLE]
    if (directory / INDEX).is_file():
        return [directory / name for name in _names(directory / INDEX, source.name)]
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        raise UsageError(f"model {source.name!r} has pickled weights ({pickled[0]}), which can run code; {ALLOWED}")
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    advice = f"; name the file itself, e.g. {gguf[0]}" if gguf else ""
    raise UsageError(f"model {source.name!r} has no weights ({WHOLE} or {INDEX}){advice}")


def stored_tensors(files: Sequence[Path], name: str) -> Tensors:
    """What the headers of safetensors files say, checked by the format's own reader; no weight is read.

    Refused is a file that is pickled (UsageError), missing or damaged (RunError).
    """
    from safetensors import SafetensorError, safe_open

    found: Tensors = {}
    for path in files:
        if not path.is_file():
            raise RunError(f"model {name!r}: {path.name} is missing")
        try:
            with safe_open(path, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    part = file.get_slice(key)
                    found[key] = (str(part.get_dtype()), part.get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise _damage(path, name, error) from None
    return found


def weight_bytes(tensors: Tensors, dtype: torch.dtype | None) -> int:
    """Bytes of all tensors in a dtype (None: as stored)."""
    total = 0
    for stored, shape in tensors.values():
        bits = int("".join(re.findall(r"\d+", stored)[:1]) or 8)
        if dtype is not None and not stored.startswith(UNSCALED):
            bits = 8 * dtype.itemsize
        total += math.prod(shape) * bits // 8
    return total


def _converted(source: Source) -> Path | None:
    """The copy in safetensors that the hub's own converter offers of pickled weights; None where there is none."""
    from transformers.safetensors_conversion import auto_conversion

    if source.offline:
        return None
    try:
        found = auto_conversion(source.location)[0]
    except Exception:  # it asks another service, which may fail in any way
        return None
    return None if found is None else Path(found)


def _names(index: Path, name: str) -> list[str]:
    try:
        document = read_json(index, most_bytes=INDEX_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"model {name!r}: {INDEX} {one_line(error)}") from None
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not places or not isinstance(document.get("metadata"), dict):
        raise UsageError(f"model {name!r}: {INDEX} has no weight_map and metadata, each an object")
    for place in places.values():
        if not isinstance(place, str) or not SHARD.fullmatch(place):
            raise UsageError(
                f"model {name!r}: {INDEX} names {str(place)[:80]!r}; allowed: *.safetensors in the same directory, as "
                "other files can run code"
            )
    return sorted(set(places.values()))


def _damage(path: Path, name: str, error: Exception) -> Exception:
    with open(path, "rb") as file:
        begin = file.read(len(POINTER))
    if begin.startswith(PICKLED):
        return UsageError(f"model {name!r}: {path.name} is pickled, which can run code; {ALLOWED}")
    if begin == POINTER:
        return RunError(f"model {name!r}: {path.name} is a pointer of Git LFS, not the file; fetch it (git lfs pull)")
    return RunError(f"model {name!r}: {path.name} is damaged: {one_line(error)}")
