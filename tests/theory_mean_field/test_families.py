"""Small models of real families: theory against measurement, and a wrong turn, which must be clearly worse."""

from dataclasses import replace

import pytest

from posbias.theory.mean_field import mean_field, spec_of
from posbias.theory.mean_field.prediction import resolve_level
from posbias.theory.mean_field.spec import MeanFieldSpec

N = 64
SEEDS = 12
CLOSE = 0.02
"""Distance allowed at 12 seeds of width 128; halves of the seeds differ by about 0.01."""
WRONG = 0.05
"""A wrong turn is at least this far off."""
FEW = "sampled(heads=400)"
"""Heads enough for distances to two digits; `auto` draws 2000 at this length."""


def changed(spec: MeanFieldSpec, change) -> MeanFieldSpec:
    return replace(spec, layers=tuple(change(layer) for layer in spec.layers))


@pytest.mark.parametrize(
    ("model_type", "level", "settings"),
    [
        ("llama", "first", {}),
        ("gpt2", "first", {"n_embd": 128, "n_head": 4, "n_layer": 4}),
        ("mistral", "first", {"sliding_window": 24}),
        ("gemma3_text", "sampled", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 32}),
    ],
)
def test_theory_meets_measurement(model_type, level, settings, fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh(model_type, seed, **settings), N, SEEDS)
    spec = spec_of(fresh(model_type, **settings))
    assert resolve_level(spec, "auto", N).name == level
    theory = mean_field(spec, N, level=FEW if level == "sampled" else level)
    assert profile_distance(theory.jacobian_norm, measured) < CLOSE
    assert theory.jacobian_norm.sum() == pytest.approx(measured.sum(), rel=0.15)


def test_parallel_residual_is_not_sequential(fresh, jacobians, profile_distance):
    measured = jacobians(lambda seed: fresh("gpt_neox", seed), N, SEEDS)
    spec = spec_of(fresh("gpt_neox"))
    sequential = changed(spec, lambda layer: replace(layer, parallel=False))
    theory = mean_field(spec, N)
    assert theory.level.name == "first"
    assert theory.jacobian_norm.sum() == pytest.approx(measured.sum(), rel=0.15)
    right = profile_distance(theory.jacobian_norm, measured)
    wrong = profile_distance(mean_field(sequential, N).jacobian_norm, measured)
    assert right < CLOSE
    assert wrong > max(WRONG, 3 * right)
