"""Influence, mixing and attention, measured on models."""

from posbias.measurement.attention import AttentionOptions, AttentionStatistics, attention_statistics
from posbias.measurement.cost import calibrate, estimate_cost, preflight
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.integrated import IntegratedGradients
from posbias.measurement.kinds import KINDS, Fisher, Jacobian, Kind, Logit, LogProbability, Probability, resolve_kinds
from posbias.measurement.measurement import (
    DEFAULT_KINDS,
    DepthProfiles,
    Measurement,
    MeasureOptions,
    RunOptions,
    Unit,
    UnitWork,
    combine,
    measure,
)
from posbias.measurement.outputs import OUTPUTS, Output, PassOptions, resolve_output
from posbias.measurement.perturbation import Perturbation
from posbias.measurement.prompt import PromptMeasurement, check_prompts, measure_prompt

__all__ = [
    "DEFAULT_KINDS",
    "KINDS",
    "OUTPUTS",
    "AttentionOptions",
    "AttentionStatistics",
    "CostEstimate",
    "DepthProfiles",
    "Fisher",
    "IntegratedGradients",
    "Jacobian",
    "Kind",
    "LogProbability",
    "Logit",
    "MeasureOptions",
    "Measurement",
    "Output",
    "PassOptions",
    "Perturbation",
    "Probability",
    "PromptMeasurement",
    "RunOptions",
    "Unit",
    "UnitWork",
    "attention_statistics",
    "calibrate",
    "check_prompts",
    "combine",
    "estimate_cost",
    "measure",
    "measure_prompt",
    "preflight",
    "resolve_kinds",
    "resolve_output",
]
