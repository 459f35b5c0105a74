"""On the pretrained demo model the power rollout is close to what gradients measure, far closer than the flat line."""

import pytest

from posbias import Profile, load_model, load_prompts, measure
from posbias.comparison.metrics import wasserstein
from posbias.theory.power_rollout import attention_rollout_prompt
from theory_calls import power_rollout

BOUNDS = {"probability": 0.05, "jacobian": 0.07}
"""W1 to the measured profiles, positions / (N - 1); 0.012 and 0.027 when this was written."""


@pytest.mark.slow
def test_power_rollout_on_the_demo_model() -> None:
    model = load_model("demo")
    prompts = load_prompts("default", model, n_positions=256, count=16, seed=0)
    measured = measure(model, prompts, kinds=tuple(BOUNDS))
    predicted = power_rollout(model, prompts).profile.influence
    assert measured.mixing is not None
    mixing = measured.mixing.tolist()
    published = sum(attention_rollout_prompt(model, ids, mixing) for ids in prompts.token_ids) / prompts.count
    flat = Profile.uniform(256).influence
    for kind, bound in BOUNDS.items():
        truth = measured.profiles[kind].influence
        distance = float(wasserstein(predicted, truth))
        assert distance <= bound
        assert distance < 0.25 * float(wasserstein(flat, truth))
        assert float(wasserstein(published, truth)) > float(wasserstein(flat, truth))
