"""A prompt's beginning run once, for many prompts that share it: keys and values of the unchanged tokens are reused."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model, Outputs

CAUSAL_PROBE = 64
"""Positions on which it is tried whether a model looks ahead."""


class Prefix:
    """The keys and values of one prompt, from which any continuation of any beginning of it can be run."""

    def __init__(self, model: HuggingFaceModel, embeddings: Float[Tensor, "one position feature"]) -> None:
        from transformers import DynamicCache

        self._model = model
        # Without the configuration: sliding layers would keep only a window, and could not be cut back.
        self._cache = DynamicCache()
        with torch.no_grad():
            self.whole = model.outputs(embeddings, [embeddings.shape[1] - 1], cache=self._cache)
        """The prompt's own last output."""

    @torch.no_grad()
    def outputs(self, start: int, embeddings: Float[Tensor, "batch rest feature"], positions: Sequence[int]) -> Outputs:
        """Outputs of prompts that begin with the prompt's first `start` positions.

        Args:
            start: How many positions are taken over.
            embeddings: What follows them, one row per prompt.
            positions: Strictly ascending, counted from the first of `embeddings`.
        """
        from transformers import DynamicCache

        if start == 0:
            return self._model.outputs(embeddings, positions)
        batch = len(embeddings)
        kept = [
            (layer.keys[:, :, :start].expand(batch, -1, -1, -1), layer.values[:, :, :start].expand(batch, -1, -1, -1))
            for layer in self._cache.layers
        ]
        return self._model.outputs(embeddings, positions, cache=DynamicCache(kept))


def trusted_prefix(model: Model, embeddings: Float[Tensor, "one position feature"]) -> Prefix | None:
    """The prompt's prefix cache, or None unless it reproduces the prompt's own output.

    The first half of the prompt is run alone and continued with the second, and must give the logits of the whole:
    so the cache works. That no position looks ahead (a mask that is not causal would) is asked of the gradient, which
    needs no tolerance: in half precision a weak look ahead is smaller than what rounding does to the logits.
    """
    n_positions = embeddings.shape[1]
    half = n_positions // 2
    if not isinstance(model, HuggingFaceModel) or half == 0 or looks_ahead(model, embeddings):
        return None
    try:
        prefix = Prefix(model, embeddings)
        first = Prefix(model, embeddings[:, :half])
        continued = first.outputs(half, embeddings[:, half:], [n_positions - half - 1])
    except Exception:  # whatever an architecture without such a cache may raise; it is run whole then
        return None
    with torch.no_grad():
        alone = model.outputs(embeddings, [n_positions - 1]).logits
    # Never below float32's: many families compute their softmax and norms in it whatever the model's type.
    epsilon = max(torch.finfo(alone.dtype).eps, torch.finfo(torch.float32).eps)
    tolerance = epsilon**0.5 * float(alone.abs().max())
    same = all(float((output.logits - alone).abs().max()) <= tolerance for output in (prefix.whole, continued))
    return prefix if same else None


def looks_ahead(model: Model, embeddings: Float[Tensor, "one position feature"]) -> bool:
    """Whether an output in the middle of the first positions depends on later ones: its gradient by them is not 0."""
    inputs = embeddings[:, :CAUSAL_PROBE].detach().requires_grad_()
    middle = (inputs.shape[1] - 1) // 2
    with torch.enable_grad():
        hidden = model.outputs(inputs, [middle]).hidden
        (gradient,) = torch.autograd.grad(hidden.float().square().sum(), inputs)
    return bool((gradient[:, middle + 1 :] != 0).any())
