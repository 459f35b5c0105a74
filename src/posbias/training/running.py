"""`run_study`: every member of a study trained, its model saved, and all of it kept in one record of verb "train".

Scalars: `counts` {status: members}, `members` [{name, coordinates, seed, status, reason, steps, loss, model}] with
`model` the member's directory within the run (None where there is none). Arrays, members first, NaN where a member has
no value: `losses` [member window], `evaluation_steps` [member evaluation] (-1 where there was none),
`evaluations/NAME` [member evaluation ...]; a quantity whose shape differs between members is stored for each as
`evaluations/NAME/MEMBER` [evaluation ...].

A study that a directory holds finished is read back from its record and models, so that nothing is trained twice. What
decides is what was trained: the members and the options. Which version of the code trained them is no reason to do it
again; the record says which it was, and whoever wants it anew leaves `resume` out.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.memory import show_bytes
from posbias.models.reference.network import ITEMS, config_from, load_parameters, save_reference
from posbias.models.reference.parameters import draw_parameters
from posbias.runs.parts import below
from posbias.runs.records import Record, check_unfinished, plain, read_record, remove_record
from posbias.tasks.synthetic import SYNTHETIC_TASKS, stack_tasks
from posbias.training.members import STATUSES, Member, TrainedMember
from posbias.training.optimisers import OPTIMISERS
from posbias.training.options import STOPPING, TrainingOptions, TrainingRun
from posbias.training.stack import Layout
from posbias.training.study import Study
from posbias.training.trainer import Trained, group, train

MODELS = "models"
"""Where a run keeps its members' models."""
ENDED_WELL = ("done", "stopped_early")
COPIES = 6
"""Times that a member's values may lie on the disk at once: the values and two moments of a checkpoint and of the one
that replaces it, less what is written only after these are gone."""
RECORD_AND_PAGE = 16 * 2**20
"""Bytes kept free for what is written when all is trained: the record, and a page with its drawing library (5 MB)."""


@dataclass(frozen=True, eq=False)
class StudyRun:
    """A study and what came of it."""

    study: Study
    trained: Trained
    models: tuple[Path | None, ...]
    """Every member's directory, for `load_model`; None where nothing was saved."""
    found: Record | None = None
    """The record of the run that trained it, where the directory held it finished; None: trained now."""


@checked
def run_study(study: Study, *, run: TrainingRun | None = None, confirmed: bool = False) -> StudyRun:
    """Train all members of a study and save each that ended well as a model directory.

    Args:
        study: What to train.
        run: Where; with a directory, models are saved under `models/` in it. With `resume`, a study that the directory
            holds finished is read back, whatever commit trained it, and an unfinished one goes on.
        confirmed: Whether a study of more than 1000 members is meant.

    Raises:
        UsageError: before anything is trained: too many members, a point that makes no model, too little disk.
        RunError: a checkpoint or a model cannot be written, or a stack lost its worker time and again.
    """
    run = TrainingRun() if run is None else run
    members, found = planned(study, run=run, confirmed=confirmed)
    if found is not None:
        return found
    if run.directory is not None and not (run.resume or run.overwrite):
        check_unfinished(run.directory)
    trained = train(members, study.options, run=run)
    if run.directory is not None:
        remove_record(run.directory)  # of an earlier study, whose models are about to be replaced
    models = tuple(_saved(index, member, run.directory) for index, member in enumerate(trained.members))
    return StudyRun(study, trained, models)


def planned(study: Study, *, run: TrainingRun, confirmed: bool) -> tuple[list[Member], StudyRun | None]:
    """What a study will train, or what it has trained already. Arguments and errors as `run_study`, before training."""
    members = study.members(confirmed=confirmed)
    if run.directory is None:
        return members, None
    known = finished_training(members, study.options, run.directory) if run.resume else None
    if known is None:
        check_disk(members, run)
        return members, None
    trained, record = known
    saved = (entry["model"] for entry in record.scalars["members"])
    models = tuple(None if place is None else run.directory / place for place in saved)
    return members, StudyRun(study, trained, models, record)


def check_disk(members: list[Member], run: TrainingRun) -> int:
    """Refuse a training whose checkpoints, models, record and page would not fit on the disk; the bytes it may need."""
    assert run.directory is not None
    needed = RECORD_AND_PAGE
    for stack in group(members, stack_size=run.stack_size):
        first = members[stack[0]]
        parameters = draw_parameters(first.config, torch.Generator().manual_seed(0))
        items = items_of(first)
        values = COPIES * Layout.of(parameters).size + (0 if items is None else items.numel())
        needed += len(stack) * values * next(iter(parameters.values())).element_size()
    there = next(path for path in (run.directory, *run.directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UsageError(
            f"{len(members)} members need up to {show_bytes(needed)} for checkpoints, models, record and page, and "
            f"{str(run.directory)!r} has {show_bytes(free)} left; allowed: at most what is left"
        )
    return needed


def _saved(index: int, trained: TrainedMember, directory: Path | None) -> Path | None:
    """Save a member's model, if it has one; its directory."""
    if directory is None or trained.parameters is None:
        return None
    place, member = directory / MODELS / f"{index:04d}", trained.member
    save_reference(
        place,
        member.config,
        parameters=trained.parameters,
        provenance={**plain(member.describe()), "status": trained.status, "steps": trained.steps},
        items=items_of(member),
    )
    return place


def items_of(member: Member) -> Float[Tensor, "item feature"] | None:
    """The vectors that token ids name in a member's saved model: its task's own; None where it reads tokens."""
    if member.task.vocabulary_size is not None:
        return None
    vectors = stack_tasks([member.task], [member.seed]).item_vectors()
    assert vectors is not None  # every task of vector inputs has them
    return vectors[0]


def training_record(done: StudyRun, arguments: Mapping[str, Any], *, command: str = "") -> Record:
    """A study's run as a record, "failed" where no member ended well; one that was found finished keeps its own."""
    if done.found is not None:
        return done.found
    study, trained = done.study, done.trained
    record = Record(
        verb="train",
        arguments=dict(arguments),
        resolved={
            "title": study.name,
            "command": command,
            "options": trained.options.describe(),
            "task": plain(study.task),
            "model": plain(study.model),
            "optimiser": plain(study.optimiser),
            "axes": {axis: plain([value for value, _ in points]) for axis, points in study.axes.items()},
            "stacks": trained.n_stacks,
            "members": [plain(each.member.describe()) for each in trained.members],
        },
        seeds={f"member_{seed}": seed for seed in study.seeds},
        arrays=_arrays(trained.members),
    )
    entries = [
        {
            "name": each.member.name,
            "coordinates": plain(dict(each.member.coordinates)),
            "seed": each.member.seed,
            "status": each.status,
            "reason": each.reason,
            "steps": each.steps,
            "loss": plain(each.losses[-1]) if len(each.losses) else None,
            "model": None if model is None else f"{MODELS}/{model.name}",
        }
        for each, model in zip(trained.members, done.models, strict=True)
    ]
    record.scalars = {"counts": trained.counts(), "members": entries}
    if not any(each.status in ENDED_WELL for each in trained.members):
        first = trained.members[0]
        record.status = "failed"
        record.error = f"none of {len(trained.members)} members ended well; the first {first.status}: {first.reason}"
    return record


def _arrays(members: Sequence[TrainedMember]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {
        "losses": _padded([each.losses for each in members], np.nan),
        "evaluation_steps": _padded([each.evaluation_steps for each in members], -1),
    }
    for name in dict.fromkeys(name for each in members for name in each.evaluations):
        found = {index: each.evaluations[name] for index, each in enumerate(members) if name in each.evaluations}
        shapes = {values.shape[1:] for values in found.values()}
        if len(shapes) == 1:
            empty = np.empty((0, *shapes.pop()))
            arrays[f"evaluations/{name}"] = _padded([found.get(index, empty) for index in range(len(members))], np.nan)
        else:
            arrays |= {f"evaluations/{name}/{index:04d}": values for index, values in found.items()}
    return arrays


def _padded(rows: list[np.ndarray], missing: float) -> np.ndarray:
    """Rows of different lengths as one array, the missing ends filled."""
    longest = max(len(row) for row in rows)
    padded = np.full((len(rows), longest, *rows[0].shape[1:]), missing, dtype=np.result_type(*rows))
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def finished_training(
    members: Sequence[Member], options: TrainingOptions, directory: Path
) -> tuple[Trained, Record] | None:
    """These members as they were trained before into a directory, to the last bit, and the record that says so.

    None where there is no whole record of just these members and options, where no member ended well, or where a model
    is missing or damaged.
    """
    try:
        record = read_record(directory)
        if record.verb != "train" or record.status != "done" or not _same(members, options, record):
            return None
        found = tuple(
            _member(member, index, record=record, directory=directory) for index, member in enumerate(members)
        )
    except (UsageError, RunError, LookupError, ValueError, TypeError, AttributeError):
        return None  # another format, or damaged: trained again
    stacks = int(record.resolved["stacks"])
    return Trained(found, options, stacks, resumed=stacks), record


def _same(members: Sequence[Member], options: TrainingOptions, record: Record) -> bool:
    """Whether the record is of these members and options; what older records do not say has its default."""
    stored = record.resolved["options"]
    if TrainingOptions(**{**stored, "stopping": STOPPING.parse(stored["stopping"])}) != options:
        return False
    recorded = [
        Member(
            each["name"],
            config_from(each["model"]),
            SYNTHETIC_TASKS.parse(each["task"]),
            each["seed"],
            OPTIMISERS.parse(each["optimiser"]),
            each["coordinates"],
        )
        for each in record.resolved["members"]
    ]
    return [plain(member.describe()) for member in members] == [plain(member.describe()) for member in recorded]


def _member(member: Member, index: int, *, record: Record, directory: Path) -> TrainedMember:
    """One member as its record and its model have it."""
    entry = record.scalars["members"][index]
    status, steps = entry["status"], entry["steps"]
    if status not in STATUSES:
        raise UsageError(f"member {member.name!r} has status {status!r}; known: {', '.join(STATUSES)}")
    windows = -(-steps // record.resolved["options"]["window"])
    losses = record.arrays["losses"][index]
    if len(losses) < windows:
        raise UsageError(f"member {member.name!r} has {len(losses)} losses, and {windows} windows of training")
    parameters = None
    if status in ENDED_WELL:
        if entry["model"] is None:
            raise UsageError(f"member {member.name!r} was not saved")
        parameters = load_parameters(directory / entry["model"], member.config)
        parameters.pop(ITEMS, None)
    evaluated = record.arrays["evaluation_steps"][index]
    evaluation_steps = evaluated[evaluated >= 0]
    evaluations: dict[str, np.ndarray] = {}
    for name, values in below(record.arrays, "evaluations/").items() if len(evaluation_steps) else ():
        quantity, _, owner = name.partition("/")
        if not owner:
            evaluations[quantity] = values[index, : len(evaluation_steps)]
        elif owner == f"{index:04d}":
            evaluations[quantity] = values
    return TrainedMember(
        member, status, entry["reason"], steps, losses[:windows], parameters, evaluation_steps, evaluations
    )
