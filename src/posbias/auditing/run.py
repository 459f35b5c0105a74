"""`audit`: how a model weighs its context, trained and at initialisation, how well theory explains it, as one record.

Load, measure unit by unit (resumable), set the theories beside the measurement, compare with intervals, save the
record, draw the report.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posbias.auditing.subjects import (
    INITIALISED,
    MOST_INITIALISATIONS,
    TRAINED,
    AuditOptions,
    examine,
    theories_of_tokens,
)
from posbias.checks import checked
from posbias.comparison import Contrast, Subject, compare_subject, contrast_subjects
from posbias.errors import UsageError
from posbias.measurement import MeasureOptions, RunOptions, Unit, check_prompts, preflight, resolve_kinds
from posbias.models import HuggingFaceModel, Model
from posbias.parts import PartStore, fingerprint, finished_run, made_by
from posbias.prompts import Prompts, load_prompts
from posbias.records import Record, run_directory
from posbias.report import conclude, paragraph, store_subjects, view_of


@dataclass(frozen=True, eq=False)
class Audit:
    """A finished audit."""

    record: Record
    subjects: tuple[Subject, ...]
    """The model as trained (where it was), then at initialisation."""
    contrasts: dict[str, Contrast]
    directory: Path | None
    report: Path | None
    """The HTML page; None where no directory was given."""

    def __repr__(self) -> str:
        states = ", ".join(subject.name for subject in self.subjects)
        return f"Audit({self.record.resolved.get('title')}: {states}; report: {self.report})"

    @property
    def findings(self) -> str:
        """One paragraph of plain findings, each backed by an interval."""
        return paragraph(view_of(self.record))


@checked
def audit(
    model: str | Path | Model,
    *,
    n_positions: int = 512,
    prompts: int | Prompts = 16,
    out: str | Path | None = None,
    options: AuditOptions | None = None,
) -> Audit:
    """Examine one model: influence trained and at initialisation, theories' errors beside a flat line, findings.

    Args:
        model: What `load_model` takes, or a loaded model. A `"config:..."` source has no trained state.
        n_positions: Length of the prompts in tokens, >= 2 and within the model's positions.
        prompts: How many to draw from `options.source`, or ready `Prompts` (their length then counts).
        out: Directory for record, report and PNGs; with it an interrupted audit can be resumed.
        options: Kinds, seeds, initialisations and the rest.

    Raises:
        UsageError: wrong input; nothing is written then.
        RunError: the run failed; with `out`, its record says why.
    """
    options = options or AuditOptions()
    resolve_kinds(list(options.kinds))
    named = model.describe().get("source", "a loaded model") if isinstance(model, Model) else model
    arguments = {
        "model": str(named),
        "n_positions": n_positions,
        "prompts": "given prompts" if isinstance(prompts, Prompts) else prompts,
        **options.describe(),
    }
    with run_directory(out, verb="audit", arguments=arguments, resume=options.resume) as directory:
        return _run(model, n_positions, prompts, options, arguments, directory)


def _run(
    source: str | Path | Model,
    n_positions: int,
    prompts: int | Prompts,
    options: AuditOptions,
    arguments: dict[str, Any],
    directory: Path | None,
) -> Audit:
    model = source if isinstance(source, Model) else options.load(source)
    if not isinstance(prompts, Prompts):
        prompts = load_prompts(options.source, model, n_positions=n_positions, count=prompts, seed=options.seed)
    check_prompts(model, prompts)
    if any(parameter.is_meta for parameter in model.network.parameters()):
        raise UsageError(
            "an audit's theories need all weights in place, and some are on disk; posbias measure does not"
        )
    settings: dict[str, Any] = {
        "model": model.describe(),
        "prompts": prompts.describe(),
        "options": options.describe(),
        "threads": options.engine.pinned_threads,
        "made_by": made_by(),
    }
    finished = finished_run(directory, lambda: settings, resume=options.resume)
    if finished is not None and directory is not None:
        view = view_of(finished)
        found = conclude(finished, directory, found=True)
        return Audit(finished, view.subjects, dict(view.contrasts), directory, found)
    store = PartStore(directory, settings, resume=options.resume)
    passes = MeasureOptions(passes=options.passes, run=RunOptions(options.engine))
    states = _states(model, prompts, options)
    cost = preflight(
        model,
        prompts,
        kinds=options.kinds,
        options=passes,
        max_memory=options.max_memory,
        beside=theories_of_tokens(model, initialised=INITIALISED in states),
        units=[unit for units in states.values() for unit in units],
    )
    given: dict[str, Any] = {"model": model, "prompts": prompts, "options": options, "store": store}
    examined = [examine(name, units, **given) for name, units in states.items()]
    generator = np.random.default_rng(options.seed)
    subjects = tuple(compare_subject(state.subject, generator=generator) for state in examined)
    contrasts = contrast_subjects(*subjects, generator=generator) if len(subjects) == 2 else {}
    resolved = {
        "title": str(settings["model"].get("source", "model")),
        "command": options.command,
        "fingerprint": fingerprint(settings),
        "engine": options.engine.describe(),
        **settings,
    }
    record = Record(verb="audit", arguments=arguments, resolved=resolved, seeds={"seed": options.seed})
    left_out = list(dict.fromkeys(reason for state in examined for reason in state.left_out))
    store_subjects(record, subjects, contrasts=contrasts, left_out=left_out)
    record.scalars["findings"] = paragraph(view_of(record))
    record.scalars["cost"] = cost
    record.scalars["caveats"] = [caveat for state in examined for caveat in state.caveats]
    page = None if directory is None else conclude(record, directory)
    return Audit(record, subjects, contrasts, directory, page)


def _states(model: Model, prompts: Prompts, options: AuditOptions) -> dict[str, list[Unit]]:
    """The states of the model that are measured, each with its units."""
    initialised = isinstance(model, HuggingFaceModel) and model.origin.init_seed is not None
    states: dict[str, list[Unit]] = {}
    if not initialised:
        states[TRAINED] = [Unit(index) for index in range(prompts.count)]
    if not isinstance(model, HuggingFaceModel):
        return states
    first_seed = (model.origin.init_seed or 0) if initialised else options.seed
    count = options.initialisations
    if count is None:
        count = prompts.count if initialised else min(prompts.count, MOST_INITIALISATIONS)
    if count > prompts.count:
        raise UsageError(
            f"initialisations must be at most the {prompts.count} prompts, one prompt for each; got {count}"
        )
    if not count and initialised:
        raise UsageError("initialisations must be at least 1 where the model itself is one (init_seed, config:); got 0")
    if count:
        states[INITIALISED] = [Unit(index % prompts.count, init_seed=first_seed + index) for index in range(count)]
    return states
