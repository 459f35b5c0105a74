"""Random covectors at the last final state, independent generators for every prompt, and what a request must be.

Signed walks estimate ||dh_last/dx_j||_F^2 = E ||v' J_j||^2 over random signs v, one probe at a time.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posbias.checks import check_seed, check_whole
from posbias.errors import UsageError
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.prompt_trace import PromptTrace
from posbias.theory.power_rollout.trace import TARGETS


def covectors(trace: PromptTrace, count: int, generator: torch.Generator) -> Float[Tensor, "count state"]:
    """Random signs in every channel of the final state; a target's own gradient, `count` times, where there is one."""
    if trace.score_gradient is not None:
        return trace.score_gradient.to(trace.state.dtype).expand(count, -1)
    return draw_signs((count, len(trace.state)), trace.state, generator)


def draw_signs(shape: tuple[int, ...], like: Float[Tensor, "..."], generator: torch.Generator) -> Tensor:
    """+1 or -1 with equal chance, independently, in the type and place of `like`."""
    drawn = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return drawn.to(like).mul_(2).sub_(1)


def generators(seed: int, count: int, device: torch.device) -> Iterator[torch.Generator]:
    """One generator for each of `count` prompts, all from `seed` and independent of each other."""
    for child in np.random.SeedSequence(seed).spawn(count):
        yield torch.Generator(device).manual_seed(int(child.generate_state(1, np.uint64)[0] >> np.uint64(1)))


def check_request(model: Model, prompts: Prompts, *, target: str) -> None:
    """Refuse what no walk can start from.

    Raises:
        UsageError: something else than a model or prompts, or a target not among TARGETS.
    """
    if not isinstance(model, Model):
        raise UsageError(f"the power rollout needs a model (what load_model returns), got {type(model).__name__}")
    if not isinstance(prompts, Prompts):
        raise UsageError(f"the power rollout needs prompts (what load_prompts returns), got {type(prompts).__name__}")
    check_target(target)


def check_draws(what: str, count: Any, seed: Any) -> None:
    """Refuse a number of draws too small to tell a spread, or a seed that is none.

    Raises:
        UsageError: `count` is no whole number of at least 2, or `seed` none of at least 0.
    """
    check_whole(what, count, least=2, numpy=True)
    check_seed(seed)


def check_target(target: str) -> None:
    """Refuse an output of the last position that is not known.

    Raises:
        UsageError: not among TARGETS.
    """
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r} of the power rollout; known: {', '.join(TARGETS)}")
