"""posbias: how a transformer language model weighs the positions of its context.

Predict it from the architecture, measure it on real models, explain it, and set every theory beside a flat line.
Names are imported when first used, so that `import posbias` is cheap. Start with `audit("demo")`, or with `load_model`,
`load_prompts` and `measure`.

    Architecture: A stack that mixes positions: `depth` layers of `heads` heads, each T_l = (1 - m_l) I + m_l mean_h
        A_lh.
    AuditOptions: Settings of an audit; the defaults are what `posbias audit` runs.
    EvaluateOptions: What is requested, and where finished samples are kept.
    LocalResponder: A loaded model.
    MeasureOptions: Settings of `measure`: those of the passes, how prompts are averaged, and where the work is done
        and kept.
    Profile: Non-negative influence of every input position on the last one; sums to 1.
    Record: One run: what was asked, what that resolved to, what came out.
    RunError: The request was fine, but the run could not be finished (NaN gradients, a full disk ...).
    ServerResponder: A model on a server.
    UsageError: The request is wrong: an unknown name, a value out of range, a length that does not fit.
    attention: Distance, entropy, sinks, content logits, similarity, monotonicity, mean kernels and mixing of a model.
    audit: Examine one model: influence trained and at initialisation, theories' errors beside a flat line, a verdict.
    closed_form: Exact rollout profile of uniform causal attention at chosen positions, O(L^2) each whatever the
        length.
    compare: Every registered distance of the first profile to the second, beside the flat line's.
    correlate: Correlate influence with behaviour over several finished evaluations: over positions, lengths and models.
    design: Find the architecture whose profile is the target.
    evaluate: Put every sample of a task, at every position, to one model, and judge its answers.
    fit: A method with the parameters that suit a model, from calibration samples alone.
    intervened: Within the context, the model with one ingredient replaced; measure it like any other.
    load_model: Load a causal language model, frozen and in evaluation mode.
    load_prompts: Equally long prompts for a model.
    load_record: Read the result of a finished run from its directory.
    measure: Measure how much every input position influences the output, and how strongly each layer mixes.
    mitigated: Within the context, a model under a method against position bias; `install` leaves it so.
    place: Order passages so that the relevant ones stand where this model uses them.
    predict: The position-bias profile a theory predicts.
    uniform_profile: The flat baseline: every position weighs 1/N.
    write_report: Write `report.html` into the directory `out`, atomically; on demand a PNG per figure before it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posbias.version import __version__

if TYPE_CHECKING:
    from posbias.architecture import Architecture
    from posbias.auditing import AuditOptions, audit
    from posbias.comparison import compare
    from posbias.designing import design
    from posbias.errors import RunError, UsageError
    from posbias.evaluation import EvaluateOptions, correlate, evaluate, place
    from posbias.evaluation.responders import LocalResponder, ServerResponder
    from posbias.interventions import intervened
    from posbias.measurement.attention.streaming import attention
    from posbias.measurement.measurement import MeasureOptions, measure
    from posbias.mitigation import mitigated
    from posbias.mitigation.fitting.fit import fit
    from posbias.models.loading import load_model
    from posbias.profiles import Profile, uniform_profile
    from posbias.prompts.loading import load_prompts
    from posbias.report import load_record, write_report
    from posbias.runs.records import Record
    from posbias.theory import closed_form, predict

_HOMES = {
    name: home
    for home, names in {
        "architecture": "Architecture",
        "auditing": "AuditOptions audit",
        "comparison": "compare",
        "designing": "design",
        "errors": "RunError UsageError",
        "evaluation": "EvaluateOptions correlate evaluate place",
        "evaluation.responders": "LocalResponder ServerResponder",
        "interventions": "intervened",
        "measurement.attention.streaming": "attention",
        "measurement.measurement": "MeasureOptions measure",
        "mitigation": "mitigated",
        "mitigation.fitting.fit": "fit",
        "models.loading": "load_model",
        "profiles": "Profile uniform_profile",
        "prompts.loading": "load_prompts",
        "runs.records": "Record",
        "report": "load_record write_report",
        "theory": "closed_form predict",
    }.items()
    for name in names.split()
}
"""Where each public name lives. No package bears the name of a function here, so none can hide one."""
_WORDED = {"correlate", "evaluate", "load_record", "place"}
"""Functions whose results answer in sentences."""

__all__ = [
    "Architecture",
    "AuditOptions",
    "EvaluateOptions",
    "LocalResponder",
    "MeasureOptions",
    "Profile",
    "Record",
    "RunError",
    "ServerResponder",
    "UsageError",
    "__version__",
    "attention",
    "audit",
    "closed_form",
    "compare",
    "correlate",
    "design",
    "evaluate",
    "fit",
    "intervened",
    "load_model",
    "load_prompts",
    "load_record",
    "measure",
    "mitigated",
    "place",
    "predict",
    "uniform_profile",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'posbias' has no attribute {name!r}")
    found = getattr(import_module(f"posbias.{_HOMES[name]}"), name)
    if name in _WORDED:
        import_module("posbias.report")  # which words their results; no room below it does
    return found


def __dir__() -> list[str]:
    return __all__
