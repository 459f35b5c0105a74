"""The positional channel: one feature of what attention reads, times a factor, where queries and keys are made of it.

A changed layer makes its queries and keys twice, as further heads that are normalised, turned and cached with the
others; so earlier tokens' changed keys are there when a later query asks, whatever is done with the cache.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posbias.checks import Natural
from posbias.errors import UsageError
from posbias.interventions.base import Attended, AttentionCall, attending, hooked
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, Spans, question_begins
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import Block


@MITIGATIONS.register("positional_channel")
@dataclass(frozen=True, repr=False)
class PositionalChannel(Mitigation):
    """One hidden channel is multiplied by a factor in the input of queries and keys, in middle layers; values stay.

    The layers are 10 to 25 of 32, 0 nearest the input, as released, and as far up in other depths. It acts on the
    queries behind the last passage. Of a prompt that is answered everything but its last token counts as a passage, so
    that it acts on the queries that predict; with `from_question` it acts on all behind the last passage that stands in
    it. With a strength s, the factor is 1 + s (factor - 1). A changed layer's keys take twice their room in the cache.

    Source: arXiv 2406.02536 and its released code, PositionalHidden/PositionalHidden.
    """

    needs_passages: ClassVar[bool] = True
    needs_question: ClassVar[bool] = True
    every_layer: ClassVar[bool] = True

    channel: Natural
    """Index in the hidden state, 0 ... width - 1; `fit` finds one."""
    factor: float = 0.0
    """The channel is multiplied by; published: 0 or -1."""
    from_question: bool = False
    """Change all queries behind the last passage, not only those that predict."""

    def known(self, passages: Spans, prompt: Sequence[int]) -> Spans:
        """The prompt's last token counts as the question, so that the change is a matter of position."""
        return passages if self.from_question else [(0, len(prompt) - 1)]

    def in_text(self, length: int) -> Spans | None:
        """All queries of a text predict; the first one sees nothing but itself, and is the same either way."""
        return None if self.from_question else [(0, 1)]

    @contextmanager
    def apply(self, model: HuggingFaceModel, passages: Places) -> Iterator[None]:
        """Make queries and keys twice, and attend with the changed ones if a query predicts."""
        blocks = model.family.blocks(model.network)
        first = 10 * len(blocks) // 32
        layers = range(first, max(26 * len(blocks) // 32, first + 1))
        if self.channel >= model.width:
            raise UsageError(f"positional_channel: channel must lie in 0 ... {model.width - 1}, got {self.channel}")
        factor = 1 + self.strength * (self.factor - 1)

        def attend(call: AttentionCall) -> Attended:
            if call.layer not in layers:
                return call.run()
            (query, changed_query), (key, changed_key) = call.query.chunk(2, 1), call.key.chunk(2, 1)
            rows = (call.query_positions >= begins().to(call.query.device)).to(call.query.device)
            changed = call.run(query=changed_query, key=changed_key) if rows.any() else None
            if changed is not None and rows.all():
                return changed
            output, weights = call.run(query=query, key=key)
            return output if changed is None else torch.where(rows[:, :, None, None], changed[0], output), weights

        def twice(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            """Add to what a projection makes of its input what it makes of the changed one."""
            scale = torch.ones_like(inputs[0][0, 0])
            scale[self.channel] = factor
            return torch.cat([output, module.forward(inputs[0] * scale)], -1)

        begins = question_begins(model, passages)
        with attending(model, str(self), attend):
            projections = [module for layer in layers for module in _projections(model, blocks[layer])]
            with hooked(module.register_forward_hook(twice) for module in projections):
                yield


def _projections(model: HuggingFaceModel, block: Block) -> tuple[nn.Module, nn.Module]:
    """The projections of queries and of keys; refused if more heads of either are not normalised and turned alike."""
    family, attention = model.family, block.attention
    norms = [norm for norm in family.head_norms(attention) if norm is not None]
    by_head = all(norm.gain.shape == (vars(attention)["head_dim"],) for norm in norms)
    # OPT splits what its projections make by the configuration's number of heads.
    if family.name == "opt" or len(family.query_key_value) != 3 or not by_head:
        raise UsageError(
            f"positional_channel: attention of {family.name} models takes no further heads; allowed are families that "
            "make queries and keys in separate maps and norm them head by head, such as llama, qwen2, qwen3 and gemma3"
        )
    query, key, _ = (attention.get_submodule(name) for name in family.query_key_value)
    return query, key
