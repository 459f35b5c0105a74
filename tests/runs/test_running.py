"""Runs of the library in a directory: written as the shell writes them, refused, taken over, continued after a kill."""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

import posbias as pb
from posbias.results.records import ARRAYS_FILE, read_record, record_in
from posbias.runs.parts import PARTS, PartStore
from posbias.runs.running import directory_names, run_directory
from posbias.training.study import study_of

ASKED = "key_value(pairs=4)"
STUDY = {
    "task": "position_copy(target=0, context=6, vocabulary=5)",
    "model": {"depth": 1, "width": 8, "residual": "none"},
    "train": {"steps": 8, "batch": 8, "window": 4, "examples": 5},
    "grid": {"task.target": [0, 5]},
}


class Killed(BaseException):
    """What a test raises in place of a signal."""


@dataclass(frozen=True)
class Asked:
    """What the verbs are asked about."""

    model: Any
    prompts: Any
    other: Any


@pytest.fixture(scope="module")
def asked(tiny_llama, long_llama):
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("synthetic", model, n_positions=8, count=3)
    return Asked(model, prompts, pb.load_model(long_llama))


def measure(asked, **settings):
    return pb.measure(asked.model, asked.prompts, options=pb.MeasureOptions(**settings))


def decompose(asked, **settings):
    options = pb.DecomposeOptions(interventions="no_rope", kinds="probability", **settings)
    return pb.decompose(asked.model, asked.prompts, options=options)


def evaluate(asked, **settings):
    options = pb.EvaluateOptions(count=3, positions=(0, 3), max_tokens=1, together=1, **settings)
    return pb.evaluate(asked.other, ASKED, options=options)


def train(asked, **settings):
    return pb.train(study_of(STUDY, name="tiny"), options=pb.TrainOptions(stack_size=1, **settings))


def mitigate(asked, *, directory=None, **ways):
    evaluation = pb.EvaluateOptions(count=2, positions=(0, 3), generate=False, **ways)
    options = pb.MitigateOptions(
        "temperature(scale=0.5)", calibration=0, evaluation=evaluation, documents=0, short=False
    )
    return pb.mitigate(asked.other, ASKED, options=options, directory=directory)


VERBS = {verb.__name__: verb for verb in (measure, decompose, evaluate, train, mitigate)}
each_verb = pytest.mark.parametrize("verb", VERBS)
SMALL = ("measure", "decompose", "evaluate", "train")


def never(*_, **__):
    raise AssertionError("nothing is computed")


def assert_same(first, second):
    assert set(first.arrays) == set(second.arrays)
    for name, values in first.arrays.items():
        np.testing.assert_array_equal(values, second.arrays[name], err_msg=name)
    differing = {"seconds", "reused", "cost", "members"}  # timed, or named by place
    scalars = [record.as_json()["scalars"] for record in (first, second)]
    for arm in chain(*(of.get("arms", ()) for of in scalars)):
        del arm["effort"]["seconds"]
    for name in set(first.scalars) - differing:
        assert scalars[0][name] == scalars[1][name], name


@each_verb
def test_a_run_lies_in_its_directory_is_refused_and_taken_over(verb, asked, tmp_path, monkeypatch):
    run, directory = VERBS[verb], tmp_path / "run"
    result = run(asked, directory=directory)
    loaded = pb.load_record(directory)
    assert_same(loaded.as_run(), run(asked).as_run())
    assert loaded.as_run().run_id == result.as_run().run_id
    assert loaded.as_run().arguments, "what was asked"
    assert not (directory / PARTS).exists()
    before = (directory / ARRAYS_FILE).read_bytes()
    with pytest.raises(pb.UsageError, match=f"holds a finished run of posbias {verb}"):
        run(asked, directory=directory)
    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "keep", never)
        again = run(asked, directory=directory, resume=True)
    assert type(again) is type(result)
    assert again.as_run().run_id == result.as_run().run_id
    assert (directory / ARRAYS_FILE).read_bytes() == before
    anew = run(asked, directory=directory, overwrite=True)
    assert anew.as_run().run_id == pb.load_record(directory).as_run().run_id != result.as_run().run_id


@pytest.mark.parametrize("verb", SMALL)
def test_a_run_killed_after_its_first_piece_goes_on_from_there(verb, asked, tmp_path, monkeypatch):
    run, directory, keep = VERBS[verb], tmp_path / "run", PartStore.keep
    kept, reused = [], []

    def killed(self, name, arrays):
        keep(self, name, arrays)
        raise Killed

    def counted(self, name, arrays):
        kept.append(name)
        return keep(self, name, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "keep", killed)
        with pytest.raises(Killed):
            run(asked, directory=directory)
    assert record_in(directory, done=True) is None
    reused = [path.stem for path in (directory / PARTS).glob("*.safetensors")]
    assert reused
    with pytest.raises(pb.UsageError, match=r"holds [0-9]+ finished pieces"):
        run(asked, directory=directory)
    monkeypatch.setattr(PartStore, "keep", counted)
    resumed = run(asked, directory=directory, resume=True)
    if verb != "train":  # its first piece is a checkpoint, which a later one replaces
        assert not set(reused) & set(kept)
    assert_same(resumed.as_run(), run(asked).as_run())
    assert not (directory / PARTS).exists()


def test_a_run_that_fails_says_why_and_a_wrong_request_leaves_nothing(asked, tmp_path, monkeypatch):
    def failing(*_, **__):
        raise pb.RunError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(PartStore, "keep", failing)
        with pytest.raises(pb.RunError, match="on fire"):
            measure(asked, directory=tmp_path / "failed")
    record = read_record(tmp_path / "failed")
    assert (record.verb, record.status, record.error) == ("measure", "failed", "the disk is on fire")
    with pytest.raises(pb.UsageError, match="does not exist"):
        pb.measure(str(tmp_path / "no-model"), asked.prompts, options=pb.MeasureOptions(directory=tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("verb", SMALL)
def test_a_file_in_the_way_another_verb_or_another_run_at_work_is_refused(verb, asked, tmp_path):
    run, directory = VERBS[verb], tmp_path / "run"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(pb.UsageError, match="cannot write to"):
        run(asked, directory=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    pb.predict(pb.Architecture(depth=1), 4).save(directory)
    with pytest.raises(pb.UsageError, match="holds a finished run of posbias predict"):
        run(asked, directory=directory)
    result = run(asked, directory=directory, resume=True)
    assert pb.load_record(directory).as_run().run_id == result.as_run().run_id


def test_another_models_run_is_not_taken_over(asked, tmp_path):
    first = measure(asked, directory=tmp_path)
    second = measure(replace(asked, model=asked.other), directory=tmp_path, resume=True)
    assert second.record.run_id != first.record.run_id
    sources = [found.record.resolved["model"]["source"] for found in (first, second, pb.load_record(tmp_path))]
    assert sources[0] != sources[1] == sources[2]


def test_within_a_run_its_directory_stands_for_it(tmp_path):
    with run_directory(tmp_path, verb="measure", arguments={"a": 1}, command="posbias measure m") as outer:
        with run_directory(tmp_path, verb="measure", arguments={"b": 2}) as inner:
            inner.finish(pb.Record("measure", {}))
        assert inner is outer
    record = read_record(tmp_path)
    assert (record.arguments, record.command) == ({"a": 1}, "posbias measure m")


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["demo", "Qwen/Qwen3-0.6B"], ["demo", "Qwen3-0.6B"]),
        (["a/base", "b/base", "b/other"], ["a-base", "b-base", "b-other"]),
        (["config:gpt2", "x.gguf"], ["gpt2", "x.gguf"]),
        (["../..", "a b/c:d"], None),
    ],
)
def test_names_of_directories(sources, names):
    found = directory_names(sources)
    assert list(found.values()) == sources
    assert names is None or list(found) == names
    assert all("/" not in name and not name.startswith(".") for name in found)


@pytest.mark.parametrize("sources", [[], ["demo", "demo"], ["config:demo", "demo"]])
def test_models_that_cannot_be_told_apart(sources):
    with pytest.raises(pb.UsageError, match=r"no model to measure|give each of them once"):
        directory_names(sources)
