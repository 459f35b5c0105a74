"""The studies that ship with the package, trained: by paper and size, each in a directory of its own.

`reproduce/data/PAPER/SIZE/*.yaml` (or `PAPER/SIZE.yaml` for a paper of one study) are ordinary study files, so that
`posbias train` takes any of them as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.parts import clear_parts
from posbias.training import Study, StudyRun, TrainingRun, run_study, study_of, training_record
from posbias.training.study_files import read_yaml

SIZES = ("smoke", "small", "full")
"""smoke: that it runs; small: signs within half an hour of two free cores; full: the source's step counts."""
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
    run: TrainingRun = field(default_factory=TrainingRun)
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
    folder = resources.files("posbias.reproduce") / "data" / paper
    single = folder / f"{settings.size}.yaml"
    files: Mapping[str, Traversable]
    if single.is_file():
        files = {WHOLE: single}
    else:
        found = sorted((folder / settings.size).iterdir(), key=lambda file: file.name)
        files = {file.name.removesuffix(".yaml"): file for file in found if file.name.endswith(".yaml")}
    for name in settings.studies:
        if name not in files:
            raise UsageError(f"{paper} has no study {name!r}; studies: {', '.join(files)}")
    chosen = settings.studies or tuple(files)
    return {name: _read(files[name]) for name in chosen}


def _read(file: Traversable) -> Study:
    with resources.as_file(file) as path:
        return study_of(read_yaml(path), name=path.stem)


def run_studies(paper: str, settings: StudySettings) -> dict[str, StudyRun]:
    """Train a paper's studies one after another; each leaves its models and its record.

    With `settings.run.resume`, finished stacks are taken from the directory and unfinished ones go on.

    Raises:
        UsageError: before anything is trained: an unknown study, or too little disk.
        RunError: a checkpoint, model or record cannot be written.
    """
    studies = shipped_studies(paper, settings)
    finished = {}
    for name, study in studies.items():
        directory = None if settings.run.directory is None else study_directory(settings.run.directory, name)
        finished[name] = run_study(study, run=replace(settings.run, directory=directory), confirmed=True)
        if directory is not None:
            arguments = {"paper": paper, "size": settings.size, "study": name}
            training_record(finished[name], arguments).save(directory)
    return finished


def study_directory(directory: Path, name: str) -> Path:
    """Where a study of a reproduction keeps its models and record."""
    return directory / "studies" / name


def clear_studies(directory: Path, names: Sequence[str]) -> None:
    """Remove the checkpoints of studies whose results are recorded."""
    for name in names:
        clear_parts(study_directory(directory, name))
