"""How much memory a checkpoint's weights will take, from the headers of its safetensors files, before any is loaded.

Only files that are here are asked: a directory's, or what the hub's client has already fetched.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from posbias.models.sources import Source

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names that transformers looks for: all weights in one file, or the list of the files that hold them."""
LENGTH_BYTES = 8
"""At the beginning of a safetensors file: the length of its header, little-endian."""
UNSCALED = ("F8", "I", "U", "BOOL")
"""Beginnings of the names of stored types that are packed numbers or indices, and stay what they are."""


def weight_bytes(source: Source, dtype: torch.dtype | None) -> int | None:
    """Bytes of all tensors in a dtype (None: as stored); None where the headers are not all here, or damaged."""
    if source.gguf is not None:
        return None
    try:
        headers = [_header(path) for path in _files(source)]
        tensors = [tensor for header in headers for name, tensor in header.items() if name != "__metadata__"]
        return sum(_bytes_of(tensor, dtype) for tensor in tensors) if tensors else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the loader says what is wrong with it


def _files(source: Source) -> list[Path]:
    """The checkpoint's files.

    Raises:
        OSError: one of them is not here.
    """
    if (whole := _place(source, WHOLE)) is not None:
        return [whole]
    if (index := _place(source, INDEX)) is None:
        return []
    found = [_place(source, name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if None in found:
        raise FileNotFoundError
    return [path for path in found if path is not None]


def _place(source: Source, name: str) -> Path | None:
    """Where a file of the checkpoint lies on this machine."""
    if source.local:
        path = Path(source.location) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(source.location, name)
    return Path(cached) if isinstance(cached, str) else None


def _header(path: Path) -> dict[str, Any]:
    """The table of a file's tensors.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path.name} has a header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
        return header


def _bytes_of(tensor: dict[str, Any], dtype: torch.dtype | None) -> int:
    start, end = tensor["data_offsets"]
    if dtype is None or str(tensor["dtype"]).startswith(UNSCALED):
        return int(end - start)
    return int(math.prod(tensor["shape"])) * dtype.itemsize
