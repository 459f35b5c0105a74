"""The Ray engine beside a pretended cluster: its workers, and what each reserves; test_ray.py has a real one."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from engine_workloads import Squares
from posbias import UsageError
from posbias.runs.engines import Local, Ray


class Reference:
    """The answer of an actor, or its error."""

    def __init__(self, call, arguments):
        self.call, self.arguments = call, arguments


class PretendedRay:
    """As much of Ray as the engine calls; actors live in this process and work when they are waited for."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, *nodes):
        self.offers, self.alive, self.most, self.reserved = nodes, set(), 0, {}

    def is_initialized(self):
        return True

    def nodes(self):
        return [{"Alive": True, "Resources": dict(zip(("CPU", "GPU"), offer, strict=True))} for offer in self.offers]

    def put(self, packed):
        return packed

    def remote(self, served):
        def options(**wanted):
            self.reserved = wanted
            return SimpleNamespace(remote=lambda *arguments: self._actor(served(*arguments)))

        return SimpleNamespace(options=options)

    def _actor(self, content):
        actor = SimpleNamespace()
        for name in ("prepare", "compute"):
            call = getattr(content, name)
            setattr(actor, name, SimpleNamespace(remote=lambda *arguments, call=call: Reference(call, arguments)))
        self.alive.add(id(actor))
        self.most = max(self.most, len(self.alive))
        return actor

    def wait(self, references, *, num_returns, timeout):
        return references[-num_returns:], references[:-num_returns]

    def get(self, reference):
        return reference.call(*reference.arguments)

    def kill(self, actor):
        self.alive.discard(id(actor))


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
    found = {outcome.unit: outcome.arrays["square"] for outcome in engine.run(Squares(tmp_path), units)}
    assert (pretended.most, pretended.reserved["num_gpus"], pretended.reserved["num_cpus"]) == (workers, engine.gpus, 1)
    assert not pretended.alive
    here = {outcome.unit: outcome.arrays["square"] for outcome in Local().run(Squares(tmp_path), units)}
    assert found.keys() == here.keys()
    for unit, square in here.items():
        np.testing.assert_array_equal(found[unit], square)


def test_a_cluster_without_so_many_gpus_is_one_line(cluster, tmp_path):
    cluster((4, 1), (4, 1))
    with pytest.raises(UsageError, match=r"^the ray cluster has no room for a worker with 1 processors and 2 GPUs$"):
        list(Ray(threads=1, gpus=2).run(Squares(tmp_path), [0]))
