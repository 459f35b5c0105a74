"""posbias: how a transformer language model weighs the positions of its context.

Predict it from the architecture, measure it on real models, explain it, and set every theory beside a flat line.
Names are imported when first used, so that `import posbias` is cheap. Start with `audit("demo")`, or with `load_model`,
`load_prompts` and `measure`.

    Architecture: What mixes positions: `depth` layers of `heads` heads, each layer T_l = (1 - m_l) I + m_l
        mean_h A_lh.
    AttentionOptions: What `attention_statistics` keeps.
    AttentionStatistics: A model's attention over a set of prompts.
    Audit: A finished audit.
    AuditOptions: Settings of an audit; the defaults are what `posbias audit` runs.
    BehaviourPlan: What is asked and measured.
    Comparison: The distances of a prediction to a measurement, and in `.flat` those of the flat line to the
        same.
    Decomposition: A model's profile with its ingredients replaced one at a time.
    DecompositionOptions: What is measured, and where finished pieces are kept.
    EvaluateOptions: What is requested, and where finished samples are kept.
    Evaluation: What a model did with one task.
    FreeRecall: Name every item of the list, in any order.
    InContextRetrieval: Name the label of the query's class, which stands beside the items of that class in the
        context.
    LocalResponder: A loaded model.
    MeasureOptions: How prompts are averaged, how intervals are made and how passes are run.
    MeasurePlan: What is measured of a model; the same for all models of a run.
    MeasuredUse: What a run measured of one model: how often an item is used, by where it stands.
    Measurement: A model's influence profiles and mixing, with pointwise intervals over prompts.
    Member: One model to train.
    PassOptions: Per prompt: the output that is read, what else is recorded, memory against time.
    Placement: The order chosen for some passages, and what it is expected to be worth.
    PositionCopy: Name the token at one position of a context of independent uniform tokens.
    Prediction: A theory's profile and what it was computed for.
    Profile: Non-negative influence of every input position on the last one; sums to 1.
    PromptSource: What `load_prompts` takes in place of a bare source, where the defaults do not fit.
    Prompts: `count` prompts of exactly `n_positions` tokens each; no padding.
    RecallAndSpan: Free recall of some lists, running span of the others, as the cue says.
    Record: One run: what was asked, what that resolved to, what came out.
    RunError: The request was fine, but the run could not be finished (NaN gradients, a full disk ...).
    RunOptions: Where prompts are measured and kept; nothing here changes a number, but for the engine's
        threads.
    RunningSpan: Name the last items of the list, in order.
    ServerResponder: A model on a server.
    Study: What a study file says, with its sections as plain settings.
    Trained: All members of a training, in the order they were given.
    TrainedMember: One member after training, or after it failed.
    TrainingOptions: What decides the result of a training, beside the member itself.
    TrainingRun: Where members are trained and kept; nothing here changes a number, but for the device.
    UsageError: The request is wrong: an unknown name, a value out of range, a length that does not fit.
    architecture: What mixes tokens in a transformer: masks, encodings, mixing schedules, and the `Architecture`
        that joins them.
    attention_rollout: Rollout of the measured attention with a given residual share per layer.
    attention_rollouts: Every rollout of a model's own attention, from one forward pass and one recomputation
        per prompt and layer.
    attention_statistics: Distance, entropy, sinks, content logits, similarity, monotonicity, mean kernels and
        mixing of a model.
    audit: Examine one model: influence as trained and at birth, the theories' errors beside a flat line,
        findings.
    audit_behaviour: Answers by position, influence and theories of the same prompts, and how they hang
        together.
    chat_prompts: Conversations of one exact length as prompts, in the order given.
    closed_form: Exact rollout profile of uniform causal attention at chosen positions, O(L^2) each whatever the
        length.
    compare: Every registered distance of a prediction to a measurement, beside the flat line's.
    correlate: Rank correlations over positions of one model, or pooled over several models and lengths.
    correlate_runs: What weighs and what is used over several saved runs of `audit_behaviour`: over positions,
        lengths and models.
    counterfactuals: Replace one ingredient at a time, in the model and in the theories, and keep every prompt's
        profile.
    evaluate: Put every sample at every position to one model, and judge its answers.
    ingredients: Predict with the diagonal power rollout as it is, and without each of its ingredients.
    intervened: Within the context, the model with one ingredient replaced; measure it like any other.
    load_model: Load a causal language model, frozen and in evaluation mode.
    load_prompts: Equally long prompts for a model.
    load_record: Read a run directory written by `Record.save`.
    load_study: Read a study file and check all of it but the points of its grid.
    measure: Measure how much every input position influences the output, and how strongly each layer mixes.
    measure_models: Measure several models one after another, the prompts of each through the engine.
    measured_use: The curve of a finished run, for placing passages.
    place: Order passages so that the relevant ones stand where this model uses them.
    power_rollout: Predict how much each input position influences the last one, from forward activations alone.
    predict: The position-bias profile a theory predicts.
    preflight: Say what a measurement will cost before it begins, and refuse one that cannot fit.
    preflight_attention: Say what `attention_statistics` and `attention_rollouts` will cost, and refuse what
        cannot fit.
    reinitialise: The same configuration with all weights drawn anew by the model class's own initialiser; a new
        model.
    run_study: Train all members of a study and save each that ended well as a model directory.
    shared_direction_rollout: Predict influence on the last position by its own path, one direction shared by
        the others, and energies.
    sign_randomised_rollout: The unbiased reference for incoherence: energies of back-propagation with random
        signs on its path terms.
    train: Train all members.
    uniform_profile: The flat baseline: every position weighs 1/N.
    value_path_share: Compare the exact Jacobian with the one that holds attention weights constant.
    write_report: Write `report.html` and a PNG per figure into the directory `out`, each atomically.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from posbias.version import __version__

if TYPE_CHECKING:
    from posbias import architecture
    from posbias.architecture import Architecture
    from posbias.auditing import (
        Audit,
        AuditOptions,
        BehaviourPlan,
        MeasurePlan,
        audit,
        audit_behaviour,
        measure_models,
        preflight_attention,
    )
    from posbias.comparison import Comparison, compare
    from posbias.decomposition import Decomposition, DecompositionOptions, counterfactuals
    from posbias.errors import RunError, UsageError
    from posbias.evaluation import (
        EvaluateOptions,
        Evaluation,
        MeasuredUse,
        Placement,
        correlate,
        correlate_runs,
        evaluate,
        measured_use,
        place,
    )
    from posbias.evaluation.responders import LocalResponder, ServerResponder
    from posbias.interventions import intervened
    from posbias.measurement import (
        AttentionOptions,
        AttentionStatistics,
        Measurement,
        MeasureOptions,
        PassOptions,
        RunOptions,
        attention_statistics,
        measure,
        preflight,
    )
    from posbias.models import load_model, reinitialise
    from posbias.profiles import Profile, uniform_profile
    from posbias.prompts import Prompts, PromptSource, chat_prompts, load_prompts
    from posbias.records import Record, load_record
    from posbias.report import write_report
    from posbias.tasks.synthetic import FreeRecall, InContextRetrieval, PositionCopy, RecallAndSpan, RunningSpan
    from posbias.theory import Prediction, closed_form, predict
    from posbias.theory.power_rollout import (
        attention_rollout,
        attention_rollouts,
        ingredients,
        power_rollout,
        shared_direction_rollout,
        sign_randomised_rollout,
        value_path_share,
    )
    from posbias.training import (
        Member,
        Study,
        Trained,
        TrainedMember,
        TrainingOptions,
        TrainingRun,
        load_study,
        run_study,
        train,
    )

_HOMES = {
    name: home
    for home, names in {
        "architecture": "Architecture",
        "auditing": "Audit AuditOptions BehaviourPlan MeasurePlan audit audit_behaviour measure_models "
        "preflight_attention",
        "comparison": "Comparison compare",
        "decomposition": "Decomposition DecompositionOptions counterfactuals",
        "errors": "RunError UsageError",
        "evaluation": "EvaluateOptions Evaluation MeasuredUse Placement correlate correlate_runs evaluate measured_use "
        "place",
        "evaluation.responders": "LocalResponder ServerResponder",
        "interventions": "intervened",
        "measurement": "AttentionOptions AttentionStatistics MeasureOptions Measurement PassOptions RunOptions "
        "attention_statistics measure preflight",
        "models": "load_model reinitialise",
        "profiles": "Profile uniform_profile",
        "prompts": "PromptSource Prompts chat_prompts load_prompts",
        "records": "Record load_record",
        "report": "write_report",
        "tasks.synthetic": "FreeRecall InContextRetrieval PositionCopy RecallAndSpan RunningSpan",
        "theory": "Prediction closed_form predict",
        "theory.power_rollout": "attention_rollout attention_rollouts ingredients power_rollout "
        "shared_direction_rollout sign_randomised_rollout value_path_share",
        "training": "Member Study Trained TrainedMember TrainingOptions TrainingRun load_study run_study train",
    }.items()
    for name in names.split()
}
"""Where each public name lives. No package bears the name of a function here, so none can hide one."""

__all__ = [
    "Architecture",
    "AttentionOptions",
    "AttentionStatistics",
    "Audit",
    "AuditOptions",
    "BehaviourPlan",
    "Comparison",
    "Decomposition",
    "DecompositionOptions",
    "EvaluateOptions",
    "Evaluation",
    "FreeRecall",
    "InContextRetrieval",
    "LocalResponder",
    "MeasureOptions",
    "MeasurePlan",
    "MeasuredUse",
    "Measurement",
    "Member",
    "PassOptions",
    "Placement",
    "PositionCopy",
    "Prediction",
    "Profile",
    "PromptSource",
    "Prompts",
    "RecallAndSpan",
    "Record",
    "RunError",
    "RunOptions",
    "RunningSpan",
    "ServerResponder",
    "Study",
    "Trained",
    "TrainedMember",
    "TrainingOptions",
    "TrainingRun",
    "UsageError",
    "__version__",
    "architecture",
    "attention_rollout",
    "attention_rollouts",
    "attention_statistics",
    "audit",
    "audit_behaviour",
    "chat_prompts",
    "closed_form",
    "compare",
    "correlate",
    "correlate_runs",
    "counterfactuals",
    "evaluate",
    "ingredients",
    "intervened",
    "load_model",
    "load_prompts",
    "load_record",
    "load_study",
    "measure",
    "measure_models",
    "measured_use",
    "place",
    "power_rollout",
    "predict",
    "preflight",
    "preflight_attention",
    "reinitialise",
    "run_study",
    "shared_direction_rollout",
    "sign_randomised_rollout",
    "train",
    "uniform_profile",
    "value_path_share",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "architecture":
        return import_module("posbias.architecture")
    if name not in _HOMES:
        raise AttributeError(f"module 'posbias' has no attribute {name!r}")
    return getattr(import_module(f"posbias.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
