"""`predict`: every registered content-free theory, what it ignores and where it refuses."""

import numpy as np
import pytest

from posbias import Architecture, UsageError, predict
from posbias.theory import THEORIES, rollout_profile

ARCHITECTURE_THEORIES = ["attention_only", "rollout", "rollout_content", "continuous", "closed_form"]
UNIFORM = Architecture(depth=6, heads=2, mixing=0.3, content=1.5)


def test_all_are_registered() -> None:
    assert set(ARCHITECTURE_THEORIES) <= set(THEORIES)


@pytest.mark.parametrize("theory", ARCHITECTURE_THEORIES)
def test_a_prediction_is_a_profile_with_its_labels(theory: str) -> None:
    prediction = predict(UNIFORM, 64, theory=theory)
    assert prediction.profile.n_positions == prediction.n_positions == 64
    assert prediction.theory == theory
    assert prediction.sink_share == 0


def test_each_theory_ignores_what_it_says() -> None:
    def influence(theory: str) -> np.ndarray:
        return predict(UNIFORM, 64, theory=theory).profile.influence

    plain = rollout_profile(Architecture(6, 2, mixing=0.3), n_positions=64)
    np.testing.assert_array_equal(influence("rollout"), plain)
    np.testing.assert_allclose(influence("closed_form"), plain, rtol=1e-13)
    np.testing.assert_array_equal(
        influence("attention_only"), rollout_profile(Architecture(6, 2, mixing=1), n_positions=64)
    )
    np.testing.assert_array_equal(influence("rollout_content"), rollout_profile(UNIFORM, n_positions=64))
    assert influence("rollout_content")[-1] > plain[-1]


def test_what_was_evaluated_is_kept() -> None:
    kept = predict(UNIFORM, 8, theory="attention_only").architecture
    assert kept is not None
    np.testing.assert_array_equal(kept.layer_mixing, 1)
    np.testing.assert_array_equal(kept.layer_content, 0)


def test_sinks_are_reported_apart_from_positions() -> None:
    prediction = predict(Architecture(depth=1, mixing=1, sinks=0.0), 9)
    assert prediction.sink_share == pytest.approx(0.1)
    np.testing.assert_allclose(prediction.profile.influence, 1 / 9)


@pytest.mark.parametrize("theory", ["continuous", "closed_form"])
def test_closed_forms_refuse_what_they_do_not_cover(theory: str) -> None:
    with pytest.raises(UsageError, match=f"theory {theory} holds for mask causal with encoding none only, got.* alibi"):
        predict(Architecture(depth=2, heads=2, encoding="alibi"), 16, theory=theory)
    with pytest.raises(UsageError, match=r"mask sliding_window\(width=4\)"):
        predict(Architecture(depth=2, mask="sliding_window(width=4)"), 16, theory=theory)
    with pytest.raises(UsageError, match="sinks"):
        predict(Architecture(depth=2, sinks=1.0), 16, theory=theory)


@pytest.mark.parametrize("theory", ARCHITECTURE_THEORIES)
def test_theories_of_architectures_refuse_other_subjects(theory: str) -> None:
    with pytest.raises(UsageError, match=f"theory {theory} needs an Architecture or a model .*, got int"):
        predict(16, 16, theory=theory)


def test_unknown_theories_list_the_known() -> None:
    with pytest.raises(UsageError, match="unknown theory 'magic'; known: attention_only, closed_form"):
        predict(UNIFORM, 16, theory="magic")
    with pytest.raises(UsageError, match="n_positions must be a whole number >= 1, got 0"):
        predict(UNIFORM, 0)


def test_without_prompts_a_length_is_needed() -> None:
    with pytest.raises(UsageError, match=r"^predict: without prompts it needs n_positions"):
        predict(UNIFORM)
