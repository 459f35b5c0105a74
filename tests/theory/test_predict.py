"""`predict`: every registered content-free theory, what it ignores and where it refuses."""

import numpy as np
import pytest

from posbias import Architecture, UsageError, load_model, load_prompts, load_record, predict
from posbias.results.result import result_of
from posbias.theory import predictions_record, rollout_profile

ARCHITECTURE_THEORIES = ["attention_only", "rollout", "rollout_content", "continuous", "closed_form"]
UNIFORM = Architecture(depth=6, heads=2, mixing=0.3, content=1.5)


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
    with pytest.raises(UsageError, match="n_positions must be a whole number >= 1"):
        predict(UNIFORM, 0)


def test_without_prompts_a_length_is_needed() -> None:
    with pytest.raises(UsageError, match=r"^predict: without prompts it needs n_positions"):
        predict(UNIFORM)


def assert_read_back(fresh, directory):
    """A saved prediction is read as the fresh one, field by field."""
    stored = load_record(fresh.save(directory))
    assert type(stored) is type(fresh)
    np.testing.assert_equal(vars(stored.profile), vars(fresh.profile))
    for name in ("theory", "n_positions", "sink_share", "spelled", "seed", "caveats"):
        assert getattr(stored, name) == getattr(fresh, name), name
    assert {key: str(value) for key, value in stored.parameters.items()} == {
        key: str(value) for key, value in fresh.parameters.items()
    }
    np.testing.assert_equal(stored.per_prompt, fresh.per_prompt)
    assert stored.settings() == fresh.settings()
    assert stored.verdict == fresh.verdict != ()


@pytest.mark.parametrize("theory", ["rollout", "attention_only"])
def test_a_stored_prediction_of_an_architecture_is_the_fresh_one(theory, tmp_path):
    sinks = [[0.0, -np.inf], [1.5, 1.5]]
    layers = Architecture(depth=2, heads=2, encoding=["alibi", "none"], mixing=[0.2, 0.7], sinks=sinks)
    assert_read_back(predict(layers, 12, theory=theory), tmp_path / "run")


@pytest.mark.parametrize("theory", ["power_rollout(key_path=False)", "mean_field"])
def test_a_stored_prediction_of_a_model_is_the_fresh_one(theory, tiny_llama, tmp_path):
    model = load_model(tiny_llama, init_seed=3)
    prompts = load_prompts("synthetic", model, n_positions=12, count=3)
    assert_read_back(predict(model, theory=theory, prompts=prompts), tmp_path / "run")


def test_several_stored_predictions_are_their_profiles(tmp_path):
    several = [predict(Architecture(depth=2, mixing=mixing), 12) for mixing in (0.1, 0.2)]
    stored = result_of(predictions_record(several))
    assert [len(theories := stored.subject.theories), *theories] == [2, "mixing 0.1", "mixing 0.2"]
