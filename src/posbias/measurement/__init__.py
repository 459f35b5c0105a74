"""Influence, mixing and attention, measured on models."""

from posbias.measurement.attention.statistics import AttentionOptions, AttentionStatistics
from posbias.measurement.attention.streaming import attention_statistics
from posbias.measurement.cost import estimate_cost, preflight
from posbias.measurement.integrated import IntegratedGradients
from posbias.measurement.kinds import KINDS, Fisher, Jacobian, Kind, Logit, LogProbability, Probability, resolve_kinds
from posbias.measurement.measurement import (
    DEFAULT_KINDS,
    Measurement,
    MeasureOptions,
    RunOptions,
    Unit,
    UnitWork,
    combine,
    measure,
)
from posbias.measurement.outputs import OUTPUTS, PassOptions, resolve_output
from posbias.measurement.perturbation import Perturbation
from posbias.measurement.prompt import PromptMeasurement, check_prompts, measure_prompt

__all__ = [
    "DEFAULT_KINDS",
    "KINDS",
    "OUTPUTS",
    "AttentionOptions",
    "AttentionStatistics",
    "Fisher",
    "IntegratedGradients",
    "Jacobian",
    "Kind",
    "LogProbability",
    "Logit",
    "MeasureOptions",
    "Measurement",
    "PassOptions",
    "Perturbation",
    "Probability",
    "PromptMeasurement",
    "RunOptions",
    "Unit",
    "UnitWork",
    "attention_statistics",
    "check_prompts",
    "combine",
    "estimate_cost",
    "measure",
    "measure_prompt",
    "preflight",
    "resolve_kinds",
    "resolve_output",
]
