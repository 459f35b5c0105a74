"""Tiny members for the trainer's tests."""

from typing import Any

import numpy as np
import torch

from posbias import Architecture
from posbias.models.reference.config import ReferenceConfig
from posbias.tasks.synthetic import PositionCopy
from posbias.training.members import Adam, AdamW, Member, TrainedMember
from posbias_papers.wu2025.retrieval import InContextRetrieval


def copier(target: int, *, seed: int = 0, optimiser: Adam | None = None, **settings: Any) -> Member:
    """A position-copy member; architecture fields (mask, encoding, depth, heads) and configuration fields mixed."""
    names = ("depth", "heads", "mask", "encoding")
    architecture = {name: settings.pop(name) for name in names if name in settings}
    config = ReferenceConfig(
        Architecture(**{"depth": 2, **architecture}),
        **{
            "width": 8,
            "vocabulary_size": 5,
            "attention": "content",
            "values": "gaussian",
            "residual": "none",
            "dtype": "float32",
            **settings,
        },
    )
    task = PositionCopy(target, context=6, vocabulary=5)
    name = f"target {target} seed {seed} {architecture}"
    return Member(name, config, task, seed, optimiser or Adam(1e-2), {"target": target})


def retriever(seed: int, *, mask: str = "causal", encoding: str = "none", heads: int = 1) -> Member:
    """An in-context-retrieval member as in the published experiment, but small."""
    config = ReferenceConfig(
        Architecture(2, heads, mask=mask, encoding=encoding),
        width=8,
        vocabulary_size=None,
        outputs=4,
        attention="content",
        values="gaussian",
        output_map=False,
        residual="none",
        readout="mlp",
        initialisation="linear",
        dtype="float32",
    )
    task = InContextRetrieval(pairs=4, burstiness=2, classes=16, labels=4, features=8)
    return Member(f"{mask} {encoding} {seed}", config, task, seed, AdamW(1e-3, weight_decay=1e-6))


def assert_same(first: TrainedMember, second: TrainedMember) -> None:
    """Equal to the last bit in everything."""
    assert (first.status, first.reason, first.steps) == (second.status, second.reason, second.steps)
    np.testing.assert_array_equal(first.losses, second.losses)
    np.testing.assert_array_equal(first.evaluation_steps, second.evaluation_steps)
    assert first.evaluations.keys() == second.evaluations.keys()
    for name, values in first.evaluations.items():
        np.testing.assert_array_equal(values, second.evaluations[name])
    assert (first.parameters is None) == (second.parameters is None)
    for name, values in (first.parameters or {}).items():
        assert second.parameters is not None
        assert torch.equal(values, second.parameters[name]), name
