"""What a run is announced to take at most, beside what its processes took: `announced.py --out DIR`.

Every setting is a command of posbias in processes of its own; announced is what it says before it begins, taken is the
sum over its processes of the most that each held (VmHWM). A ratio below 1 is a broken promise. Models are made where
they are measured (a 1.5B GGUF file takes 1.6 GB of disk and 9 GB of memory), but for the demo and for what `--gguf`
names.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from journal import VERB, Table, journal
from random_models import CONFIGS, QWEN, write_config, write_gguf

from posbias.memory import parse_bytes
from posbias.runs.records import Record
from posbias.runs.running import run_directory

PAUSE = 0.01
"""Seconds between two readings of the processes."""
ANNOUNCED = re.compile(r"^estimate: at most (.+?) for ", re.MULTILINE)
EVERY = ("measure --length 256 --count 2", "measure --length 2048 --count 1 --kinds probability --checkpointing")
SETTINGS: dict[str, tuple[str, ...]] = {
    "demo": (
        *EVERY,
        "measure --length 1024 --count 2 --kinds probability",
        "measure --length 256 --count 2 --kinds probability --dtype bfloat16",
        "measure --length 256 --count 4 --kinds probability --workers 2",
        "attention --length 1024 --count 2",
        "decompose --length 256 --count 2 --interventions no_rope",
        "evaluate --task key_value(pairs=10) --positions 0,9 --count 2",
        "audit --length 256 --count 2 --initialisations 1",
    ),
    "gpt2": (
        "measure --length 512 --count 2 --prompts synthetic",
        "attention --length 512 --count 2 --prompts synthetic",
    ),
    "gemma2": ("measure --length 512 --count 2 --kinds probability --prompts synthetic",),
    "gguf": ("measure --length 256 --count 1", "measure --length 256 --count 1 --kinds probability --dtype bfloat16"),
    "named": EVERY,
}
"""By model: what is run on it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SETTINGS, default=[name for name in SETTINGS if name != "named"])
    parser.add_argument("--gguf", type=Path, help="a GGUF file to measure as `named`")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the record of all numbers")
    arguments = parser.parse_args()
    with run_directory(arguments.out, verb=VERB, arguments=vars(arguments)) as run:
        record = Record(verb=VERB, arguments=vars(arguments), scalars={"load_before": os.getloadavg()})
        with journal(record, run.directory) as kept, tempfile.TemporaryDirectory() as folder:
            for name in arguments.models:
                model = source(name, Path(folder), named=arguments.gguf)
                kept.add(name, table(name, model, SETTINGS[name]))


def source(name: str, folder: Path, *, named: Path | None) -> str:
    """What posbias is given as the model."""
    if name in CONFIGS:
        return write_config(name, folder)
    if name == "gguf":
        return str(write_gguf(folder / "qwen2-1.5b.gguf", **QWEN))
    return "demo" if name == "demo" else str(named)


def table(name: str, model: str, settings: Iterable[str]) -> Table:
    """Announced, taken and their ratio, by setting."""
    rows = {}
    for setting in settings:
        verb, *flags = setting.split()
        said, taken = announced_and_taken([verb, model, *flags])
        rows[setting] = {"announced, GB": said / 1e9, "taken, GB": taken / 1e9, "ratio": said / taken}
        print(f"{name}: {setting}: {said / 1e9:.2f} / {taken / 1e9:.2f} = {said / taken:.2f}", flush=True)
    return Table(name, rows)


def announced_and_taken(arguments: list[str]) -> tuple[int, int]:
    """Bytes that posbias says it will take at most, and those its processes held; with its report drawn."""
    with tempfile.TemporaryDirectory() as out:
        errors = Path(out) / "errors"
        with errors.open("w") as file:
            command = [sys.executable, "-m", "posbias", *arguments, "--out", str(Path(out) / "run")]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
            taken = most_held(process.pid)
            code = process.wait()
        text = errors.read_text()
    if code:
        raise RuntimeError(f"posbias {' '.join(arguments)} ended with exit code {code}: {text}")
    return max(parse_bytes(said) for said in ANNOUNCED.findall(text)), taken


def most_held(pid: int) -> int:
    """Sum over a process and its children of the most that each held, read until it ends."""
    held: dict[int, int] = {}
    while True:
        try:
            family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            states = {process.pid: process.status() for process in family}
        except psutil.NoSuchProcess:
            continue
        if states[pid] == psutil.STATUS_ZOMBIE:
            return sum(held.values())
        for each in states:
            held[each] = max(held.get(each, 0), peak_of(each))
        time.sleep(PAUSE)


def peak_of(pid: int) -> int:
    """The most a process has held; 0 where it is gone."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


if __name__ == "__main__":
    main()
