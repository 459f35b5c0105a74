"""A key bias against position bias: from a formula, from a design, or fitted to what a model should retrieve."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float

from posbias.checks import Positive
from posbias.errors import UsageError
from posbias.interventions.keys import KeyBiased, biased
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, question_begins
from posbias.models.hugging_face import HuggingFaceModel

Table = Sequence[Sequence[float]]
"""Numbers by layer and head."""
Scales = Sequence[Sequence[Positive]]
"""Factors by layer and head, > 0."""
BEFORE = torch.tensor([1.0, 0.0], dtype=torch.float64)
"""A bias of the context: 1 for the keys before the question, 0 for those from it on."""


def check_shape(method: str, table: Sequence[Sequence[float]], model: HuggingFaceModel) -> None:
    """Refuse a table that is not one number for each head of each layer."""
    heads, depth = model.sizes.get("heads", 0), model.sizes.get("layers", 0)
    if [len(layer) for layer in table] != [heads] * depth:
        raise UsageError(f"{method}: the model has {depth} layers of {heads} heads; give a value for each")


def factors(
    method: Mitigation, scales: Sequence[Sequence[float]] | None, model: HuggingFaceModel
) -> Callable[[int], Float[torch.Tensor, "heads"]] | None:
    """Factors by layer, at the method's strength."""
    if scales is None:
        return None
    check_shape(method.name, scales, model)
    return (torch.tensor(scales, dtype=torch.float64) ** method.strength).__getitem__


@MITIGATIONS.register("key_bias")
@dataclass(frozen=True, repr=False)
class KeyBiasMethod(Mitigation):
    """Numbers b_j are added to the logits of the keys, per layer and head; with a strength s, s b_j.

    As fitted by `fit` (`mitigation/fits.py`): splines of ln(1 + j), a few numbers per head, which are defined
    at every length. Everything that `key_biased` takes is allowed, such as a design's gamma keys. Source: ours;
    docs/theory.md has the family.
    """

    needs_question: ClassVar[bool] = True

    biases: str | Sequence[str]
    """A key encoding for all layers, or one for each, layer 0 nearest the input: `"gamma_key(alpha=1.5)"`."""
    from_question: bool = False
    """Only queries behind the last passage have the bias: what the passages say of one another stays."""
    scales: Scales | None = None
    """Factors > 0 of each head's own logits for the queries that have the bias, by layer and head; with a strength s,
    to the power of s. They make attention sharper or flatter. None: 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "biases", KeyBiased(self.biases).biases)

    @property
    def needs_passages(self) -> bool:  # type: ignore[override]
        """To know where the question begins."""
        return self.from_question

    def apply(self, model: HuggingFaceModel, passages: Places) -> AbstractContextManager[None]:
        """Add s b_j in every attention module."""
        logits = KeyBiased(self.biases).logits(model, self.strength)
        scales = factors(self, self.scales, model)
        first = question_begins(model, passages) if self.from_question else 0
        return biased(model, str(self), logits, scales=scales, first_query=first)
