"""The studies that ship with the package, trained: by paper and size, each in a directory of its own.

`papers/PAPER/data/SIZE/*.yaml` (or `SIZE.yaml` for a paper of one study) are ordinary study files, so that
`posbias train` takes any of them as well.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.papers.reproduction import Reproduction
from posbias.runs.directories import held
from posbias.runs.parts import clear_parts, finished_run, made_by
from posbias.runs.records import Record, describe_environment, finished_record
from posbias.training import (
    Schedule,
    Study,
    StudyRun,
    TrainedMember,
    TrainOptions,
    study_of,
    train,
    training_record,
)
from posbias.training.running import planned
from posbias.training.study import read_yaml

SIZES = ("smoke", "small", "full")
"""smoke: that it runs; small: signs within half an hour of two free cores; full: the source's step counts."""
FOLDERS = {"icl-2502.01951": "wu2025", "position-copy-liu2026": "liu2026"}
"""Where the studies of a paper lie."""
WHOLE = "study"
"""Name of the study of a paper that has only one."""


@dataclass(frozen=True)
class StudySettings:
    """How a paper's studies are run again."""

    size: str = "small"
    """`smoke`, `small` or `full`."""
    studies: tuple[str, ...] = ()
    """Names of the studies to run; none: all of the paper."""
    seed: int = 0
    """Of the bootstrap and of the sequences that influence is measured on; training has the study files' seeds."""
    run: TrainOptions = field(default_factory=TrainOptions)
    """Where; with a directory every study's models and record are kept in `studies/NAME` below it."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise UsageError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"size": self.size, "studies": list(self.studies) or "all"}


def shipped_studies(paper: str, settings: StudySettings) -> dict[str, Study]:
    """A paper's studies of one size, by name.

    Raises:
        UsageError: a study of that name does not exist.
    """
    folder = resources.files(f"posbias.papers.{FOLDERS[paper]}") / "settings"
    single = folder / f"{settings.size}.yaml"
    files: Mapping[str, Traversable]
    if single.is_file():
        files = {WHOLE: single}
    else:
        entries = sorted((folder / settings.size).iterdir(), key=lambda file: file.name)
        files = {file.name.removesuffix(".yaml"): file for file in entries if file.name.endswith(".yaml")}
    for name in settings.studies:
        if name not in files:
            raise UsageError(f"{paper} has no study {name!r}; studies: {', '.join(files)}")
    chosen = settings.studies or tuple(files)
    return {name: _read(files[name]) for name in chosen}


def _read(file: Traversable) -> Study:
    with resources.as_file(file) as path:
        return study_of(read_yaml(path), name=path.stem)


def reproduced(
    paper: str,
    settings: object,
    make: Callable[[Sequence[TrainedMember], Schedule, StudySettings], Reproduction],
) -> Reproduction:
    """Train a paper's networks, or read them back, and put its statements to the test.

    Args:
        paper: Whose studies.
        settings: `StudySettings`, or None for its defaults.
        make: From all members, the options of the first study and the settings.

    Raises:
        UsageError: settings of another kind, no such study, or too little disk; before anything is trained.
        RunError: a checkpoint or model cannot be written.
    """
    chosen = StudySettings() if settings is None else settings
    if not isinstance(chosen, StudySettings):
        raise UsageError(f"{paper} takes StudySettings, got {type(chosen).__name__}")
    runs = run_studies(paper, chosen)
    members = [member for run in runs.values() for member in run.trained.members]
    reproduction = make(members, next(iter(runs.values())).trained.schedule, chosen)
    return replace(reproduction, statements=[*reproduction.statements, *_trained_before(runs)])


def run_studies(paper: str, settings: StudySettings) -> dict[str, StudyRun]:
    """Train a paper's studies one after another; each leaves its models and its record.

    With `settings.run.resume`, finished studies are read back from the directory whatever commit trained them, finished
    stacks of an unfinished one are taken from there, and unfinished ones go on. A study's checkpoints are removed only
    when its models and its record lie on the disk.

    Raises:
        UsageError: before anything is trained: an unknown study, or too little disk.
        RunError: a checkpoint, model or record cannot be written.
    """
    studies = shipped_studies(paper, settings)
    runs = {
        name: replace(settings.run, directory=_below(settings.run.directory, name), confirmed=True) for name in studies
    }
    # All are checked before the first trains; those found finished are not read a second time.
    finished = {name: planned(study, runs[name])[1] for name, study in studies.items()}
    arguments = {"paper": paper, "size": settings.size}
    return {
        name: _settled(study, runs[name], finished=finished[name], arguments={**arguments, "study": name})
        for name, study in studies.items()
    }


def _settled(study: Study, run: TrainOptions, *, finished: StudyRun | None, arguments: Mapping[str, Any]) -> StudyRun:
    """One study, found or trained; its directory holds its models and its record, and no checkpoints."""
    with nullcontext() if run.directory is None else held(run.directory):
        completed = finished or train(study, options=run)
        if run.directory is not None:
            if completed.earlier is None:
                training_record(completed, arguments).write_run(run.directory)
            clear_parts(run.directory)
    return completed


def finished_reproduction(paper: str, settings: StudySettings) -> Record | None:
    """The record of just this reproduction where its directory holds it finished and `settings.run` resumes it."""
    run = settings.run
    return finished_run(run.directory, lambda: reproduction_settings(paper, settings), resume=run.resume)


def reproduction_settings(paper: str, settings: StudySettings) -> dict[str, Any]:
    """Everything the record of a finished reproduction depends on: the code, and the very networks below it."""
    networks = {}
    for name in shipped_studies(paper, settings):
        below = _below(settings.run.directory, name)
        record = None if below is None else finished_record(below)
        networks[name] = None if record is None else record.run_id
    return {"paper": paper, **settings.describe(), "seed": settings.seed, "networks": networks, "made_by": made_by()}


def _below(directory: Path | None, name: str) -> Path | None:
    """Where a study of a reproduction keeps its models and record."""
    return None if directory is None else directory / "studies" / name


def _trained_before(runs: Mapping[str, StudyRun]) -> list[str]:
    """With what other code the studies that were read back had been trained: findings are newer than their networks."""
    by_code: dict[str, list[str]] = {}
    this = describe_environment()
    for name, run in runs.items():
        code = this if run.earlier is None else run.earlier.environment
        if run.earlier is not None and any(code.get(part) != this[part] for part in ("posbias", "commit")):
            trained_with = f"posbias {code.get('posbias')}, commit {code.get('commit') or 'unknown'}"
            by_code.setdefault(f"{trained_with}, {run.earlier.created[:10]}", []).append(name)
    return [f"Trained before, with {code}: {', '.join(names)}; read back here." for code, names in by_code.items()]
