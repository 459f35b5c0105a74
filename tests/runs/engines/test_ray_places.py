"""How many workers the Ray engine gives a cluster by its processors and GPUs; test_ray.py has a real one."""

from types import SimpleNamespace

import pytest

from posbias import UsageError
from posbias.runs.engines import Ray


def cluster(*nodes):
    """As much of Ray as tells its nodes' processors and GPUs."""
    offers = [{"Alive": True, "Resources": {"CPU": processors, "GPU": gpus}} for processors, gpus in nodes]
    return SimpleNamespace(nodes=lambda: offers)


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
def test_as_many_workers_as_there_is_room_for(nodes, engine, workers):
    assert engine._places(cluster(*nodes)) == (workers, 1)


def test_a_cluster_without_so_many_gpus_is_one_line():
    with pytest.raises(UsageError, match=r"^the ray cluster has no room for a worker with 1 processors and 2 GPUs$"):
        Ray(threads=1, gpus=2)._places(cluster((4, 1), (4, 1)))
