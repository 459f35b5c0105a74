"""Peak memory of one method in this process over its memory after loading: `peak.py METHOD N_POSITIONS SIZE`.

SIZE is a `Size` as JSON. The clock starts this file in a process of its own.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gradients
import torch
from subject import Size, random_llama, random_prompts

import attention

SHORT = 16


def megabytes(name: str) -> float:
    """A line of this process's status: VmRSS (now) or VmHWM (the highest)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def extra_megabytes(method: str, n_positions: int, size: Size) -> float:
    """What running the method adds at most to what the process holds after a short pass."""
    model = random_llama(size, attention="eager" if method in attention.EAGER else "sdpa")
    build = {**gradients.METHODS, **attention.METHODS}[method]
    build(model, random_prompts(1, SHORT))()
    run = build(model, random_prompts(1, n_positions))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = megabytes("VmRSS")
    run()
    return megabytes("VmHWM") - before


def main() -> None:
    method, n_positions, size = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    extra = extra_megabytes(method, int(n_positions), Size(**json.loads(size)))
    print(json.dumps({"extra_megabytes": extra}))


if __name__ == "__main__":
    main()
