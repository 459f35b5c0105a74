"""Times and memory of several methods in one run: interleaved, medians, the peak of a fresh process."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from subject import Size

HERE = Path(__file__).resolve().parent


def now(device: torch.device) -> float:
    """Seconds: the processor's own, or the clock's once an accelerator has done what it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def interleaved(methods: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median processor seconds of each method; one of each per round, so that all see the same machine.

    Processor time, not the clock's: another process that takes the core away does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, run in methods.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def extra_megabytes(method: str, n_positions: int, size: Size) -> float:
    """Peak memory of a fresh process over what it holds when model, libraries and a short pass are done."""
    command = [sys.executable, str(HERE / "peak.py"), method, str(n_positions), json.dumps(asdict(size))]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE).stdout
    return float(json.loads(shown.splitlines()[-1])["extra_megabytes"])
