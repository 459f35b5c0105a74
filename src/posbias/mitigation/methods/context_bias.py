"""A bias of the context: one number per head for all keys before the question."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch

from posbias.interventions.keys import biased
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, question_begins
from posbias.mitigation.methods.key_bias import BEFORE, Scales, Table, check_shape, factors
from posbias.models.hugging_face import HuggingFaceModel


@MITIGATIONS.register("context_bias")
@dataclass(frozen=True, repr=False)
class ContextBias(Mitigation):
    """From the question on, the logits of all keys before it get one number per head: more attention to them, or less.

    The same at every place in the context, and so at every length. With `scales`, each head's own logits are multiplied
    as well, which makes its attention sharper or flatter. As fitted by `fit`. Source: ours.
    """

    needs_passages: ClassVar[bool] = True
    needs_question: ClassVar[bool] = True

    values: Table
    """Nats, by layer and head, layer 0 nearest the input; with a strength s, s times as much."""
    scales: Scales | None = None
    """Factors of each head's logits, like those of `key_bias`, for queries from the question on."""

    def apply(self, model: HuggingFaceModel, passages: Places) -> AbstractContextManager[None]:
        """Add s b to the logits of the keys before the question, in every attention module."""
        check_shape(self.name, self.values, model)
        table = self.strength * torch.tensor(self.values, dtype=torch.float64)[..., None] * BEFORE
        scales = factors(self, self.scales, model)
        begins = question_begins(model, passages)
        return biased(model, str(self), lambda layer, _: table[layer], scales=scales, by_side=True, first_query=begins)
