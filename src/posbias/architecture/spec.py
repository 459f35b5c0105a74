"""`Architecture`: everything that decides how a transformer mixes positions, apart from learning.

Depth, heads, mask, encoding, residual mixing and content, resolved per layer and head. The same object drives theory,
measurement on reference models and training. Mixing is the share of attention in each layer's update, m_l in
T_l = (1 - m_l) I + m_l A_l; layer 0 is nearest the input.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64, Int64
from pydantic import AllowInfNan

from posbias.architecture.encodings import ENCODINGS, Encoding
from posbias.architecture.masks import MASKS, Mask
from posbias.checks import RESIDUAL_MIXING, checked
from posbias.errors import UsageError, check_most
from posbias.registry import Registry

MOST_HEADS = 30_000
"""Heads in all layers of an architecture, each resolved by itself; the largest models have 16,000."""


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Heads of one layer that share mask and encoding."""

    mask: Mask
    encoding: Encoding
    heads: Int64[np.ndarray, "group"]
    """Indices of the heads in their layer."""
    n_heads: int
    """Heads in the whole layer (the published ALiBi slopes depend on it)."""
    content: Float64[np.ndarray, "group"]
    """Diagonal logit offset of each head of the group."""
    sinks: Float64[np.ndarray, "group"]
    """Logit of each head's sink key, an extra key every query sees; -inf if there is none."""

    def linear_slopes(self) -> Float64[np.ndarray, "group"] | None:
        """Linear slopes of the group's heads, or None."""
        slopes = self.encoding.linear_slopes(self.n_heads)
        return None if slopes is None else slopes[self.heads]

    def logits_of_rows(
        self, queries: Int64[np.ndarray, "n_queries"], n_positions: int
    ) -> Float64[np.ndarray, "group n_queries n_positions"]:
        """Logits of some queries over all keys, diagonal content included; hidden keys are not removed."""
        logits = self.encoding.pair_logits(queries, np.arange(n_positions), self.n_heads)[self.heads]
        logits[:, np.arange(len(queries)), queries] += self.content[:, None]
        return np.asarray(logits)

    def masked_logits(self, n_positions: int) -> Float64[np.ndarray, "group query key"]:
        """All logits of the group's heads, -inf for keys that the mask hides; dense, for small contexts."""
        logits = self.logits_of_rows(np.arange(n_positions), n_positions)
        logits[:, ~self.mask.visible(n_positions)] = -np.inf
        return logits


@checked
@dataclass(frozen=True, eq=False)
class Architecture:
    """A stack that mixes positions: `depth` layers of `heads` heads, each T_l = (1 - m_l) I + m_l mean_h A_lh.

    Args:
        depth: Layers L, >= 1. Layer 0 is nearest the input.
        heads: Attention heads H per layer, >= 1.
        mask: A `Mask` or its literal spelling (`"sliding_window(width=64)"`); or a list per layer, whose items may
            themselves be lists per head.
        encoding: An `Encoding` or its literal spelling, likewise.
        mixing: m_l in [0, 1]: a number or a list per layer. 0.1 by default, about
            that of residual networks; 1 is attention without residual stream.
        content: Offset of the diagonal logit (natural-log units, any finite value), relative to all other keys: a
            number, a list per layer, or `[layer][head]`.
        sinks: Logit of an extra key that every query sees but that is not an input position (a learned sink), beside
            keys at logit 0: a number, a list per layer, or `[layer][head]`; -inf, or None for all, means no sink. Rows
            then sum to less than 1; the sink takes the rest.

    Raises:
        UsageError: a value out of range, an unknown variant, or a list of the wrong length.
    """

    depth: Annotated[int, Ge(1)]
    heads: Annotated[int, Ge(1)] = 1
    mask: Mask | str | Sequence[Any] = "causal"
    encoding: Encoding | str | Sequence[Any] = "none"
    mixing: float | str | Sequence[float] | np.ndarray = RESIDUAL_MIXING
    content: float | Sequence[Any] | np.ndarray = 0.0
    sinks: Annotated[float, AllowInfNan(True)] | Sequence[Any] | np.ndarray | None = None

    def __post_init__(self) -> None:
        check_most("depth x heads", self.depth * self.heads, MOST_HEADS, "heads")
        # Resolve everything once, so that a wrong value is refused here and not in the middle of a computation.
        for layer in range(self.depth):
            for group in self.head_groups[layer]:
                group.encoding.check_heads(self.heads)
        _ = self.layer_mixing

    @cached_property
    def layer_mixing(self) -> Float64[np.ndarray, "depth"]:
        """Mixing coefficient of every layer."""
        return resolve_mixing(self.mixing, self.depth)

    @cached_property
    def layer_content(self) -> Float64[np.ndarray, "depth heads"]:
        """Diagonal logit offset of every layer and head."""
        content = _spread("content", self.content, self.depth, self.heads)
        if not np.all(np.isfinite(content)):
            raise UsageError(f"content must be finite, got {self.content!r}")
        return content

    @cached_property
    def layer_sinks(self) -> Float64[np.ndarray, "depth heads"]:
        """Sink logit of every layer and head; -inf is no sink."""
        sinks = _spread("sinks", -np.inf if self.sinks is None else self.sinks, self.depth, self.heads)
        if not np.all(sinks < np.inf):
            raise UsageError("sinks must be finite logits, or -inf (None for all) for no sink")
        return sinks

    @property
    def bare(self) -> bool:
        """True without content and sinks."""
        return not np.any(self.layer_content) and bool(np.all(self.layer_sinks == -np.inf))

    @cached_property
    def head_groups(self) -> tuple[tuple[HeadGroup, ...], ...]:
        """For every layer its groups of heads with equal mask and encoding; together they are all heads."""
        masks = _per_head(self.mask, MASKS, self.depth, self.heads)
        encodings = _per_head(self.encoding, ENCODINGS, self.depth, self.heads)
        layers = []
        for layer in range(self.depth):
            groups: dict[tuple[Mask, Encoding], list[int]] = {}
            for head, pair in enumerate(zip(masks[layer], encodings[layer], strict=True)):
                groups.setdefault(pair, []).append(head)
            layers.append(
                tuple(
                    HeadGroup(
                        mask,
                        encoding,
                        np.array(heads),
                        self.heads,
                        content=self.layer_content[layer, heads],
                        sinks=self.layer_sinks[layer, heads],
                    )
                    for (mask, encoding), heads in groups.items()
                )
            )
        return tuple(layers)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record: the architecture as resolved, null for no sink since JSON has no -inf."""
        sinks = [[None if logit == -np.inf else logit for logit in layer] for layer in self.layer_sinks.tolist()]
        return {
            "depth": int(self.depth),
            "heads": int(self.heads),
            "mask": _spelling(self.mask),
            "encoding": _spelling(self.encoding),
            "mixing": self.layer_mixing.tolist(),
            "content": self.layer_content.tolist() if np.any(self.layer_content) else 0.0,
            "sinks": sinks if np.any(self.layer_sinks > -np.inf) else None,
        }

    @classmethod
    def from_description(cls, described: Mapping[str, Any]) -> "Architecture":
        """The architecture that `describe` described."""
        sinks = described["sinks"]
        if sinks is not None:
            sinks = [[-np.inf if logit is None else logit for logit in layer] for layer in sinks]
        return cls(**{**described, "sinks": sinks})

    @classmethod
    def from_model(cls, model: Any, *, mixing: Any = RESIDUAL_MIXING) -> "Architecture":
        """The architecture of a loaded model, from its configuration; mixing is measured, not configured.

        ALiBi slopes and windows are the model's own. Rotary and absolute encodings add no bias of their own without
        content, so they read as "none"; `dataclasses.replace` gives them constant content.

        Args:
            model: A model that `posbias.load_model` returned.
            mixing: As above; the published rollout uses `posbias.measure(model, prompts).mixing`.

        Raises:
            UsageError: not a loaded model, or one without a family description.
        """
        if not hasattr(model, "architecture_traits"):
            raise UsageError(f"from_model needs a model (from load_model), got {type(model).__name__}")
        return cls(**model.architecture_traits(), mixing=mixing)


def resolve_mixing(mixing: Any, depth: int) -> Float64[np.ndarray, "depth"]:
    """One coefficient per layer from a number or a list.

    Raises:
        UsageError: wrong list length, or a coefficient outside [0, 1].
    """
    values = _spread("mixing", mixing, depth)
    for layer, value in enumerate(values):
        if not 0 <= value <= 1:
            raise UsageError(f"mixing must lie in [0, 1], got {value} at layer {layer}")
    return values


def _spread(name: str, value: Any, *shape: int) -> Float64[np.ndarray, "depth *heads"]:
    """Spread a number, one value per layer or [layer][head] to one value for each."""
    try:
        values = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"{name} {value!r} is not a number or a list of numbers, one per layer") from None
    if values.shape not in {(), shape[:1], shape}:
        by_head = f" or shape {list(shape)} (layers, heads)" if len(shape) > 1 else ""
        raise UsageError(f"{name} has shape {list(values.shape)}; give a number, {shape[0]} values (layers){by_head}")
    return np.broadcast_to(values[:, None] if 0 < values.ndim < len(shape) else values, shape).copy()


def _per_head(value: Any, registry: Registry[Any], depth: int, heads: int) -> list[list[Any]]:
    """Spread one variant, a list per layer, or lists per layer and head to [layer][head]."""
    if not isinstance(value, list | tuple):
        return [[_variant(value, registry)] * heads] * depth
    rows = []
    _check_length(value, depth, f"{registry.sort} list", "layers")
    for layer in value:
        if isinstance(layer, list | tuple):
            _check_length(layer, heads, f"{registry.sort} list of a layer", "heads")
            rows.append([_variant(item, registry) for item in layer])
        else:
            rows.append([_variant(layer, registry)] * heads)
    return rows


def _check_length(values: Sequence[Any], count: int, name: str, of: str) -> None:
    if len(values) != count:
        raise UsageError(f"{name}: {len(values)} values given for {count} {of}; give one or {count}")


def _variant(value: Any, registry: Registry[Any]) -> Any:
    if isinstance(value, str):
        return registry.parse(value)
    if not isinstance(value, Mask | Encoding) or type(value).name not in registry:
        raise UsageError(f"{value!r} is not a {registry.sort}; known: {', '.join(registry)}")
    return value


def _spelling(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_spelling(item) for item in value]
    return str(value)
