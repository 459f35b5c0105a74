"""From an architecture to its kernels: the fastest form each group of heads has."""

from typing import Any

from posbias.architecture import Architecture, HeadGroup, KeyEncoding
from posbias.checks import check_whole
from posbias.theory.kernels.base import AbsoluteKernel, Kernel, SumKernel
from posbias.theory.kernels.distance import DistanceKernel, rises_too_far
from posbias.theory.kernels.keys import KeyKernel
from posbias.theory.kernels.linear import LinearKernel


def group_kernel(group: HeadGroup, n_positions: int) -> Kernel:
    """The kernel of heads that share mask and encoding, each weighted by 1 / (heads of the layer).

    Logits that rise by hundreds of nats with the distance are taken row by row, in O(N^2), as absolute ones are.
    """
    check_whole("n_positions", n_positions, least=1, numpy=True)
    if group.linear_slopes() is not None:
        return LinearKernel(group, n_positions)
    if isinstance(group.encoding, KeyEncoding):
        return KeyKernel(group, n_positions)
    if not group.encoding.relative or rises_too_far(group, n_positions):
        return AbsoluteKernel(group, n_positions)
    return DistanceKernel(group, n_positions)


def layer_kernels(architecture: Architecture, n_positions: int) -> tuple[Kernel, ...]:
    """The mean attention of every layer, layer 0 nearest the input; equal layers share one kernel."""
    known: dict[Any, Kernel] = {}
    layers = []
    for groups in architecture.head_groups:
        key = tuple(
            (group.mask, group.encoding, group.heads.tobytes(), group.content.tobytes(), group.sinks.tobytes())
            for group in groups
        )
        if key not in known:
            parts = [group_kernel(group, n_positions) for group in groups]
            known[key] = parts[0] if len(parts) == 1 else SumKernel(parts)
        layers.append(known[key])
    return tuple(layers)
