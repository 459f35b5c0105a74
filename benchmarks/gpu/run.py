"""All that users do, on random models of real shapes, beside bare passes and peers: one table, equality first.

`python benchmarks/gpu/run.py` takes the GPU that is there and at most nine minutes; without one it runs the same works
on the smallest real shape, and with `--small` on tiny ones in a minute or two. Each work is first held to what it must
equal, on a tiny shape of its family in float32 on the same device; then it and its floor or peer are timed in turn, and
medians compared. A row that is not equal, fails or finds no time says so; the exit code is 1 if a result was not equal.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "measure"))

import torch
from clock import now
from shapes import random_model
from works import WORKS, Load

from posbias.checks import AUTO
from posbias.errors import RunError, UsageError, one_line
from posbias.models.devices import CPU, accelerators, check_device
from posbias.models.hugging_face import HuggingFaceModel

TABLE = Path(__file__).resolve().parent / "table.json"
SECONDS = 480
"""After which no further row begins, so that all ends within nine minutes."""
ROW_SECONDS = 30
"""After which no row is timed once more."""
REPEATS = 3
COLUMNS = ("work", "shape", "load", "beside", "peer s", "posbias s", "ratio", "target", "met")


@dataclass(frozen=True)
class Case:
    """One row: a work on a family's shape."""

    work: str
    family: str
    size: str
    load: Load
    most_seconds: float | None = None
    """What it may take by the clock."""


@dataclass
class Row:
    """What came of it."""

    case: Case
    peer: str
    target: float | None
    peer_seconds: float | None = None
    seconds: float | None = None
    note: str = ""
    """Why there is no number, or what is wrong; empty: all went well."""

    @property
    def ratio(self) -> float | None:
        """Seconds over the peer's."""
        return None if self.seconds is None or not self.peer_seconds else self.seconds / self.peer_seconds

    @property
    def met(self) -> bool | None:
        """Whether the ratio is within its target, and the seconds within theirs; None without either."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio <= self.target and (self.seconds or 0.0) <= (self.case.most_seconds or math.inf)

    def cells(self) -> list[str]:
        """Texts of the table's columns."""
        load = self.case.load
        numbers = [f"{load.prompts} x {load.positions}" if load.positions else f"{load.prompts} x {load.pairs} pairs"]
        times = [f"{value:.3f}" if value is not None else "-" for value in (self.peer_seconds, self.seconds)]
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        target = "-" if self.target is None else f"{self.target:.2f}"
        target += "" if self.case.most_seconds is None else f", {self.case.most_seconds:g} s"
        met = self.note or {None: "-", True: "yes", False: "no"}[self.met]
        return [self.case.work, f"{self.case.family} {self.case.size}", *numbers, self.peer, *times, ratio, target, met]


GRADIENTS = ("probability gradients", "probability beside captum", "probability beside inseq", "Jacobian, 4 probes")
MIXED = ("answers, mixed lengths", "scoring, mixed lengths")
SHARED = ("answers, shared beginnings", "scoring, shared beginnings")
FORWARD = ("attention statistics", "power rollout")
ROLLED = ("attention rollout", "mean field")
INSIDE = ("method inside the model", "method, mixed lengths")
RETRIEVAL = Load(prompts=24, answer=40, pairs=20)
FULL = [
    *[Case("probability gradients", "llama", "7B", Load(n)) for n in (512, 2048, 8192)],
    *[Case(work, "llama", "7B", Load(2048)) for work in (GRADIENTS[-1], *FORWARD)],
    Case("audit", "llama", "135M", Load(256, prompts=16), most_seconds=20),
    *[Case(work, "llama", "7B", Load(1024, prompts=16)) for work in INSIDE],
    *[Case(work, "llama", "7B", Load(1024, prompts=24, answer=40)) for work in MIXED],
    *[Case(work, "llama", "135M", RETRIEVAL) for work in SHARED],
    *[Case(work, "llama", "135M", Load(640, prompts=48, answer=40)) for work in MIXED],
    Case("fitting a key bias", "llama", "135M", Load(prompts=16, pairs=8)),
    *[Case(work, "llama", "135M", Load(256, prompts=32)) for work in GRADIENTS[::3]],
    *[Case(work, "llama", "135M", Load(512)) for work in (*GRADIENTS[1:3], *ROLLED, FORWARD[-1])],
    *[
        Case(work, family, "1.5B", Load(2048))
        for family in ("qwen3", "gemma3", "bloom")
        for work in (GRADIENTS[0], *FORWARD)
    ],
    *[
        Case(work, family, "1.5B", Load(1024, prompts=16, answer=40))
        for family in ("qwen3", "gemma3", "bloom")
        for work in MIXED
    ],
    *[Case("attention statistics", "llama", "7B", Load(n)) for n in (16_384, 32_768)],
    Case(GRADIENTS[0], "llama", "7B", Load(32_768, checkpointing=True)),
]
ON_CPU = [
    *[Case(work, "llama", "135M", Load(256)) for work in (*GRADIENTS, *FORWARD, *ROLLED)],
    *[Case(GRADIENTS[0], "llama", "narrow", Load(n, prompts=8)) for n in (64, 128, 256)],
    *[Case(work, "llama", "135M", Load(256, prompts=8, answer=16)) for work in MIXED],
    *[Case(work, "llama", "135M", Load(prompts=4, answer=16, pairs=4)) for work in SHARED],
    Case("fitting a key bias", "llama", "135M", Load(prompts=4, pairs=3)),
    *[Case(work, "llama", "135M", Load(256, prompts=4)) for work in INSIDE],
    Case("audit", "llama", "135M", Load(128, prompts=4)),
]
SMALL_LOADS = {
    "answers, mixed lengths": Load(96, prompts=6, answer=8),
    "scoring, mixed lengths": Load(96, prompts=6, answer=8),
    "answers, shared beginnings": Load(prompts=3, answer=8, pairs=3),
    "scoring, shared beginnings": Load(prompts=3, answer=8, pairs=3),
    "fitting a key bias": Load(prompts=4, pairs=3),
    "audit": Load(32, prompts=4),
    "probability gradients": Load(64, prompts=4),
    **dict.fromkeys(INSIDE, Load(64, prompts=4)),
}
OF_FAMILIES = (GRADIENTS[0], *FORWARD, *MIXED, INSIDE[0])
SMALL = [
    *[Case(work, "llama", "small", SMALL_LOADS.get(work, Load(64))) for work in WORKS],
    *[
        Case(work, family, "tiny", SMALL_LOADS.get(work, Load(64)))
        for family in ("qwen3", "gemma3", "bloom")
        for work in OF_FAMILIES
    ],
]


def timed(ours: Callable[[], Any], peer: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Median seconds of each, in turns; the first runs warm up, and count only if there is no time for more."""
    seconds: tuple[list[float], list[float]] = ([], [])
    begun = time.monotonic()
    while len(seconds[0]) <= REPEATS and (time.monotonic() - begun < ROW_SECONDS or not seconds[0]):
        for kept, run in zip(seconds, (ours, peer), strict=True):
            start = now(device)
            run()
            kept.append(now(device) - start)
    ours_after, peers_after = (kept[1:] or kept for kept in seconds)
    return statistics.median(ours_after), statistics.median(peers_after)


class Bench:
    """Models of the shapes, one at a time, and the rows that come of them."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, seconds: float = SECONDS) -> None:
        self.device, self.dtype = device, dtype
        self.until = time.monotonic() + seconds
        self._checked: dict[tuple[str, str], str] = {}
        self._model: tuple[tuple[str, str], HuggingFaceModel] | None = None

    def row(self, case: Case) -> Row:
        """Hold one case to what it must equal, then time it."""
        work = WORKS[case.work]
        row = Row(case, work.peer, work.on_cpu if self.device.type == "cpu" else work.target)
        if work.package and util.find_spec(work.package) is None:
            return replace(row, note=f"{work.package} is not installed")
        if time.monotonic() > self.until:
            return replace(row, note="no time left")
        row.note = self.unequal(case.work, case.family)
        if row.note:
            return row
        try:
            pair = work.pair(self.model(case), case.load)
            row.seconds, peer = timed(pair.ours, pair.peer, self.device)
            row.peer_seconds = peer * pair.passes
        except (RunError, UsageError, torch.OutOfMemoryError) as error:
            row.note = f"fails: {one_line(error)[:80]}"
        return row

    def unequal(self, name: str, family: str) -> str:
        """What is wrong with a work on a family; empty if nothing is. Each is tried once."""
        if (name, family) not in self._checked:
            work = WORKS[name]
            model = random_model(family, "tiny", device=self.device, dtype=torch.float32)
            try:
                work.check(model, work.load)
                self._checked[name, family] = ""
            except AssertionError as error:
                self._checked[name, family] = f"unequal: {' '.join(str(error).split())[:80]}"
            except (RunError, UsageError) as error:
                self._checked[name, family] = f"fails: {one_line(error)[:80]}"
        return self._checked[name, family]

    def model(self, case: Case) -> HuggingFaceModel:
        """The model of a case; the one before is let go first."""
        key = (case.family, case.size)
        if self._model is None or self._model[0] != key:
            self._model = None
            if self.device.type != "cpu":
                torch.accelerator.memory.empty_cache()
            self._model = key, random_model(*key, device=self.device, dtype=self.dtype)
        return self._model[1]


def table(rows: list[Row]) -> str:
    """All rows, columns aligned."""
    cells = [list(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def document(rows: list[Row], facts: dict[str, Any]) -> dict[str, Any]:
    """The table and what it depends on, for a JSON file."""
    entries = [
        {**asdict(row), "ratio": row.ratio, "met": row.met, "equal": not row.note.startswith("unequal")} for row in rows
    ]
    return {**facts, "rows": entries}


def facts_of(device: torch.device, dtype: torch.dtype, *, small: bool) -> dict[str, Any]:
    """Device, precision, versions, date."""
    name = f"{device.type}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "shapes": "tiny" if small else "real",
        "packages": {package: metadata.version(package) for package in ("posbias", "torch", "transformers")},
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default=AUTO)
    parser.add_argument("--small", action="store_true", help="tiny shapes in float32")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), metavar="WORK")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no further row begins")
    parser.add_argument("--out", type=Path, default=TABLE, help="JSON of the table")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = check_device(given.device) or next(accelerators(), CPU)
    if device == CPU:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dtype = torch.float32 if given.small or device == CPU else torch.bfloat16
    bench = Bench(device, dtype, seconds=given.seconds)
    rows = []
    for case in SMALL if given.small else ON_CPU if device == CPU else FULL:
        if case.work in given.works:
            rows.append(bench.row(case))
            print("  ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    facts = facts_of(device, dtype, small=given.small)
    print(", ".join(f"{key} {value}" for key, value in facts.items() if key != "packages"))
    print(table(rows))
    given.out.write_text(json.dumps(document(rows, facts), indent=1))
    raise SystemExit(int(any(row.note.startswith("unequal") for row in rows)))


if __name__ == "__main__":
    main()
