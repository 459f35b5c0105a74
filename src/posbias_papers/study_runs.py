"""Experiments that train the studies in a paper's folder, each study in a directory of its own.

`papers/PAPER/settings/SIZE/*.yaml` (or `SIZE.yaml` for a paper of one study) are ordinary study files, so that
`posbias train` takes any of them as well.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Annotated, Any, ClassVar

from posbias.checks import OneOf, checked
from posbias.errors import UsageError
from posbias.runs.running import run_directory
from posbias.training import (
    Study,
    StudyRun,
    TrainedMember,
    TrainingSchedule,
    TrainOptions,
    study_of,
    train,
)
from posbias.training.running import planned
from posbias.training.study import read_yaml
from posbias_papers.reproduction import Experiment, Reproduction

SIZES = ("smoke", "small", "full")
"""smoke: that it runs; small: signs within half an hour of two free cores; full: the source's step counts."""
WHOLE = "study"
"""Name of the study of a paper that has only one."""


@checked
@dataclass(frozen=True)
class StudySettings:
    """How a paper's studies are run again."""

    size: Annotated[str, OneOf(*SIZES)] = "small"
    """`smoke`, `small` or `full`."""
    studies: tuple[str, ...] = ()
    """Names of the studies to run; none: all of the paper."""
    seed: int = 0
    """Kept in the record; training has the study files' seeds."""
    run: TrainOptions = field(default_factory=TrainOptions)
    """Device, engine and directory; a directory keeps every study's models and record in `studies/NAME` below it."""

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {"size": self.size, "studies": list(self.studies) or "all"}


class StudyExperiment(Experiment):
    """A published experiment that trains the networks of the studies in its paper's folder."""

    settings = StudySettings
    folder: ClassVar[str]
    """Folder of the paper, below `posbias_papers`."""

    @abstractmethod
    def judge(
        self, members: Sequence[TrainedMember], options: TrainingSchedule, settings: StudySettings
    ) -> Reproduction:
        """The paper's statements, tables and figures from all trained members and the schedule of the first study."""

    def check(self, settings: Any) -> StudySettings:
        """Settings of its own class that name only studies of the paper."""
        chosen: StudySettings = super().check(settings)
        self.studies(chosen)
        return chosen

    def studies(self, settings: StudySettings) -> dict[str, Study]:
        """The paper's studies of one size, by name.

        Raises:
            UsageError: there is no study of a chosen name.
        """
        folder = resources.files(f"posbias_papers.{self.folder}") / "settings"
        single = folder / f"{settings.size}.yaml"
        if single.is_file():
            files = {WHOLE: single}
        else:
            entries = sorted((folder / settings.size).iterdir(), key=lambda file: file.name)
            files = {file.name.removesuffix(".yaml"): file for file in entries if file.name.endswith(".yaml")}
        unknown = [name for name in settings.studies if name not in files]
        if unknown:
            raise UsageError(f"{self.name} has no study {unknown[0]!r}; studies: {', '.join(files)}")
        studies = {}
        for name in settings.studies or files:
            with resources.as_file(files[name]) as path:
                studies[name] = study_of(read_yaml(path), name=path.stem)
        return studies

    def run(self, settings: StudySettings) -> Reproduction:
        """Train the networks, or read them back, and put the paper's statements to the test."""
        runs = self.trained(settings)
        members = [member for run in runs.values() for member in run.trained.members]
        return self.judge(members, next(iter(runs.values())).trained.schedule, settings)

    def trained(self, settings: StudySettings) -> dict[str, StudyRun]:
        """Train the studies one after another; each leaves its models and its record.

        With `settings.run.resume`, finished studies are read back from the directory whatever commit trained them,
        finished stacks of an unfinished one are taken from there, and unfinished ones go on. A study's checkpoints are
        removed only when its models and its record lie on the disk.

        Raises:
            UsageError: too little disk, before anything is trained.
            RunError: a checkpoint, model or record cannot be written.
        """
        studies = self.studies(settings)
        below = None if settings.run.directory is None else settings.run.directory / "studies"
        runs = {name: replace(settings.run, directory=below and below / name, confirmed=True) for name in studies}
        # All are checked before the first trains; finished ones are not read a second time.
        finished = {name: planned(study, runs[name])[1] for name, study in studies.items()}
        arguments = {"paper": self.name, "size": settings.size}
        completed = {}
        for name, study in studies.items():
            options = runs[name]
            with run_directory(
                options.directory,
                verb="train",
                arguments={**arguments, "study": name},
                resume=options.resume,
                overwrite=options.overwrite,
            ) as run:
                completed[name] = finished[name] or train(study, options=options)
                run.finish(completed[name].record)
        return completed
