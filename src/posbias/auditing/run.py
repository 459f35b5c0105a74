"""`audit`: how a model weighs its context, trained and at initialisation, how well theory explains it, as one record.

Load, measure unit by unit (resumable), set the theories beside the measurement, compare with intervals, save the
record, draw the report. Every unit (a prompt, or an initialisation with its prompt) is one piece in the `PartStore`:
influence, mixing and the theories that read the prompt (`measurement/theories.py`). `audit_behaviour` adds the model's
answers to a task, and influence on the same prompts, as a run of its own.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from posbias.auditing.options import AuditOptions
from posbias.checks import checked
from posbias.comparison.distances import Sample
from posbias.comparison.stored import Audit, Subject, SubjectProfile, compare_subject, contrast_subjects, store_subjects
from posbias.errors import UsageError
from posbias.evaluation.correlate import BehaviourPlan, check_behaviour, with_influence
from posbias.evaluation.evaluation import BEHAVIOUR, Evaluation
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.run import evaluate_responder
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import combine
from posbias.measurement.options import MeasureOptions
from posbias.measurement.prompt import check_prompts
from posbias.measurement.theories import architecture_theories
from posbias.measurement.units import Unit, measure_units, settings_of_units
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import named
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.prompts import Prompts
from posbias.prompts.loading import load_prompts
from posbias.results.records import REPORT_FILE, Record
from posbias.results.result import write_report
from posbias.runs.parts import fingerprint, finished_run
from posbias.runs.running import held, run_directory
from posbias.theory.mean_field import scatter_caveat


@checked
def audit(
    model: Model | str | Path | nn.Module,
    *,
    n_positions: int = 512,
    prompts: int | Prompts = 16,
    out: str | Path | None = None,
    options: AuditOptions | None = None,
) -> Audit:
    """Examine one model: influence as trained and at initialisation, theories beside a flat line, and a verdict.

    Args:
        model: A loaded model, or what `load_model` takes: a hub id, a path, "demo", a model of transformers, or
            "config:...", which has no trained state.
        n_positions: Length of the prompts in tokens, >= 2 and within the model's positions.
        prompts: Number to draw from `options.source`, or `Prompts`, whose length then counts.
        out: Directory for record and report; with it an interrupted audit can be resumed.
        options: Kinds, seeds, initialisations and the rest.

    Raises:
        UsageError: wrong input; nothing is written then.
        RunError: the run failed; with `out`, its record says why.
    """
    options = options or AuditOptions()
    resolve_kinds(list(options.kinds))
    if not isinstance(model, str | Path):
        model = options.opened(model)
    arguments = {
        "model": named(model),
        "n_positions": n_positions,
        "prompts": "given prompts" if isinstance(prompts, Prompts) else prompts,
        **options.describe(),
    }
    resume, overwrite = options.resume, options.overwrite
    with run_directory(out, verb="audit", arguments=arguments, resume=resume, overwrite=overwrite) as run:
        loaded = model if isinstance(model, Model) else options.load(model)
        if not isinstance(prompts, Prompts):
            prompts = load_prompts(options.source, loaded, n_positions=n_positions, count=prompts, seed=options.seed)
        check_prompts(loaded, prompts)
        if any(parameter.is_meta for parameter in loaded.network.parameters()):
            raise UsageError(
                "an audit's theories need all weights in place, and some are on disk; posbias measure does not"
            )
        record = _record(loaded, prompts, options, run.directory)
        run.finish(record)
        if run.directory is None:
            return Audit.from_record(record)
        write_report(record, run.directory)
        return Audit.from_record(record).in_directory(run.directory)


def _record(model: Model, prompts: Prompts, options: AuditOptions, directory: Path | None) -> Record:
    """The record of an audit, made now or found finished in its directory."""
    kinds, measuring = resolve_kinds(list(options.kinds)), MeasureOptions(**vars(options.passes), engine=options.engine)
    settings = settings_of_units(model, prompts, {"options": options.describe()}, engine=options.engine)
    finished = finished_run(directory, lambda: settings, resume=options.resume)
    if finished is not None:
        return finished
    found, used = measure_units(
        model,
        prompts,
        _states(model, prompts, options),
        kinds=kinds,
        seed=options.seed,
        options=replace(measuring, directory=directory),
        settings=settings,
        theories=True,
    )
    generator = np.random.default_rng(options.seed)
    subjects: list[Subject] = []
    left_out: list[str] = []
    caveats: list[str] = []
    for state, measured in found.items():
        subject, reasons = combine(measured, state=state)
        mixing = subject.mixing["token_mean"].value if subject.mixing else None
        theories, missing = architecture_theories(model, prompts.n_positions, mixing)
        for name in measured[0].theories:
            sample = Sample.of(np.stack([each.theories[name] for each in measured]))
            theories[name] = SubjectProfile(Profile(sample.average), sample.units)
        subjects.append(compare_subject(replace(subject, theories=theories), generator=generator))
        left_out += [*reasons, *missing]
        drawn = [each.networks for each in measured if each.networks is not None and len(each.networks) > 1]
        caveats += [scatter_caveat(np.concatenate(drawn), initialisations=len(drawn))] if drawn else []
    contrasts = contrast_subjects(*subjects, generator=generator) if len(subjects) == 2 else {}
    resolved = {
        "title": str(settings["model"].get("source", "model")),
        "fingerprint": fingerprint(settings),
        "engine": options.engine.describe(),
        **settings,
        "together": used.together,
    }
    record = Record("audit", {}, resolved, seeds={"seed": options.seed})
    store_subjects(record, subjects, contrasts=contrasts, left_out=list(dict.fromkeys(left_out)))
    record.scalars["caveats"] = caveats
    return record


def _states(model: Model, prompts: Prompts, options: AuditOptions) -> dict[str, list[Unit]]:
    initialised = isinstance(model, HuggingFaceModel) and model.origin.init_seed is not None
    states = {} if initialised else {"trained": [Unit(index) for index in range(prompts.count)]}
    if not isinstance(model, HuggingFaceModel):
        return states
    first_seed = (model.origin.init_seed or 0) if initialised else options.seed
    count = options.initialisations
    if count is None:
        count = prompts.count if initialised else min(prompts.count, 8)  # of which six would carry a claim
    if count > prompts.count:
        raise UsageError(
            f"initialisations must be at most the {prompts.count} prompts, one prompt for each; got {count}"
        )
    if not count and initialised:
        raise UsageError("initialisations must be at least 1 if the model itself is one (init_seed, config:); got 0")
    if count:
        states["initialised"] = [Unit(index % prompts.count, init_seed=first_seed + index) for index in range(count)]
    return states


@checked
def link_behaviour(audit: Record, directory: Path) -> Path:
    """Let the page of a finished audit lead to that of the behaviour below it, and draw it anew."""
    related = {"behaviour: does what weighs also get used?": f"{BEHAVIOUR}/{REPORT_FILE}"}
    with held(directory):
        if audit.resolved.get("related") != related:
            audit.resolved["related"] = related
            audit.save(directory, overwrite=True)
        return write_report([audit], directory)


@checked
def audit_behaviour(model: Model, plan: BehaviourPlan, *, out: str | Path | None = None) -> Evaluation:
    """Answers by position, influence on the same prompts, and how they hang together.

    Args:
        model: With a tokenizer that knows character offsets.
        plan: Task, samples, kinds.
        out: Run directory; with it an interrupted run can be resumed.

    Raises:
        UsageError: wrong input, a task whose items have no places, a tokenizer without offsets, or prompts that do not
            fit into memory.
        RunError: the run failed; finished samples and prompts are kept.
    """
    arguments = {"task": str(plan.task), "count": plan.evaluation.count}
    resume, overwrite = plan.evaluation.resume, plan.evaluation.overwrite
    with run_directory(out, verb="evaluate", arguments=arguments, resume=resume, overwrite=overwrite) as run:
        directory = run.directory
        options, responder = replace(plan.evaluation, directory=directory), LocalResponder(model, LocalOptions())
        samples = check_behaviour(model, plan)
        evaluation = evaluate_responder(responder, plan.task, options, samples=samples, beside=plan.measured)
        if evaluation.outputs:  # it was not found finished
            if directory is not None and directory.name == BEHAVIOUR:
                evaluation.record.resolved["related"] = {"the audit of the model": f"../{REPORT_FILE}"}
            evaluation = with_influence(model, plan, samples, evaluation, directory)
        run.finish(evaluation.record)
        if directory is not None:
            write_report(evaluation, directory)
    return evaluation
