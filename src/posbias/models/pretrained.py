"""Networks of transformers where they will run: with the weights of checked files, or drawn from a seed.

What a configuration describes is counted, and held against the files and the memory, before anything is allocated.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posbias.errors import RunError, UsageError, one_line
from posbias.memory import available_bytes, show_bytes
from posbias.models.initialise import NetworkSize, attention_of, network_size, random_network
from posbias.models.placement import AUTO, Placement, Sizes, check_room
from posbias.models.precision import cast_weights
from posbias.models.sources import Source
from posbias.models.weight_files import (
    Tensors,
    fetch_weights,
    loaded_files,
    stored_tensors,
    weight_bytes,
)

CPU = torch.device("cpu")
BEYOND_FILES, BEYOND_ALWAYS = 2, 10**7
"""A network of more than this many times the numbers its files hold, and this many more, is not the files' network."""


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
    placement = Placement(wanted.max_memory)
    network = _loaded(config, wanted, placement.arguments)
    placement.belongs_to(network)
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
        sizes = _sizes_made(size, source) if tensors is None else _sizes_stored(size, tensors, packed=packed)
        check_room(source.name, sizes, dtype=dtype, spread=tensors is not None, max_memory=limit)


def _sizes_made(size: NetworkSize, source: Source) -> Sizes:
    """Of weights expanded from a GGUF file beside it, or drawn in float32 before they are cast."""
    path = None if source.gguf is None else Path(source.location) / source.gguf
    file, at_least = (0, torch.float32.itemsize) if path is None else (path.stat().st_size, 1)

    def sizes(dtype: torch.dtype) -> tuple[int, int]:
        return size.numbers * max(dtype.itemsize, at_least), file + size.largest * torch.float32.itemsize

    return sizes


def _sizes_stored(size: NetworkSize, tensors: Tensors, *, packed: bool) -> Sizes:
    """Of weights in files, which are mapped into memory: they count beside those that are made of them."""
    stored = weight_bytes(tensors, None)

    def sizes(dtype: torch.dtype) -> tuple[int, int]:
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
    _check_complete(info, source.name)
    if source.gguf is not None:
        _forget_quantisation(network)
        cast_weights(network, dtype)
    return network  # type: ignore[no-any-return]


def _check_complete(info: dict[str, Any], name: str) -> None:
    """Refuse weights of another shape than the configuration's, and ones that are not there."""
    if info["mismatched_keys"]:
        weight, found, described = min(info["mismatched_keys"])
        raise RunError(
            f"model {name!r}: weight {weight!r} has shape {list(found)} in its files, {list(described)} by its"
            " configuration"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RunError(f"model {name!r}: {len(missing)} weights are not in its files, first {missing[0]!r}")


def _forget_quantisation(network: Any) -> None:
    """GGUF weights were expanded while loading; what is left is a plain model and must be saved as one."""
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        if name in vars(network):
            delattr(network, name)
