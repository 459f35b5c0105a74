"""Every count that a user can give has a stated limit, and more is refused in one line before anything is done."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from planted import Planted, planted_scores
from posbias import (
    AttentionOptions,
    DesignOptions,
    EvaluateOptions,
    FitOptions,
    MitigateOptions,
    TrainOptions,
    UsageError,
    design,
    place,
)
from posbias.architecture import Rope, Sinusoidal
from posbias.cli.place import scores_of
from posbias.evaluation.placement import MeasuredUse
from posbias.evaluation.responders import LocalOptions, ServerOptions
from posbias.measurement.outputs import PassOptions
from posbias.mitigation import MITIGATIONS
from posbias.runs.engines import Ray
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.tasks.synthetic import SYNTHETIC_TASKS
from posbias.theory.mean_field import SampledHeads
from posbias.training import STOPPING, Study, TrainingSchedule

MANY = 10**12
COUNTS: dict[str, Callable[[int], Any]] = {
    "evaluate: count": lambda n: EvaluateOptions(count=n),
    "evaluate: skip": lambda n: EvaluateOptions(skip=n),
    "evaluate: together": lambda n: EvaluateOptions(together=n),
    "evaluate: max_tokens": lambda n: EvaluateOptions(max_tokens=n),
    "evaluate: thinking_tokens": lambda n: EvaluateOptions(thinking_tokens=n),
    "local responder: batch": lambda n: LocalOptions(batch=n),
    "server: concurrency": lambda n: ServerOptions(concurrency=n),
    "server: retries": lambda n: ServerOptions(retries=n),
    "training: steps": lambda n: TrainingSchedule(steps=n),
    "training: batch": lambda n: TrainingSchedule(steps=1, batch=n),
    "training: window": lambda n: TrainingSchedule(steps=1, window=n),
    "training: evaluate_every": lambda n: TrainingSchedule(steps=1, window=1, evaluate_every=n),
    "training: examples": lambda n: TrainingSchedule(steps=1, examples=n),
    "training: stack_size": lambda n: TrainOptions(stack_size=n),
    "training: chunk": lambda n: TrainOptions(chunk=n),
    "below: windows": lambda n: STOPPING.parse(f"below(loss=0.1, windows={n})"),
    "mitigate: calibration": lambda n: MitigateOptions(calibration=n),
    "mitigate: documents": lambda n: MitigateOptions(documents=n),
    "mitigate: length": lambda n: MitigateOptions(length=n),
    "fit: steps": lambda n: FitOptions(steps=n),
    "repeat_prompt: times": lambda n: MITIGATIONS.parse(f"repeat_prompt(times={n})"),
    "self_consistency: draws": lambda n: MITIGATIONS.parse(f"self_consistency(draws={n})"),
    "planted: count": lambda n: planted_scores(Planted((0.5,), ((0.5,),)), count=n, generator=np.random.default_rng(0)),
    "sampled: heads": lambda n: SampledHeads(heads=n),
    "rows": lambda n: PassOptions(rows=n),
    "precision_prompts": lambda n: PassOptions(precision_prompts=n),
    "block": lambda n: AttentionOptions(block=n),
    "kernel_cells": lambda n: AttentionOptions(kernel_cells=n),
    "ray: retries": lambda n: Ray(retries=n),
    "rope: head_dim": lambda n: Rope(head_dim=n),
    "sinusoidal: width": lambda n: Sinusoidal(width=n),
    "needle: tokens": lambda n: LANGUAGE_TASKS.parse(f"needle(tokens={n})"),
    "needle: distractors": lambda n: LANGUAGE_TASKS.parse(f"needle(distractors={n})"),
    "key_value: pairs": lambda n: LANGUAGE_TASKS.parse(f"key_value(pairs={n})"),
    "documents: documents": lambda n: LANGUAGE_TASKS.parse(f"documents(documents={n})"),
    "starts": lambda n: design("flat", options=DesignOptions(depth=2, n_positions=16, starts=n)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_beyond_its_limit_is_refused_with_value_and_limit(name: str):
    with pytest.raises(UsageError) as refused:
        COUNTS[name](MANY)
    (line,) = str(refused.value).splitlines()
    assert line.startswith((f"{name} is 1,000,000,000,000 ", f"{name} takes 1,000,000,000,000 "))
    assert "; at most " in line
    assert "=NUMBER in the environment for more)" in line


WHOLE = {"target", "seed"}
"""Parameters of synthetic tasks that are no counts."""


@pytest.mark.parametrize("name", sorted(SYNTHETIC_TASKS))
def test_no_parameter_of_a_synthetic_task_is_without_a_limit(name: str):
    task = SYNTHETIC_TASKS[name]
    given = {"target": 0} if name == "position_copy" else {}
    counts = [each.name for each in dataclasses.fields(task) if "int" in str(each.type) and each.name not in WHOLE]
    counts = [each for each in counts if each != "answers"]
    assert counts
    for each in counts:
        with pytest.raises(UsageError, match=r"\b" + each) as refused:
            task(**{**given, each: MANY})
        assert "at most" in str(refused.value) or "must" in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_limit_can_be_raised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSBIAS_MAX_EXAMPLES", "1e13")
    assert EvaluateOptions(count=MANY).count == MANY


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"depth": 12, "n_positions": 10**8}, "the profile at twice n_positions takes 200,000,000 cells"),
        ({"depth": 30_000, "n_positions": 512}, "a search from 8 starts through 30000 layers at 512 positions"),
    ],
)
def test_a_design_that_would_fill_memory_or_take_days_is_refused(options: dict[str, int], told: str):
    with pytest.raises(UsageError, match=told):
        design("u_shape(middle=4.0)", over="gamma_key", options=DesignOptions(**options))


def test_a_grid_of_more_members_than_can_be_trained_is_refused_when_it_is_meant_too():
    points = {f"axis {number}": [(value, {}) for value in range(100)] for number in range(8)}
    study = Study("s", {}, {}, {}, TrainingSchedule(steps=1), points)
    with pytest.raises(UsageError, match=r"study 's': the grid times the seeds is 10\^16 or more repeats; at most"):
        study.members(confirmed=True)


def test_positions_times_width_has_the_limit_of_an_array():
    with pytest.raises(UsageError, match="positions x width takes 1,000,000,000 cells"):
        Sinusoidal(width=100_000).vectors_at(np.arange(10_000))


def test_as_many_passages_as_resamples_would_fill_memory_with_are_refused():
    use = MeasuredUse(np.random.default_rng(0).random((8, 3)), (0, 1, 2), 3)
    with pytest.raises(UsageError, match="passages x resamples takes 100,000,000 cells; at most"):
        place([1.0] * 100_000, use)


def test_a_file_of_too_many_scores_is_refused_at_the_first_beyond(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POSBIAS_MAX_ITEMS", "3")
    path = tmp_path / "scores.txt"
    path.write_text("0.5\n" * 3)
    assert scores_of(str(path)) == [0.5] * 3
    path.write_text("0.5\n" * 4 + "never read\n")
    with pytest.raises(UsageError, match="what one file holds is 4 items; at most 3 items are allowed"):
        scores_of(str(path))
