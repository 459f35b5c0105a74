"""Kernels through the whole network: from the input kernel forwards, then the last position's gradient back to it.

The input kernel says which positions start with equal vectors: different tokens have independent embeddings, equal
tokens the same one; learned positions add their variance at i = j, encodings that are added to the input the products
of their vectors. Of a model of vector inputs the vectors themselves are known.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int

from posbias.errors import UsageError
from posbias.theory.mean_field.bins import Bins, Kernel
from posbias.theory.mean_field.levels import Level, Setting
from posbias.theory.mean_field.spec import AttentionSpec, LayerSpec, MeanFieldSpec, MlpSpec, NormSpec, ResidualSpec


def input_kernel(spec: MeanFieldSpec, bins: Bins, *, token_ids: Int[np.ndarray, "n_positions"] | None = None) -> Kernel:
    """Kernel of the vectors entering the first block (before the embedding norm, if any).

    Args:
        spec: The model.
        bins: Positions in bins.
        token_ids: One prompt of bins.n_positions tokens; None means all tokens differ.
    """
    equal = np.zeros((bins.count, bins.count)) if token_ids is None else _equal_tokens(token_ids, bins)
    block = spec.embedding * equal
    same = np.full(bins.count, spec.input_power)
    if spec.added is not None:
        # In wide bins the vectors of the position in the middle stand for all.
        middle = spec.added.vectors_at(bins.starts + (bins.sizes - 1) // 2)
        gram = middle @ middle.T / spec.width
        block, same = block + gram, same + np.diagonal(gram)
    if bins.exact:
        np.fill_diagonal(block, same)
    return Kernel(block, same)


def vector_kernel(spec: MeanFieldSpec, bins: Bins, vectors: Float64[np.ndarray, "position feature"]) -> Kernel:
    """Kernel of one prompt of given vectors, which only the network's weights are random beside.

    Args:
        spec: The model.
        bins: One per position.
        vectors: What enters the network, before positions are added to it.

    Raises:
        UsageError: bins of several positions: more than 512 of them.
    """
    if not bins.exact:
        raise UsageError(f"mean field takes given vectors at up to 512 positions, got {bins.n_positions}")
    if spec.added is not None:
        vectors = vectors + spec.added.vectors_at(np.arange(bins.n_positions))
    block = vectors @ vectors.T / spec.width + (spec.input_power - spec.embedding) * np.eye(bins.n_positions)
    return Kernel(block, np.diagonal(block).copy())


def _equal_tokens(token_ids: Int[np.ndarray, "n_positions"], bins: Bins) -> Float64[np.ndarray, "bin bin"]:
    """Share of pairs of different positions from two bins that hold the same token."""
    from scipy.sparse import csr_array

    _, token = np.unique(token_ids, return_inverse=True)
    bin_of = np.repeat(np.arange(bins.count), bins.sizes)
    counts = csr_array((np.ones(len(token)), (bin_of, token)), shape=(bins.count, int(token.max()) + 1))
    counts.sum_duplicates()
    pairs: Any = (counts @ counts.T).toarray()
    possible = bins.sizes[:, None] * bins.sizes[None, :].astype(np.float64)
    inner = np.diagonal(pairs) - bins.sizes
    np.fill_diagonal(pairs, inner)
    np.fill_diagonal(possible, np.maximum(np.diagonal(possible) - bins.sizes, 1))
    return np.asarray(pairs / possible)


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
    steps: tuple[Step, ...]
    final: Kernel
    """Residual stream after the last block."""

    @property
    def attentions(self) -> list[tuple[AttentionSpec, Branch]]:
        """The attention branches, from the first layer on."""
        branches = [branch for step in self.steps for branch in step.branches]
        return [(branch.spec, branch) for branch in branches if isinstance(branch.spec, AttentionSpec)]


def run_forward(spec: MeanFieldSpec, entry: Kernel, level: Level, setting: Setting) -> Forward:
    """Push the input kernel through all blocks."""
    stream, steps = _normed(spec.embedding_norm, entry), []
    for layer in spec.layers:
        for members in _groups(layer):
            steps.append(_step(members, stream, level, setting))
            stream = _normed(steps[-1].residual.norm, steps[-1].joined)
    return Forward(entry, tuple(steps), stream)


def run_backward(spec: MeanFieldSpec, forward: Forward, level: Level, setting: Setting) -> Kernel:
    """Gradient kernel at the input, of a random unit-variance functional of the last position's output."""
    count = setting.bins.count
    start = np.zeros((count, count))
    start[-1, -1] = 1.0
    gradient = _pulled(spec.final_norm, Kernel(start, np.diagonal(start).copy()), forward.final)
    for step in reversed(forward.steps):
        gradient = _pulled(step.residual.norm, gradient, step.joined)
        arriving = gradient.scaled(step.residual.added**2)
        gradient = gradient.scaled(step.residual.kept**2)
        for branch in step.branches:
            gradient = gradient + _branch_gradient(branch, arriving, level, setting)
    return _pulled(spec.embedding_norm, gradient, forward.entry).scaled(spec.input_scale**2)


def _normed(norm: NormSpec | None, kernel: Kernel) -> Kernel:
    return kernel if norm is None else norm.forward(kernel)


def _pulled(norm: NormSpec | None, gradient: Kernel, kernel: Kernel) -> Kernel:
    return gradient if norm is None else norm.backward(gradient, kernel)


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
        joined = joined + _normed(branch.spec.post_norm, branch.output).scaled(residual.added**2)
    return Step(branches, residual, joined)


def _run_branch(spec: AttentionSpec | MlpSpec, stream: Kernel, level: Level, setting: Setting) -> Branch:
    x = _normed(spec.pre_norm, stream)
    if isinstance(spec, AttentionSpec):
        return Branch(spec, stream, x, level.forward(spec, x, setting))
    return Branch(spec, stream, x, spec.forward(setting.width, x))


def _branch_gradient(branch: Branch, gradient: Kernel, level: Level, setting: Setting) -> Kernel:
    """What a branch adds to the gradient kernel of the stream it read."""
    spec = branch.spec
    gradient = _pulled(spec.post_norm, gradient, branch.output)
    if isinstance(spec, AttentionSpec):
        gradient = level.backward(spec, branch.x, gradient, setting)
    else:
        gradient = spec.backward(setting.width, branch.x, gradient)
    return _pulled(spec.pre_norm, gradient, branch.stream)
