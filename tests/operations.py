"""What would run on an accelerator, counted on a device that holds no values: "meta"."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Operations that would start work on an accelerator (views start none), and the largest result, in elements.

    On the device "meta" whatever would read a value back is refused, so what runs there waits for none.
    """

    count = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(result, Tensor):
            self.count += 1
            self.largest = max(self.largest, result.numel())
        return result
