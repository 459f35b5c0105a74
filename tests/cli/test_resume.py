"""Runs continued and replaced: nothing lost, nothing done twice, nothing written over unasked."""

import shutil

import numpy as np
import pytest

import posbias as pb
from posbias import load_model
from posbias.results.records import read_record
from posbias.runs.parts import PARTS, PartStore
from posbias.runs.running import LOCK_FILE, held


@pytest.mark.parametrize("command", ["measure MODEL --length 24 --count 10 --out OUT", "report RUN --out OUT"])
def test_a_second_verb_that_writes_into_the_directory_is_refused(posbias, tiny_llama, tmp_path, command):
    assert posbias("predict", "--depth", 1, "--length", 4, "--out", tmp_path / "run").returncode == 0
    words = {"MODEL": tiny_llama, "OUT": tmp_path / "out", "RUN": tmp_path / "run"}
    (tmp_path / "out").mkdir()
    with held(tmp_path / "out"):
        result = posbias(*(words.get(word, word) for word in command.split()))
    assert result.returncode == 2
    assert "another run is writing" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize("place", ["parts", "arms/one/parts", "studies/depth/parts", "length-512/parts"])
def test_finished_pieces_of_a_run_that_did_not_end_are_refused_with_their_count(posbias, tmp_path, place):
    out = tmp_path / "run"
    store = PartStore((out / place).parent, {})
    for name in ("a", "b", "c"):
        store.keep(name, {"x": np.zeros(1)})
    command = ["predict", "--depth", 1, "--length", 4, "--out", out]
    refused = posbias(*command)
    assert refused.returncode == 2
    assert "run' holds 3 finished pieces; --overwrite replaces it" in refused.stderr
    assert len(list((out / place).glob("*.safetensors"))) == 3
    assert posbias(*command, "--overwrite").returncode == 0
    assert not list((out / place).glob("*.safetensors"))


def test_answers_of_a_server_arms_and_studies_count_as_finished_work(posbias, tmp_path):
    for name in ("answers/ab/abc.json", "answers/cd/cde.json", "arms/one/record.json", "studies/depth/record.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}")
    refused = posbias("predict", "--depth", 1, "--length", 4, "--out", tmp_path)
    assert refused.returncode == 2
    assert "holds 4 finished pieces; " in refused.stderr


def test_a_run_that_failed_leaves_room_for_another(posbias, long_llama, tmp_path):
    asked = ["--task", "key_value(pairs=2)", "--count", "1", "--no-score", "--out"]
    command = ["evaluate", long_llama, *asked, tmp_path / "run"]
    assert posbias(*command, "--max-tokens", 9000).returncode == 1
    again = posbias(*command, "--max-tokens", 1)
    assert "holds 1 finished pieces" in again.stderr, "the sample that did not fit"
    assert posbias(*command, "--max-tokens", 1, "--overwrite").returncode == 0


def test_a_saved_run_is_not_replaced_unasked(tmp_path):
    first, second = (pb.Record("predict", {}, scalars={"number": number}) for number in (1, 2))
    first.save(tmp_path / "run")
    first.save(tmp_path / "run")  # the same once more
    with pytest.raises(pb.UsageError, match=r"holds a finished run of posbias predict .* overwrite=True replaces it"):
        second.save(tmp_path / "run")
    assert read_record(tmp_path / "run").scalars == {"number": 1}
    second.save(tmp_path / "run", overwrite=True)
    assert read_record(tmp_path / "run").scalars == {"number": 2}


def test_pieces_of_other_settings_are_not_reused(tmp_path):
    PartStore(tmp_path, {"seed": 0}).keep("piece", {"x": np.zeros(1)})
    assert PartStore(tmp_path, {"seed": 0}).find("piece")["x"] == 0
    assert PartStore(tmp_path, {"seed": 1}).find("piece") is None
    (tmp_path / PARTS / "piece.safetensors").write_bytes(b"torn")
    assert PartStore(tmp_path, {"seed": 0}).find("piece") is None
    assert PartStore(None, {}).find("piece") is None


def test_a_changed_model_under_the_same_name_is_not_taken_for_finished(posbias, tiny_llama, tmp_path):
    copy, runs = tmp_path / "model", []
    shutil.copytree(tiny_llama, copy)
    for seed in (None, None, 3):
        if seed is not None:
            load_model(tiny_llama, init_seed=seed).network.save_pretrained(copy)
        flags = ("--length", 16, "--count", 2, "--kinds", "probability", "--out", tmp_path / "out", "--resume")
        assert posbias("measure", copy, *flags).returncode == 0
        runs.append(read_record(tmp_path / "out").run_id)
    assert runs[0] == runs[1] != runs[2]
