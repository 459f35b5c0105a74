"""A paper's studies survive a kill: what was trained is read back (killed anywhere: tests/cli/test_kill_points.py)."""

import numpy as np
import pytest

from posbias import TrainOptions
from posbias.training import running
from posbias.training.study import study_of
from posbias_papers.reproduction import Reproduction, StudyExperiment, StudySettings
from training_cases import assert_same


def study(target):
    document = {
        "task": f"position_copy(target={target}, context=6, vocabulary=5)",
        "model": {"depth": 1, "width": 8, "residual": "none"},
        "train": {"steps": 8, "batch": 8, "window": 4, "examples": 5},
        "seeds": 2,
    }
    return study_of(document, name=f"target {target}")


class Paper(StudyExperiment):
    """A paper of two small studies."""

    name, judge = "paper", None

    def __init__(self, judge):
        self.judge = judge

    def studies(self, settings):
        return {"first": study(0), "second": study(5)}


def reproduced(settings, judge):
    return Paper(judge).run(settings)


class Killed(BaseException):
    """What a test raises in place of a signal."""


def settings(directory, **run):
    return StudySettings("smoke", run=TrainOptions(directory=directory, checkpoint_seconds=0, **run))


def told(members, options, chosen):
    losses = np.array([each.losses[-1] for each in members], dtype=np.float64)
    return Reproduction("a paper", "a title", [], [], [], [], {"members": len(members)}, arrays={"losses": losses})


def test_a_kill_before_the_findings_are_saved_loses_nothing(tmp_path, monkeypatch):
    seen = []

    def killed(members, options, chosen):
        seen.extend(members)
        raise Killed

    with pytest.raises(Killed):
        reproduced(settings(tmp_path), killed)
    monkeypatch.setattr(running, "train_members", None)  # training anything again would fail
    again = []
    made = reproduced(settings(tmp_path, resume=True), lambda *got: (again.extend(got[0]), told(*got))[1])
    for first, second in zip(seen, again, strict=True):
        assert_same(first, second)
    assert (made.numbers["members"], made.statements) == (4, [])


def test_a_second_study_killed_in_training_goes_on_and_the_first_is_read_back(tmp_path, monkeypatch):
    whole = reproduced(settings(None), told)
    original = running.train_members

    def killed(members, schedule, *, options):
        if members[0].task.target == 5:
            raise Killed
        return original(members, schedule, options=options)

    with monkeypatch.context() as patch:
        patch.setattr(running, "train_members", killed)
        with pytest.raises(Killed):
            reproduced(settings(tmp_path), told)
    resumed = reproduced(settings(tmp_path, resume=True), told)
    assert resumed.numbers == whole.numbers  # read back, but trained by the same code
    np.testing.assert_array_equal(resumed.arrays["losses"], whole.arrays["losses"])
