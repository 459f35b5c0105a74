"""posbias: how a transformer language model weighs the positions of its context.

Predict it from the architecture, measure it on real models, explain it, and set every theory beside a flat line.
Names are imported when first used, so that `import posbias` is cheap.
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
        evaluate,
        measured_use,
        place,
        tie,
        tie_runs,
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
    "Architecture": "architecture",
    "AttentionOptions": "measurement",
    "AttentionStatistics": "measurement",
    "Audit": "auditing",
    "AuditOptions": "auditing",
    "BehaviourPlan": "auditing",
    "Comparison": "comparison",
    "Decomposition": "decomposition",
    "DecompositionOptions": "decomposition",
    "EvaluateOptions": "evaluation",
    "Evaluation": "evaluation",
    "FreeRecall": "tasks.synthetic",
    "InContextRetrieval": "tasks.synthetic",
    "LocalResponder": "evaluation.responders",
    "MeasureOptions": "measurement",
    "MeasurePlan": "auditing",
    "MeasuredUse": "evaluation",
    "Measurement": "measurement",
    "Member": "training",
    "PassOptions": "measurement",
    "Placement": "evaluation",
    "PositionCopy": "tasks.synthetic",
    "Prediction": "theory",
    "Profile": "profiles",
    "PromptSource": "prompts",
    "Prompts": "prompts",
    "RecallAndSpan": "tasks.synthetic",
    "Record": "records",
    "RunError": "errors",
    "RunOptions": "measurement",
    "RunningSpan": "tasks.synthetic",
    "ServerResponder": "evaluation.responders",
    "Study": "training",
    "Trained": "training",
    "TrainedMember": "training",
    "TrainingOptions": "training",
    "TrainingRun": "training",
    "UsageError": "errors",
    "attention_rollout": "theory.power_rollout",
    "attention_rollouts": "theory.power_rollout",
    "attention_statistics": "measurement",
    "audit": "auditing",
    "audit_behaviour": "auditing",
    "chat_prompts": "prompts",
    "closed_form": "theory",
    "compare": "comparison",
    "counterfactuals": "decomposition",
    "evaluate": "evaluation",
    "ingredients": "theory.power_rollout",
    "intervened": "interventions",
    "load_model": "models",
    "load_prompts": "prompts",
    "load_record": "records",
    "load_study": "training",
    "measure": "measurement",
    "measure_models": "auditing",
    "measured_use": "evaluation",
    "place": "evaluation",
    "power_rollout": "theory.power_rollout",
    "predict": "theory",
    "preflight": "measurement",
    "preflight_attention": "auditing",
    "reinitialise": "models",
    "run_study": "training",
    "shared_direction_rollout": "theory.power_rollout",
    "sign_randomised_rollout": "theory.power_rollout",
    "tie": "evaluation",
    "tie_runs": "evaluation",
    "train": "training",
    "uniform_profile": "profiles",
    "value_path_share": "theory.power_rollout",
    "write_report": "report",
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
    "tie",
    "tie_runs",
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
