"""Published experiments by the name of their paper, and what they give: sentences, rows, tables and figures.

Each is registered in its paper's folder. Those that train take the studies of that folder, each run in a directory of
its own: `settings/SIZE/*.yaml` (or `SIZE.yaml` for a paper of one study) are ordinary study files, so that
`posbias train` takes any of them as well.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from typing import Annotated, Any, ClassVar

import numpy as np

from posbias.checks import OneOf, checked
from posbias.errors import UsageError
from posbias.models.reference.network import ITEMS, load_parameters
from posbias.registry import Registry
from posbias.results.figures import Curve, Figure, Stroke
from posbias.results.page import Report
from posbias.results.records import Record, plain
from posbias.results.result import RESULTS, Result
from posbias.results.showing import Shown
from posbias.results.tables import Table
from posbias.runs.running import run_directory
from posbias.training.members import TrainedMember, TrainingSchedule
from posbias.training.options import TrainOptions
from posbias.training.running import train
from posbias.training.study import Study, load_study

PAPERS: Registry[Any] = Registry("paper")
"""Published experiments by the name of their paper."""
CURVE_PARTS = ("x", "y", "low", "high")
"""Arrays of a stored curve; the last two if it has a band."""
FIGURE_PARTS = ("slug", "title", "x_label", "y_label", "log_range", "linear_range", "rows")

Rows = Sequence[Mapping[str, Any]]
Columns = Mapping[str, Callable[[Any], str]]
"""What a table says of a row, by the name of its column."""


@RESULTS.register("reproduce")
@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(Result):
    """A published experiment, run again."""

    drawn_by: ClassVar = "posbias_papers.reproduction:reproduction_report"
    experiment: str
    """Its name in `PAPERS`."""
    title: str
    rows: Rows
    """One row per comparison, plain JSON values."""
    statements: Sequence[str]
    """Outcomes, one or two sentences each, with their numbers."""
    tables: Sequence[Table]
    figures: Sequence[Figure]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Other numbers behind its sentences."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Profiles and mixing by slash-separated name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def record(self) -> Record:  # type: ignore[override]  # made when it is asked for
        """Its words and numbers; a curve is arrays `figures/<slug>/<number>/x`, `/y`, and `/low`, `/high`."""
        resolved = {"title": self.title, **plain(self.settings)}
        record = Record("reproduce", {}, resolved, seeds=dict(self.seeds), arrays=dict(self.arrays))
        record.scalars = {
            **{name: plain(getattr(self, name)) for name in ("experiment", "rows", "statements")},
            "facts": plain(self.numbers),
            "tables": [plain(vars(table)) for table in self.tables],
            "figures": [_figure_as_stored(figure, record.arrays) for figure in self.figures],
        }
        return record

    @classmethod
    def from_record(cls, record: Record) -> "Reproduction":
        """The experiment that a record holds."""
        scalars = record.scalars
        return cls(
            **{name: scalars[name] for name in ("experiment", "rows", "statements")},
            numbers=scalars["facts"],
            title=record.resolved["title"],
            tables=[Table(table["title"], table["header"], table["cells"]) for table in scalars["tables"]],
            figures=[_stored_figure(figure, record.arrays) for figure in scalars["figures"]],
            arrays=record.arrays,
            settings=record.resolved,
            seeds=record.seeds,
        ).with_record(record)

    def shown(self) -> Shown:
        """The title; outcomes and figures are on the page."""
        return Shown(self.title)


def _figure_as_stored(figure: Figure, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """A figure as plain values, its curves put into `arrays`."""
    curves = []
    for number, curve in enumerate(figure.curves):
        stem = f"figures/{figure.slug}/{number}"
        parts = {part: getattr(curve, part) for part in CURVE_PARTS}
        known = {part: values for part, values in parts.items() if values is not None and np.isfinite(values).any()}
        arrays |= {f"{stem}/{part}": values for part, values in known.items()}
        curves.append({"name": curve.name, "arrays": stem, **vars(curve.stroke)})
    return {**{name: plain(getattr(figure, name)) for name in FIGURE_PARTS}, "curves": curves}


def _stored_figure(stored: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Figure:
    curves = []
    for each in stored["curves"]:
        parts: dict[str, Any] = {part: arrays.get(f"{each['arrays']}/{part}") for part in CURVE_PARTS}
        if parts["x"] is None or parts["y"] is None:
            raise UsageError(f"the record has no curve {each['arrays']}")
        stroke = Stroke(each["colour"], each["dash"])
        curves.append(Curve(each["name"], stroke=stroke, **parts))
    return Figure(
        **{name: stored[name] for name in ("slug", "title", "x_label", "y_label")},
        curves=tuple(curves),
        log_range=stored["log_range"] and tuple(stored["log_range"]),
        linear_range=stored["linear_range"] and tuple(stored["linear_range"]),
        rows=tuple(stored.get("rows", ())),  # findings on influence and learning, of before
    )


def reproduction_report(run: Reproduction) -> Report:
    """Numbers of the paper beside the new ones."""
    said = run.statements  # among them the count of verdicts, "Of 13 published findings: ..."
    tables = [_laid_out(table) for table in run.tables]
    return Report(
        kicker=f"posbias · a published experiment, run again · {PAPERS[run.experiment].paper}",
        verdict=[next((text for text in said if text.startswith("Of ")), said[0])] if said else [],
        picture=run.figures[:1],
        summary=tables[:1],
        statements=said,
        figures=run.figures[1:],
        tables=tables[1:],
    )


def _laid_out(table: Table) -> Table:
    """A table with sentences is broken into lines, its verdicts first."""
    prose = any(len(cell) > 60 for row in table.cells for cell in row)
    rows = [table.header, *table.cells]
    if prose and "verdict" in table.header:
        place = table.header.index("verdict")
        rows = [[row[place], *row[:place], *row[place + 1 :]] for row in rows]
    return Table(table.title, rows[0], rows[1:], prose=prose)


def tabled(title: str, rows: Sequence[Any], columns: Columns) -> Table:
    """A table with a line for each row."""
    return Table(title, list(columns), [[told(row) for told in columns.values()] for row in rows])


class Experiment(ABC):
    """A published experiment that can be run again, registered under the name of its paper."""

    name: ClassVar[str]
    paper: ClassVar[str]
    """Title of the paper."""
    settings: ClassVar[type | None] = None
    """The class of its settings; None: everything is as published."""

    def check(self, settings: Any) -> Any:
        """Refuse settings that the experiment does not take.

        Returns:
            The settings, or their defaults if they are None.
        """
        if settings is None:
            return self.settings and self.settings()
        if self.settings is None or not isinstance(settings, self.settings):
            taken = self.settings.__name__ if self.settings else "no settings, everything being as published"
            raise UsageError(f"{self.name} takes {taken}, got {type(settings).__name__}")
        return settings

    @abstractmethod
    def run(self, settings: Any) -> Reproduction:
        """Run it again with settings that `check` has seen.

        Raises:
            RunError: a measurement fails, or a file cannot be written.
        """


def reproduce(paper: str, *, settings: Any = None) -> Reproduction:
    """Run a published experiment again.

    Args:
        paper: A name in `PAPERS`.
        settings: An object of the experiment's own class (`BirthSettings` for birth-2603.10123); None: its defaults.

    Returns:
        Rows, tables, figures and the sentences on them.

    Raises:
        UsageError: unknown paper, or settings it does not take.
        RunError: a measurement fails, or a file cannot be written.
    """
    experiment: Experiment = PAPERS[paper]()
    return experiment.run(experiment.check(settings))


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
                studies[name] = load_study(path)
        return studies

    def run(self, settings: StudySettings) -> Reproduction:
        """Train the studies one after another, and put the paper's statements to the test.

        Each study leaves its models and its record. With `settings.run.resume`, finished studies are read back from the
        directory whatever commit trained them, finished stacks of an unfinished one are taken from there, and
        unfinished ones go on. A study's checkpoints are removed only when its models and its record lie on the disk.

        Raises:
            RunError: a checkpoint, model or record cannot be written, or a model of a finished study cannot be read.
        """
        studies = self.studies(settings)
        below = None if settings.run.directory is None else settings.run.directory / "studies"
        members: list[TrainedMember] = []
        for name, study in studies.items():
            chosen = replace(settings.run, directory=below and below / name)
            arguments = {"paper": self.name, "size": settings.size, "study": name}
            with run_directory(
                chosen.directory,
                verb="train",
                arguments=arguments,
                resume=chosen.resume,
                overwrite=chosen.overwrite,
            ):
                run = train(study, options=chosen)
            for outcome, model in zip(run.trained.members, run.models, strict=True):
                if outcome.parameters is None and model is not None:  # it was read back
                    tensors = load_parameters(model, outcome.member.config)
                    outcome = replace(outcome, parameters={part: tensors[part] for part in tensors if part != ITEMS})
                members.append(outcome)
        return self.judge(members, next(iter(studies.values())).schedule, settings)
