"""A key bias against position bias: from a formula, from a design, or fitted to what a model should retrieve."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from posbias.interventions.keys import KeyBiased, KeyLogits, biased
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places
from posbias.mitigation.methods.heads import checked_scales, factors
from posbias.mitigation.methods.question import question_begins
from posbias.models.hugging_face import HuggingFaceModel


@MITIGATIONS.register("key_bias")
@dataclass(frozen=True)
class KeyBiasMethod(Mitigation):
    """Numbers b_j are added to the logits of the keys, per layer and head; with a strength s, s b_j.

    As fitted by `fit` (`mitigation/fitting/bias.py`): splines of ln(1 + j), a few numbers per head, which are defined
    at every length. Everything that `key_biased` takes is allowed, such as a design's gamma keys. Source: ours;
    docs/theory.md has the family.
    """

    needs_question: ClassVar[bool] = True

    biases: str | Sequence[str]
    """A key encoding for all layers, or one for each, layer 0 nearest the input: `"gamma_key(alpha=1.5)"`."""
    from_question: bool = False
    """Only queries behind the last passage have the bias: what the passages say of one another stays."""
    scales: Sequence[Sequence[float]] | None = None
    """Factors > 0 of each head's own logits for the queries that have the bias, by layer and head; with a strength s,
    to the power of s. They make attention sharper or flatter. None: 1."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "biases", KeyBiased(self.biases).biases)
        object.__setattr__(self, "scales", checked_scales(self.name, self.scales))

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

        added = KeyLogits(logits, factors(self, self.scales, depth, heads))
        with (
            question_begins(model, passages if self.from_question else (), name=self.name) as begins,
            biased(model, str(self), added, first_query=begins if self.from_question else 0),
        ):
            yield

    def description(self, model: HuggingFaceModel) -> HuggingFaceModel:
        """At full strength, for all queries, the logits by position that theories read."""
        if self.strength == 1 and not self.from_question and self.scales is None:
            return KeyBiased(self.biases).description(model, rerun=True)
        return super().description(model)
