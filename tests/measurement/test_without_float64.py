"""Every kind of influence on a device without float64, as `mps` is: the same numbers as on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM

import posbias as pb
from posbias.measurement.kinds import KINDS
from posbias.models.devices import has_float64
from posbias.prompts.prompts import Prompts

SINGLE = torch.device("meta")
"""The name under which tensors of the device go; torch's own calls for it need no driver."""
FROM_ANYWHERE = ("copy", "index")
"""Operations that take tensors of the CPU beside those of a device, as on real ones."""


class Far(torch.Tensor):
    """A tensor on the device: what it holds lies on the CPU, and is never in float64."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Far":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=SINGLE, **layout)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def tolist(self) -> Any:
        return self.inner.tolist()

    def dequantize(self) -> "Far":
        return self

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return computed(call, arguments, keywords or {})


class WithSingle(TorchDispatchMode):
    """A machine that has the device."""

    def __torch_dispatch__(self, call: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return computed(call, arguments, keywords or {})


def computed(call: Any, arguments: Any, keywords: Any) -> Any:
    far: list[Far] = []
    near: list[torch.Tensor] = []

    def inner(value: Any) -> Any:
        if isinstance(value, Far):
            far.append(value)
            return value.inner
        if isinstance(value, torch.Tensor) and value.ndim:
            near.append(value)
        return torch.device("cpu") if isinstance(value, torch.device) and value == SINGLE else value

    target = keywords.get("device")
    result = call(*tree_map(inner, arguments), **tree_map(inner, keywords))
    assert not (far and near) or any(name in str(call) for name in FROM_ANYWHERE), f"{call}: tensors of two devices"

    def there(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, Far):
            return value
        if value.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return next((argument for argument in far if argument.inner is value), Far(value))

    return tree_map(there, result) if target == SINGLE or (far and target is None) else result


@pytest.mark.parametrize("kind", list(KINDS))
def test_sums_that_need_float64_are_taken_on_the_cpu(kind: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    network = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=32, max_position_embeddings=16, **sizes))
    model, prompts = pb.load_model(network), Prompts(np.arange(12).reshape(2, 6))
    on_cpu = pb.measure(model, prompts, kinds=[kind])
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Far(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else Far(buffer)
    model.device = SINGLE
    with WithSingle():
        assert not has_float64(SINGLE)
        far = pb.measure(model, prompts, kinds=[kind])
    has_float64.cache_clear()
    np.testing.assert_allclose(far.profiles[kind].influence, on_cpu.profiles[kind].influence, rtol=1e-6)
    np.testing.assert_allclose(far.mixing, on_cpu.mixing, rtol=1e-6)
