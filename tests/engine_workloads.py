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
    doomed: tuple[int, ...] = ()
    """Units whose worker is killed at every attempt."""
    wrong: tuple[int, ...] = ()
    """Units that raise UsageError."""
    broken: tuple[int, ...] = ()
    """Units that raise RunError."""
    dies_preparing: bool = False
    seconds: float = 0.0
    description: str = "squares"

    def prepare(self) -> Any:
        (self.folder / f"open-{os.getpid()}").touch()
        atexit.register((self.folder / f"open-{os.getpid()}").unlink, missing_ok=True)
        if self.dies_preparing:
            os.kill(os.getpid(), signal.SIGKILL)
        return "prepared"

    def compute(self, prepared: Any, unit: int) -> dict[str, np.ndarray]:
        assert prepared == "prepared"
        with (self.folder / str(unit)).open("a") as marks:
            marks.write("x")
        if unit in self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        if unit in self.wrong:
            raise UsageError(f"unit {unit} is wrong;\nreally")
        if unit in self.broken:
            raise RunError(f"unit {unit} is broken")
        time.sleep(self.seconds)
        return {"square": np.array([unit * unit]), "process": np.array([os.getpid()])}

    def attempts(self, unit: int) -> int:
        return len((self.folder / str(unit)).read_text())
