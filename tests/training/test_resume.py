"""A finished study is read back instead of trained again, and a stopped one goes on, to the last bit.

Killed in earnest: tests/cli/test_kill_points.py.
"""

import sys
from dataclasses import replace

import numpy as np
import pytest

from posbias import TrainOptions, UsageError, load_model, load_record, train
from posbias.results.records import read_record
from posbias.results.result import result_of, verdict
from posbias.runs.engines import Local
from posbias.runs.parts import PartStore, _digest, made_by
from posbias.training.members import Adam, Below, TrainingSchedule
from posbias.training.running import StudyRun
from posbias.training.study import study_of
from posbias.training.trainer import DECIDING, StackWork, train_members
from training_cases import assert_same, copier

STUDY = {
    "task": "position_copy(target=0, context=6, vocabulary=5)",
    "model": {"depth": 1, "width": 8, "residual": "none"},
    "optimiser": "adam(learning_rate=0.1)",
    "train": {"steps": 14, "batch": 8, "window": 4, "evaluate_every": 4, "examples": 5},
    # One member diverges, others have targets of their own.
    "grid": {"optimiser.learning_rate": [0.1, 1e30], "task.target": [0, 5]},
    "seeds": 2,
}


def trained(directory, study=STUDY, **settings):
    return train(study_of(study, name="tiny"), options=TrainOptions(directory=directory, **settings))


@pytest.fixture
def finished(tmp_path):
    return tmp_path, trained(tmp_path)


def never(*arguments, **settings):
    raise AssertionError("nothing is to be trained")


def test_a_finished_study_is_read_back_to_the_last_bit_but_for_parameters(finished, monkeypatch):
    directory, done = finished
    monkeypatch.setattr("posbias.training.running.train_members", never)
    for again in (trained(directory, resume=True), load_record(directory)):
        assert isinstance(again, StudyRun)
        assert {each.status for each in done.trained.members} == {"done", "diverged"}
        for stored, fresh in zip(again.trained.members, done.trained.members, strict=True):
            assert stored.member.describe() == fresh.member.describe()
            assert_same(stored, replace(fresh, parameters=None))
        assert again.models == done.models
        assert [model is None for model in again.models] == [False] * 4 + [True] * 4
        assert again.trained.schedule == done.trained.schedule
        assert again.trained.resumed == again.trained.n_stacks == done.trained.n_stacks
        assert again.record.run_id == done.record.run_id
        for own, same in zip(again.shown().curves, done.shown().curves, strict=True):
            np.testing.assert_array_equal(own.y, same.y)
    assert verdict(again)[0].startswith("8 members in ")
    del again.record.scalars["members"][0]["status"]
    with pytest.raises(UsageError, match=r"is damaged: KeyError 'status'"):
        result_of(again.record)


def test_no_commit_and_no_other_version_has_it_trained_again(finished, monkeypatch):
    directory, _ = finished
    record = read_record(directory)
    record.environment |= {"commit": "0" * 40, "posbias": "0.0.1"}
    record.save(directory)
    monkeypatch.setattr("posbias.training.running.train_members", never)
    assert trained(directory, resume=True).record.environment["commit"] == "0" * 40


def test_what_differs_from_the_record_is_not_taken_from_it(finished, monkeypatch):
    directory, _ = finished
    monkeypatch.setattr("posbias.training.running.train_members", never)
    for changed in (
        {"train": {**STUDY["train"], "steps": 16}},
        {"seeds": [0, 2]},
        {"model": {**STUDY["model"], "width": 10}},
        {"task": "position_copy(target=0, context=6, vocabulary=6)"},
        {"optimiser": "adam(learning_rate=0.1, beta1=0.5)"},
    ):
        with pytest.raises(AssertionError, match="nothing is to be trained"):
            trained(directory, {**STUDY, **changed}, resume=True)


def test_a_run_that_failed_is_trained_again(finished):
    directory, done = finished
    assert load_model(done.models[0]).vocabulary_size == 5
    replace(done.record, status="failed", error="all diverged").save(directory, overwrite=True)
    assert trained(directory, resume=True).record.run_id != done.record.run_id


def test_a_commit_elsewhere_leaves_checkpoints_good_and_a_change_of_the_trainer_does_not(tmp_path, monkeypatch):
    options = TrainingSchedule(steps=4, batch=8, window=4, examples=5)
    work = StackWork((copier(0),), ((0,),), options, TrainOptions(directory=tmp_path))
    before = work.store().fingerprint
    monkeypatch.setattr("posbias.results.records.commit_of", lambda checkout: "0" * 40)
    assert work.store().fingerprint == before
    monkeypatch.setattr("posbias.training.trainer.DECIDING", DECIDING[:1])
    assert work.store().fingerprint != before


def test_the_hash_of_sources_changes_with_any_of_them(tmp_path, monkeypatch):
    (tmp_path / "hashed_package" / "inner").mkdir(parents=True)
    for place in ("__init__.py", "inner/__init__.py", "inner/one.py"):
        (tmp_path / "hashed_package" / place).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hashed_package", raising=False)
    first = made_by(["hashed_package"])
    assert "commit" not in first
    (tmp_path / "hashed_package" / "inner" / "one.py").write_text("x = 1")
    assert made_by(["hashed_package"]) == first, "a process runs the code it has read"
    _digest.cache_clear()
    assert made_by(["hashed_package"])["sources"] != first["sources"]


def test_evaluated_at_the_end_alone_a_member_has_one_evaluation():
    """evaluate_every = 0: no value at step 0, none in between."""
    options = TrainingSchedule(steps=10, batch=8, window=4, evaluate_every=0, examples=5)
    (member,) = train_members([copier(0)], options).members
    assert member.evaluation_steps.tolist() == [10]
    assert all(len(values) == 1 for values in member.evaluations.values())
    (blind,) = train_members([copier(0)], replace(options, examples=0)).members
    assert blind.evaluation_steps.tolist() == []
    assert blind.evaluations == {}
    assert np.isfinite(blind.losses).all()


# One member ends early, so that checkpoints hold members of both sorts.
OPTIONS = TrainingSchedule(steps=32, batch=8, window=4, evaluate_every=8, examples=5, stopping=Below(1.2, windows=1))
MEMBERS = [copier(5), copier(0), copier(3, depth=1)]


class Stopped(BaseException):
    """What a test raises in the middle of a training."""


def in_process(directory, **settings):
    return TrainOptions(engine=Local(threads=1), directory=directory, checkpoint_seconds=0, **settings)


@pytest.mark.parametrize("checkpoint", [1, 6])
def test_a_training_that_is_stopped_anywhere_goes_on_to_the_same_bits(tmp_path, monkeypatch, checkpoint):
    mixed = [copier(5), copier(0, optimiser=None), copier(2, seed=4)]
    wild = [copier(target, optimiser=Adam(rate)) for target, rate in ((1, 1e30), (2, 1e-2), (3, 1e-1))]
    for stack in (MEMBERS, mixed, wild):
        whole = train_members(stack, OPTIONS, options=in_process(None))
        assert stack is not MEMBERS or whole.counts() == {"done": 2, "stopped_early": 1}
        keep, kept = PartStore.keep, []

        def stopping(self, name, arrays, keep=keep, kept=kept):
            keep(self, name, arrays)
            kept.append(name)
            if len(kept) == checkpoint:
                raise Stopped

        with monkeypatch.context() as patch:
            patch.setattr(PartStore, "keep", stopping)
            with pytest.raises(Stopped):
                train_members(stack, OPTIONS, options=in_process(tmp_path, overwrite=True))
        for _ in range(2):  # the second finds its stacks finished
            resumed = train_members(stack, OPTIONS, options=in_process(tmp_path, resume=True))
            for first, second in zip(whole.members, resumed.members, strict=True):
                assert_same(first, second)
        assert resumed.resumed == resumed.n_stacks


def test_checkpoints_of_another_training_are_not_used(tmp_path):
    train_members(MEMBERS, OPTIONS, options=in_process(tmp_path))
    shorter = TrainingSchedule(steps=8, batch=16, window=4, examples=20)
    found = train_members(MEMBERS, shorter, options=in_process(tmp_path, resume=True))
    assert found.resumed == 0
    assert {each.steps for each in found.members} == {8}
