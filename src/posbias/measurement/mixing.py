"""Residual mixing m_l of every layer: how large the attention branch a is beside the stream x it is added to.

Two definitions are in use (arXiv 2602.16837): their paper's, ||a||_F / (||x||_F + ||a||_F) over the sequence, and
their code's, the mean over tokens of |a| / (|x| + |a|). a is what the branch really adds, after any post-norm.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError
from posbias.models.hugging_face import HuggingFaceModel, watch_branches
from posbias.models.model import BranchNorms, Model


@dataclass(frozen=True, eq=False)
class Mixing:
    """Mixing of every layer on one prompt, both in [0, 1]."""

    tokens: Float64[np.ndarray, "layers"]
    """Mean over tokens of |a| / (|x| + |a|)."""
    frobenius: Float64[np.ndarray, "layers"]
    """||a||_F / (||x||_F + ||a||_F)."""
    by_position: Float64[np.ndarray, "layers n_positions"]
    """|a| / (|x| + |a|) of every token."""


def mixing_of_layers(model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, prompt: int) -> Mixing:
    """Both mixings of every layer on one prompt, whose index is for messages, by one forward pass without gradients."""
    return mixing_from_norms(model.branch_norms(model.token_tensor([token_ids.tolist()])), prompt=prompt)


@contextmanager
def mixing_of_first_pass(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, prompt: int
) -> Iterator[Callable[[], Mixing | None]]:
    """Both mixings from the first forward pass within the context, so that they cost no pass of their own.

    A pass that reads more than the prompt (a target after it, copies in a batch) measures the prompt all the same if
    every layer is causal; after one that reads less, or none at all, there is a pass for the mixing alone. What is
    yielded gives the mixing when the context is over; None without a family description.
    """
    if not model.described:
        yield lambda: None
        return
    if not isinstance(model, HuggingFaceModel):
        yield lambda: mixing_of_layers(model, token_ids, prompt=prompt)
        return
    with watch_branches(model.family.blocks(model.network), once=model.network) as watch:

        def mixing() -> Mixing:
            length = watch.stream[0].shape[-1] if watch.stream else 0
            if length < len(token_ids) or (length > len(token_ids) and not _causal(model, length)):
                return mixing_of_layers(model, token_ids, prompt=prompt)
            norms = watch.norms()
            own = slice(len(token_ids))
            return mixing_from_norms(BranchNorms(norms.stream[:, :1, own], norms.branch[:, :1, own]), prompt=prompt)

        yield mixing


def mixing_from_norms(norms: BranchNorms, *, prompt: int) -> Mixing:
    """Both mixings of every layer, from the norms of a forward pass of a single prompt; its index is for messages."""
    stream, branch = _float64(norms.stream[:, 0]), _float64(norms.branch[:, 0])
    for layer, total in enumerate((stream + branch).min(axis=1)):
        if not np.isfinite(total) or total == 0:
            raise RunError(f"mixing: |x| + |a| is {total} on prompt {prompt}, layer {layer}; it must be finite and > 0")
    stream_norm, branch_norm = (np.linalg.norm(values, axis=1) for values in (stream, branch))
    share = branch / (stream + branch)
    return Mixing(share.mean(axis=1), branch_norm / (stream_norm + branch_norm), share)


def _causal(model: HuggingFaceModel, n_positions: int) -> bool:
    """Whether no layer looks forwards."""
    masks = (model.family.mask(model.config, layer) for layer in range(model.family.depth(model.config)))
    return all(mask.mutual_prefix(n_positions) <= 1 for mask in masks)


def _float64(values: Float[Tensor, "layer position"]) -> Float64[np.ndarray, "layer position"]:
    return np.asarray(values.detach().double().cpu().numpy())
