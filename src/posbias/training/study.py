"""`Study`: a YAML file that says which models are trained on what: a base, a grid over it, and seeds.

    task: position_copy(target=0)
    model: {depth: 2, width: 10, residual: none}
    optimiser: adam(learning_rate=1e-2)
    train: {steps: 2000, batch: 256}
    grid:
      task.target: [0, 4, 9]
      model.depth: [1, 2]
    seeds: 3

An axis of the grid is a dotted setting with a list of values, or a name with labelled groups of dotted settings. What
the task fixes (vocabulary, outputs, width of vectors) is not said again. The file is read strictly into plain values:
no tags, no repeated keys, and no word or date that becomes something else.
"""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from posbias.architecture import Architecture
from posbias.checks import CELLS, checked
from posbias.errors import UsageError, check_most
from posbias.files import read_yaml
from posbias.models.reference.config import ReferenceConfig
from posbias.registry import Registry, parse_literal_call
from posbias.tasks.synthetic import EVALUATION_BATCH, SYNTHETIC_TASKS
from posbias.training.members import OPTIMISERS, Member, TrainingSchedule, stopping_rule

MOST_SEEDS = 1_000_000
"""Seeds that a count may stand for: a slip of the keyboard must not fill the memory."""
ARCHITECTURE_FIELDS = tuple(entry.name for entry in fields(Architecture))
MODEL_FIELDS = ARCHITECTURE_FIELDS + tuple(
    entry.name
    for entry in fields(ReferenceConfig)
    if entry.name not in ("architecture", "seed", "vocabulary_size", "outputs")  # which the task fixes
)
SECTIONS = ("name", "task", "model", "optimiser", "train", "grid", "seeds")

Settings = dict[str, Any]


@checked
@dataclass(frozen=True, eq=False)
class Study:
    """A study file, its sections as plain settings."""

    name: str
    task: Settings
    """Parameters of the task and, under "name", its name."""
    model: Settings
    """Fields of `Architecture` and `ReferenceConfig`."""
    optimiser: Settings
    """Parameters of the optimiser and, under "name", its name."""
    schedule: TrainingSchedule
    axes: Mapping[str, Sequence[tuple[Any, Settings]]] = field(default_factory=dict)
    """Points of every axis of the grid, each a plain value and the dotted settings it stands for."""
    seeds: tuple[int, ...] = (0,)

    def members(self) -> list[Member]:
        """Every point of the grid, in its order, with every seed."""
        count, members = math.prod(map(len, self.axes.values())) * len(self.seeds), []
        check_most(f"study {self.name!r}: the grid times the seeds", count, 100_000, "members")
        for points in itertools.product(*self.axes.values()):
            coordinates = dict(zip(self.axes, (value for value, _ in points), strict=True))
            settings = {key: value for _, changes in points for key, value in changes.items()}
            members += [self._member(coordinates, settings, seed) for seed in self.seeds]
        return members

    def _member(self, coordinates: Settings, changes: Settings, seed: int) -> Member:
        spelled = [f"{axis.rpartition('.')[2]}={str(value).replace(' ', '')}" for axis, value in coordinates.items()]
        name = " ".join([*spelled, f"seed={seed}"])
        sections = {section: dict(getattr(self, section)) for section in ("task", "model", "optimiser")}
        for section in ("task", "optimiser"):
            if f"{section}.name" in changes:
                sections[section] = {}  # another task or optimiser has parameters of its own, wherever they stand
        for key, value in changes.items():
            section, _, setting = key.partition(".")
            sections[section][setting] = value
        try:
            task = SYNTHETIC_TASKS.build(sections["task"].pop("name"), **sections["task"])
            optimiser = OPTIMISERS.build(sections["optimiser"].pop("name"), **sections["optimiser"])
            config = _config(sections["model"], task)
            member = Member(name, config, task, seed, optimiser, coordinates)
            member.check()
            widest = max(config.width, config.n_outputs, task.n_positions)
            sequences = max(self.schedule.batch, min(self.schedule.examples, EVALUATION_BATCH))
            check_most("sequences x positions x features", sequences * task.n_positions * widest, CELLS)
        except UsageError as error:
            raise UsageError(f"study {self.name!r}, member {name!r}: {error}") from None
        return member


@checked
def load_study(path: str | Path) -> Study:
    """Read a study file and check all of it except the points of its grid."""
    return study_of(read_yaml(path, "study", plain_value), name=Path(path).stem)


def study_of(document: Any, *, name: str) -> Study:
    """A study from the plain values of its file, which may name it otherwise."""
    document = _mapping(document, "the study", SECTIONS)
    name = str(document.get("name", name))
    for section in ("task", "train"):
        if section not in document:
            raise UsageError(f"study {name!r} has no section {section!r}; sections: {', '.join(SECTIONS)}")
    train = _mapping(document["train"], "train", [entry.name for entry in fields(TrainingSchedule)])
    if "stopping" in train:
        train["stopping"] = stopping_rule(str(train["stopping"]))
    return Study(
        name=name,
        task=_settings(SYNTHETIC_TASKS, document["task"], "task"),
        model=_mapping(document.get("model", {}), "model", MODEL_FIELDS),
        optimiser=_settings(OPTIMISERS, document.get("optimiser", "adamw"), "optimiser"),
        schedule=TrainingSchedule(**train),
        axes=_axes(document.get("grid", {})),
        seeds=_seeds(document.get("seeds", 1)),
    )


def _config(model: Settings, task: Any) -> ReferenceConfig:
    """The model's configuration at a point of the grid, including the settings that its task fixes."""
    # Defaults of a trained model that differ from those of `ReferenceConfig`, which are theory's.
    defaults = {"attention": "content", "values": "gaussian", "residual": "added", "dtype": "float32"}
    settings = {**defaults, **model}
    architecture = {key: settings.pop(key) for key in ARCHITECTURE_FIELDS if key in settings}
    if "depth" not in architecture:
        raise UsageError("model.depth is not given; a whole number >= 1 is needed")
    if task.width is not None:
        settings.setdefault("width", task.width)
    settings |= {"vocabulary_size": task.vocabulary_size, "outputs": task.n_outputs}
    try:
        return ReferenceConfig(Architecture(**architecture), **settings)
    except UsageError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"model: a value has the wrong type ({error})") from None


def _settings(registry: Registry[Any], value: Any, section: str) -> Settings:
    """A variant's name and parameters, from a mapping or a literal call."""
    if isinstance(value, Mapping):
        if not isinstance(value.get("name"), str):
            raise UsageError(f"{section} needs a name; known: {', '.join(registry)}")
        registry[value["name"]]
        return dict(value)
    if not isinstance(value, str):
        raise UsageError(f"{section} must be a literal call or a mapping with a name, got {value!r}")
    name, positional, keywords = parse_literal_call(value, registry.sort)
    known = [entry.name for entry in fields(registry[name])]
    if len(positional) > len(known):
        raise UsageError(f"{section} {value!r} has more values than parameters: {', '.join(known)}")
    return {"name": name, **dict(zip(known, positional, strict=False)), **keywords}


def _axes(grid: Any) -> dict[str, list[tuple[Any, Settings]]]:
    """Axes with their points; two axes that set the same are refused, since coordinates would contradict the member."""
    if not isinstance(grid, Mapping):
        raise UsageError(f"grid must be a mapping of settings to lists, got {grid!r}")
    axes: dict[str, list[tuple[Any, Settings]]] = {}
    setters: dict[str, str] = {}
    for axis, points in grid.items():
        if isinstance(points, list):
            axes[axis] = [(value, {axis: value}) for value in points]
        elif isinstance(points, Mapping) and all(isinstance(changes, Mapping) for changes in points.values()):
            axes[axis] = [(label, dict(changes)) for label, changes in points.items()]
        else:
            raise UsageError(f"grid axis {axis!r} must be a list of values, or labels with settings, got {points!r}")
        if not axes[axis]:
            raise UsageError(f"grid axis {axis!r} has no values; at least 1 is needed")
        for key in dict.fromkeys(key for _, changes in axes[axis] for key in changes):
            section, _, setting = key.partition(".")
            if section not in ("task", "model", "optimiser") or not setting:
                allowed = "allowed: model.FIELD, task.PARAMETER, optimiser.PARAMETER"
                raise UsageError(f"grid setting {key!r} is unknown; {allowed}")
            if section == "model" and setting not in MODEL_FIELDS:
                raise UsageError(f"grid setting {key!r} is unknown; fields of model: {', '.join(MODEL_FIELDS)}")
            if setters.setdefault(key, axis) != axis:
                raise UsageError(f"grid axes {setters[key]!r} and {axis!r} both set {key!r}; one of them may")
    return axes


def _seeds(value: Any) -> tuple[int, ...]:
    """The seeds of a study, from a count or a list."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and 1 <= value <= MOST_SEEDS:
        return tuple(range(value))
    listed = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    if listed and value and len(set(value)) == len(value):
        return tuple(value)
    raise UsageError(
        f"seeds must be a count in 1 ... {MOST_SEEDS} or a list of different whole numbers >= 0, got {value!r}"
    )


def _mapping(value: Any, section: str, known: Sequence[str]) -> Settings:
    """The fields of a section, after a check that all of them are known."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{section} must be a mapping of fields to values, got {value!r}")
    for key in value:
        if key not in known:
            raise UsageError(f"{section} has no field {key!r}; fields: {', '.join(known)}")
    return dict(value)


SCALARS: Mapping[str, Callable[[str], Any]] = {
    r"(~|null|Null|NULL)?": lambda _: None,
    r"true|True|TRUE|false|False|FALSE": lambda text: text.lower() == "true",
    r"[-+]?(0|[1-9][\d_]*)": int,
    r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?": float,
    r"[-+]?\.(inf|Inf)|\.(nan|NaN)": lambda text: float(text.replace(".", "")),
}
"""Texts without quotes that are no texts, by YAML 1.2, and what they are."""


def plain_value(text: str) -> Any:
    """What a text without quotes is."""
    return next((read(text) for pattern, read in SCALARS.items() if re.fullmatch(pattern, text)), text)
