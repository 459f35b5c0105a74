"""Exact changes of weights by a method: low-rank updates, W becomes W + B A."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from posbias.interventions.base import hooked


@dataclass(frozen=True, eq=False)
class LowRank:
    """The update B A of one projection."""

    down: Float[Tensor, "rank read"]
    """A."""
    up: Float[Tensor, "made rank"]
    """B."""


@contextmanager
def updated(network: nn.Module, updates: Mapping[str, LowRank]) -> Iterator[None]:
    """Within the context, projections compute with low-rank updates, by their paths; a gradient flows through these."""

    def beside(update: LowRank) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            down, up = update.down.to(output), update.up.to(output)
            return output + linear(linear(inputs[0], down), up)

        return hook

    with hooked(network.get_submodule(path).register_forward_hook(beside(update)) for path, update in updates.items()):
        yield
