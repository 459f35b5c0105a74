"""What measuring costs, beside the bare passes and beside captum, inseq, transformers' matrices and jacrev.

Run `python benchmarks/measure/run.py --out runs/measuring` in an environment with the `bench` extra; peers that are not
installed are left out. In every part the methods' results are asserted equal first, memory's at the shortest length;
then they are timed in turn, and the median of each is set beside the floor's. The record in `--out` has every number.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gradients
import torch
from journal import VERB, journal
from parts import PARTS, Plan

from posbias.errors import UsageError
from posbias.results.records import Record
from posbias.runs.running import run_directory


def main() -> None:
    arguments = parsed()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    plan = Plan(lengths=tuple(arguments.lengths), repeats=arguments.repeats, methods=chosen(arguments.methods))
    for name in left_out(arguments.methods):
        print(f"left out: {name} ({gradients.PACKAGES[name]} is not installed)")
    try:
        run(plan, arguments.parts, arguments=vars(arguments), out=arguments.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=list(Plan.lengths), help="of the gradient profiles and their memory"
    )
    parser.add_argument("--repeats", type=int, default=Plan.repeats, help="timed runs of every method")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=gradients.METHODS,
        default=list(gradients.METHODS),
        help="of the gradient profiles and their memory; the floor always runs",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the record of all numbers")
    return parser.parse_args()


def chosen(names: list[str]) -> tuple[str, ...]:
    """The methods that run: those asked for and installed, and the floor."""
    return tuple(name for name in gradients.METHODS if name == "floor" or (name in names and gradients.installed(name)))


def left_out(names: list[str]) -> list[str]:
    """The peers asked for that are not installed."""
    return [name for name in names if not gradients.installed(name)]


def run(plan: Plan, parts: list[str], *, arguments: Mapping[str, Any], out: Path | None) -> Record:
    """Every table of the parts, printed as they come; the record of them all, also in `out`."""
    threads = torch.get_num_threads()
    load = os.getloadavg()
    resolved = {**asdict(plan), "parts": parts, "threads": threads}
    peers = {name: version(name) for name in sorted(set(gradients.PACKAGES.values()))}
    with run_directory(out, verb=VERB, arguments=arguments) as opened:
        record = Record(verb=VERB, arguments=dict(arguments), resolved=resolved, scalars={"load_before": load})
        record.environment["packages"] |= peers
        header(record.environment["packages"], threads=threads, load=load)
        with journal(record, opened.directory) as kept:
            for part in parts:
                for table in PARTS[part](plan):
                    kept.add(part, table)
    return record


def version(package: str) -> str | None:
    """Of an installed package, else None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def header(packages: Mapping[str, str | None], *, threads: int, load: tuple[float, float, float]) -> None:
    """Versions, threads and load: what the numbers depend on."""
    shown = ("torch", "transformers", "captum", "inseq")
    versions = ", ".join(f"{name} {packages[name]}" for name in shown if packages[name])
    loads = ", ".join(f"{value:.1f}" for value in load)
    print(f"{versions}; threads {threads}, cores {os.cpu_count()}; load before {loads}")
    print("seconds are processor time, medians of interleaved runs", flush=True)


if __name__ == "__main__":
    main()
