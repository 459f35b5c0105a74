"""A prompt's attention: statistics and rollout, streamed by posbias and from all matrices at once.

The peer is what one writes with transformers alone: eager attention, `output_attentions=True`, the head means, and
the rollout as a product of N x N matrices.
"""

from collections.abc import Callable

import numpy as np
import torch
from subject import tokens_of

import posbias as pb
from posbias.measurement.options import AttentionOptions
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts import Prompts
from posbias.theory.power_rollout import attention_rollout_prompt

MIXING = 0.3
Method = Callable[[], np.ndarray]


def streamed(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """All of posbias's attention statistics; the mean attention distance by layer and head is returned."""
    options = AttentionOptions(rollouts=False)
    return lambda: pb.attention(model, prompts, options=options).distance.by_head


def pulled(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """posbias's rollout of the model's own attention."""
    return lambda: attention_rollout_prompt(model, prompts.token_ids[0], MIXING)


@torch.no_grad()
def matrices(model: HuggingFaceModel, prompts: Prompts) -> tuple[torch.Tensor, ...]:
    """Every layer's [batch head query key]."""
    tokens = tokens_of(prompts).to(model.device)
    output = model.network(tokens, use_cache=False, output_attentions=True, logits_to_keep=1)
    if not output.attentions:
        raise SystemExit("transformers returned no attention; the model must run eager")
    kept: tuple[torch.Tensor, ...] = output.attentions
    return kept


def dense_distance(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """Mean attention distance by layer and head, from the matrices."""
    position = torch.arange(prompts.n_positions, dtype=torch.float32, device=model.device)

    def run() -> np.ndarray:
        distance = position[:, None] - position[None, :]
        means = [(kept[0] * distance).sum(dim=2).mean(dim=1) for kept in matrices(model, prompts)]
        return torch.stack(means).numpy(force=True)

    return run


def dense_rollout(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """The rollout as it is usually written: T_L-1 ... T_0, multiplied out."""

    def run() -> np.ndarray:
        rollout = torch.eye(prompts.n_positions, device=model.device)
        for kept in matrices(model, prompts):
            rollout = (1 - MIXING) * rollout + MIXING * kept[0].mean(dim=0) @ rollout
        return (rollout[-1] / rollout[-1].sum()).numpy(force=True)

    return run


METHODS: dict[str, Callable[[HuggingFaceModel, Prompts], Method]] = {
    "posbias, all statistics": streamed,
    "posbias, rollout": pulled,
    "eager, one statistic": dense_distance,
    "eager, dense rollout": dense_rollout,
}
EAGER = ("eager, one statistic", "eager, dense rollout")
PAIRS = (("posbias, all statistics", "eager, one statistic"), ("posbias, rollout", "eager, dense rollout"))
ROUND_OFF = 1e-3


def build(model: HuggingFaceModel, eager: HuggingFaceModel, prompts: Prompts) -> dict[str, Method]:
    """Methods by name; those of a pair are asserted to give the same numbers."""
    methods = {name: METHODS[name](eager if name in EAGER else model, prompts) for name in METHODS}
    for one, other in PAIRS:
        np.testing.assert_allclose(methods[one](), methods[other](), rtol=ROUND_OFF, err_msg=one)
    return methods
