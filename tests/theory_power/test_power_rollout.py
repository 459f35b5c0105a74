"""The power rollout and the published rollout on actual attention: what profiles must be, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from posbias import RunError, UsageError
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout import PowerRollout
from posbias.theory.power_rollout.rollout import fast_products, trace_model
from theory_calls import power_rollout, power_rollout_prompt
from tiny_families import CONFIGS, shaken_model

Build = Callable[..., HuggingFaceModel]
Draw = Callable[..., np.ndarray]
ALL_SETTINGS = [PowerRollout(key_path=False), PowerRollout(target="probability")]
"""All ways from the default, which every family walks."""
WALKED = [(kind, PowerRollout()) for kind in sorted(CONFIGS)]
WALKED += [(kind, each) for kind in ("gemma3_text", "phi3", "opt", "bloom") for each in ALL_SETTINGS]


@pytest.mark.parametrize(("kind", "settings"), WALKED, ids=str)
def test_a_profile_of_every_family_in_either_precision(
    kind: str, settings: PowerRollout, tiny_model: Build, random_ids: Draw
) -> None:
    exact = power_rollout_prompt(tiny_model(kind), random_ids(), settings)
    assert exact.dtype == np.float64
    assert exact.min() >= 0
    assert exact.sum() == pytest.approx(1, abs=1e-12)
    single = power_rollout_prompt(tiny_model(kind, dtype=torch.float32), random_ids(), settings)
    np.testing.assert_allclose(single, exact, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "reduced", "precision"), [("cuda", True, "high"), ("cuda", False, None), ("cpu", True, None)]
)
def test_products_are_fast_for_reduced_models_on_cuda_alone_and_as_before_afterwards(
    device: str, reduced: bool, precision: str | None
) -> None:
    before = torch.get_float32_matmul_precision()
    with fast_products(torch.device(device), reduced=reduced):
        assert torch.get_float32_matmul_precision() == (precision or before)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("settings", ALL_SETTINGS, ids=str)
def test_blocks_of_queries_change_nothing(
    settings: PowerRollout, tiny_model: Build, random_ids: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny_model("gemma3_text"), random_ids()
    whole = power_rollout_prompt(model, ids, settings)
    rows = 4 * 4 * len(ids)  # four queries of four heads
    monkeypatch.setattr("posbias.models.attention_blocks.elements_at_once", lambda _device: rows)
    np.testing.assert_allclose(power_rollout_prompt(model, ids, settings), whole, rtol=1e-10)


def test_no_influence_from_beyond_the_windows_reach(tiny_model: Build, random_ids: Draw) -> None:
    """Three layers of window 5 reach 1 + 3 * 4 = 13 positions; of 21, the first 8 cannot be seen."""
    for settings in ALL_SETTINGS:
        profile = power_rollout_prompt(tiny_model("mistral"), random_ids(), settings)
        assert np.all(profile[:8] == 0)
        assert np.all(profile[8:] > 0)


def test_a_single_position_has_all_influence(tiny_model: Build, random_ids: Draw) -> None:
    for settings in ALL_SETTINGS:
        assert power_rollout_prompt(tiny_model("gemma3_text"), random_ids(0, 1), settings).tolist() == [1.0]


def test_probability_and_logprob_are_the_same_direction(tiny_model: Build, random_ids: Draw) -> None:
    model = tiny_model("qwen3")
    first, second, whole = (
        power_rollout_prompt(model, random_ids(), PowerRollout(target=target))
        for target in ("probability", "logprob", "jacobian")
    )
    np.testing.assert_allclose(first, second, rtol=1e-9)
    assert np.abs(first - whole).max() > 1e-6


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_the_scores_gradient_is_autograds(kind: str, tiny_model: Build, random_ids: Draw) -> None:
    model, ids = tiny_model(kind), random_ids()
    traced = trace_model(model, ids, target="probability")
    hidden = model.last(model.embed(torch.as_tensor(ids)[None])).hidden[0].detach().requires_grad_(True)
    (expected,) = torch.autograd.grad(model.network.lm_head(hidden).softmax(-1).max(), hidden)
    assert traced.score_gradient is not None
    torch.testing.assert_close(traced.score_gradient, expected, rtol=1e-5, atol=1e-9)


def test_a_set_of_prompts_is_the_mean_of_its_prompts(tiny_model: Build, random_ids: Draw) -> None:
    model = tiny_model("llama")
    prompts = Prompts(np.stack([random_ids(seed) for seed in range(4)]))
    rollout = power_rollout(model, prompts, key_path=False)
    for row, ids in zip(rollout.per_prompt, prompts.token_ids, strict=True):
        np.testing.assert_array_equal(row, power_rollout_prompt(model, ids, PowerRollout(key_path=False)))
    np.testing.assert_allclose(rollout.profile.influence, rollout.per_prompt.mean(0))
    assert rollout.profile.low is not None
    assert rollout.profile.high is not None
    assert np.all(rollout.profile.low <= rollout.profile.influence + 1e-15)
    assert np.all(rollout.profile.influence <= rollout.profile.high + 1e-15)


def test_prompts_beyond_the_models_positions_are_refused(tiny_model: Build, random_ids: Draw) -> None:
    with pytest.raises(UsageError, match="1 to 64 tokens for this model, got 65"):
        power_rollout_prompt(tiny_model("llama"), random_ids(n_positions=65))


def test_half_precision_is_computed_in_single_and_weights_that_are_not_numbers_are_a_run_error(
    random_ids: Draw,
) -> None:
    model = shaken_model("llama", dtype=torch.float32)
    expected = power_rollout_prompt(model, random_ids())
    half = HuggingFaceModel(model.network.to(torch.bfloat16))
    np.testing.assert_allclose(power_rollout_prompt(half, random_ids()), expected, rtol=0.05)
    with torch.no_grad():
        half.network.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="logits are not finite"):
        power_rollout_prompt(half, random_ids())


def test_no_hook_stays_on_the_model(tiny_model: Build, random_ids: Draw) -> None:
    model = tiny_model("gemma3_text")
    power_rollout_prompt(model, random_ids())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.network.modules())
