"""The local engine: every unit once, a dead worker ends the run, errors passed on, nothing left running."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

import posbias as pb
from engine_workloads import Squares
from posbias import RunError, UsageError
from posbias.models.loading import load_same
from posbias.models.networks import random_network
from posbias.models.weights import network_sha256
from posbias.runs.engines import ENGINES, Local, Ray, collect
from posbias.runs.parts import PARTS, PartStore


def results(engine, workload, units):
    return dict(engine.run(workload, units))


def workers():
    """Worker processes of this one; the tracker of their semaphores stays."""
    return [child for child in psutil.Process().children() if "loky.backend.popen_loky_posix" in child.cmdline()]


def test_units_are_spread_over_processes_and_each_is_done_once(tmp_path):
    work = Squares(tmp_path, seconds=0.02)
    outcomes = results(Local(workers=2), work, list(range(12)))
    assert {unit: int(arrays["square"][0]) for unit, arrays in outcomes.items()} == {
        unit: unit**2 for unit in range(12)
    }
    assert all(work.attempts(unit) == 1 for unit in range(12))
    processes = {int(arrays["process"][0]) for arrays in outcomes.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert not list(tmp_path.glob("open-*")), "workers that have nothing left to do clean up behind themselves"
    assert not any(psutil.pid_exists(process) for process in processes)


def test_a_worker_that_dies_ends_the_run_and_what_is_finished_is_kept(tmp_path):
    work = Squares(tmp_path, doomed=(3,), seconds=0.02)
    store = PartStore(tmp_path / "run", {})
    names = [f"unit-{unit}" for unit in range(5)]
    message = r"^one of 2 workers died \(SIGKILL\); is there memory for so many\? What is finished is kept if"
    with pytest.raises(RunError, match=message):
        collect(work, names, engine=Local(workers=2), store=store)
    kept = {path.stem for path in (tmp_path / "run" / PARTS).iterdir()}
    assert {"unit-0", "unit-1"} <= kept
    assert "unit-3" not in kept
    again = collect(Squares(tmp_path), names, engine=Local(workers=2), store=PartStore(tmp_path / "run", {}))
    assert [int(arrays["square"][0]) for arrays in again] == [0, 1, 4, 9, 16]
    assert all(work.attempts(unit) == 1 for unit in range(5) if f"unit-{unit}" in kept), "nothing is done twice"


def test_errors_of_a_unit_stop_the_run_as_they_would_in_this_process(tmp_path):
    for number in (1, 2):
        with pytest.raises(UsageError, match=r"unit 3 is wrong;\\nreally"):
            list(Local(workers=number).run(Squares(tmp_path, wrong=(3,)), range(6)))
        with pytest.raises(RunError, match="unit 3 is broken"):
            list(Local(workers=number).run(Squares(tmp_path, broken=(3,)), range(6)))
    assert not workers()


def test_workers_that_die_while_preparing_end_the_run(tmp_path):
    with pytest.raises(RunError, match=r"one of 2 workers died \(SIGKILL"):
        list(Local(workers=2).run(Squares(tmp_path, dies_preparing=True), range(6)))


def test_an_abandoned_run_leaves_no_process(tmp_path):
    outcomes = Local(workers=2).run(Squares(tmp_path), range(100))
    next(outcomes)
    assert len(workers()) == 2
    outcomes.close()
    assert not workers()


SCRIPT = """
import sys
from pathlib import Path
from engine_workloads import Squares
from posbias.runs.engines import Local
print(sorted(arrays["square"].item() for _, arrays in Local(workers=2).run(Squares(Path(sys.argv[1])), range(3))))
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
        ("local(workers=0)", "workers must be a whole number >= 1 and < 1,025, got 0"),
        ("local(threads=0)", "threads must be a whole number >= 1 and < 1,025 or None, got 0"),
        ("ray(retries=5)", "unexpected keyword argument 'retries'; parameters of ray: threads, workers, address, gpus"),
        ("local(workers=True)", "workers must be a whole number >= 1 and < 1,025, got True"),
        ("ray(gpus=-1)", "gpus must be a finite number >= 0, got -1"),
        ("ray(workers=0)", "workers must be a whole number >= 1"),
        ("slurm", "unknown engine 'slurm'; known: local, ray"),
    ],
)
def test_wrong_engines(spelled, message):
    with pytest.raises(UsageError, match=message.replace("(", ".")):
        ENGINES.parse(spelled)


def test_no_units_start_nothing(tmp_path):
    assert list(Local(workers=2).run(Squares(tmp_path), [])) == []
    assert collect(Squares(tmp_path), [], engine=Local(workers=2), store=PartStore(None, {})) == []


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
