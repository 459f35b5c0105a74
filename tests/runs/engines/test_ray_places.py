"""The Ray engine beside a pretended cluster: its workers, and what each reserves; test_ray.py has a real one."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from engine_workloads import Squares
from posbias import UsageError
from posbias.runs.engines import Local, Ray


class PretendedRay:
    """As much of Ray as the engine calls; tasks are done in this process when they are waited for."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, *nodes):
        self.offers, self.most, self.reserved = nodes, 0, {}

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": dict(zip(("CPU", "GPU"), offer, strict=True))} for offer in self.offers]

    def put(self, packed):
        return packed

    def remote(self, function):
        def options(**wanted):
            self.reserved = wanted
            return SimpleNamespace(remote=lambda *arguments: partial(function, *arguments))

        return SimpleNamespace(options=options)

    def wait(self, calls, *, num_returns, timeout):
        self.most = max(self.most, len(calls))
        return calls[-num_returns:], calls[:-num_returns]

    def get(self, call):
        return call()


@pytest.fixture
def cluster(monkeypatch):
    def of(*nodes):
        pretended = PretendedRay(*nodes)
        monkeypatch.setitem(sys.modules, "ray", pretended)
        return pretended

    return of


@pytest.mark.parametrize(
    ("nodes", "engine", "workers"),
    [
        (((4, 1), (4, 1)), Ray(threads=1, gpus=1), 2),
        (((4, 1), (4, 1)), Ray(threads=1, gpus=0.5), 4),
        (((4, 1), (4, 0)), Ray(threads=1, gpus=1), 1),
        (((2, 0), (2, 0)), Ray(threads=1), 4),
        (((4, 2), (4, 2)), Ray(threads=1, gpus=1, workers=3), 3),
    ],
)
def test_every_worker_reserves_its_gpus_and_the_numbers_are_those_of_this_process(
    cluster, tmp_path, nodes, engine, workers
):
    pretended, units = cluster(*nodes), list(range(9))
    found = dict(engine.run(Squares(tmp_path), units))
    assert (pretended.most, pretended.reserved["num_gpus"], pretended.reserved["num_cpus"]) == (workers, engine.gpus, 1)
    here = dict(Local().run(Squares(tmp_path), units))
    assert found.keys() == here.keys()
    for unit, arrays in here.items():
        np.testing.assert_array_equal(found[unit]["square"], arrays["square"])


def test_a_cluster_without_so_many_gpus_is_one_line(cluster, tmp_path):
    cluster((4, 1), (4, 1))
    with pytest.raises(UsageError, match=r"^the ray cluster has no room for a worker with 1 processors and 2 GPUs$"):
        list(Ray(threads=1, gpus=2).run(Squares(tmp_path), [0]))
