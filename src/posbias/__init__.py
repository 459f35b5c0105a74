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
    from posbias.auditing import Audit, AuditOptions, audit
    from posbias.comparison import Comparison, compare
    from posbias.errors import RunError, UsageError
    from posbias.measurement import AttentionStatistics, Measurement, MeasureOptions, attention_statistics, measure
    from posbias.models import load_model, reinitialise
    from posbias.profiles import Profile, uniform_profile
    from posbias.prompts import Prompts, load_prompts
    from posbias.records import Record, load_record
    from posbias.report import write_report
    from posbias.theory import Prediction, closed_form, predict
    from posbias.theory.power_rollout import attention_rollout, power_rollout

_HOMES = {
    "Architecture": "architecture",
    "AttentionStatistics": "measurement",
    "Audit": "auditing",
    "AuditOptions": "auditing",
    "Comparison": "comparison",
    "MeasureOptions": "measurement",
    "Measurement": "measurement",
    "Prediction": "theory",
    "Profile": "profiles",
    "Prompts": "prompts",
    "Record": "records",
    "RunError": "errors",
    "UsageError": "errors",
    "attention_rollout": "theory.power_rollout",
    "attention_statistics": "measurement",
    "audit": "auditing",
    "closed_form": "theory",
    "compare": "comparison",
    "load_model": "models",
    "load_prompts": "prompts",
    "load_record": "records",
    "measure": "measurement",
    "power_rollout": "theory.power_rollout",
    "predict": "theory",
    "reinitialise": "models",
    "uniform_profile": "profiles",
    "write_report": "report",
}
"""Where each public name lives. No package bears the name of a function here, so none can hide one."""

__all__ = [
    "Architecture",
    "AttentionStatistics",
    "Audit",
    "AuditOptions",
    "Comparison",
    "MeasureOptions",
    "Measurement",
    "Prediction",
    "Profile",
    "Prompts",
    "Record",
    "RunError",
    "UsageError",
    "__version__",
    "architecture",
    "attention_rollout",
    "attention_statistics",
    "audit",
    "closed_form",
    "compare",
    "load_model",
    "load_prompts",
    "load_record",
    "measure",
    "power_rollout",
    "predict",
    "reinitialise",
    "uniform_profile",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "architecture":
        return import_module("posbias.architecture")
    if name not in _HOMES:
        raise AttributeError(f"module 'posbias' has no attribute {name!r}")
    return getattr(import_module(f"posbias.{_HOMES[name]}"), name)
