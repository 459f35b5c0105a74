"""Kernels through the whole network: forwards from the input, then the last position's gradient back to it."""

from dataclasses import dataclass

import numpy as np

from posbias.theory.mean_field.bins import Kernel
from posbias.theory.mean_field.levels import Level, Setting
from posbias.theory.mean_field.mlp import mlp_backward, mlp_forward
from posbias.theory.mean_field.spec import AttentionSpec, LayerSpec, MeanFieldSpec, MlpSpec, ResidualSpec


@dataclass(frozen=True, eq=False)
class Branch:
    """One branch as it was run: what it read, what it put out, and its two maps."""

    spec: AttentionSpec | MlpSpec
    stream: Kernel
    """Residual stream the branch read."""
    x: Kernel
    """The same after the pre-norm."""
    output: Kernel
    """Before any post-norm."""


@dataclass(frozen=True, eq=False)
class Step:
    """Branches that read the same stream (two of them with a parallel residual), and how they joined it."""

    branches: tuple[Branch, ...]
    residual: ResidualSpec
    joined: Kernel
    """The stream after the addition, before a norm of the stream."""


@dataclass(frozen=True, eq=False)
class Forward:
    """All kernels of a forward pass."""

    entry: Kernel
    """Input vectors, before an embedding norm."""
    steps: tuple["Step", ...]
    final: Kernel
    """Residual stream after the last block."""


def run_forward(spec: MeanFieldSpec, entry: Kernel, level: Level, setting: Setting) -> Forward:
    """Push the input kernel through all blocks."""
    stream = entry if spec.embedding_norm is None else spec.embedding_norm.forward(entry)
    steps = []
    for layer in spec.layers:
        for members in _groups(layer):
            steps.append(_step(members, stream, level, setting))
            norm = steps[-1].residual.norm
            stream = steps[-1].joined if norm is None else norm.forward(steps[-1].joined)
    return Forward(entry, tuple(steps), stream)


def run_backward(spec: MeanFieldSpec, forward: Forward, level: Level, setting: Setting) -> Kernel:
    """Gradient kernel at the input, of a random unit-variance functional of the last position's output."""
    count = setting.bins.count
    start = np.zeros((count, count))
    start[-1, -1] = 1.0
    gradient = Kernel(start, np.diagonal(start).copy())
    if spec.final_norm is not None:
        gradient = spec.final_norm.backward(gradient, forward.final)
    for step in reversed(forward.steps):
        if step.residual.norm is not None:
            gradient = step.residual.norm.backward(gradient, step.joined)
        arriving = gradient.scaled(step.residual.added**2)
        gradient = gradient.scaled(step.residual.kept**2)
        for branch in step.branches:
            gradient = gradient + _branch_gradient(branch, arriving, level, setting)
    if spec.embedding_norm is not None:
        gradient = spec.embedding_norm.backward(gradient, forward.entry)
    return gradient.scaled(spec.input_scale**2)


def _groups(layer: LayerSpec) -> list[list[AttentionSpec | MlpSpec]]:
    """A layer's branches, those that read the same stream together."""
    present: list[AttentionSpec | MlpSpec] = [part for part in (layer.attention, layer.mlp) if part is not None]
    return [present] if layer.parallel else [[part] for part in present]


def _step(members: list[AttentionSpec | MlpSpec], stream: Kernel, level: Level, setting: Setting) -> Step:
    """Run branches that read the same stream and add them to it."""
    residual = members[0].residual
    branches = tuple(_run_branch(member, stream, level, setting) for member in members)
    joined = stream.scaled(residual.kept**2)
    for branch in branches:
        joined = joined + _post_normed(branch).scaled(residual.added**2)
    return Step(branches, residual, joined)


def _run_branch(spec: AttentionSpec | MlpSpec, stream: Kernel, level: Level, setting: Setting) -> Branch:
    x = stream if spec.pre_norm is None else spec.pre_norm.forward(stream)
    if isinstance(spec, AttentionSpec):
        return Branch(spec, stream, x, level.forward(spec, x, setting))
    return Branch(spec, stream, x, mlp_forward(spec, setting.width, x))


def _post_normed(branch: Branch) -> Kernel:
    norm = branch.spec.post_norm
    return branch.output if norm is None else norm.forward(branch.output)


def _branch_gradient(branch: Branch, gradient: Kernel, level: Level, setting: Setting) -> Kernel:
    """What a branch adds to the gradient kernel of the stream it read."""
    spec = branch.spec
    if spec.post_norm is not None:
        gradient = spec.post_norm.backward(gradient, branch.output)
    if isinstance(spec, AttentionSpec):
        gradient = level.backward(spec, branch.x, gradient, setting)
    else:
        gradient = mlp_backward(spec, setting.width, branch.x, gradient)
    return gradient if spec.pre_norm is None else spec.pre_norm.backward(gradient, branch.stream)
