"""The files that hold a checkpoint's weights: those that transformers will open, each looked into before it is.

Weights come from safetensors files (and GGUF) only, which cannot carry code. What transformers opens follows from
`config.json`, the index and the names of files beside them, so that is what is checked: not what else lies there.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for one which Git LFS has not fetched."""
UNSCALED = ("F8", "F4", "F6", "I", "U", "BOOL")
"""Beginnings of the names of stored types that are packed numbers or indices, and stay what they are."""
EIGHT_BIT = "F8_E[45]"
"""Stored types of eight-bit floats that stand for a weight with a scale of its own (F8_E8M0 is such a scale)."""
Tensors = dict[str, tuple[str, list[int]]]
"""By name: stored type and shape."""

TABLES = r"(^|\.)(rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)|position_ids)$"
"""Tables that a network makes of its configuration, and that older versions of transformers saved beside the weights.

Frequencies are held against those that the network turns by, in `check_frequencies`.
"""
MASKS = r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$"
"""Causal masks, and the number they put in, which older versions saved likewise; a bias has one dimension."""
LATER_TOKENS = r"(^|\.)(mtp|mtp_layers|mtp_block)\."
"""Heads that predict the tokens after the next, for decoding ahead; a layer of them may be numbered like a block."""
OTHER_HEADS = r"^(v_head|value_head|reward_head|score|classifier)\."
"""Heads of a value model or classifier: they read the last block beside the unembedding, and add nothing to it."""
OTHER_SENSES = r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mm_projector|embed_vision)\."
"""Encoders of images and sound: a prompt of text passes none."""
NO_PLACE_NEEDED = re.compile("|".join((TABLES, LATER_TOKENS, OTHER_HEADS, OTHER_SENSES)))
FREQUENCY_TOLERANCE, HALF_STEP = 0.01, 1e-7
"""Relative and absolute, of frequencies that may have been stored in half precision, which has steps of 6e-8 near 0."""
LATER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Entries of a configuration that count blocks after the last which predict later tokens."""


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
    """Read the headers of safetensors files, checked by the format's own reader; no weight is read.

    Refused is a file that is pickled (UsageError), missing or damaged (RunError), and a tensor that two files hold.
    """
    from safetensors import SafetensorError, safe_open

    tensors: Tensors = {}
    for path in files:
        if not path.is_file():
            raise RunError(f"model {name!r}: {path.name} is missing")
        try:
            with safe_open(path, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    if key in tensors:
                        raise RunError(f"model {name!r}: {path.name} holds {key[:80]!r}, as another file does")
                    part = file.get_slice(key)
                    tensors[key] = (str(part.get_dtype()), part.get_shape())
        except (SafetensorError, OSError, ValueError) as error:
            raise _damage(path, name, error) from None
    return tensors


def check_once(tensors: Tensors, body: str, name: str) -> None:
    """Refuse two tensors for one place: the name of the network's body may stand in front of either or not."""
    first_names: dict[str, str] = {}
    for key in tensors:
        bare = re.sub(rf"^({re.escape(body)}\.)+", "", key)
        if bare in first_names:
            raise RunError(
                f"model {name!r}: its files hold {first_names[bare][:80]!r} and {key[:80]!r}, which are one weight"
            )
        first_names[bare] = key


def check_types(tensors: Tensors, places: Mapping[str, Tensor], *, packed: bool, name: str) -> None:
    """Refuse numbers that would be cast without a scale: integers and eight-bit floats in the place of floats.

    Of packed weights some library unpacks all that have a scale beside them.
    """
    for key, (stored, shape) in tensors.items():
        place = places.get(key)
        integer = place is not None and not place.is_floating_point()
        if not stored.startswith(UNSCALED) or integer or _needs_no_place(key, shape):
            continue
        module = key.rpartition(".")[0]
        scaled = any(
            neighbour != key and neighbour.startswith(f"{module}.") and "scale" in neighbour for neighbour in tensors
        )
        if not packed or (re.match(EIGHT_BIT, stored) and not scaled):
            reason = "which its configuration names no quantisation of" if not packed else "with no scale beside it"
            raise UsageError(f"model {name!r}: weight {key[:80]!r} is stored as {stored}, {reason}")


def without_place(unexpected: Iterable[str], tensors: Tensors, config: Any) -> list[str]:
    """Names of weights that a network did not take, but that may belong to the one the files were written from."""
    text = config.get_text_config()
    last = text.num_hidden_layers + max(int(getattr(text, entry, None) or 0) for entry in LATER_LAYERS)
    later = re.compile("|".join(rf"(^|\.)layers\.{layer}\." for layer in range(text.num_hidden_layers, last)) or "$^")
    # A name may have lost or gained the name of the network's body in front.
    shapes = {key: shape for key in unexpected for name, (_, shape) in tensors.items() if name.endswith(key)}
    return sorted(key for key in unexpected if not _needs_no_place(key, shapes.get(key, [1])) and not later.search(key))


def check_frequencies(files: Sequence[Path], network: nn.Module, config: Any, *, name: str) -> None:
    """Refuse stored frequencies of rotary positions that are neither the network's own nor those of its base unscaled.

    Older versions of transformers saved the unscaled ones beside the weights, in the weights' precision.
    """
    from safetensors import safe_open

    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    bases = [
        float(entry["rope_theta"])
        for entry in (rope, *rope.values())
        if isinstance(entry, dict) and "rope_theta" in entry
    ]
    buffers = dict(network.named_buffers())
    frequencies = [
        buffer.cpu().double() for path, buffer in buffers.items() if path.endswith("inv_freq") and not buffer.is_meta
    ]
    for path in files if frequencies else ():
        with safe_open(path, framework="pt") as file:
            for key in [key for key in file.keys() if key.endswith("rotary_emb.inv_freq")]:  # noqa: SIM118
                stored = file.get_tensor(key).double()
                powers = torch.arange(len(stored), dtype=torch.float64) / max(len(stored), 1)
                expected = [*frequencies, *(base**-powers for base in bases)]
                near = partial(torch.allclose, stored, rtol=FREQUENCY_TOLERANCE, atol=HALF_STEP)
                if not any(stored.shape == values.shape and near(values) for values in expected):
                    raise RunError(
                        f"model {name!r}: {key[:80]!r} holds other frequencies than the rotary positions of its "
                        "configuration have"
                    )


def _needs_no_place(key: str, shape: Sequence[int]) -> bool:
    return bool(NO_PLACE_NEEDED.search(key)) or (bool(re.search(MASKS, key)) and len(shape) != 1)


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
    """The copy in safetensors that the hub's own converter offers of pickled weights; None if there is none."""
    from transformers.safetensors_conversion import auto_conversion

    if source.offline:
        return None
    try:
        converted = auto_conversion(source.location)[0]
    except Exception:  # it asks another service, which may fail in any way
        return None
    return None if converted is None else Path(converted)


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
