"""Token ids through a local model: with one live cache that is cut back and continued, or whole each time.

Both runners give the logits of the last positions of a sequence; `LiveCache` runs only what differs from the sequence
before. Its cache keeps every position of every layer: layers with a sliding window mask what they must not see, so
that any of them can be cut back.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.errors import RunError
from posbias.evaluation.responders.prefixes import shared_length
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.prefix import looks_ahead

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of every layer, each [batch, head, position, feature]."""
SHORT_PROBE = 64
"""Tokens on which a cache is tried where no layer has a window; two windows and a half otherwise."""


@dataclass(frozen=True)
class Kept:
    """The keys and values of one whole prompt."""

    layers: Layers
    n_positions: int

    @property
    def bytes(self) -> int:
        """Memory of the keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class Runner(ABC):
    """Runs token ids and counts how many."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.processed = 0
        """Tokens run through the network so far."""

    @abstractmethod
    def run(self, token_ids: Int64[np.ndarray, "_"], *, rows: int) -> Float[Tensor, "rows vocabulary"]:
        """Next-token logits of the last `rows` positions (>= 1) of a sequence, in order.

        Raises:
            RunError: the network fails, or its logits are not finite.
        """

    def forget(self) -> None:
        """Run the next sequence from its first token."""
        return

    def keep(self, n_positions: int) -> Kept | None:
        """Keys and values of the first positions of the last sequence; None where there is no cache."""
        return None

    def _outputs(self, token_ids: Int64[np.ndarray, "batch new"], rows: int, cache: Any) -> Tensor:
        batch, new = token_ids.shape
        self.processed += batch * new
        with torch.no_grad():
            embeddings = self.model.embed(self.model.token_tensor(token_ids.tolist()))
            positions = list(range(new - rows, new))
            if isinstance(self.model, HuggingFaceModel):
                logits = self.model.outputs(embeddings, positions, cache=cache).logits
            else:
                logits = self.model.outputs(embeddings, positions).logits
        if not bool(logits.isfinite().any(dim=-1).all()) or bool(logits.isnan().any()):
            raise RunError(f"the model's logits are not finite numbers after {new} tokens; try dtype float32")
        return logits


class WholePrompts(Runner):
    """Every sequence from its first token: the plain way, and the only one where no cache can be trusted."""

    def run(self, token_ids: Int64[np.ndarray, "_"], *, rows: int) -> Float[Tensor, "rows vocabulary"]:
        """Logits of the last `rows` positions."""
        return self._outputs(token_ids[None], rows, None)[0]


class LiveCache(Runner):
    """One cache, cut back to what a sequence shares with the one before and continued from there."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._held = np.zeros(0, dtype=np.int64)
        self._layers: Layers = []

    def run(self, token_ids: Int64[np.ndarray, "_"], *, rows: int) -> Float[Tensor, "rows vocabulary"]:
        """Logits of the last `rows` positions; what the sequence shares with the last one is not run again."""
        start = min(shared_length(self._held, token_ids), len(token_ids) - rows)
        cache = cache_of([(keys[:, :, :start], values[:, :, :start]) for keys, values in self._layers] if start else [])
        self.forget()  # should the network fail, nothing is held
        logits = self._outputs(token_ids[None, start:], rows, cache)[0]
        self._held, self._layers = token_ids.copy(), layers_of(cache)
        return logits

    def forget(self) -> None:
        """Run the next sequence from its first token."""
        self._held, self._layers = self._held[:0], []

    def keep(self, n_positions: int) -> Kept:
        """Views, not copies: they stay as they are when the cache goes on."""
        layers = [(keys[:, :, :n_positions], values[:, :, :n_positions]) for keys, values in self._layers]
        return Kept(layers, n_positions)

    def step(self, token_ids: Int64[np.ndarray, "batch one"], cache: Any) -> Float[Tensor, "batch vocabulary"]:
        """Logits after one more token of several sequences, whose cache goes on by one position."""
        return self._outputs(token_ids, 1, cache)[:, 0]


def cache_of(layers: Layers) -> Any:
    """A cache as transformers takes it, of full layers whatever the configuration says; empty for no layers."""
    from transformers import DynamicCache

    return DynamicCache(layers) if layers else DynamicCache()


def layers_of(cache: Any) -> Layers:
    """The keys and values that a cache holds."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def joined(kept: Sequence[Kept]) -> Layers:
    """Prompts of one length as a batch."""
    columns = zip(*(prompt.layers for prompt in kept), strict=True)
    return [(torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer])) for layer in columns]


def chosen(layers: Layers, rows: Sequence[int]) -> Layers:
    """Some sequences of a batch."""
    return [(keys[list(rows)], values[list(rows)]) for keys, values in layers]


def trusted_runner(model: Model, token_ids: Int64[np.ndarray, "_"]) -> Runner:
    """A live cache where the model's cache proves right on these tokens, else the plain way.

    The tokens (as many as the widest window needs) are run, cut back to the half and continued with the second half
    reversed, one token at the last step: each time the logits must be those of the whole sequence run alone. A model
    that looks ahead is run the plain way, too.
    """
    probe = token_ids[: _probe_length(model)]
    if not isinstance(model, HuggingFaceModel) or len(probe) < 4:
        return WholePrompts(model)
    half = len(probe) // 2
    turned = np.concatenate([probe[:half], probe[half:][::-1]])
    live, whole = LiveCache(model), WholePrompts(model)
    if looks_ahead(model, model.embed(model.token_tensor([probe.tolist()]))):
        return whole
    try:
        pairs = [
            (live.run(tokens, rows=rows), whole.run(tokens, rows=rows))
            for tokens, rows in ((probe, 1), (turned[:-1], half // 2), (turned, 1))
        ]
    except Exception:  # whatever an architecture without such a cache may raise; it is run whole then
        return WholePrompts(model)
    epsilon = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    same = all(float((ours - theirs).abs().max()) <= epsilon**0.5 * float(theirs.abs().max()) for ours, theirs in pairs)
    same = same and live.processed < whole.processed
    return LiveCache(model) if same else WholePrompts(model)


def _probe_length(model: Model) -> int:
    """Long enough that every sliding window has left positions behind, before the cut and after it."""
    window = getattr(getattr(model, "config", None), "sliding_window", None)
    return max(SHORT_PROBE, 5 * window // 2) if isinstance(window, int) else SHORT_PROBE
