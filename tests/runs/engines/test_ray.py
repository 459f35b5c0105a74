"""The Ray engine on a real cluster of two nodes, one of which is killed in the middle of a run or of a training."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import posbias as pb
from engine_workloads import Squares
from posbias import UsageError
from posbias.results.records import read_record
from posbias.runs.engines import Local, Ray
from posbias.training.members import TrainingSchedule
from posbias.training.trainer import train_members
from training_cases import assert_same, copier

ray = pytest.importorskip("ray", reason="the ray extra is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(monkeypatch):
    # Nodes find what this process finds; on real machines it is installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    # A GPU of each node is Ray's to lend whether or not it is there; models run on what they find.
    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False}
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    nodes.second = nodes.add_node(num_cpus=1, num_gpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_two_nodes_give_the_bits_of_this_process_and_survive_the_loss_of_one(cluster, tiny_llama, tmp_path):
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("default", model, n_positions=24, count=6)

    def measured(engine):
        return pb.measure(model, prompts, options=pb.MeasureOptions(engine=engine))

    here, there = measured(Local(threads=1)), measured(Ray(threads=1, address=cluster.address))
    for kind in here.per_prompt:
        np.testing.assert_array_equal(here.per_prompt[kind], there.per_prompt[kind])
    np.testing.assert_array_equal(here.mixing, there.mixing)

    with pytest.raises(UsageError, match=r"^the ray cluster has no node with a processor and 2 GPUs for a worker$"):
        list(Ray(threads=1, gpus=2, address=cluster.address).run(Squares(tmp_path), [0]))

    work = Squares(tmp_path, seconds=1.0)
    found, nodes = [], [cluster.second]
    for _, arrays in Ray(threads=1, address=cluster.address).run(work, list(range(12))):
        found.append(arrays)
        if nodes and len({int(arrays["process"][0]) for arrays in found}) == 2:  # both are at work
            cluster.remove_node(nodes.pop(), allow_graceful=False)
    assert sorted(int(arrays["square"][0]) for arrays in found) == [unit**2 for unit in range(12)]
    attempts = [work.attempts(unit) for unit in range(12)]
    assert max(attempts) == 2
    assert sum(attempts) == 13  # the unit that the dead node was at, and no other, is done again
    assert len({int(arrays["process"][0]) for arrays in found}) == 2
    assert os.getpid() not in {int(arrays["process"][0]) for arrays in found}


def test_a_cluster_that_loses_a_node_trains_every_member_to_the_same_bits(cluster, tmp_path):
    members = [copier(target, seed=seed) for target in range(6) for seed in range(2)]
    schedule = TrainingSchedule(steps=400, batch=16, window=10, examples=10)
    here = train_members(members, schedule, options=pb.TrainOptions(stack_size=2))
    engine = Ray(threads=1, address=cluster.address)
    run = pb.TrainOptions(engine=engine, stack_size=2, directory=tmp_path, checkpoint_seconds=0)
    removed = []

    def lose_a_node():
        while not list((tmp_path / "parts").glob("stack-000[0-5].safetensors")):
            time.sleep(0.05)
        cluster.remove_node(cluster.second, allow_graceful=False)
        removed.append(True)

    threading.Thread(target=lose_a_node, daemon=True).start()
    there = train_members(members, schedule, options=run)
    assert removed
    for first, second in zip(here.members, there.members, strict=True):
        assert_same(first, second)


def test_the_command_on_a_cluster_saves_the_arrays_of_the_local_engine(cluster, tiny_llama, tmp_path):
    flags = ("--length", "24", "--count", "4", "--kinds", "jacobian(probes=2),probability", "--threads", "1")
    engines = {"local": (), "ray(gpus=1)": ("--ray-address", cluster.address, "--workers", "2", "--device", "auto")}
    for engine, more in engines.items():
        command = ["-m", "posbias", "measure", str(tiny_llama), *flags, "--engine", engine, *more]
        finished = subprocess.run(
            [sys.executable, *command, "--out", str(tmp_path / engine)], capture_output=True, text=True, check=False
        )
        assert finished.returncode == 0, finished.stderr
    here, there = (read_record(tmp_path / engine) for engine in engines)
    assert (
        there.resolved["measurement"]["engine"] | {"name": "ray", "workers": 2}
        == there.resolved["measurement"]["engine"]
    )
    assert (there.arguments["device"], there.arguments["dtype"]) == ("auto", "auto")
    ran = there.resolved["model"]
    assert (ran["device"], ran["dtype"]) == (here.resolved["model"]["device"], here.resolved["model"]["dtype"])
    assert here.arrays.keys() == there.arrays.keys()
    for name, array in here.arrays.items():
        np.testing.assert_array_equal(there.arrays[name], array, err_msg=name)


def test_a_cluster_that_is_not_there_is_one_line():
    with pytest.raises(UsageError, match=r"no ray cluster at '127\.0\.0\.1:1'") as caught:
        list(Ray(address="127.0.0.1:1").run(Squares(os.curdir), [0]))
    assert "\n" not in str(caught.value)


def test_workers_of_a_cluster_on_this_machine_count_for_its_memory(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert Ray(workers=8).processes_here == 8
    assert Ray(threads=1024).processes_here == 1
    assert Ray(workers=8, address="10.0.0.1:6379").processes_here == 1
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Ray(workers=8).processes_here == 1
