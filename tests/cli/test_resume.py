"""`posbias measure` killed at random moments and continued: nothing lost, nothing counted twice, the same bits."""

import random
import subprocess
import sys
import time

import numpy as np
import pytest

import posbias as pb
from posbias import parts
from posbias.directories import LOCK_FILE, exclusive
from posbias.measurement.measurement import RunOptions
from posbias.parts import PARTS, PartStore

FLAGS = ("--length", "24", "--count", "10", "--kinds", "jacobian(probes=2),probability", "--threads", "1")
COMMAND = [sys.executable, "-m", "posbias", "measure"]


def kept(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / PARTS).glob("*.safetensors")}


@pytest.mark.parametrize(
    "command",
    [
        "measure MODEL",
        "measure MODEL MODEL",
        "decompose MODEL",
        "evaluate MODEL --task key_value",
        "train study.yaml",
        "reproduce icl-2502.01951 --size smoke",
    ],
)
def test_resuming_needs_the_directory_to_go_on_in(posbias, tiny_llama, command):
    result = posbias(*(tiny_llama if word == "MODEL" else word for word in command.split()), "--resume")
    assert result.returncode == 2
    assert result.stderr == "posbias: --resume needs --out: the directory of the run that is continued\n"


def test_killed_again_and_again_the_result_is_that_of_an_undisturbed_run(posbias, tiny_llama, tmp_path):
    out, whole = tmp_path / "killed", tmp_path / "whole"
    assert posbias("measure", tiny_llama, *FLAGS, "--out", whole).returncode == 0
    assert not (whole / PARTS).exists()
    chance = random.Random(0)
    history: dict[str, int] = {}
    for _ in range(2):
        process = subprocess.Popen(
            [*COMMAND, str(tiny_llama), *FLAGS, "--out", str(out), "--resume"], stdout=subprocess.DEVNULL
        )
        wanted, deadline = len(history) + 2, time.monotonic() + 100
        while len(kept(out)) < wanted and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.03))
        process.kill()
        process.wait()
        now = kept(out)
        assert history.items() <= now.items()  # finished prompts are neither lost nor measured again
        history = now
    result = posbias("measure", tiny_llama, *FLAGS, "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    killed, undisturbed = pb.load_record(out), pb.load_record(whole)
    assert killed.arrays.keys() == undisturbed.arrays.keys()
    for name, array in undisturbed.arrays.items():
        np.testing.assert_array_equal(killed.arrays[name], array, err_msg=name)
    assert not (out / PARTS).exists()


def test_workers_and_one_process_finish_each_others_runs(tiny_llama, tmp_path):
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("default", model, n_positions=24, count=4)

    def measured(workers, directory=None, resume=False):
        engine = pb.engines.Local(workers=workers, threads=1)
        run = RunOptions(engine, directory=directory, resume=resume)
        return pb.measure(model, prompts, kinds="jacobian", options=pb.MeasureOptions(run=run))

    one, two = measured(1), measured(2, tmp_path)
    np.testing.assert_array_equal(one.per_prompt["jacobian"], two.per_prompt["jacobian"])
    (tmp_path / PARTS / "prompt-000002.safetensors").unlink()
    before = kept(tmp_path)
    again = measured(1, tmp_path, resume=True)
    assert before.items() <= kept(tmp_path).items()
    np.testing.assert_array_equal(one.per_prompt["jacobian"], again.per_prompt["jacobian"])
    anew = measured(1, tmp_path)
    assert not before.items() & kept(tmp_path).items()
    np.testing.assert_array_equal(one.per_prompt["jacobian"], anew.per_prompt["jacobian"])
    parts.clear_parts(tmp_path)
    assert not (tmp_path / PARTS).exists()


@pytest.mark.parametrize(
    "command",
    [
        f"measure MODEL {' '.join(FLAGS)} --out OUT",
        "report RUN --out OUT",
        "evaluate MODEL --lm-eval OUT --task key_value(pairs=2)",
        "list masks --out OUT",
    ],
)
def test_a_second_verb_that_writes_into_the_directory_is_refused(posbias, tiny_llama, tmp_path, command):
    assert posbias("predict", "--depth", 1, "--length", 4, "--out", tmp_path / "run").returncode == 0
    words = {"MODEL": tiny_llama, "OUT": tmp_path / "out", "RUN": tmp_path / "run"}
    (tmp_path / "out").mkdir()
    with exclusive(tmp_path / "out"):
        result = posbias(*(words.get(word, word) for word in command.split()))
    assert result.returncode == 2
    assert "another run is writing" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK_FILE]


def test_pieces_of_other_settings_are_not_reused(tmp_path):
    PartStore(tmp_path, {"seed": 0}, resume=False).keep("piece", {"x": np.zeros(1)})
    assert PartStore(tmp_path, {"seed": 0}, resume=True).find("piece")["x"] == 0
    assert PartStore(tmp_path, {"seed": 1}, resume=True).find("piece") is None
    (tmp_path / PARTS / "piece.safetensors").write_bytes(b"torn")
    assert PartStore(tmp_path, {"seed": 0}, resume=True).find("piece") is None
    assert PartStore(None, {}, resume=True).find("piece") is None


@pytest.mark.parametrize("flags", [("--engine", "local", "--ray-address", "auto"), ("--max-memory", "much")])
def test_wrong_flags_are_one_line(posbias, tiny_llama, flags):
    result = posbias("measure", tiny_llama, *flags)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert flags[-1] in result.stderr or flags[-2] in result.stderr
