"""`measure_models`: one measurement of several models, each a record in a directory of its own.

Models follow one another, their prompts go through the engine; a finished model is known again by its record, an
unfinished one continues from its finished prompts (docs/measure).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.measurement import DEFAULT_KINDS, Measurement, measure
from posbias.measurement.units import MeasureOptions
from posbias.models.devices import AUTO
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import as_model, load_model, refuse_loaded
from posbias.models.model import Model
from posbias.models.reference.network import ReferenceTransformer
from posbias.progress import report
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts, PromptSource
from posbias.runs.records import Record, finished_record
from posbias.runs.running import check_unfinished, failed_record, held, run_directory


@dataclass(frozen=True)
class Loading:
    """How models are loaded, as `load_model` takes it."""

    init_seed: int | None = None
    """Measure the models re-initialised at random with this seed; None: as they are."""
    dtype: str = AUTO
    device: str = AUTO
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the chat template that renders conversations."""

    @property
    def of_loading(self) -> dict[str, Any]:
        """The settings above, as `load_model` takes them, without those of a subclass."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Loading)}

    def load(self, source: str | Path) -> HuggingFaceModel | ReferenceTransformer:
        """Load the model of a source, and say in what precision it runs where."""
        model = load_model(source, **self.of_loading)
        report(f"model {model.identity['source']}: {model.precision}")
        return model

    def opened(self, subject: Any) -> Model:
        """The model of a subject: loaded so, unless it is loaded already, and then these settings are refused."""
        if isinstance(subject, str | Path):
            return self.load(subject)
        refuse_loaded(subject, self.of_loading)
        return as_model(subject)


@checked
@dataclass(frozen=True)
class MeasurePlan(Loading):
    """Measurements to make on a model; the same for all models of a run."""

    source: PromptSource = field(default_factory=PromptSource)
    n_positions: int = 512
    """Context length N in positions, >= 1."""
    count: int = 16
    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    seed: int = 0
    """Seed of prompts, probes and the bootstrap, >= 0."""
    options: MeasureOptions = field(default_factory=MeasureOptions)
    """Averaging, passes, engine and whether to resume; each model has a directory of its own."""

    def prompts(self, model: Model) -> Prompts:
        """Source of the prompts: the same text for all models, in each one's own tokens."""
        return load_prompts(self.source, model, n_positions=self.n_positions, count=self.count, seed=self.seed)


@checked
def measure_source(source: str, plan: MeasurePlan, *, directory: Path | None) -> Measurement:
    """Load one model, and measure it into the directory."""
    model = plan.load(source)
    if len(model.places) > 1:  # else every weight would stay in place from the forward to the backward pass
        plan = replace(plan, options=replace(plan.options, checkpointing=True))
    prompts = plan.prompts(model)
    options = replace(plan.options, directory=directory)
    return measure(model, prompts, kinds=list(plan.kinds), seed=plan.seed, options=options)


@checked
def measure_models(
    sources: Sequence[str],
    plan: MeasurePlan | None = None,
    *,
    out: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
    page: Callable[[Sequence[Record], Path], object] | None = None,
) -> Iterator[tuple[str, Record]]:
    """Measure several models one after another, the prompts of each through the engine.

    Args:
        sources: As `load_model` takes them, each once.
        plan: What is measured of each; its engine serves all of them.
        out: Directory for all, with one per model; `options.resume` takes finished work from there.
        arguments, command: For the records, beside the model.
        page: Draws finished records into a directory, as `write_report` does: each into its own as it is done, at last
            all of them side by side into `out`. None: no pages.

    Yields:
        Name and record of each model as it is done. A model that fails has a record with status "failed" that says why,
        and the next one follows; a finished record that its directory holds stays there.

    Raises:
        UsageError: no models, one of them twice, wrong options, a directory that is in use, or a first model that
            cannot be measured at all.
    """
    plan = plan or MeasurePlan()
    if plan.options.resume and out is None:
        raise UsageError("resume=True needs out: the directory of the run that is continued")
    names = directory_names(sources)
    resolve_kinds(list(plan.kinds))
    records: list[Record] = []
    resume, overwrite = plan.options.resume, plan.options.overwrite
    with nullcontext() if out is None else held(out) as directory:
        if directory is not None and not (resume or overwrite):
            for name in names:
                check_unfinished(directory / name, shell=bool(command))  # of all, before hours go into the first
        for name, source in names.items():
            passed = {"model": source, **(arguments or {})}
            own = None if directory is None else directory / name
            try:
                with run_directory(
                    own, verb="measure", arguments=passed, command=command, resume=resume, overwrite=overwrite
                ) as run:
                    record = measure_source(source, plan, directory=run.directory).record
                    run.finish(record)
                    if run.directory is not None and page is not None:
                        page([record], run.directory)
            except (RunError, UsageError) as error:
                if isinstance(error, UsageError) and not records:
                    raise
                record = _failed(passed, error, own)
            records.append(record)
            yield name, record
        done = [record for record in records if record.status == "done"]
        if directory is not None and page is not None and done:
            page(done, directory)


def _failed(arguments: Mapping[str, Any], error: RunError | UsageError, directory: Path | None) -> Record:
    """The record of a model that failed, left in its directory unless a finished one is there or another run works."""
    if directory is not None:
        with suppress(RunError, UsageError), held(directory) as path:
            if finished_record(path) is None:
                failed_record("measure", arguments, error).write_run(path)
    return Record(verb="measure", arguments=dict(arguments), status="failed", error=str(error))


def directory_names(sources: Sequence[str]) -> dict[str, str]:
    """{name: source}: directories named by the last part of every model's name, with as many before it as needed."""
    if not sources:
        raise UsageError("no model to measure; give at least 1")
    parts: dict[str, list[str]] = {}
    for source in sources:
        path = Path(source.removeprefix("config:")).expanduser()
        whole = (path.resolve() if path.exists() else path).parts
        clean = [
            "".join(sign if sign.isalnum() or sign in "._-" else "_" for sign in part).strip(".") for part in whole
        ]
        parts[source] = [part for part in clean if part.strip("_")] or ["model"]
    for taken in range(1, max(map(len, parts.values())) + 1):
        names = {"-".join(own[-taken:]): source for source, own in parts.items()}
        if len(names) == len(sources):
            return names
    raise UsageError(f"the models {', '.join(sources)} cannot be told apart by their names; give each of them once")
