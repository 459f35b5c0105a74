"""Stacks of a study on a Ray cluster of two nodes, one of which is killed in the middle."""

import os
import sys
import threading
import time

import pytest

from posbias import TrainOptions
from posbias.runs.engines import Ray
from posbias.training.members import TrainingSchedule
from posbias.training.trainer import train_members
from training_cases import assert_same, copier

ray = pytest.importorskip("ray", reason="the ray extra is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

OPTIONS = TrainingSchedule(steps=400, batch=16, window=10, examples=10)


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    nodes = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.second = nodes.add_node(num_cpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_a_cluster_that_loses_a_node_trains_every_member_to_the_same_bits(cluster, tmp_path):
    members = [copier(target, seed=seed) for target in range(6) for seed in range(2)]
    here = train_members(members, OPTIONS, options=TrainOptions(stack_size=2))
    run = TrainOptions(
        engine=Ray(threads=1, address=cluster.address),
        stack_size=2,
        directory=tmp_path,
        checkpoint_seconds=0,
    )
    removed = []

    def lose_a_node():
        while not list((tmp_path / "parts").glob("stack-000[0-5].safetensors")):
            time.sleep(0.05)
        cluster.remove_node(cluster.second, allow_graceful=False)
        removed.append(True)

    threading.Thread(target=lose_a_node, daemon=True).start()
    there = train_members(members, OPTIONS, options=run)
    assert removed
    for first, second in zip(here.members, there.members, strict=True):
        assert_same(first, second)
