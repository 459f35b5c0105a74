"""Networks of transformers where they will run, with the weights of checked files or drawn from a seed; tokenizers.

What a configuration describes is counted, and held against the files and the memory, before anything is allocated.
"""

import copy
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posbias.errors import RunError, UsageError, one_line
from posbias.files import read_json
from posbias.memory import available_bytes, show_bytes
from posbias.models.initialise import NetworkSize, attention_of, network_size, random_network
from posbias.models.placement import AUTO, Sizes, check_room, spread
from posbias.models.sources import Source
from posbias.models.weight_files import Tensors, fetch_weights, loaded_files, stored_tensors, weight_bytes
from posbias.models.weights import cast_weights

CPU = torch.device("cpu")
BEYOND_FILES, BEYOND_ALWAYS = 2, 10**7
"""A network of more than this many times the numbers its files hold, and this many more, is not the files' network."""
TOKENIZER_BYTES = 100_000_000
"""The largest file of a tokenizer read; those of 262,144 tokens have 40 MB."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "chat_template*")
"""What the files of tokenizers are called."""


@dataclass(frozen=True)
class Wanted:
    """Where a network comes from, and how it will run."""

    source: Source
    dtype: torch.dtype = torch.float32
    device: torch.device | None = CPU
    """None: spread over what is there."""
    max_memory: int | None = None
    """Bytes on one device; None: what is free."""


def pretrained_network(config: Any, wanted: Wanted) -> nn.Module:
    """The network with the weights of its files, on its device or spread.

    Raises:
        UsageError: weights that could carry code, lie elsewhere or do not fit; a configuration that builds no network.
        RunError: weights that are damaged, missing, or another network's.
    """
    source = wanted.source
    packed = source.gguf is None and getattr(config, "quantization_config", None) is not None
    if wanted.device is None and source.gguf is not None:
        raise UsageError(f"device {AUTO!r} needs safetensors weights, and {source.name!r} is a GGUF file")
    try:
        local = fetch_weights(source)
    except OSError as error:
        raise RunError(f"model {source.name!r}: the hub did not provide its weights: {one_line(error)}") from None
    tensors = None if source.gguf is not None else stored_tensors(loaded_files(local), source.name)
    _check_size(config, wanted, tensors, packed=packed)
    wanted = replace(wanted, source=local)
    if wanted.device is not None:
        # Packed weights are placed while loading; they can be neither cast nor, some of them, moved.
        network = _loaded(config, wanted, {"device_map": wanted.device} if packed else {})
        return network if packed else network.to(wanted.device)
    arguments = spread(wanted.max_memory)
    folder = tempfile.TemporaryDirectory(prefix="posbias-offload-", ignore_cleanup_errors=True)
    network = _loaded(config, wanted, {**arguments, "offload_folder": folder.name})
    weakref.finalize(network, folder.cleanup)
    return network


def drawn_network(config: Any, wanted: Wanted, seed: int) -> nn.Module:
    """The network with random weights.

    Raises:
        UsageError: a bad seed, a network that does not fit, or a configuration that builds none.
    """
    if wanted.device is None:
        raise UsageError(f"device {AUTO!r} spreads the weights of a file; name a device for random ones, e.g. cpu")
    _check_size(config, wanted, None, packed=False)
    with refused_configuration(wanted.source.name):
        return cast_weights(random_network(config, seed=seed), wanted.dtype).to(wanted.device)


@contextmanager
def refused_configuration(name: str) -> Iterator[None]:
    """Say in one line what transformers, torch or a family's description cannot make of a configuration.

    Raises:
        UsageError: whatever was raised, as a refusal of the configuration.
    """
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise UsageError(
            f"model {name!r}: configuration refused: no network runs by it ({type(error).__name__}: {one_line(error)})"
        ) from None


def _check_size(config: Any, wanted: Wanted, tensors: Tensors | None, *, packed: bool) -> None:
    """Hold what the configuration describes against its files and against the memory, before it is allocated."""
    source, dtype, limit = wanted.source, wanted.dtype, wanted.max_memory
    with refused_configuration(source.name):
        size = network_size(config)
    if tensors is not None and not packed:
        held = weight_bytes(tensors, torch.int8)
        if size.numbers > max(BEYOND_FILES * held, held + BEYOND_ALWAYS):
            raise RunError(
                f"model {source.name!r}: its configuration describes {size.numbers:,} numbers, its files hold {held:,}"
            )
    free = available_bytes()
    if free is not None and size.tables > free:
        raise UsageError(
            f"model {source.name!r}: its configuration describes tables of {show_bytes(size.tables)} beside its "
            f"weights; {show_bytes(free)} are free"
        )
    if wanted.device is not None:
        sizes = _sizes(size, source, tensors, packed=packed)
        check_room(source.name, sizes, dtype=dtype, spreadable=tensors is not None, max_memory=limit)


def _sizes(size: NetworkSize, source: Source, tensors: Tensors | None, *, packed: bool) -> Sizes:
    """What loading takes: weights in files are mapped into memory, and count beside those that are made of them.

    A GGUF file is expanded beside itself; random weights are drawn in float32 before they are cast.
    """
    file = 0 if source.gguf is None else (Path(source.location) / source.gguf).stat().st_size
    at_least = torch.float32.itemsize if source.gguf is None else 1
    stored = None if tensors is None else weight_bytes(tensors, None)

    def sizes(dtype: torch.dtype) -> tuple[int, int]:
        if tensors is None or stored is None:
            return size.numbers * max(dtype.itemsize, at_least), file + size.largest * torch.float32.itemsize
        weights = stored if packed else max(weight_bytes(tensors, dtype), size.numbers * dtype.itemsize)
        return weights, 0 if weights == stored else stored

    return sizes


def _loaded(config: Any, wanted: Wanted, placement: dict[str, Any]) -> nn.Module:
    """What transformers loads from a directory whose files were checked."""
    from transformers import AutoModelForCausalLM

    source, dtype = wanted.source, wanted.dtype
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention_of(config),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **placement,
            **source.arguments,
        )
    except ImportError as error:
        raise UsageError(f"model {source.name!r} needs a package that is not there: {one_line(error)}") from None
    except Exception as error:
        raise RunError(f"model {source.name!r} cannot be loaded: {one_line(error)}") from None
    if info["mismatched_keys"]:
        weight, found, described = min(info["mismatched_keys"])
        raise RunError(
            f"model {source.name!r}: weight {weight!r} has shape {list(found)} in its files, {list(described)} by its"
            " configuration"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RunError(f"model {source.name!r}: {len(missing)} weights are not in its files, first {missing[0]!r}")
    if source.gguf is not None:
        # Its weights were expanded while loading; what is left is a plain model and must be saved as one.
        vars(network.config).pop("quantization_config", None)
        for name in ("is_quantized", "hf_quantizer", "quantization_method"):
            vars(network).pop(name, None)
        cast_weights(network, dtype)
    return network  # type: ignore[no-any-return]


def read_tokenizer(source: Source) -> Any:
    """The tokenizer, or None where there is none to be read: models are usable with token ids alone.

    Raises:
        UsageError: its files are larger than those of every tokenizer, or not the JSON they are called.
    """
    from transformers import AutoTokenizer

    directory = Path(source.location)
    if source.local and directory.is_file():
        return None
    patterns = TOKENIZER_FILES if source.local and source.gguf is None else ()
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}):
        if path.stat().st_size > TOKENIZER_BYTES:
            raise UsageError(f"model {source.name!r}: {path.name} is larger than {TOKENIZER_BYTES:,} bytes")
        if path.suffix == ".json":
            try:
                read_json(path, most_bytes=TOKENIZER_BYTES)
            except (OSError, ValueError) as error:
                raise UsageError(f"model {source.name!r}: {path.name} {one_line(error)}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
        tokenizer.decode(tokenizer("A trial.")["input_ids"])
        return tokenizer
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # anything a damaged or absent one may raise (a panic of Rust is no Exception)
        return None
