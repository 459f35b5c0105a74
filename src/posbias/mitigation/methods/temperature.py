"""Attention that does not fade with the length of the prompt."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from posbias.interventions.base import Attended, AttentionCall, attending
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Spans
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel


@MITIGATIONS.register("temperature")
@dataclass(frozen=True, repr=False)
class Temperature(Mitigation):
    """Logits of the query at position i are multiplied by max(1, scale ln(1 + i)): attention does not fade with length.

    The factor's distance from 1 is multiplied by the strength. Source: scalable-softmax, arXiv 2501.19399, where the
    scale is learnt in training; as a change of a finished model it is calibrated.
    """

    scale: Annotated[float, Interval(gt=0, lt=100)] = 0.15
    """Per head's logits, in 1 / ln(tokens), > 0; 1 / ln 800 leaves the query at 800 as it is."""

    def apply(self, model: HuggingFaceModel, passages: Spans) -> AbstractContextManager[None]:
        """Multiply every query."""

        def attend(call: AttentionCall) -> Attended:
            factor = (self.scale * in_float64(call.query_positions).log1p()).clamp(min=1.0)
            factor = 1 + self.strength * (factor - 1)
            return call.run(query=call.query * factor.to(call.query)[:, None, :, None])

        return attending(model, str(self), attend)
