"""A training that is killed and resumed ends with the bits of one that never was."""

import os
import signal
import subprocess
import sys

import pytest

from posbias import RunError, TrainOptions
from posbias.runs.parts import PartStore, clear_parts
from posbias.training.members import Adam, Below, TrainingSchedule
from posbias.training.trainer import train_members
from training_cases import assert_same, copier

# One member ends early, so that checkpoints hold members of both sorts.
OPTIONS = TrainingSchedule(steps=32, batch=8, window=4, evaluate_every=8, examples=5, stopping=Below(1.2, windows=1))
MEMBERS = [copier(5), copier(0), copier(3, depth=1)]

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {path!r}
from posbias.runs.parts import PartStore
keep = PartStore.keep
kept = []
def killing(self, name, arrays):
    keep(self, name, arrays)
    kept.append(name)
    if len(kept) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
PartStore.keep = killing
from test_resume import MEMBERS, OPTIONS
from posbias.runs.engines import Local
from posbias.training.options import TrainOptions
from posbias.training.trainer import train_members
options = TrainOptions(engine=Local(threads=1), directory=Path({folder!r}), checkpoint_seconds=0)
train_members(MEMBERS, OPTIONS, options=options)
"""


class Stopped(BaseException):
    """What a test raises in the middle of a training."""


def in_process(directory, **settings):
    from posbias.runs.engines import Local

    return TrainOptions(engine=Local(threads=1), directory=directory, checkpoint_seconds=0, **settings)


def test_a_killed_training_resumes_to_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    here = os.path.dirname(__file__)
    code = KILLED.format(path=[here, os.path.dirname(here)], folder=str(folder))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    kept = sorted(path.name for path in (folder / "parts").glob("*.safetensors"))
    assert kept == ["stack-0000-checkpoint.safetensors"]
    whole = train_members(MEMBERS, OPTIONS, options=in_process(None))
    assert [each.status for each in whole.members] == ["done", "stopped_early", "done"]
    resumed = train_members(MEMBERS, OPTIONS, options=in_process(folder, resume=True))
    for first, second in zip(whole.members, resumed.members, strict=True):
        assert_same(first, second)
    again = train_members(MEMBERS, OPTIONS, options=in_process(folder, resume=True))
    assert again.resumed == 2
    for first, second in zip(whole.members, again.members, strict=True):
        assert_same(first, second)
    clear_parts(folder)
    assert not (folder / "parts").exists()


@pytest.mark.parametrize("checkpoint", [1, 6])
def test_it_may_stop_anywhere(tmp_path, monkeypatch, checkpoint):
    members = [copier(5), copier(0, optimiser=None), copier(2, seed=4)]
    wild = [copier(target, optimiser=Adam(rate)) for target, rate in ((1, 1e30), (2, 1e-2), (3, 1e-1))]
    for stack in (members, wild):
        whole = train_members(stack, OPTIONS, options=in_process(None))
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
        resumed = train_members(stack, OPTIONS, options=in_process(tmp_path, resume=True))
        for first, second in zip(whole.members, resumed.members, strict=True):
            assert_same(first, second)


def test_checkpoints_of_another_training_are_not_used(tmp_path):
    train_members(MEMBERS, OPTIONS, options=in_process(tmp_path))
    shorter = TrainingSchedule(steps=8, batch=16, window=4, examples=20)
    found = train_members(MEMBERS, shorter, options=in_process(tmp_path, resume=True))
    assert found.resumed == 0
    assert {each.steps for each in found.members} == {8}


def test_a_disk_that_fills_is_one_line(tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("posbias.files.write_atomically", full)
    with pytest.raises(RunError, match=r"cannot write .*: No space left on device") as caught:
        train_members(MEMBERS, OPTIONS, options=in_process(tmp_path))
    assert "\n" not in str(caught.value)
