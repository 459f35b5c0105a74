"""A pretended device without float64, as `mps` is: tensors lie on the CPU, and refuse what such a device would."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from posbias.models.devices import has_float64
from posbias.models.hugging_face import HuggingFaceModel

SINGLE = torch.device("meta")
"""The name under which tensors of the device go; torch's own calls for it need no driver."""
FROM_ANYWHERE = ("copy", "index")
"""Operations that take tensors of the CPU beside those of a device, as on real ones."""


class Far(torch.Tensor):
    """A tensor on the device: what it holds lies on the CPU, and is never in float64."""

    is_meta = False

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


class NewOnSingle(TorchFunctionMode):
    """Tensors of numbers for the device are made on the CPU first: for the real `meta`, torch drops what they hold."""

    def __torch_function__(self, call: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if call in (torch.tensor, torch.as_tensor) and keywords.get("device") == SINGLE:
            return call(*arguments, **{**keywords, "device": "cpu"}).to(SINGLE)
        return call(*arguments, **keywords)


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


@contextmanager
def on_single(model: HuggingFaceModel | None = None) -> Iterator[torch.device]:
    """This machine has the device within the context, and the model lies on it, for good."""
    for module in () if model is None else model.network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Far(parameter.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else Far(buffer)
    if model is not None:
        model.device = SINGLE
    with WithSingle(), NewOnSingle():
        has_float64.cache_clear()
        assert not has_float64(SINGLE)
        yield SINGLE
    has_float64.cache_clear()
