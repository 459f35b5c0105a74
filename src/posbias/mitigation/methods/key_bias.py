"""A key bias against position bias: from a formula, from a design, or fitted to what a model should retrieve."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Interval
from jaxtyping import Float

from posbias.errors import UsageError
from posbias.interventions.attention import Attended, AttentionCall, attending
from posbias.interventions.keys import KeyBiased, KeyLogits, biased
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, Spans
from posbias.mitigation.methods.passage_attention import question_begins
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel

Table = tuple[tuple[float, ...], ...]
"""Numbers by layer and head."""
BEFORE = torch.tensor([1.0, 0.0], dtype=torch.float64)
"""A bias of the context: 1 for the keys before the question, 0 for those from it on."""


@MITIGATIONS.register("key_bias")
@dataclass(frozen=True)
class KeyBiasMethod(Mitigation):
    """Numbers b_j are added to the logits of the keys, per layer and head; with a strength s, s b_j.

    As fitted by `fit` (`mitigation/fitting.py`): splines of ln(1 + j), a few numbers per head, which are defined at
    every length. Everything that `key_biased` takes is allowed, such as a design's gamma keys.
    """

    needs_question: ClassVar[bool] = True
    not_in_weights: ClassVar[str] = "its numbers are by the position of the key"

    biases: str | Sequence[str]
    """A key encoding for all layers, or one for each, layer 0 nearest the input: `"gamma_key(alpha=1.5)"`."""
    from_question: bool = False
    """Only queries behind the last passage have the bias: what the passages say of one another stays."""
    scales: Sequence[Sequence[float]] | None = None
    """Factors > 0 of each head's own logits for the queries that have the bias, by layer and head; with a strength s,
    to the power of s. They make attention sharper or flatter. None: 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "biases", KeyBiased(self.biases).biases)
        object.__setattr__(self, "scales", checked_scales(self.name, "scales", self.scales))

    @property
    def needs_passages(self) -> bool:  # type: ignore[override]
        """To know where the question begins."""
        return self.from_question

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Places) -> Iterator[None]:
        """Add s b_j in every attention module."""
        heads, depth = model.family.heads(model.config), model.family.depth(model.config)
        layers = KeyBiased(self.biases).layers(depth)
        for bias in layers:
            bias.check_heads(heads)

        def logits(layer: int, n_positions: int) -> torch.Tensor:
            return torch.tensor(self.strength * layers[layer].key_logits(n_positions, heads))

        added = KeyLogits(logits, _factors(self, self.scales, depth, heads))
        with (
            question_begins(model, self, passages) as begins,
            biased(model, self, added, first_query=begins if self.from_question else 0),
        ):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """At full strength, for all queries, the logits by position that theories read."""
        if self.strength == 1 and not self.from_question and self.scales is None:
            return KeyBiased(self.biases).description(model, rerun=rerun)
        return super().description(model, rerun=rerun)


@MITIGATIONS.register("context_bias")
@dataclass(frozen=True)
class ContextBias(Mitigation):
    """From the question on, the logits of all keys before it get one number per head: more attention to them, or less.

    The same at every place in the context, and so at every length. With `scales`, each head's own logits are multiplied
    as well, which makes its attention sharper or flatter. As fitted by `fit`.
    """

    needs_passages: ClassVar[bool] = True
    needs_question: ClassVar[bool] = True
    not_in_weights: ClassVar[str] = "it depends on where the question begins"

    values: Sequence[Sequence[float]]
    """Nats, by layer and head, layer 0 nearest the input; with a strength s, s times as much."""
    scales: Sequence[Sequence[float]] | None = None
    """Factors of each head's logits, like those of `key_bias`, for queries from the question on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _by_head(self.name, "values", self.values))
        object.__setattr__(self, "scales", checked_scales(self.name, "scales", self.scales))

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Places) -> Iterator[None]:
        """Add s b to the logits of the keys before the question, in every attention module."""
        heads, depth = model.family.heads(model.config), model.family.depth(model.config)
        check_shape(self.name, self.values, depth, heads)
        table = self.strength * torch.tensor(self.values, dtype=torch.float64)[..., None] * BEFORE

        added = KeyLogits(lambda layer, _: table[layer], _factors(self, self.scales, depth, heads), by_side=True)
        with question_begins(model, self, passages) as begins, biased(model, self, added, first_query=begins):
            yield


def _factors(
    method: Mitigation, scales: Sequence[Sequence[float]] | None, depth: int, heads: int
) -> Callable[[int], Float[torch.Tensor, "heads"]] | None:
    """Factors by layer, at the method's strength."""
    if scales is None:
        return None
    check_shape(method.name, scales, depth, heads)
    return (torch.tensor(scales, dtype=torch.float64) ** method.strength).__getitem__


def check_shape(method: str, table: Sequence[Sequence[float]], depth: int, heads: int) -> None:
    """Refuse a table that is not one number for each head of each layer."""
    if [len(layer) for layer in table] != [heads] * depth:
        raise UsageError(f"{method}: the model has {depth} layers of {heads} heads; give a value for each")


def checked_scales(method: str, name: str, factors: Sequence[Sequence[float]] | None) -> Table | None:
    """Positive numbers by layer and head, for a parameter of that name."""
    if factors is None:
        return None
    scales = _by_head(method, name, factors)
    if min(map(min, scales)) <= 0:
        raise UsageError(f"{method}: {name} must be above 0, got {min(map(min, scales)):g}")
    return scales


def _by_head(method: str, name: str, values: Sequence[Sequence[float]]) -> Table:
    """Finite numbers by layer and head."""
    try:
        table = tuple(tuple(map(float, layer)) for layer in values)
        finite = bool(table) and all(map(len, table)) and np.isfinite(np.concatenate(table)).all()
    except (TypeError, ValueError):
        finite = False
    if not finite:
        raise UsageError(f"{method}: {name} must be numbers, [layer][head], got {str(values)[:60]}")
    return table


@MITIGATIONS.register("temperature")
@dataclass(frozen=True)
class Temperature(Mitigation):
    """Logits of the query at position i are multiplied by max(1, scale ln(1 + i)): attention does not fade with length.

    The factor's distance from 1 is multiplied by the strength. Source: scalable-softmax, arXiv 2501.19399, where the
    scale is learnt in training; as a change of a finished model it is calibrated.
    """

    not_in_weights: ClassVar[str] = "its factor depends on the length of the prompt"
    grid: ClassVar[Mapping[str, Sequence[float]]] = {"scale": (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)}

    scale: Annotated[float, Interval(gt=0, lt=100)] = 0.15
    """Per head's logits, in 1 / ln(tokens), > 0; 1 / ln 800 leaves the query at 800 as it is."""

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Spans) -> Iterator[None]:
        """Multiply every query."""

        def attend(call: AttentionCall) -> Attended:
            factor = (self.scale * in_float64(call.query_positions).log1p()).clamp(min=1.0)
            factor = 1 + self.strength * (factor - 1)
            return call.run(query=call.query * factor.to(call.query)[:, None, :, None])

        with attending(model, self, attend):
            yield
