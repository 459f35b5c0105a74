"""Models measured, audited and compared as records: as trained and at initialisation, beside every theory."""

from posbias.auditing.attention import attention_record, preflight_attention
from posbias.auditing.behaviour import audit_behaviour, link_behaviour
from posbias.auditing.comparing import Chosen, comparison_record, ingredient_record
from posbias.auditing.measuring import MeasurePlan, directory_names, measure_models, measure_source, measurement_record
from posbias.auditing.run import AuditOptions, audit

__all__ = [
    "AuditOptions",
    "Chosen",
    "MeasurePlan",
    "attention_record",
    "audit",
    "audit_behaviour",
    "comparison_record",
    "directory_names",
    "ingredient_record",
    "link_behaviour",
    "measure_models",
    "measure_source",
    "measurement_record",
    "preflight_attention",
]
