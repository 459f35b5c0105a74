"""A made-up audit with known properties: a U as trained, a falling line at birth, one good theory and one bad one."""

from collections.abc import Callable

import numpy as np
import pytest

from posbias import Profile, Record
from posbias.comparison.distances import Sample
from posbias.comparison.stored import (
    Mixing,
    Subject,
    SubjectProfile,
    compare_subject,
    contrast_subjects,
    store_subjects,
)
from posbias.results.page import Report

N_POSITIONS = 256
LONGEST_LINE = 25
"""Words of a line of the verdict."""


@pytest.fixture(autouse=True)
def short_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report that a test makes answers in short lines."""
    make = Report.__init__

    def made(self: Report, *arguments: object, **keywords: object) -> None:
        make(self, *arguments, **keywords)  # type: ignore[arg-type]
        assert [line for line in self.verdict if len(line.split()) > LONGEST_LINE] == []

    monkeypatch.setattr(Report, "__init__", made)


def u_shape(n_positions: int = N_POSITIONS) -> np.ndarray:
    relative = np.linspace(0, 1, n_positions)
    return 0.5 + 6 * np.exp(-25 * relative) + 2 * np.exp(-18 * (1 - relative)) + 20 * (relative == 0)


def falling(n_positions: int = N_POSITIONS) -> np.ndarray:
    shape = 1 / (1 + np.arange(n_positions)) ** 0.6
    shape[-1] *= 30
    return shape


def measured(shape: np.ndarray, *, seed: int, count: int) -> SubjectProfile:
    units = shape * np.exp(0.35 * np.random.default_rng(seed).normal(size=(count, shape.size)))
    profiles = Sample.of(units).units
    return SubjectProfile(Profile.mean_of(profiles), profiles)


def mixing(layers: int, seed: int) -> dict[str, Mixing]:
    value = 0.15 + 0.1 * np.random.default_rng(seed).random(layers) + 0.3 * np.exp(-np.arange(layers) / 2.0)
    return {
        "frobenius": Mixing(value, value - 0.02, value + 0.02),
        "token_mean": Mixing(value * 0.9),
    }


def build_subjects(*, count: int = 16, n_positions: int = N_POSITIONS) -> tuple[Subject, Subject]:
    random = np.random.default_rng(0)
    shape, birth = u_shape(n_positions), falling(n_positions)
    jacobian = measured(shape, seed=1, count=count)
    read = Sample.of(shape * np.exp(0.2 * random.normal(size=(count, n_positions))))
    theories = {
        "rollout": SubjectProfile(Profile.normalised(falling(n_positions) ** 3)),
        "attention_only": SubjectProfile(Profile.normalised(np.exp(-np.arange(n_positions) / 3.0))),
        "power_rollout": SubjectProfile(Profile(read.average), read.units),
    }
    trained = Subject(
        "trained",
        {"jacobian": jacobian, "probability": measured(shape**1.2, seed=2, count=count)},
        theories,
        mixing(30, 3),
    )
    born = Subject(
        "initialised",
        {"jacobian": measured(birth, seed=4, count=8)},
        {
            "rollout": SubjectProfile(Profile.normalised(falling(n_positions))),
            "closed_form": SubjectProfile(Profile.normalised(falling(n_positions) ** 1.1)),
        },
        mixing(30, 5),
    )
    return trained, born


def build_audit(*, model: str = "demo", count: int = 16, n_positions: int = N_POSITIONS) -> Record:
    generator = np.random.default_rng(11)
    trained, born = (
        compare_subject(entry, generator=generator) for entry in build_subjects(count=count, n_positions=n_positions)
    )
    record = Record(
        verb="audit",
        arguments={"model": model, "n_positions": n_positions, "prompts": count, "out": "runs/demo"},
        resolved={
            "command": f"posbias audit {model} --length {n_positions} --count {count} --seed 0 --out runs/demo",
            "model": {"source": model, "family": "llama", "depth": 30, "dtype": "float32"},
            "prompts": {
                "source": "default",
                "seed": 0,
                "count": count,
                "n_positions": n_positions,
                "sha256": "ab" * 32,
            },
            "mixing": [0.1] * 30,
        },
        seeds={"prompts": 0, "probes": 1},
    )
    return store_subjects(
        record,
        (trained, born),
        contrasts=contrast_subjects(trained, born, generator=generator),
        left_out=["Content logits were not measured.", "The mean-field theory does not apply to this family."],
    )


@pytest.fixture
def audit_record() -> Callable[..., Record]:
    return build_audit
