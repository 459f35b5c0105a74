"""The experiments that can be reproduced, by name; each is imported when it is run."""

from collections.abc import Callable
from typing import Any

from posbias.registry import Registry
from posbias.report.reproductions import Reproduction

PAPERS: Registry[Callable[[Any], Reproduction]] = Registry("paper")


def reproduce(paper: str, *, settings: Any = None) -> Reproduction:
    """Run a published experiment again.

    Args:
        paper: A name in `PAPERS`.
        settings: Of that experiment (`BirthSettings` for birth-2603.10123), or None for its defaults.

    Returns:
        Sentences, rows, tables and figures; `posbias.report.reproductions.reproduction_record` makes a record of it.

    Raises:
        UsageError: unknown paper, or settings it does not take.
        RunError: a measurement failed.
    """
    run: Callable[[Any], Reproduction] = PAPERS[paper]
    return run(settings)


@PAPERS.register("rollout-2602.16837")
def rollout(settings: Any) -> Reproduction:
    """A Structural Theory of Position Bias in Transformers: Table 2 from the measured mixing of five ALiBi models."""
    from posbias.reproduce.rollout import reproduce_rollout

    return reproduce_rollout(settings)


@PAPERS.register("birth-2603.10123")
def birth(settings: Any) -> Reproduction:
    """Lost in the Middle at Birth: the closed form against untrained Qwen2- and GPT-2-shaped models."""
    from posbias.reproduce.birth import reproduce_birth

    return reproduce_birth(settings)


@PAPERS.register("position-copy-liu2026")
def position_copy(settings: Any) -> Reproduction:
    """Stack of causal attention creates implicit positional embedding: small networks trained to copy one position."""
    from posbias.reproduce.position_copy import reproduce_position_copy

    return reproduce_position_copy(settings)


@PAPERS.register("icl-2502.01951")
def in_context_retrieval(settings: Any) -> Reproduction:
    """On the Emergence of Position Bias in Transformers: in-context retrieval by depth, encoding, mask and data."""
    from posbias.reproduce.icl import reproduce_icl

    return reproduce_icl(settings)
