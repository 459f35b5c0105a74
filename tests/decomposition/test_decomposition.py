"""Shifts are paired differences of masses, every source is what its name says, and a run can be interrupted."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import DecomposeOptions, RunError, UsageError, decompose, intervened
from posbias.comparison.metrics import STATISTICS
from posbias.decomposition.decomposition import (
    MASSES,
    SOURCES,
    Decomposition,
    Examiner,
    mean_intervals,
    scores_of,
    shifts_of,
)
from posbias.decomposition.options import DEFAULT_INTERVENTIONS
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.prompt import measure_prompt
from posbias.prompts import Prompts
from posbias.results.records import read_record
from posbias.results.result import as_stored, result_of
from posbias.statistics import mean_ends
from posbias.theory.power_rollout import power_rollout_prompt
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


def test_measured_profiles_are_measurements_of_the_intervened_model(model, prompts, decomposition):
    kinds = resolve_kinds(KINDS)
    for name in ("no_rope", "no_residual", "bidirectional"):
        with intervened(model, name) as changed:
            norms = measure_prompt(changed, prompts.token_ids[1], kinds=kinds, key=(0, 1)).norms
        for kind in ("jacobian", "probability"):
            found = item(decomposition, name).profiles["measured", kind]
            np.testing.assert_array_equal(found[1], norms[kind] / norms[kind].sum())
    norms = measure_prompt(model, prompts.token_ids[1], kinds=kinds, key=(0, 1)).norms["jacobian"]
    np.testing.assert_array_equal(decomposition.baseline["measured", "jacobian"][1], norms / norms.sum())


def test_every_profile_is_a_distribution_and_every_absence_has_a_reason(decomposition):
    assert not decomposition.left_out
    for entry in decomposition.counterfactuals:
        assert {source for source, _ in entry.profiles} | set(entry.reasons) == set(SOURCES)
        for rows in entry.profiles.values():
            assert rows.shape == (COUNT, POSITIONS)
            np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-9)
    reasons = {entry.name: set(entry.reasons) for entry in decomposition.counterfactuals}
    assert reasons == {
        "bidirectional": {"power_rollout_rerun"},
        "attention_scaled(factor=0.5)": set(),
        "no_residual": {"power_rollout_rerun"},
        "no_rope": set(),
        "no_content": set(),
        "sink_masked": set(),
        "window(width=4)": set(),
        "attention_scaled(factor=1.0)": set(),
    }


def test_the_power_rollout_is_that_of_the_changed_model(model, prompts, decomposition):
    ids = prompts.token_ids[1]
    window = item(decomposition, "window(width=4)").profiles
    with intervened(model, "window(width=4)") as changed:
        again = power_rollout_prompt(changed, ids)
        np.testing.assert_allclose(window["power_rollout_rerun", "jacobian"][1], again, rtol=1e-12)
    assert ("power_rollout_rerun", "probability") not in window  # it speaks of the first kind alone
    assert not np.allclose(power_rollout_prompt(model, ids), again, rtol=1e-3)


def test_a_change_that_changes_nothing_shifts_nothing(decomposition):
    entry = item(decomposition, "attention_scaled(factor=1.0)")
    assert np.all(entry.divergence < 1e-12)
    shifts = [shift for shift in decomposition.shifts if shift.intervention == entry.name]
    assert len(shifts) == 3 * (len(SOURCES) + 1)  # the measurement speaks of the second kind, too
    for shift in shifts:
        for number in (shift.shift, shift.gap):
            assert number is None or (abs(number.value) < 1e-9 and not number.excludes(0.0))


def test_a_shift_is_the_mean_of_the_prompts_shifts_with_the_bootstrap_of_the_pairs(decomposition):
    profiles = item(decomposition, "no_rope").profiles
    for shift in (shift for shift in decomposition.shifts if shift.intervention == "no_rope"):
        statistic, series = STATISTICS[shift.mass], (shift.source, shift.kind)
        before, after = statistic(decomposition.baseline[series]), statistic(profiles[series])
        assert shift.before.value == pytest.approx(before.mean(), abs=1e-15)
        assert shift.after.value == pytest.approx(after.mean(), abs=1e-15)
        assert shift.shift.value == pytest.approx((after - before).mean(), abs=1e-15)
        assert shift.shift.low <= shift.shift.value <= shift.shift.high
        # A mass of the average profile is the average mass: the profile's own shift is the same number.
        means = statistic(profiles[series].mean(0)) - statistic(decomposition.baseline[series].mean(0))
        assert shift.shift.value == pytest.approx(float(means), abs=1e-14)
        if shift.source == "measured":
            assert shift.gap is None
            continue
        truth = statistic(profiles["measured", shift.kind]) - statistic(decomposition.baseline["measured", shift.kind])
        assert shift.gap is not None
        assert shift.gap.value == pytest.approx((after - before - truth).mean(), abs=1e-15)


def test_intervals_are_paired(decomposition):
    rows = np.random.default_rng(0).normal(size=(9, 2))
    low, high = mean_ends(rows, least=-1.0, most=1.0)
    for index, interval in enumerate(mean_intervals(rows)):
        assert (interval.low, interval.high) == pytest.approx((low[index], high[index]))
    # A theory that misses every prompt's shift by the same amount: as sure as if one prompt had shown nothing.
    generator = np.random.default_rng(1)
    before = generator.dirichlet(np.ones(20), 8)
    after = generator.dirichlet(np.ones(20), 8)
    moved = after.copy()
    moved[:, 0] += 0.01
    profiles = {("measured", "jacobian"): before, ("theory", "jacobian"): before}
    shifts = shifts_of("x", profiles, {("measured", "jacobian"): after, ("theory", "jacobian"): moved})
    gap = next(shift.gap for shift in shifts if shift.source == "theory" and shift.mass == "first_tenth")
    assert gap is not None
    assert gap.value == pytest.approx(0.01, rel=1e-9)
    assert 0 < gap.low < gap.value < gap.high < 0.02


def test_a_score_is_the_mean_absolute_gap_beside_that_of_no_shift():
    generator = np.random.default_rng(2)
    before = generator.dirichlet(np.ones(20), 8)
    after = {name: generator.dirichlet(np.r_[40.0, np.full(19, 5.0)], 8) for name in "ab"}
    perfect = {
        name: {("measured", "k"): rows, ("good", "k"): rows, ("idle", "k"): before} for name, rows in after.items()
    }
    baseline = {("measured", "k"): before, ("good", "k"): before, ("idle", "k"): before, ("mute", "k"): before}
    scores = {score.source: score for score in scores_of(baseline, perfect)}
    assert set(scores) == {"good", "idle"}
    truth = [
        abs(float((STATISTICS[m](rows) - STATISTICS[m](before)).mean())) for rows in after.values() for m in MASSES
    ]
    assert scores["good"].error.value == 0
    assert scores["good"].no_shift.value == pytest.approx(np.mean(truth))
    assert scores["idle"].error.value == pytest.approx(np.mean(truth))
    assert scores["idle"].difference.value == 0
    assert (scores["good"].decides, scores["idle"].decides) == (-1, 0)
    assert scores["good"].interventions == ("a", "b")


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
    few = Prompts(prompts.token_ids[:2])
    names = ["no_rope", "no_residual"]
    options = DecomposeOptions(interventions=names, kinds=("probability",), directory=tmp_path, resume=True)
    whole = decompose(model, few, options=replace(options, directory=None, resume=False))

    computed = []
    original = Examiner._compute

    def dying(self, intervention, name):
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append((intervention, name))
        return original(self, intervention, name)

    monkeypatch.setattr(Examiner, "_compute", dying)
    with pytest.raises(KeyboardInterrupt):
        decompose(model, few, options=options)
    first = list(computed)
    computed.clear()
    monkeypatch.setattr(Examiner, "_compute", lambda self, *key: computed.append(key) or original(self, *key))
    resumed = decompose(model, few, options=options)
    assert not set(first) & set(computed)
    assert len(first) + len(computed) == 2 + 2 * 2
    for one, other in zip(whole.counterfactuals, resumed.counterfactuals, strict=True):
        assert one.reasons == other.reasons
        assert set(one.profiles) == set(other.profiles)
        for series, rows in one.profiles.items():
            np.testing.assert_array_equal(rows, other.profiles[series])
    assert whole.shifts == resumed.shifts


def test_families_without_an_ingredient_say_so(prompts):
    few = Prompts(prompts.token_ids[:2])
    model = shaken_model("bloom")
    options = DecomposeOptions(interventions=["no_rope", "bidirectional"], kinds=("logit",))
    found = decompose(model, few, options=options)
    off, both_ways = found.counterfactuals
    assert "no rotary module" in off.reasons["measured"]
    assert off.divergence is None
    assert "measured" not in both_ways.reasons
    assert "the first kind measured is logit" in found.left_out["power_rollout_rerun"]
    assert {shift.source for shift in found.shifts} == {"measured"}
    assert "no_rope" not in found.divergences


def test_bad_requests_are_refused(model, prompts):
    with pytest.raises(UsageError, match="at least 3 positions, got 2"):
        decompose(model, Prompts(prompts.token_ids[:, :2]))
    with pytest.raises(UsageError, match="unknown intervention"):
        decompose(model, prompts, options=DecomposeOptions(interventions="off"))
    with pytest.raises(UsageError, match="unknown influence kind"):
        decompose(model, prompts, options=DecomposeOptions(kinds=("jacobi",)))
    with pytest.raises(UsageError, match="seed must be"):
        decompose(model, prompts, options=DecomposeOptions(seed=-1))
    with pytest.raises(UsageError, match=r"model must be Model .* or a model of transformers, got 7"):
        decompose(7, prompts)
    broken = shaken_model("llama")
    with torch.no_grad():
        broken.network.model.layers[1].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="the output on prompt 0 is not finite"):
        decompose(broken, Prompts(prompts.token_ids[:2]))


def test_one_prompt_and_three_positions_work_with_infinite_intervals(model, prompts):
    one = Prompts(prompts.token_ids[:1, :3])
    found = decompose(model, one, options=DecomposeOptions(interventions="no_rope", kinds=("probability",)))
    assert all(shift.shift.low == -np.inf for shift in found.shifts)
    assert all(score.decides == 0 for score in found.scores)
    assert json.loads(json.dumps(found.record.as_json(), allow_nan=False))["scalars"]["count"] == 1


def test_a_loaded_run_offers_the_fields_of_a_fresh_one(decomposition, tmp_path):
    loaded = pb.load_record(decomposition.save(tmp_path))
    assert isinstance(loaded, Decomposition)
    for name in ("left_out", "kinds", "shifts", "scores", "divergences", "sources", "count", "title"):
        assert getattr(loaded, name) == getattr(decomposition, name), name
    assert list(loaded.baseline) == list(decomposition.baseline)
    for fresh, read in zip(decomposition.counterfactuals, loaded.counterfactuals, strict=True):
        assert (read.name, read.ingredient, read.reasons) == (fresh.name, fresh.ingredient, fresh.reasons)
        assert list(read.profiles) == list(fresh.profiles)
        np.testing.assert_array_equal(read.divergence, fresh.divergence)
        for series, rows in fresh.profiles.items():
            np.testing.assert_array_equal(read.profiles[series], rows)
    assert loaded.shown().title == decomposition.shown().title
    stored = read_record(tmp_path).scalars  # what the fields say is what is stored
    assert as_stored(loaded.shifts) == stored["shifts"]
    assert as_stored(loaded.scores) == stored["scores"]


def test_a_damaged_record_is_refused(decomposition):
    for damage in ({"scalars": {}}, {"arrays": {}}, {"scalars": {**decomposition.record.scalars, "left_out": 3}}):
        with pytest.raises(UsageError, match="is damaged"):
            result_of(replace(decomposition.record, **damage))
