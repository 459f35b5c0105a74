"""The weights of a network: where they lie, one by one, as fingerprints, and in another precision.

A network that accelerate has spread over devices holds empty tensors in place of the weights it has put away in other
memory or on disk; these are fetched for a moment each.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

from posbias.models.layout import changing_kinds
from posbias.models.model import Model

AnyModel = TypeVar("AnyModel", bound=Model)
REDUCED = (torch.float16, torch.bfloat16)
"""Types whose loss of precision is checked."""

PLACES = 65521
"""Period of the position factors of a weight's second sum, a prime."""
SUMMED = 16 * PLACES
"""Numbers of a weight summed at a time (8 MB as 64-bit integers): whole periods, so that all have the same factors."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: the integers its bits are read as."""
UNIMPORTANT = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
"""Entries of a configuration that change no number, or are described beside it."""


def dispatched(network: nn.Module) -> bool:
    """Tell whether accelerate moves weights to where they are used, so that not all of them are in place."""
    return hasattr(network, "hf_device_map")


def quantised(network: nn.Module) -> bool:
    """Tell whether the weights are packed numbers of few bits."""
    return getattr(network, "hf_quantizer", None) is not None


def iterate_weights(network: nn.Module) -> Iterator[tuple[str, Shaped[Tensor, "..."]]]:
    """Every parameter once, with its name, in the order of `named_parameters`, with its values in place."""
    from accelerate.utils import align_module_device

    yielded: set[int] = set()
    for prefix, module in network.named_modules():
        weights = [
            (name, weight) for name, weight in module.named_parameters(recurse=False) if id(weight) not in yielded
        ]
        yielded.update(id(weight) for _, weight in weights)
        if not any(weight.is_meta for _, weight in weights):
            yield from ((f"{prefix}.{name}".removeprefix("."), weight) for name, weight in weights)
            continue
        with align_module_device(module):
            for name, _ in weights:
                yield f"{prefix}.{name}".removeprefix("."), module.get_parameter(name)


def first_not_finite(network: nn.Module) -> str | None:
    """Name of the first parameter that holds NaN or infinite values, or None."""
    for name, parameter in iterate_weights(network):
        if not parameter.is_floating_point():
            continue
        parameter = _unpacked(parameter)
        parameter = parameter.float() if parameter.element_size() == 1 else parameter  # 8-bit floats have no sum
        # A finite sum has finite terms, and is several times cheaper; a sum may also overflow, hence the second look.
        if not bool(parameter.sum().isfinite()) and not bool(parameter.isfinite().all()):
            return name
    return None


def weights_sha256(network: nn.Module, dtype: torch.dtype | None = None) -> str:
    """A fingerprint of all weights: names, shapes, dtypes, and two exact integer sums over the bits of each.

    With a dtype, that of the weights rounded to it, one at a time.

    The second sum weighs every element by its place, so that rows or heads that change places are seen; any edit of
    single values is. About a second per gigabyte, and no copy larger than SUMMED numbers.
    """
    digest = hashlib.sha256()
    for name, parameter in iterate_weights(network):
        if dtype is not None and parameter.is_floating_point():
            parameter = _unpacked(parameter).to(dtype)
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} {_sums(_unpacked(parameter))}".encode())
    return digest.hexdigest()


def config_sha256(network: nn.Module) -> str:
    """A fingerprint of the configuration: what the weights alone do not say (rotary base, windows, soft caps)."""
    config: Any = getattr(network, "config", None)
    entries = config.to_dict() if hasattr(config, "to_dict") else {}
    relevant = {key: value for key, value in entries.items() if key not in UNIMPORTANT}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def buffers_sha256(network: nn.Module) -> str:
    """A fingerprint of the tables beside the weights (RoPE frequencies, slopes), which an edit may have changed.

    Left out are the frequencies of a RoPE that sets them anew for every length of prompt.
    """
    digest = hashlib.sha256()
    for prefix, module in network.named_modules():
        own_frequencies = bool(changing_kinds(module))
        if hasattr(module, "active_adapters") and hasattr(module, "disable_adapters"):  # a layer of peft
            scaling = getattr(module, "scaling", None)
            digest.update(f"{prefix} {module.active_adapters} {module.disable_adapters} {scaling}".encode())
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and not (own_frequencies and "inv_freq" in name):
                path = f"{prefix}.{name}".removeprefix(".")
                digest.update(f"{path} {tuple(buffer.shape)} {buffer.dtype} {_sums(buffer)}".encode())
    return digest.hexdigest()


def network_sha256(network: nn.Module, described: Mapping[str, str] | None = None) -> str:
    """Weights, tables and configuration: what two processes must agree on to compute the same.

    Fingerprints that `Model.describe` has taken before are not taken again.
    """
    fingerprints = {"weights_sha256": weights_sha256, "buffers_sha256": buffers_sha256, "config_sha256": config_sha256}
    parts = [(described or {}).get(name) or take(network) for name, take in fingerprints.items()]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def cast_weights(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network with its floating weights in `dtype`, in place.

    Its buffers (RoPE frequencies, tables of sines) are never rounded, as `from_pretrained(dtype=...)` keeps them in
    float32 too: angles grow with the position, and with them what a rounded frequency costs.
    """
    wide = torch.finfo(dtype).bits

    def changed(module: nn.Module) -> None:
        for weight in module.parameters(recurse=False):
            if weight.is_floating_point():
                weight.data = weight.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and torch.finfo(buffer.dtype).bits < wide:
                setattr(module, name, buffer.to(dtype))

    return network.apply(changed)


def converted(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """A copy of the model, on its device, with all weights in a wider `dtype`; it lives as long as it is referred to.

    Takes the memory of one more model, at the width of `dtype`.
    """
    view = copy.copy(model)
    view.network = cast_weights(copy.deepcopy(model.network), dtype)
    view.dtype = dtype
    return view


def _sums(weight: Shaped[Tensor, "..."]) -> tuple[int, int]:
    """Sum of the elements' bits as integers, plain and weighed by place, both modulo 2^64."""
    flat = weight.detach().reshape(-1).contiguous()
    words = flat.view(WORDS[flat.element_size()])
    plain, placed = 0, 0
    for start in range(0, words.numel(), SUMMED):
        part = words[start : start + SUMMED].to(torch.int64, copy=True)
        plain, placed = plain + int(part.sum()), placed + int(part.mul_(_places(part.device)[: len(part)]).sum())
    return plain % 2**64, placed % 2**64


@cache
def _places(device: torch.device) -> Int64[Tensor, "summed"]:
    return torch.arange(SUMMED, device=device) % PLACES + 1


def _unpacked(parameter: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """The numbers of a weight that some library packs into a tensor of its own kind, with few operations."""
    packed = type(parameter.data) is not Tensor and parameter.is_floating_point()
    return parameter.dequantize() if packed else parameter
