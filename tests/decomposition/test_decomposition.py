"""Shifts are paired differences of masses of the changed model, and a run can be interrupted."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import DecomposeOptions, RunError, UsageError, decompose, intervened
from posbias.comparison.metrics import STATISTICS
from posbias.decomposition import decomposition as room
from posbias.decomposition.options import DEFAULT_INTERVENTIONS
from posbias.prompts import Prompts
from posbias.statistics import mean_ends
from tiny_families import VOCABULARY, shaken_model

POSITIONS = 8
COUNT = 2
KINDS = ("jacobian(probes=1)", "probability")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model():
    return shaken_model("llama")


@pytest.fixture(scope="module")
def prompts():
    return Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (COUNT, POSITIONS)))


@pytest.fixture(scope="module")
def decomposition(model, prompts):
    torch.set_num_threads(1)
    chosen = [*DEFAULT_INTERVENTIONS, "window(width=4)", "attention_scaled(factor=1.0)"]
    return decompose(model, prompts, options=DecomposeOptions(interventions=chosen, kinds=KINDS))


def item(decomposition, name):
    (found,) = [entry for entry in decomposition.counterfactuals if entry.name == name]
    return found


def test_profiles_are_measurements_of_the_intervened_model(model, prompts, decomposition):
    """Distributions, of every intervention that a Llama allows: all of these."""
    measured = {"as it is": pb.measure(model, prompts, kinds=KINDS)}
    for entry in decomposition.counterfactuals:
        with intervened(model, entry.name) as changed:
            measured[entry.name] = pb.measure(changed, prompts, kinds=KINDS)
    cases = {"as it is": decomposition.baseline, **{item.name: item.profiles for item in decomposition.counterfactuals}}
    for name, profiles in cases.items():
        assert list(profiles) == ["jacobian", "probability"]
        for kind, rows in profiles.items():
            norms = measured[name].per_prompt[kind]
            np.testing.assert_allclose(rows, norms / norms.sum(axis=1, keepdims=True), rtol=1e-12)


def test_a_change_that_changes_nothing_shifts_nothing(decomposition):
    entry = item(decomposition, "attention_scaled(factor=1.0)")
    assert np.all(entry.divergence < 1e-12)
    shifts = [shift for shift in decomposition.shifts if shift.intervention == entry.name]
    assert len(shifts) == 3 * 2
    for shift in shifts:
        assert abs(shift.shift.value) < 1e-9
        assert not shift.shift.excludes(0.0)


def test_a_shift_is_the_mean_of_the_prompts_shifts_with_the_interval_of_the_pairs(decomposition):
    profiles = item(decomposition, "no_rope").profiles
    for shift in (shift for shift in decomposition.shifts if shift.intervention == "no_rope"):
        statistic, baseline = STATISTICS[shift.mass], decomposition.baseline[shift.kind]
        before, after = statistic(baseline), statistic(profiles[shift.kind])
        assert shift.before.value == pytest.approx(before.mean(), abs=1e-15)
        assert shift.after.value == pytest.approx(after.mean(), abs=1e-15)
        assert shift.shift.value == pytest.approx((after - before).mean(), abs=1e-15)
        (low,), (high,) = mean_ends((after - before)[:, None], least=-1.0, most=1.0)
        assert (shift.shift.low, shift.shift.high) == pytest.approx((low, high))
        # A mass of the average profile is the average mass: the profile's own shift is the same number.
        means = statistic(profiles[shift.kind].mean(0)) - statistic(baseline.mean(0))
        assert shift.shift.value == pytest.approx(float(means), abs=1e-14)


def test_the_divergence_is_kullback_leibler_of_the_next_token(model, prompts, decomposition):
    def probabilities(changed):
        ids = changed.token_tensor([prompts.token_ids[0].tolist()])
        with torch.no_grad():
            return changed.last(changed.embed(ids)).logits[0].double().softmax(-1).numpy()

    before = probabilities(model)
    with intervened(model, "no_content") as changed:
        after = probabilities(changed)
    found = item(decomposition, "no_content").divergence
    assert found[0] == pytest.approx(float(np.sum(before * np.log(before / after))), rel=1e-6)
    assert decomposition.divergences["no_content"].value == pytest.approx(found.mean())


def test_an_interrupted_run_continues_and_gives_the_same(model, prompts, tmp_path, monkeypatch):
    options = DecomposeOptions(
        interventions=["no_rope", "no_residual"], kinds=("probability",), directory=tmp_path, resume=True
    )
    whole = decompose(model, prompts, options=replace(options, directory=None, resume=False))
    computed, original = [], room.measured_profiles

    def dying(changed, **settings):
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(changed)
        return original(changed, **settings)

    monkeypatch.setattr(room, "measured_profiles", dying)
    with pytest.raises(KeyboardInterrupt):
        decompose(model, prompts, options=options)
    computed.clear()
    resumed = decompose(model, prompts, options=options)
    assert len(computed) == 1, "the unchanged model and the first intervention were there"
    for one, other in zip(whole.counterfactuals, resumed.counterfactuals, strict=True):
        np.testing.assert_array_equal(one.profiles["probability"], other.profiles["probability"])
    assert whole.shifts == resumed.shifts


def test_families_without_an_ingredient_say_so(prompts):
    options = DecomposeOptions(interventions=["no_rope", "bidirectional"], kinds=("logit",))
    found = decompose(shaken_model("bloom"), prompts, options=options)
    off, both_ways = found.counterfactuals
    assert "no rotary module" in off.reason
    assert off.divergence is None
    assert both_ways.reason is None
    assert {shift.intervention for shift in found.shifts} == set(found.divergences) == {"bidirectional"}


def test_bad_requests_are_refused(model, prompts):
    with pytest.raises(UsageError, match="at least 3 positions, got 2"):
        decompose(model, Prompts(prompts.token_ids[:, :2]))
    for options, message in (
        ({"interventions": "off"}, "unknown intervention"),
        ({"kinds": ("jacobi",)}, "unknown influence kind"),
        ({"seed": -1}, "seed must be"),
    ):
        with pytest.raises(UsageError, match=message):
            decompose(model, prompts, options=DecomposeOptions(**options))
    with pytest.raises(UsageError, match=r"model must be Model .* or a model of transformers, got 7"):
        decompose(7, prompts)
    broken = shaken_model("llama")
    with torch.no_grad():
        broken.network.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="the output on prompt 0 is not finite"):
        decompose(broken, prompts)


def test_one_prompt_and_three_positions_work_with_infinite_intervals(model, prompts):
    one = Prompts(prompts.token_ids[:1, :3])
    found = decompose(model, one, options=DecomposeOptions(interventions="no_rope", kinds=("probability",)))
    assert all(shift.shift.low == -np.inf for shift in found.shifts)
    assert json.loads(json.dumps(found.record.as_json(), allow_nan=False))["scalars"]["count"] == 1


def test_a_loaded_run_offers_the_fields_of_a_fresh_one(decomposition, tmp_path):
    loaded = pb.load_record(decomposition.save(tmp_path))
    for name in ("kinds", "shifts", "divergences", "count"):
        assert getattr(loaded, name) == getattr(decomposition, name), name
    for fresh, read in zip(decomposition.counterfactuals, loaded.counterfactuals, strict=True):
        assert (read.name, read.ingredient, read.reason) == (fresh.name, fresh.ingredient, fresh.reason)
        assert list(read.profiles) == list(fresh.profiles)
        np.testing.assert_array_equal(read.divergence, fresh.divergence)
        for kind, rows in fresh.profiles.items():
            np.testing.assert_array_equal(read.profiles[kind], rows)
    assert loaded.shown().title == decomposition.shown().title
