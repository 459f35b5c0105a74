"""Every count that a user can give has a stated limit, and more is refused in one line before anything is done."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints

import numpy as np
import pytest

import posbias as pb
from behaviour_runs import measured
from posbias.architecture import ENCODINGS, MASKS, Sinusoidal
from posbias.checks import checked_value
from posbias.cli.finished import scores_of
from posbias.designing.result import TARGETS
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import ServerOptions
from posbias.interventions.base import INTERVENTIONS
from posbias.measurement.kinds import KINDS
from posbias.measurement.outputs import OUTPUTS
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.runs.engines import ENGINES
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.tasks.language.rules import RULES
from posbias.tasks.synthetic import SYNTHETIC_TASKS
from posbias.theory import THEORIES
from posbias.theory.mean_field.recursion import LEVELS
from posbias.training.members import OPTIMISERS, STOPPING, TrainingSchedule
from posbias.training.study import Study

MANY = 10**12
OPTIONS = (pb.AttentionOptions, pb.AuditOptions, pb.CompareOptions, pb.DecomposeOptions, pb.DesignOptions)
OPTIONS += (pb.EvaluateOptions, pb.FitOptions, LocalOptions, pb.MeasureOptions, pb.MitigateOptions, ServerOptions)
OPTIONS += (pb.TrainOptions, TrainingSchedule)
REGISTRIES = (ENCODINGS, ENGINES, INTERVENTIONS, KINDS, LANGUAGE_TASKS, LEVELS, MASKS, MITIGATIONS, OPTIMISERS, OUTPUTS)
REGISTRIES += (RULES, STOPPING, SYNTHETIC_TASKS, TARGETS, THEORIES)
NO_COUNTS = {"seed", "init_seed", "position", "positions", "tokens", "target", "first_layer", "last_layer", "layers"}
NO_COUNTS |= {"channel", "dummy", "knots", "depth", "heads", "n_positions", "width", "length", "last"}
NO_COUNTS |= {"workers"}
"""Whole numbers of which a large one takes nothing, or is refused with others whose product it multiplies."""


def declared() -> Iterator[tuple[str, Any]]:
    """The name and annotation of every option, and of every parameter of every variant."""
    variants = [registry[name] for registry in REGISTRIES for name in registry]
    for kind in (*OPTIONS, *filter(dataclasses.is_dataclass, variants)):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            yield f"{kind.__name__}.{field.name}", hints[field.name]


@pytest.mark.parametrize(("name", "hint"), list(declared()))
def test_every_option_is_held_to_what_it_declares(name: str, hint: Any):
    """Numbers are no switches, nothing is NaN, and a count has an upper bound."""
    numbers = {number for number in (int, float) if number.__name__ in str(hint)}
    hostile = [float("nan"), 10**400, object()] if numbers else []
    hostile += [True, np.bool_(False)] if numbers and "bool" not in str(hint) else []
    hostile += [MANY] if numbers == {int} and name.rpartition(".")[2] not in NO_COUNTS else []
    for value in hostile:
        with pytest.raises(pb.UsageError) as refused:
            checked_value(name, value, hint)
        (line,) = str(refused.value).splitlines()
        assert line.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"depth": 12, "n_positions": 10**8}, "the profile at twice n_positions: 200,000,000 cells"),
        ({"depth": 30_000, "n_positions": 512}, "a search from 8 starts through 30000 layers at 512 positions"),
    ],
)
def test_a_design_that_would_fill_memory_or_take_days_is_refused(options: dict[str, int], told: str):
    with pytest.raises(pb.UsageError, match=told):
        pb.design("u_shape(middle=4.0)", over="gamma_key", options=pb.DesignOptions(**options))


def test_a_grid_of_more_members_than_can_be_trained_is_refused():
    points = {f"axis {number}": [(value, {}) for value in range(100)] for number in range(8)}
    study = Study("s", {}, {}, {}, TrainingSchedule(steps=1), points)
    with pytest.raises(pb.UsageError, match=r"study 's': the grid times the seeds: 10\^16 or more members; at most"):
        study.members()


def test_positions_times_width_has_the_limit_of_an_array():
    with pytest.raises(pb.UsageError, match="positions x width: 1,000,000,000 cells"):
        Sinusoidal(width=100_000).vectors_at(np.arange(10_000))


def test_as_many_passages_as_resamples_would_fill_memory_with_are_refused():
    with pytest.raises(pb.UsageError, match="passages x resamples: 100,000,000 cells; at most"):
        pb.place([1.0] * 100_000, measured(np.ones((8, 3))))


def test_a_file_of_too_many_scores_is_refused_at_the_first_beyond(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("posbias.cli.finished.MOST_SCORES", 3)
    path = tmp_path / "scores.txt"
    path.write_text("0.5\n" * 3)
    assert scores_of(str(path)) == [0.5] * 3
    path.write_text("0.5\n" * 4 + "never read\n")
    with pytest.raises(pb.UsageError, match="what one file holds: 4 scores; at most 3 are allowed"):
        scores_of(str(path))
