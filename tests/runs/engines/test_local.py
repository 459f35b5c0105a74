"""The local engine: every unit once, dead workers replaced, errors passed on, nothing left running."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch

import posbias as pb
from engine_workloads import Squares, Variables
from posbias import RunError, UsageError
from posbias.models.loading import load_same
from posbias.models.networks import random_network
from posbias.models.weights import network_sha256
from posbias.runs.engines import ENGINES, Local, Ray, collect
from posbias.runs.engines.engine import STARTS_LOST, Starts
from posbias.runs.parts import PARTS, PartStore


def results(engine, workload, units):
    return {outcome.unit: outcome for outcome in engine.run(workload, units)}


def test_units_are_spread_over_processes_and_each_is_done_once(tmp_path):
    work = Squares(tmp_path, seconds=0.02)
    outcomes = results(Local(workers=2), work, list(range(12)))
    assert {unit: int(outcome.arrays["square"][0]) for unit, outcome in outcomes.items()} == {
        unit: unit**2 for unit in range(12)
    }
    assert all(work.attempts(unit) == 1 for unit in range(12))
    processes = {int(outcome.arrays["process"][0]) for outcome in outcomes.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert not list(tmp_path.glob("open-*")), "workers that have nothing left to do clean up behind themselves"
    assert not any(psutil.pid_exists(process) for process in processes)


def test_workers_get_no_keys_but_the_hubs(monkeypatch):
    names = ("OPENAI_API_KEY", "MY_KEY", "GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "TOKENIZERS_PARALLELISM")
    for name in names:
        monkeypatch.setenv(name, "true")
    outcomes = results(Local(workers=2), Variables(names), [0, 1])
    assert [outcome.arrays["there"].tolist() for outcome in outcomes.values()] == [[False] * 4 + [True] * 2] * 2
    assert os.environ["OPENAI_API_KEY"] == "true"


def test_a_killed_worker_costs_its_own_unit_only_which_is_done_again(tmp_path):
    work = Squares(tmp_path, killed=(2, 5))
    outcomes = results(Local(workers=2), work, list(range(8)))
    assert all(outcome.arrays is not None for outcome in outcomes.values())
    assert [work.attempts(unit) for unit in range(8)] == [1, 1, 2, 1, 1, 2, 1, 1]


def test_a_unit_that_kills_every_worker_fails_alone_and_the_others_are_kept(tmp_path):
    work = Squares(tmp_path, doomed=(1,))
    store = PartStore(tmp_path / "run", {}, resume=False)
    names = [f"unit-{unit}" for unit in range(5)]
    message = r"1 of 5 units failed, first unit-1: lost its worker 2 times \(ended by signal 9\); the others are kept"
    with pytest.raises(RunError, match=message):
        collect(work, names, engine=Local(workers=2, retries=1), store=store)
    assert sorted(path.stem for path in (tmp_path / "run" / PARTS).iterdir()) == [n for n in names if n != "unit-1"]
    again = collect(
        Squares(tmp_path), names, engine=Local(workers=2), store=PartStore(tmp_path / "run", {}, resume=True)
    )
    assert [int(arrays["square"][0]) for arrays in again] == [0, 1, 4, 9, 16]
    assert [work.attempts(unit) for unit in range(5)] == [1, 3, 1, 1, 1]


def test_errors_of_a_unit_stop_the_run_as_they_would_in_this_process(tmp_path):
    for workers in (1, 2):
        with pytest.raises(UsageError, match=r"unit 3 is wrong;\\nreally"):
            list(Local(workers=workers).run(Squares(tmp_path, wrong=(3,)), range(6)))
        with pytest.raises(RunError, match="unit 3 is broken"):
            list(Local(workers=workers).run(Squares(tmp_path, broken=(3,)), range(6)))
    assert not psutil.Process().children(recursive=True)


def test_workers_that_die_while_preparing_end_the_run(tmp_path):
    with pytest.raises(RunError, match=r"[34] workers died while preparing \(ended by signal 9\)"):
        list(Local(workers=2).run(Squares(tmp_path, dies_preparing=True), range(6)))


def test_with_room_for_fewer_workers_than_asked_for_the_run_goes_on_with_those(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("posbias.runs.engines.engine.announce", said.append)
    work = Squares(tmp_path, prepares=1, seconds=0.2)
    outcomes = results(Local(workers=2), work, range(40))
    assert {unit: int(outcome.arrays["square"][0]) for unit, outcome in outcomes.items()} == {
        unit: unit**2 for unit in range(40)
    }
    assert work.begun() == 1 + STARTS_LOST  # and no more are started
    assert said == ["3 workers died while preparing (ended by signal 9): going on with 1"]


def test_when_the_last_worker_dies_over_a_unit_another_may_take_its_place(tmp_path):
    work = Squares(tmp_path, prepares=2, seconds=0.2, killed=(30,))
    outcomes = results(Local(workers=3), work, range(36))
    assert all(outcome.arrays is not None for outcome in outcomes.values())
    assert work.attempts(30) == 2


def test_starts_are_counted_until_a_worker_is_prepared():
    starts = Starts(4)
    for _ in range(2):
        starts.failed("gone", remaining=2)
    starts.succeeded()
    for _ in range(2):
        starts.failed("gone", remaining=2)
    assert starts.wanted(2) == 4
    starts.failed("gone", remaining=2)
    starts.succeeded()  # one that was still preparing
    assert starts.wanted(2) == 2
    starts.make_room(1)  # a worker died over a unit: one more may be started, in its place
    assert starts.wanted(1) == 2
    for _ in range(3):
        starts.failed("gone", remaining=1)
    assert starts.wanted(1) == 1
    with pytest.raises(RunError, match=r"3 workers died while preparing \(gone\); is there memory"):
        starts.wanted(0)


def test_an_abandoned_run_leaves_no_process(tmp_path):
    outcomes = Local(workers=2).run(Squares(tmp_path), range(100))
    next(outcomes)
    assert psutil.Process().children()
    outcomes.close()
    assert not psutil.Process().children()


SCRIPT = """
import sys
from pathlib import Path
from engine_workloads import Squares
from posbias.runs.engines import Local
print(sorted(outcome.arrays["square"].item() for outcome in Local(workers=2).run(Squares(Path(sys.argv[1])), range(3))))
"""
PATHS = os.pathsep.join(entry for entry in sys.path if entry)
"""Where this process looks for modules."""


def test_a_script_without_a_main_guard_may_use_workers(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": PATHS}
    run = subprocess.run([sys.executable, str(path), str(tmp_path)], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stdout, run.stderr) == (0, "[0, 1, 4]\n", "")


def test_workers_load_the_very_model_the_run_began_with(tiny_llama):
    loaded = pb.load_model(tiny_llama, init_seed=4)
    weights = network_sha256(loaded.network)
    again = load_same(loaded.request, weights)
    assert again.origin.init_seed == 4
    assert network_sha256(again.network) == weights
    with pytest.raises(RunError, match="found another model"):
        load_same(replace(loaded.request, init_seed=5), weights)
    again.network.model.rotary_emb.inv_freq.mul_(0.5)
    assert network_sha256(again.network) != weights
    edited = again.describe()
    assert edited["weights_sha256"] == loaded.describe()["weights_sha256"]
    assert edited["buffers_sha256"] != loaded.describe()["buffers_sha256"]
    assert pb.models.hugging_face.HuggingFaceModel(loaded.network).request is None
    with pytest.raises(UsageError, match="only models from load_model, without an intervention, allow"):
        load_same(None, weights)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("local(workers=0)", "workers must be a whole number in .1, 1025., got 0"),
        ("local(threads=0)", "threads must be a whole number in .1, 1025., got 0"),
        ("local(retries=-1)", "retries must be a whole number >= 0, got -1"),
        ("local(workers=True)", "workers must be a whole number in .1, 1025., got True"),
        ("ray(gpus=-1)", "gpus must be a number >= 0, got -1"),
        ("ray(workers=0)", "workers must be a whole number >= 1, got 0"),
        ("slurm", "unknown engine 'slurm'; known: local, ray"),
    ],
)
def test_wrong_engines(spelled, message):
    with pytest.raises(UsageError, match=message.replace("(", ".")):
        ENGINES.parse(spelled)


def test_no_units_start_nothing(tmp_path):
    assert list(Local(workers=2).run(Squares(tmp_path), [])) == []
    assert collect(Squares(tmp_path), [], engine=Local(workers=2), store=PartStore(None, {}, resume=False)) == []


def test_arrays_keep_type_and_shape_through_a_process(tmp_path):
    (outcome,) = Local(workers=2).run(Squares(tmp_path), [3])
    assert outcome.arrays["square"].dtype == np.int64
    assert outcome.arrays["square"].shape == (1,)


ORPHANS = """
import sys
from pathlib import Path
from engine_workloads import Squares
from posbias.runs.engines import Local
list(Local(workers=2).run(Squares(Path(sys.argv[1]), seconds=1000), range(1000)))
"""


def test_workers_of_a_killed_run_end_in_the_middle_of_their_units(tmp_path):
    run = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], env={**os.environ, "PYTHONPATH": PATHS})
    while not {"0", "1"} <= {mark.name for mark in tmp_path.iterdir()}:
        assert run.poll() is None
        time.sleep(0.01)
    workers = [psutil.Process(int(mark.name.removeprefix("open-"))) for mark in tmp_path.glob("open-*")]
    run.kill()
    run.wait()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_without_ray_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"engine ray needs the ray package: pip install 'posbias\[ray\]'"):
        list(Ray().run(Squares(tmp_path), [0]))


def test_frequencies_that_follow_the_length_of_a_prompt_make_no_other_network():
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    )  # fmt: skip
    network = random_network(config, seed=0).eval()
    fresh, frequencies = network_sha256(network), network.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        network(torch.arange(40)[None])
    assert not torch.equal(network.model.rotary_emb.inv_freq, frequencies)
    assert network_sha256(network) == fresh
