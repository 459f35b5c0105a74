"""Workloads for the engines' tests, importable in worker processes too."""

import atexit
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posbias import RunError, UsageError


@dataclass(frozen=True)
class Squares:
    """Unit k gives k squared and its process; what happens on the way is told by the fields."""

    folder: Path
    """Where attempts leave a mark."""
    killed: tuple[int, ...] = ()
    """Units whose worker is killed at the first attempt."""
    doomed: tuple[int, ...] = ()
    """Units whose worker is killed at every attempt."""
    wrong: tuple[int, ...] = ()
    """Units that raise UsageError."""
    broken: tuple[int, ...] = ()
    """Units that raise RunError."""
    dies_preparing: bool = False
    prepares: int | None = None
    """How many workers may be prepared before all further ones die of it; None: any number."""
    seconds: float = 0.0
    description: str = "squares"

    def prepare(self) -> Any:
        (self.folder / f"open-{os.getpid()}").touch()
        atexit.register((self.folder / f"open-{os.getpid()}").unlink, missing_ok=True)
        if self.dies_preparing:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.prepares is not None:
            (self.folder / f"preparing-{os.getpid()}").touch()
            places = [self.folder / f"place-{index}" for index in range(self.prepares)]
            if not any(_take(place) for place in places):
                os.kill(os.getpid(), signal.SIGKILL)
        return "prepared"

    def compute(self, prepared: Any, unit: int) -> dict[str, np.ndarray]:
        assert prepared == "prepared"
        first = not (self.folder / str(unit)).exists()
        with (self.folder / str(unit)).open("a") as marks:
            marks.write("x")
        if unit in self.doomed or (first and unit in self.killed):
            os.kill(os.getpid(), signal.SIGKILL)
        if unit in self.wrong:
            raise UsageError(f"unit {unit} is wrong;\nreally")
        if unit in self.broken:
            raise RunError(f"unit {unit} is broken")
        time.sleep(self.seconds)
        return {"square": np.array([unit * unit]), "process": np.array([os.getpid()])}

    def attempts(self, unit: int) -> int:
        return len((self.folder / str(unit)).read_text())

    def begun(self) -> int:
        """Workers that began to prepare."""
        return len(list(self.folder.glob("preparing-*")))


@dataclass(frozen=True)
class Variables:
    """Whether the process that does a unit has variables in its environment, and something in them."""

    names: tuple[str, ...]
    description: str = "variables"

    def prepare(self) -> Any:
        return None

    def compute(self, _prepared: Any, _unit: int) -> dict[str, np.ndarray]:
        return {"there": np.array([bool(os.environ.get(name)) for name in self.names])}


def _take(place: Path) -> bool:
    """Whether this process is the first to take a place."""
    try:
        place.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
