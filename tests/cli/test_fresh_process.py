"""What a command or a call needs is there in a process in which nothing else was imported before.

Registries are filled by imports: a test in one process with others sees what these have imported (what is listed of
each: `test_startup.py`).
"""

import re
from pathlib import Path
from typing import Any

import pytest

import posbias as pb
from fresh import OUT_OF_TIME, run_fresh
from page_blocks import BESIDE, PAGES, ROOT, blocks_of
from posbias.evaluation.responders import PlantedResponder
from posbias.results.result import RESULTS

VERBS = sorted(RESULTS)
SECONDS = 6
"""Processor time after which a command has read its arguments, and computes."""
MISSING = r"cannot be reached|holds no posbias run|has no readable tokenizer"
"""What a command says that needs a server, or what another command makes: a run, an exported model."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two evaluations, and a run of every verb that failed."""
    directory = tmp_path_factory.mktemp("runs")
    for name, share in (("one", 0.9), ("other", 0.2)):
        options = pb.EvaluateOptions(count=16, positions="all")
        pb.evaluate(PlantedResponder((share, share)), "documents(documents=3)", options=options).save(directory / name)
    for verb in VERBS:
        pb.Record(verb=verb, arguments={}, status="failed", error="no memory").save(directory / f"failed-{verb}")
    return directory


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("posbias compare one other", "worse on average"),
        ("posbias place --run one --scores 0.5,0.3,0.1", "Leave the order"),
        ("posbias report one", "report: "),
        ('python \'import posbias; print(posbias.compare("one", "other").verdict)\'', "worse on average"),
        (
            "python 'from posbias.integrations import placed_order; print(placed_order([0.5, 0.3, 0.1], \"one\"))'",
            "(0, 1, 2)",
        ),
    ],
)
def test_runs_are_read(command: str, said: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    done = run_fresh(command)
    assert done.returncode == 0, done.stderr
    assert said in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("posbias compare failed-train failed-train", "a run of train cannot be compared"),
        (
            "posbias place --run failed-train --scores 1,2",
            "placing needs a finished run of posbias evaluate, got 'train'",
        ),
        ("posbias correlate failed-train one", "a correlation needs a finished run of posbias audit --behaviour"),
        ("posbias export failed-train --to out", "is a run of posbias train; export takes one of mitigate"),
    ],
)
def test_runs_of_another_verb_are_known(
    command: str, complaint: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    done = run_fresh(command)
    assert done.returncode == 2
    assert complaint in done.stderr


READS = """
import posbias
for run in {runs}:
    try:
        posbias.load_record(run)
    except posbias.UsageError as error:
        print(error)
"""


def test_a_run_of_every_verb_is_known_to_load_record(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    loaded = run_fresh(["python", READS.format(runs=[f"failed-{verb}" for verb in VERBS])])
    assert loaded.returncode == 0, loaded.stderr
    assert "unknown" not in loaded.stdout, "though a record without results may be damaged"


def commands_not_run() -> list[Any]:
    """Commands of README and docs whose blocks no test runs; what takes seconds to begin is slow, but for README's."""
    found = []
    for page in (page for page in PAGES if page.parent == ROOT or page.is_relative_to(ROOT / "docs")):
        commands = [command for block in blocks_of(page) if block.not_run for command in block.commands]
        marks = () if page.name == "README.md" else pytest.mark.slow
        # `posbias explore` waits for a browser and ends by itself never: test_predict drives it.
        begun = [each for each in commands if each.startswith("posbias ") and each != "posbias explore"]
        found += [pytest.param(each, marks=marks) for each in begun]
    return found


@pytest.mark.parametrize("command", commands_not_run())
def test_a_command_that_takes_long_or_needs_what_is_not_there_begins(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes until it is ended, or misses the server, the model or the run that its page speaks of."""
    monkeypatch.chdir(tmp_path)
    for name in BESIDE:
        (tmp_path / name).symlink_to(ROOT / name)
    done = run_fresh(command, seconds=SECONDS)
    assert done.returncode == OUT_OF_TIME or re.search(MISSING, done.stderr), done
