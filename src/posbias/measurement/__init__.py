"""Influence, mixing and attention, measured on models."""

from posbias.measurement.attention import AttentionStatistics, HeadStatistic, PrefixMonotonicity, attention_statistics
from posbias.measurement.kinds import KINDS, Fisher, Jacobian, Kind, Logit, LogProbability, Probability, resolve_kinds
from posbias.measurement.measure import measure
from posbias.measurement.measurement import DEFAULT_KINDS, Measurement, MeasureOptions, combine, half_profiles
from posbias.measurement.prompt import PassOptions, PromptMeasurement, check_prompts, measure_prompt

__all__ = [
    "DEFAULT_KINDS",
    "KINDS",
    "AttentionStatistics",
    "Fisher",
    "HeadStatistic",
    "Jacobian",
    "Kind",
    "LogProbability",
    "Logit",
    "MeasureOptions",
    "Measurement",
    "PassOptions",
    "PrefixMonotonicity",
    "Probability",
    "PromptMeasurement",
    "attention_statistics",
    "check_prompts",
    "combine",
    "half_profiles",
    "measure",
    "measure_prompt",
    "resolve_kinds",
]
