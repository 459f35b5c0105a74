"""`train`: every member of a study trained, its model saved, and all of it kept in one record of verb "train".

Scalars: `counts` {status: members}, `members` [{name, coordinates, seed, status, reason, steps, loss, model}] with
`model` the member's directory within the run (None if there is none). Arrays, members first, NaN if a member has no
value: `losses` [member window], `evaluation_steps` [member evaluation] (-1 if there was none),
`evaluations/NAME` [member evaluation ...]; a quantity whose shape differs between members is stored for each as
`evaluations/NAME/MEMBER` [evaluation ...].

A study that a directory holds finished is read back from its record and models, so that nothing is trained twice. It is
recognised by what was trained, the members and the schedule. The version of the code is no reason to train again: the
record names it, and whoever wants the study anew leaves `resume` out.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.models.reference.network import ITEMS, load_parameters, save_reference
from posbias.runs.records import plain, read_record, remove_record
from posbias.runs.running import run_directory
from posbias.tasks.synthetic import stack_tasks
from posbias.training.members import Member, TrainedMember
from posbias.training.options import TrainingSchedule, TrainOptions
from posbias.training.result import ENDED_WELL, MODELS, StudyRun, record_of
from posbias.training.study import Study, load_study
from posbias.training.trainer import train_members


@checked
def train(study: Study | str | Path, *, options: TrainOptions | None = None) -> StudyRun:
    """Train all members of a study and save each that ended well as a model directory.

    Args:
        study: What to train, or a study file.
        options: Engine, device and directory; by default this process, its first accelerator or the CPU, and nothing
            is kept.

    Raises:
        UsageError: before anything is trained: too many members, a point that makes no model.
        RunError: a checkpoint or a model cannot be written, or a stack repeatedly lost its worker.
    """
    study = study if isinstance(study, Study) else load_study(study)
    options = TrainOptions() if options is None else options
    with run_directory(
        options.directory,
        verb="train",
        arguments={"study": study.name},
        resume=options.resume,
        overwrite=options.overwrite,
    ) as run:
        members, earlier = planned(study, options)
        result = earlier or _trained(study, members, options)
        run.finish(result.record)
    return result


def _trained(study: Study, members: list[Member], options: TrainOptions) -> StudyRun:
    """The study, trained, its models saved."""
    trained, directory = train_members(members, study.schedule, options=options), options.directory
    if directory is not None:
        remove_record(directory)  # of an earlier study, whose models are about to be replaced
    models = tuple(_saved(index, member, directory) for index, member in enumerate(trained.members))
    return StudyRun(record_of(study, trained, models), trained, models, directory)


def planned(study: Study, options: TrainOptions) -> tuple[list[Member], StudyRun | None]:
    """The members of a study, and its run if the directory holds it finished. Errors as `train`, before training."""
    members, directory = study.members(confirmed=options.confirmed), options.directory
    if directory is None:
        return members, None
    return members, finished_training(members, study.schedule, directory) if options.resume else None


def _saved(index: int, trained: TrainedMember, directory: Path | None) -> Path | None:
    """Save a member's model, if it has one, and return its directory."""
    if directory is None or trained.parameters is None:
        return None
    place, member, items = directory / MODELS / f"{index:04d}", trained.member, None
    if member.task.vocabulary_size is None:  # token ids of its saved model name the vectors of its task
        items = stack_tasks([member.task], [member.seed]).item_vectors()
        assert items is not None  # every task of vector inputs has them
    save_reference(
        place,
        member.config,
        parameters=trained.parameters,
        provenance={**plain(member.describe()), "status": trained.status, "steps": trained.steps},
        items=None if items is None else items[0],
    )
    return place


def finished_training(members: Sequence[Member], schedule: TrainingSchedule, directory: Path) -> StudyRun | None:
    """The run that trained these members before into a directory, with their parameters to the last bit.

    None if there is no whole record of just these members and schedule, if no member ended well, or if a model is
    missing or damaged.
    """
    try:
        record = read_record(directory)
        if record.verb != "train" or record.status != "done":
            return None
        run = StudyRun.from_record(record).in_directory(directory)
        recorded = [plain(outcome.member.describe()) for outcome in run.trained.members]
        if run.trained.schedule != schedule or recorded != [plain(member.describe()) for member in members]:
            return None
        places = zip(members, run.trained.members, run.models, strict=True)
        outcomes = tuple(_with_parameters(member, outcome, model) for member, outcome, model in places)
    except (UsageError, RunError, LookupError, ValueError, TypeError, AttributeError):
        return None  # another format, or damaged: trained again
    return replace(run, trained=replace(run.trained, members=outcomes))


def _with_parameters(member: Member, outcome: TrainedMember, model: Path | None) -> TrainedMember:
    """A member as its record has it, with the parameters of its model if it ended well."""
    parameters = None
    if outcome.status in ENDED_WELL:
        if model is None:
            raise UsageError(f"member {member.name!r} was not saved")
        parameters = load_parameters(model, member.config)
        parameters.pop(ITEMS, None)
    return replace(outcome, member=member, parameters=parameters)
