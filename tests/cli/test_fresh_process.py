"""What a command or a call needs is there in a process in which nothing else was imported before.

Registries are filled by imports: a test in one process with others sees what these have imported.
"""

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posbias as pb
from fresh import OUT_OF_TIME, run_fresh
from page_blocks import BESIDE, PAGES, ROOT, blocks_of
from posbias.evaluation.responders import Reply, Responder, Response
from posbias.results.result import RESULTS

VERBS = sorted(RESULTS)
OTHER_DOORS = {
    **dict.fromkeys(
        ("RESULTS", "CLAIMS", "MODEL_CLAIMS", "PAPERS"),
        ("posbias_papers.published",),
    ),
    "ENGINES": ("posbias.runs.engines",),  # one module, which has them all
}
"""What is imported before a registry is read that others than its own package fill."""
SECONDS = 6
"""Processor time after which a command has read its arguments, and computes."""
MISSING = r"cannot be reached|holds no posbias run|has no readable tokenizer"
"""What a command says that needs a server, or what another command makes: a run, an exported model."""


class RightAtTimes(Responder):
    """Right if the gold passage stands first, and in a share of the other prompts."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.generator = np.random.default_rng(0)

    def respond(self, requests: Any, *, generate: bool = True, score: bool = False) -> list[Reply]:
        answers = [request.answer if self.generator.random() < self.share else "?" for request in requests]
        return [Reply(Response(str(answer), "stop"), None) for answer in answers]

    def describe(self) -> dict[str, Any]:
        return {"kind": "times", "model": {"source": f"times {self.share}"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two evaluations, and a run of every verb that failed."""
    directory = tmp_path_factory.mktemp("runs")
    for name, share in (("one", 0.9), ("other", 0.2)):
        options = pb.EvaluateOptions(count=16, positions="all")
        pb.evaluate(RightAtTimes(share), "documents(documents=3)", options=options).save(directory / name)
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
        ("posbias correlate failed-train one", "a correlation needs a finished run of posbias evaluate, got 'train'"),
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
        # `posbias explore` waits for a browser and ends by itself never: test_explore drives it.
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


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def imported_with(trees: dict[str, ast.Module], *doors: str) -> set[str]:
    """Modules of posbias that the import of some brings, as their top levels say."""
    waiting, found = list(doors), set[str]()
    while waiting:
        name = waiting.pop()
        if name in found or name not in trees:
            continue
        found.add(name)
        waiting.append(name.rpartition(".")[0])
        for node in trees[name].body:
            if isinstance(node, ast.ImportFrom):
                waiting += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_every_registry_is_full_once_its_door_is_imported() -> None:
    trees = {module_of(path): ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")}
    homes: dict[str, str] = {}
    fillers: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            match node:
                case ast.AnnAssign(target=ast.Name(registry), value=ast.Call(func=ast.Name("Registry"))):
                    homes[registry] = name
                case ast.Call(func=ast.Attribute(ast.Name(registry), "register")):
                    fillers.setdefault(registry, set()).add(name)
    assert len(homes) > 20
    for registry, home in homes.items():
        lazily = getattr(import_module(home), registry)._homes.values()
        doors = (*OTHER_DOORS.get(registry, (home, home.rpartition(".")[0])), *lazily)
        assert fillers[registry] <= imported_with(trees, *doors), registry
