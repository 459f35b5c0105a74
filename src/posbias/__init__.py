"""posbias: how a transformer language model weighs the positions of its context.

Start with `audit("demo")`, or with `load_model`, `load_prompts` and `measure`. Functions take their subject first and
settings as one `options=`; results show themselves in a notebook, `save` into a directory, and come back by
`load_record`.

Ask about a model or an architecture:
    audit: Examine one model: influence as trained and at initialisation, theories beside a flat line, and a verdict.
    measure: Measure how much every input position influences the output, and how strongly each layer mixes.
    attention: Measure a model's attention: distance, entropy, sinks, content logits, kernels, mixing and rollouts.
    predict: Predict the profile of an architecture or a model by a theory.
    compare: Compare two profiles by every registered distance, beside the flat line's.
    decompose: Replace one ingredient of a model at a time, and keep every prompt's profile.
    evaluate: Put every sample of a task, at every position, to one model, and judge its answers.
    correlate: Correlate influence with behaviour over several finished evaluations: over positions, lengths and models.
    place: Order passages so that the relevant ones stand where this model uses them.
    mitigate: Try methods against position bias on one model and task, and judge each.
    design: Find the architecture whose profile is the target.
    train: Train all members of a study and save each that ended well as a model directory.

Load, and read finished runs:
    load_model: Load a causal language model, frozen and in evaluation mode.
    load_prompts: Load equally long prompts for a model.
    load_record: Read the result of a finished run from its directory.
    Record: One run: what was asked, what that resolved to, what came out.
    write_report: Write `report.html` into the directory `out`, atomically.

What is asked about:
    Architecture: A stack that mixes positions: `depth` layers of `heads` heads, each T_l = (1 - m_l) I + m_l mean_h
        A_lh.
    Profile: Non-negative influence of every input position on the last one; sums to 1.
    LocalResponder: A loaded model with a tokenizer, and with a chat template if requests are conversations.
    ServerResponder: A model on a server.

Change a model within a context, or for good:
    intervened: Context in which one ingredient of a model is replaced; measure it like any other model.
    mitigated: Context in which a method against position bias acts on a model; after `install` it acts until `remove`.
    fit: Fit a method's parameters to a model, from calibration samples alone.
    export: Write a fitted method for other programs: an adapter that PEFT, vLLM and llama.cpp load, or a whole
        checkpoint.

Exact values:
    closed_form: Exact rollout profile of uniform causal attention at chosen positions, O(L^2) each whatever the length.

Settings, all keyword arguments:
    AttentionOptions: Settings of `attention`.
    AuditOptions: Settings of an audit; the defaults are what `posbias audit` runs.
    CompareOptions: Settings of `compare`: which profiles of the two runs are compared, and the seed of resamples.
    CorrelateOptions: Settings of `correlate`.
    DecomposeOptions: Settings of a decomposition, and where its finished pieces are kept.
    DesignOptions: Settings of `design`.
    EvaluateOptions: Settings of `evaluate`: the samples that are requested, and the folder of finished ones.
    FitOptions: Settings of a fit by gradient.
    MeasureOptions: Settings of `measure`: those of the passes, and where the work is done and kept.
    MitigateOptions: Methods that are tried, the samples that judge them, and the measure that decides.
    PlaceOptions: Settings of `place`.
    TrainOptions: Settings of `train`: where members are trained and kept; none but the device changes results.

Errors:
    RunError: The request was fine, but the run could not be finished (NaN gradients, a full disk ...).
    UsageError: The request is wrong: an unknown name, a value out of range, a length that does not fit.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posbias.version import __version__ as __version__

if TYPE_CHECKING:
    from posbias.architecture import Architecture as Architecture
    from posbias.auditing.options import AuditOptions as AuditOptions
    from posbias.auditing.run import audit as audit
    from posbias.comparison.compare import compare as compare
    from posbias.comparison.options import CompareOptions as CompareOptions
    from posbias.decomposition.decomposition import decompose as decompose
    from posbias.decomposition.options import DecomposeOptions as DecomposeOptions
    from posbias.designing.design import design as design
    from posbias.designing.options import DesignOptions as DesignOptions
    from posbias.errors import RunError as RunError
    from posbias.errors import UsageError as UsageError
    from posbias.evaluation.correlate import correlate as correlate
    from posbias.evaluation.options import CorrelateOptions as CorrelateOptions
    from posbias.evaluation.options import EvaluateOptions as EvaluateOptions
    from posbias.evaluation.options import PlaceOptions as PlaceOptions
    from posbias.evaluation.place import place as place
    from posbias.evaluation.responders import LocalResponder as LocalResponder
    from posbias.evaluation.responders import ServerResponder as ServerResponder
    from posbias.evaluation.run import evaluate as evaluate
    from posbias.exporting import export as export
    from posbias.interventions import intervened as intervened
    from posbias.measurement.attention import attention as attention
    from posbias.measurement.measurement import measure as measure
    from posbias.measurement.options import AttentionOptions as AttentionOptions
    from posbias.measurement.options import MeasureOptions as MeasureOptions
    from posbias.mitigation.fitting import fit as fit
    from posbias.mitigation.methods.applying import mitigated as mitigated
    from posbias.mitigation.options import FitOptions as FitOptions
    from posbias.mitigation.options import MitigateOptions as MitigateOptions
    from posbias.mitigation.run import mitigate as mitigate
    from posbias.models.loading import load_model as load_model
    from posbias.profiles import Profile as Profile
    from posbias.prompts.loading import load_prompts as load_prompts
    from posbias.results.records import Record as Record
    from posbias.results.result import load_record as load_record
    from posbias.results.result import write_report as write_report
    from posbias.theory import closed_form as closed_form
    from posbias.theory import predict as predict
    from posbias.training.options import TrainOptions as TrainOptions
    from posbias.training.running import train as train

_IMPORTS = re.compile(r"^    from (posbias[\w.]*) import (\w+) as ", re.MULTILINE)
_HOMES = {name: home for home, name in _IMPORTS.findall(Path(__file__).read_text(encoding="utf-8"))}
"""Where each public name lives, read off the imports above, which none but type checkers run. No package bears the name
of a function here, so none can hide one."""
_READERS = "load_record write_report"
"""Functions that meet finished runs of every verb."""


def __getattr__(name: str) -> Any:
    if name == "cite":
        raise AttributeError("posbias.cite left posbias after 0.1.0: CITATION.cff names posbias and its sources")
    if name not in _HOMES:
        raise AttributeError(f"module 'posbias' has no attribute {name!r}")
    if name in _READERS.split():
        import_module("posbias_papers.published")  # has the words of published claims and experiments
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
