"""Units done on a Ray cluster: tasks spread over the nodes, whose processes each prepare once; an optional extra.

A node or worker that dies costs the units it was at; Ray tries them again on what is left of the cluster. The nodes
must be able to load what the workload names (a hub id, or a path that all of them share) and to import posbias.
"""

import os
import pickle
import socket
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.checks import check_size, check_whole
from posbias.errors import RunError, UsageError
from posbias.limits import REPEATS
from posbias.runs.engines.engine import ENGINES, Arrays, Engine, Workload, compute_packed, library_environment

REACH_SECONDS = 10.0
"""How long a cluster's address may take to answer."""
PLACE_SECONDS = 300.0
"""How often the cluster is asked whether it still has room, while nothing gets finished."""


@ENGINES.register("ray")
@dataclass(frozen=True)
class Ray(Engine):
    """A Ray cluster: the one at `address`, or one started on this machine for the run."""

    workers: int | None = None
    """Units done at a time, >= 1; None: as many as the cluster has room for."""
    address: str | None = None
    """"host:port", "ray://host:port" or "auto"; None: $RAY_ADDRESS, else a cluster on this machine."""
    gpus: float = 0
    """Graphics processors that each worker reserves, >= 0."""
    retries: int = 2
    """How often a unit is tried again after its worker died, >= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None:
            check_whole("ray: workers", self.workers, least=1)
        check_size("ray: retries", self.retries, REPEATS, least=0)
        if not self.gpus >= 0:
            raise UsageError(f"ray: gpus must be a number >= 0, got {self.gpus!r}")

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[tuple[int, Arrays]]:
        """See `Engine.run`."""
        if not units:
            return
        with _connected(self.address) as ray:
            places, cpus = _places(ray, self)
            compute = ray.remote(_computed).options(
                num_cpus=cpus,
                num_gpus=self.gpus,
                max_retries=self.retries,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": library_environment()},
            )
            packed, waiting = ray.put(pickle.dumps(workload)), deque(units)
            calls: dict[Any, int] = {}
            try:
                while waiting or calls:
                    while waiting and len(calls) < places:
                        unit = waiting.popleft()
                        calls[compute.remote(packed, self.pinned_threads, unit)] = unit
                    ready, _ = ray.wait(list(calls), num_returns=1, timeout=PLACE_SECONDS)
                    if not ready:
                        _places(ray, self)  # refuses what is left of the cluster if it has no room any more
                        continue
                    yield calls.pop(ready[0]), _received(ray, ready[0])
            finally:
                for call in calls:
                    ray.cancel(call, force=True)

    @property
    def processes_here(self) -> int:
        """Those of a cluster that is started here for the run; of another one nothing is known."""
        if self.address is not None or os.environ.get("RAY_ADDRESS"):
            return 1
        return self.workers or max(1, (os.cpu_count() or 1) // self.pinned_threads)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**super().describe(), "workers": self.workers}


def _computed(packed: bytes, threads: int, unit: int) -> dict[str, np.ndarray] | Exception:
    """As `compute_packed`; errors are handed over, since Ray would raise its own in their place."""
    try:
        return compute_packed(packed, threads, unit)
    except Exception as error:
        return error


def _received(ray: Any, call: Any) -> Arrays:
    """The result of a finished task."""
    try:
        content = ray.get(call)
    except ray.exceptions.RayError as error:
        raise RunError(
            f"a worker of the cluster died over a unit each time it was tried ({type(error).__name__}); what is "
            "finished is kept if the run has a directory, and --resume goes on from there"
        ) from None
    if isinstance(content, Exception):
        raise content
    # Copies: what Ray hands over lies in a store that goes with the cluster.
    return {name: np.array(array) for name, array in content.items()}


def _places(ray: Any, engine: Ray) -> tuple[int, float]:
    """Workers to use, and processors that each reserves: its threads, if every node has that many."""
    offers = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    if not offers:
        raise UsageError("the ray cluster has no node with a processor; start one with `ray start`")
    cpus = min(engine.pinned_threads, *(offer["CPU"] for offer in offers))
    room = int(sum(offer["CPU"] // cpus for offer in offers))
    if engine.gpus:
        room = min(room, int(sum(offer.get("GPU", 0) // engine.gpus for offer in offers)))
    if room < 1:
        raise UsageError(f"the ray cluster has no room for a worker with {cpus:g} processors and {engine.gpus:g} GPUs")
    return engine.workers or room, cpus


def _check_reachable(address: str | None) -> None:
    """Refuse a host that does not answer at once; Ray itself would try for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no ray cluster at {address!r}: {error}") from None


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The ray module, connected; a connection that was there before stays."""
    try:
        import ray
    except ImportError:
        raise UsageError("engine ray needs the ray package: pip install 'posbias[ray]'") from None
    if ray.is_initialized():
        yield ray
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        started_here = {"include_dashboard": False} if address is None else {}
        _check_reachable(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **started_here)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UsageError(f"no ray cluster at {address or 'this machine'!r}: {reason[:200]}") from None
    try:
        yield ray
    finally:
        ray.shutdown()
