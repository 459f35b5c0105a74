"""Units done on a Ray cluster: actors that each prepare once, spread over the nodes; an optional extra.

A node or worker that dies costs the units it was at; they are tried again on what is left of the cluster. The nodes
must be able to load what the workload names (a hub id, or a path that all of them share) and to import posbias.
"""

import os
import pickle
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from posbias.checks import check_whole
from posbias.errors import RunError, UsageError
from posbias.runs.engines.engine import (
    ENGINES,
    OF_THE_HUB,
    Engine,
    Outcome,
    Queue,
    Starts,
    Workload,
    keys_of_environment,
    library_environment,
    pinned,
)
from posbias.runs.engines.local import answer, prepare_packed, unpack

REACH_SECONDS = 10.0
"""How long a cluster's address may take to answer."""
PLACE_SECONDS = 300.0
"""How long to wait for the cluster to place and prepare a worker while no other works."""


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None:
            check_whole("ray: workers", self.workers, least=1)
        if not self.gpus >= 0:
            raise UsageError(f"ray: gpus must be a number >= 0, got {self.gpus!r}")

    def run(self, workload: Workload, units: Sequence[int], *, prepared: Any = None) -> Iterator[Outcome]:
        """See `Engine.run`."""
        if not units:
            return
        with _connected(self.address) as ray:
            yield from _Actors(ray, workload, Queue(units, self.retries), self).run()

    @property
    def processes_here(self) -> int:
        """Those of a cluster that is started here for the run; of another one nothing is known."""
        if self.address is not None or os.environ.get("RAY_ADDRESS"):
            return 1
        return self.workers or max(1, (os.cpu_count() or 1) // self.pinned_threads)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**super().describe(), "workers": self.workers}


class _Served:
    """The content of an actor."""

    def __init__(self, packed: bytes, threads: int) -> None:
        self._packed, self._threads = packed, threads

    def prepare(self) -> tuple[str, Any]:
        self._workload, self._prepared, reply = prepare_packed(self._packed)
        return reply

    def compute(self, unit: int) -> tuple[str, Any]:
        with pinned(self._threads):
            return answer(self._workload, self._prepared, unit)


class _Actors:
    def __init__(self, ray: Any, workload: Workload, queue: Queue, engine: Ray) -> None:
        self._ray = ray
        self._queue = queue
        places, cpus = _places(ray, engine)
        self._starts = Starts(places)
        self._remote = ray.remote(_Served).options(
            num_cpus=cpus,
            num_gpus=engine.gpus,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            # Variables can be set there, not taken away.
            runtime_env={"env_vars": library_environment() | dict.fromkeys(keys_of_environment(*OF_THE_HUB), "")},
        )
        self._threads = engine.pinned_threads
        self._packed = ray.put(pickle.dumps(workload))
        self._calls: dict[Any, tuple[Any, int | None]] = {}
        """By the answer that is waited for: the actor, and its unit (None while it prepares)."""

    def run(self) -> Iterator[Outcome]:
        """All outcomes; every actor is gone afterwards, however this ends."""
        try:
            while self._queue or self._busy():
                while len(self._calls) < min(self._starts.wanted(len(self._calls)), len(self._queue) + self._busy()):
                    actor = self._remote.remote(self._packed, self._threads)
                    self._calls[actor.prepare.remote()] = (actor, None)
                patience = None if self._busy() else PLACE_SECONDS
                ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=patience)
                if not ready:
                    raise RunError(f"ray placed no worker within {PLACE_SECONDS:.0f} s; is there room on the cluster?")
                outcome = self._hear(ready[0])
                if outcome is not None:
                    yield outcome
        finally:
            for actor, _ in self._calls.values():
                self._ray.kill(actor)

    def _busy(self) -> int:
        return sum(unit is not None for _, unit in self._calls.values())

    def _hear(self, reference: Any) -> Outcome | None:
        """One answer of an actor, or its death; the actor gets its next unit, or goes."""
        actor, unit = self._calls.pop(reference)
        try:
            reply = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return self._lose(actor, unit, error)
        try:
            content = unpack(reply)
        except BaseException:
            self._ray.kill(actor)
            raise
        if unit is None:
            self._starts.succeeded()
        if self._queue:
            following = self._queue.popleft()
            self._calls[actor.compute.remote(following)] = (actor, following)
        else:
            self._ray.kill(actor)
        if unit is None:
            return None
        # Copies: what Ray hands over lies in a store that goes with the cluster.
        return Outcome(unit, {name: np.array(array) for name, array in content.items()})

    def _lose(self, actor: Any, unit: int | None, error: Exception) -> Outcome | None:
        """An actor or its node has died: over a unit, which is tried again, or while preparing."""
        self._ray.kill(actor)
        reason = type(error).__name__
        if unit is not None:
            self._starts.make_room(len(self._calls))
            return self._queue.lose(unit, reason)
        self._starts.failed(reason, remaining=len(self._calls))
        return None


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
