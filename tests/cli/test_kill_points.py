"""Runs killed at every change of the disk: what is there can be read, and `--resume` finishes it.

The same bits as an undisturbed run, nothing done twice, nothing left behind.
"""

import itertools
import math
import random
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import without_notes
from crashing import TAKING, Nursery, Outcome
from posbias.files import TEMPORARY
from posbias.results.records import Record, read_record
from posbias.runs.running import LOCK_FILE

SHORT = "--length 16 --count 2 --kinds probability"
STUDY = """
task: position_copy(target=0, context=6, vocabulary=5)
model: {depth: 1, width: 8, residual: none}
train: {steps: 8, batch: 8, window: 4, examples: 5}
grid: {task.target: [0, 5]}
"""
BEHAVIOUR = "audit-with-behaviour"
ASKED = "key_value(pairs=4)"


@dataclass(frozen=True)
class Case:
    """A command that writes a run, and what reads one."""

    command: str
    """Words; TINY, LONG and STUDY stand for the models and the study, WHOLE for the undisturbed runs."""
    readers: tuple[str, ...] = ("report OUT", "report OUT --out ELSE")
    """Words likewise; OUT is what the killed run left."""
    resumes: bool = True
    before: str = ""
    """A command that has filled the directory; what it left is there until the new run replaces it."""
    needs: tuple[str, ...] = ()
    """Cases whose undisturbed runs are read, as WHOLE/CASE."""


COMPARED = ("report OUT", "report OUT --out ELSE", "compare OUT OUT --kind probability")
PLACED = ("report OUT", "place --run OUT --scores 0.9,0.4,0.1")
CASES = {
    "measure": Case(f"measure TINY {SHORT} --threads 1", COMPARED),
    "measure-over-another-run": Case(
        f"measure TINY {SHORT} --threads 1", COMPARED, before="attention TINY --length 16 --count 2"
    ),
    "audit": Case(f"audit TINY {SHORT} --threads 1 --initialisations 1", COMPARED),
    BEHAVIOUR: Case(
        f"audit LONG {SHORT} --threads 1 --initialisations 0 --behaviour {ASKED} --behaviour-count 2 "
        "--behaviour-positions 0,3 --behaviour-kinds probability --behaviour-max-tokens 1",
        (*COMPARED, "report OUT/behaviour", "place --run OUT --scores 0.9,0.4", "correlate OUT OUT"),
    ),
    "decompose": Case(f"decompose TINY {SHORT} --interventions no_rope"),
    "evaluate": Case(f"evaluate LONG --task {ASKED} --count 6 --positions 0,3 --max-tokens 1 --recovery", PLACED),
    "evaluate-over-another-run": Case(
        f"evaluate LONG --task {ASKED} --count 6 --positions 0,3 --max-tokens 1",
        PLACED,
        before=f"evaluate LONG --task {ASKED} --count 3 --max-tokens 1 --no-score",
    ),
    "mitigate": Case(
        f"mitigate LONG --task {ASKED} --positions 0,3 --count 2 --calibration 4 --no-generate "
        "--methods key_bias,adapter --fit steps=2 --documents 1 --no-short"
    ),
    "train": Case("train STUDY --threads 1"),
    "train-over-another-run": Case("train STUDY --threads 1", before=f"measure TINY {SHORT}"),
    "attention": Case("attention TINY --length 16 --count 2", resumes=False),
    "predict": Case("predict --depth 2 --length 16", (*COMPARED[:2], "compare OUT OUT"), resumes=False),
    "verify": Case("verify wu2025/theorem-4.1", resumes=False),
    "place": Case("place --run WHOLE/evaluate --scores 0.9,0.4,0.1", resumes=False, needs=("evaluate",)),
    "compare": Case("compare WHOLE/measure WHOLE/audit", resumes=False, needs=("measure", "audit")),
    "correlate": Case(f"correlate WHOLE/{BEHAVIOUR}", ("report OUT",), resumes=False, needs=(BEHAVIOUR,)),
    "report": Case("report WHOLE/measure WHOLE/audit", (), resumes=False, needs=("measure", "audit")),
    "reproduce": Case("reproduce icl-2502.01951 --size smoke --study depth --threads 1"),
}
VOLATILE = {"cost": 0, "cost_of_influence": 0, "reused": 0, "seconds": 0}
"""Scalars that depend on time, or on what was interrupted."""
ROUNDING = {"behaviour": 1e-6}
"""By the place of a record below a run: by how much scores of samples differ that were read in one pass with others
and, after a kill between them, alone."""
KILLED = -9
FAST = {"measure": 1, "audit": 1, "evaluate": 1, "train": 1, "mitigate": 1}
"""How many points of some cases belong to the ordinary suite."""


@dataclass(frozen=True)
class Whole:
    """An undisturbed run."""

    directory: Path
    outcome: Outcome

    @property
    def points(self) -> int:
        """Changes of the disk that it makes."""
        return len(self.outcome.changes)


class Bench:
    """Models, undisturbed runs and the process to run commands in."""

    def __init__(self, root: Path, models: dict[str, Path]) -> None:
        (root / "study.yaml").write_text(STUDY)
        self.root = root
        self.words = {**{name: str(path) for name, path in models.items()}, "STUDY": str(root / "study.yaml")}
        self.words["WHOLE"] = str(root / "whole")
        self.wholes: dict[str, Whole] = {}
        self.nursery = Nursery()
        self.read: set[tuple[str, frozenset[tuple[str, int]]]] = set()
        """States that readers have met: by case, names and sizes of the files that they may see."""

    def words_of(self, command: str, **places: Path) -> list[str]:
        """The words of a command, with what stands for models and directories replaced."""
        known = {**self.words, **{name: str(path) for name, path in places.items()}}
        words = []
        for word in command.split():
            stem, slash, rest = word.partition("/")
            words.append(known.get(stem, stem) + slash + rest)
        return words

    def run(self, name: str, out: Path, *, resume: bool = False, **limits: Any) -> Outcome:
        """The command of a case into a directory."""
        case = CASES[name]
        command = [*self.words_of(case.command), "--out", str(out)]
        if resume and case.resumes:
            command.append("--resume")
        elif name != "report" and (case.before or resume):  # finished work that lies there is to be replaced
            command.append("--overwrite")
        return self.nursery.run(command, watched=out, **limits)

    def fill(self, name: str, out: Path) -> None:
        """What lay in the directory before."""
        shutil.rmtree(out, ignore_errors=True)
        if CASES[name].before:
            outcome = self.nursery.run([*self.words_of(CASES[name].before), "--out", str(out)])
            assert [each.code for each in outcome.ended] == [0], outcome

    def whole(self, name: str) -> Whole:
        """The undisturbed run of a case, made once."""
        for needed in CASES[name].needs:
            self.whole(needed)
        if name not in self.wholes:
            out = self.root / "whole" / name
            self.fill(name, out)
            outcome = self.run(name, out)
            assert [each.code for each in outcome.ended] == [0], outcome
            self.wholes[name] = Whole(out, outcome)
        return self.wholes[name]


@pytest.fixture(scope="module")
def bench(tmp_path_factory, tiny_llama, long_llama) -> Iterator[Bench]:
    root = tmp_path_factory.mktemp("killed")
    (root / "whole").mkdir()
    made = Bench(root, {"TINY": tiny_llama, "LONG": long_llama})
    yield made
    made.nursery.close()


def pieces(directory: Path) -> set[str]:
    """Finished pieces, below a directory and the runs in it."""
    return {str(path.relative_to(directory)) for path in directory.rglob("parts/*.safetensors")}


def computed(outcome: Outcome) -> set[str]:
    """Pieces that a command put in their places; a checkpoint is replaced by the next as the work goes on."""
    found = set()
    for sort, path in outcome.changes:
        place, _, name = path.rpartition("/")
        if sort == "os.rename" and place.endswith("parts") and "checkpoint" not in name:
            found.add(f"{place}/{name[1:].partition('.safetensors')[0]}.safetensors")
    return found


def records(directory: Path) -> dict[str, Record]:
    """All runs below a directory, by place."""
    return {
        str(path.parent.relative_to(directory)): read_record(path.parent)
        for path in directory.rglob("arrays.safetensors")
    }


def listing(directory: Path) -> set[str]:
    """All files below a directory, the locks apart."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(directory)) for path in files}


def assert_undisturbed(out: Path, whole: Path, rounding: Mapping[str, float]) -> None:
    """The results of the undisturbed run to the last bit, or to a record's `rounding`, and no file more or less."""
    assert listing(out) == listing(whole)
    wanted = records(whole)
    for place, record in records(out).items():
        assert record.status == "done"
        assert record.arrays.keys() == wanted[place].arrays.keys()
        for name, array in wanted[place].arrays.items():
            np.testing.assert_allclose(record.arrays[name], array, rtol=rounding.get(place, 0.0), err_msg=name)
        assert near(told(record), told(wanted[place]), rounding.get(place, 0.0))


def near(value: Any, wanted: Any, rounding: float) -> bool:
    """True if two trees of plain values are equal, but for the rounding of their numbers."""
    if isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(near(value[name], wanted[name], rounding) for name in wanted)
    if isinstance(wanted, list | tuple):
        return len(value) == len(wanted) and all(map(near, value, wanted, itertools.repeat(rounding)))
    return value == wanted or (isinstance(wanted, float) and math.isclose(value, wanted, rel_tol=rounding))


def told(record: Record) -> dict[str, Any]:
    """What a record says, but for time, command and identity."""
    resolved = {**record.resolved, "command": ""}
    arms = record.scalars.get("arms", ())
    timed = {"arms": [arm | {"effort": arm["effort"] | {"seconds": 0}} for arm in arms]}
    if record.verb == "reproduce":
        resolved["fingerprint"] = ""  # names the very networks
    return {"scalars": record.scalars | VOLATILE | timed, "resolved": resolved, "seeds": record.seeds}


def assert_readable(bench: Bench, name: str, looked: Path) -> None:
    """Every verb that reads gives a result, or one line that says what is wrong; once for each state it can see."""
    seen = {path for path in listing(looked) if "parts/" not in path and not path.endswith(TEMPORARY)}
    state = name, frozenset((path, (looked / path).stat().st_size) for path in seen)
    if state in bench.read:
        return
    bench.read.add(state)
    commands = [bench.words_of(reader, OUT=looked, ELSE=looked.parent / "else") for reader in CASES[name].readers]
    outcome = bench.nursery.run(*commands)
    assert len(outcome.ended) == len(commands), outcome
    for command, ended in zip(commands, outcome.ended, strict=True):
        one_line = ended.code in (1, 2) and ended.stderr.count("\n") == 1 and "unexpected" not in ended.stderr
        assert ended.code == 0 or one_line, (command, ended)


def assert_goes_on(bench: Bench, name: str, out: Path) -> None:
    """What a killed run left can be read, and the same command finishes it without doing anything twice."""
    whole, looked = bench.whole(name), out.parent / "looked"
    shutil.rmtree(looked, ignore_errors=True)
    if out.exists():
        shutil.copytree(out, looked)
    assert_readable(bench, name, looked)
    there = records(looked) if looked.exists() else {}
    had = pieces(out) if CASES[name].resumes else set()
    outcome = bench.run(name, out, resume=True)
    assert [each.code for each in outcome.ended] == [0], outcome
    assert not had & computed(outcome), "finished pieces are not computed again"
    assert_undisturbed(out, whole.directory, ROUNDING if name == BEHAVIOUR else {})
    if CASES[name].resumes:
        for place, record in records(out).items():
            before = there.get(place)
            judged_again = record.verb == "reproduce"  # by what --resume says
            if before is not None and not judged_again and told(before) == told(record):
                assert before.run_id == record.run_id, "a finished run is not made again"


def assert_survives(bench: Bench, name: str, point: int) -> None:
    """Killed at one point and finished."""
    out = bench.root / "killed" / name
    bench.fill(name, out)
    outcome = bench.run(name, out, point=point)
    assert outcome.status == KILLED, outcome
    assert_goes_on(bench, name, out)


def findings_at(bench: Bench, name: str, points: Iterable[int]) -> list[str]:
    """What does not hold at some points, each on one line."""
    whole, findings = bench.whole(name), []
    for point in points:
        try:
            assert_survives(bench, name, point)
        except AssertionError as error:
            findings.append(f"point {point}, {whole.outcome.changes[point]}: {error}")
    return findings


@pytest.mark.parametrize("name", FAST)
def test_killed_at_some_changes_of_the_disk(bench, name):
    points = random.Random(name).sample(range(bench.whole(name).points), FAST[name])
    assert not findings_at(bench, name, points)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_change_of_the_disk(bench, name, capsys):
    whole = bench.whole(name)
    findings = findings_at(bench, name, range(whole.points))
    sorts = Counter(sort.removeprefix("os.") for sort, _ in whole.outcome.changes)
    with capsys.disabled():
        counted = ", ".join(f"{count} {sort}" for sort, count in sorted(sorts.items()))
        print(f"\n{name}: {whole.points} crash points ({counted}), {len(findings)} findings")
    assert not findings, "\n".join(findings)


def assert_full(bench: Bench, name: str, point: int) -> None:
    """On a disk that fills at one point a run ends with one line, and goes on when there is room again."""
    out = bench.root / "full" / name
    bench.fill(name, out)
    (ended,) = bench.run(name, out, full=point).ended
    lines = without_notes(ended.stderr)
    assert (ended.code in (1, 2), len(lines)) == (True, 1), ended
    assert "No space left on device" in lines[0]
    assert "unexpected" not in lines[0]
    assert_goes_on(bench, name, out)


@pytest.mark.parametrize("name", ["measure"])
def test_a_disk_that_fills_is_one_line(bench, name):
    taking = [number for number, (sort, _) in enumerate(bench.whole(name).outcome.changes) if sort in TAKING]
    assert_full(bench, name, random.Random(name).choice(taking))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["measure", "audit", "evaluate", "decompose", "train", "mitigate"])
def test_a_disk_that_fills_anywhere_is_one_line(bench, name, capsys):
    taking = [number for number, (sort, _) in enumerate(bench.whole(name).outcome.changes) if sort in TAKING]
    for point in taking:
        assert_full(bench, name, point)
    with capsys.disabled():
        print(f"\n{name}: the disk full at {len(taking)} points, 0 findings")
