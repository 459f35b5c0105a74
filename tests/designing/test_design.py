"""Designs: exact ones to rounding, searched ones against the theory that they were searched with, refusals."""

import numpy as np
import pytest

from posbias import (
    Architecture,
    DesignOptions,
    Profile,
    UsageError,
    design,
    load_record,
    predict,
)
from posbias.designing.initialisation import Initialisation
from posbias.designing.result import TOLERANCE, Design, distance_apart, resolve_target
from posbias.designing.solving import Problem
from posbias.results.result import report_of, result_of
from posbias.theory import Rollout, rollout_profile
from posbias.theory.mean_field import mean_field
from tiny_families import born_model

TARGETS = ["flat", "power(2.5)", "power(-0.5)", "recency(8.0)", "recency(-6.0)", "u_shape(0.05)", "u_shape(20)"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("n_positions", "mixing"),
    [
        (40, [0.3] * 8),
        (512, [0.1] * 24),
        (300, [0.9] * 24),
        (90, [1.0]),
        (40, np.random.default_rng(0).uniform(size=7).tolist()),
    ],
)
def test_a_key_bias_meets_any_target_entry_by_entry(target, n_positions, mixing):
    options = DesignOptions(depth=len(mixing), heads=2, mixing=mixing, n_positions=n_positions)
    found = design(target, over="key_bias", options=options)
    wanted = resolve_target(target).profile(n_positions, float(np.prod(1 - np.array(mixing))))
    got = rollout_profile(found.architecture, n_positions=n_positions)
    np.testing.assert_allclose(got, wanted, rtol=1e-11)
    assert found.exact


@pytest.mark.parametrize("mixing", [[0.1] * 24, np.random.default_rng(2).uniform(size=12).tolist(), [0.3, 1.0, 0.5]])
def test_telescoping_gamma_keys_make_every_row_flat_at_every_length(mixing):
    found = design(
        "flat", over="gamma_key", options=DesignOptions(depth=len(mixing), heads=3, mixing=mixing, n_positions=64)
    )
    residual = float(np.prod(1 - np.array(mixing)))
    for n in (64, 257):
        rollout = Rollout(found.architecture, n)
        rows = [rollout.pull(rollout.unit(position)) for position in range(n)]
        expected = np.tril(np.ones((n, n))) * (1 - residual) / (np.arange(n)[:, None] + 1) + residual * np.eye(n)
        np.testing.assert_allclose(rows, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("exponent", [-0.7, 0.5, 3.0])
def test_telescoping_gamma_keys_hold_power_laws_at_lengths_never_asked_for(exponent):
    found = design(f"power({exponent})", over="gamma_key", options=DesignOptions(depth=16, mixing=0.2, n_positions=100))
    profile = predict(found.architecture, n_positions=999, theory="rollout").profile.influence
    wanted = resolve_target(f"power({exponent})").profile(999, 0.8**16)
    np.testing.assert_allclose(profile, wanted, rtol=1e-11)


@pytest.mark.parametrize("sinks", [None, 1.0])
def test_gradients_of_the_misfit_equal_differences(sinks):
    base = Architecture(depth=4, heads=3, mixing=[0.1, 0.3, 0.2, 0.4], sinks=sinks)
    problem = Problem(base, resolve_target("recency(2.0)"), (20, 33))
    values = np.linspace(-0.7, 0.7, 4)
    _, gradient = problem.misfit_and_gradient(values)
    steps = 1e-6 * np.eye(len(values))
    expected = [(problem.misfit(values + step) - problem.misfit(values - step)) / 2e-6 for step in steps]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-9)


def test_a_searched_design_is_nearer_to_its_target():
    found = design("recency(3.0)", options=DesignOptions(depth=6, heads=4, mixing=0.2, n_positions=[48, 96]))
    assert not found.exact
    assert set(found.profiles) == {24, 48, 96, 192}
    for n in (48, 96):
        after, before = found.distances[n]
        assert after < 0.5 * before
    assert np.isfinite(found.range_nats)


@pytest.mark.parametrize(
    ("target", "depth", "mixing", "most"),
    [
        ("recency(rate=5)", 12, 0.9, 0.089),
        ("u_shape", 12, 0.9, 0.043),
        pytest.param("recency(rate=5)", 32, 0.3, 0.0199, marks=pytest.mark.slow),
        pytest.param("u_shape", 32, 0.3, 0.0106, marks=pytest.mark.slow),
    ],
)
def test_a_strongly_mixed_stack_comes_near_by_default_and_says_what_it_misses(target, depth, mixing, most):
    """Not the corner of the search where one key holds everything (W1 .81), and never called met."""
    found = design(target, options=DesignOptions(depth=depth, heads=8, mixing=mixing, n_positions=128))
    after, before = found.distances[128]
    assert after < most < before
    assert not found.met
    assert "--over key_bias" in report_of(found.record).verdict[1]


def test_a_target_missed_at_one_of_two_lengths_is_not_met():
    found = design("u_shape", options=DesignOptions(depth=8, mixing=0.9, n_positions=[32, 64]))
    assert not found.met
    assert found.distances[32][0] > TOLERANCE
    assert "Another mixing may come nearer" in report_of(found.record).verdict[1]


def test_power_laws_beyond_the_largest_exponent_are_searched_for_and_bounds_are_counted():
    """The layers whose exponent would be above 1e12 attend to themselves: what is left is of order N / 1e12."""
    for depth, mixing in ((32, 0.9), (4, 1.0)):
        found = design("power(2)", options=DesignOptions(depth=depth, mixing=mixing, n_positions=64))
        assert not found.exact
        assert found.met
        assert found.distances[64][0] < 1e-9
        assert found.at_ends == (20 if depth == 32 else 3)


def test_the_last_position_counts_where_the_target_says_what_it_has():
    """Half of a given profile on the last position, which a shape without it would not tell."""
    weights = np.append(np.full(29, 0.5 / 29), 0.5)
    exact = design(weights, over="key_bias", options=DesignOptions(depth=20, mixing=0.3, n_positions=30))
    assert exact.met
    assert exact.distances[30][0] < 1e-14
    flat = Profile.uniform(30)
    assert distance_apart(flat, exact.targets[30]) < 1e-14
    # What lies above 1/30 on the last position comes from all others alike, 15 of 29 steps on average.
    assert exact.distance(flat) == pytest.approx((0.5 - 1 / 30) * 15 / 29)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"target": [0.4, 0.3, 0.3 * 0.5, 0.15], "over": "key_bias", "n_positions": 4},
            "last position has 0.15.*leaves 0.81",
        ),
        ({"target": [1.0, -1.0]}, "all finite and > 0"),
        ({"target": "flatt"}, "unknown target 'flatt'"),
        ({"target": "power(-1.0)"}, "exponent must be a number > -1 and <= 100, got -1"),
        ({"over": ""}, "unknown free parameter ''; known: gamma_key, key_bias"),
        ({"over": "alibi"}, r"alibi left posbias after 0.1.0: .* predict --encoding 'alibi\(slopes="),
        ({"over": "windows"}, r"windows left posbias after 0.1.0: .* predict --mask 'sliding_window\(width=W\)'"),
        ({"over": "mixing"}, "free parameter mixing left posbias after 0.1.0: give other mixings"),
        ({"over": "gamma_alibi"}, "gamma_alibi left posbias after 0.1.0: gamma_key, beside which"),
        ({"theory": "magic"}, "theory must be one of rollout, mean_field"),
        ({"over": "key_bias", "n_positions": [8, 16]}, "exact at one length"),
        ({"over": "key_bias", "mixing": 0.0}, "attention moves nothing"),
        ({"mixing": 0.0}, "mixing is 0 in every layer: attention moves nothing"),
        ({"n_positions": 2}, "n_positions must be a whole number >= 3"),
        ({"starts": 0}, "starts must be a whole number >= 1"),
        ({"depth": None}, "depth is missing"),
        ({"theory": "mean_field"}, "needs a model"),
        ({"depth": None, "architecture": Architecture(depth=2, mask="sliding_window(width=4)")}, "designed for causal"),
        ({"over": "residual_scale"}, r"mixing s / \(1 \+ s\)"),
        ({"over": "norm_placement"}, "free parameter norm_placement left posbias"),
        ({"over": "spline"}, "free parameter spline left posbias after 0.1.0: key_bias is exact"),
        ({"over": "key_bias", "theory": "mean_field", "model": object()}, "mean field designs over gamma_key alone"),
    ],
)
def test_bad_input_is_named(given, message):
    arguments = {"target": "flat", "depth": 2, "n_positions": 8, **given}
    subject = {name: arguments.pop(name) for name in ("target", "over", "architecture", "model") if name in arguments}
    with pytest.raises(UsageError, match=message):
        design(**subject, options=DesignOptions(**arguments))


def test_gamma_keys_beside_sinks_are_searched_for_and_not_called_exact():
    base = Architecture(depth=3, mixing=0.2, sinks=1.0)
    found = design("flat", over="gamma_key", architecture=base, options=DesignOptions(n_positions=40))
    after, was = found.distances[40]
    assert not found.exact
    assert after < was / 5


def test_a_target_from_a_file_and_a_profile(tmp_path):
    weights = np.linspace(1, 2, 20)
    (tmp_path / "target.csv").write_text("position,influence\n" + "\n".join(f"{j},{w}" for j, w in enumerate(weights)))
    found = design(
        str(tmp_path / "target.csv"), over="key_bias", options=DesignOptions(depth=30, mixing=0.5, n_positions=20)
    )
    assert isinstance(found, Design)
    np.testing.assert_allclose(found.profiles[20].influence, weights / weights.sum(), rtol=1e-10)
    again = design(found.profiles[20], over="key_bias", options=DesignOptions(depth=30, mixing=0.5, n_positions=10))
    assert again.distances[10][0] < 1e-12


def test_a_target_from_a_run(tmp_path):
    from posbias import Record

    one, other = np.linspace(1, 2, 20) / 30, np.linspace(2, 1, 20) / 30
    arrays = {"measured/jacobian/influence": one, "theories/rollout/influence": other}
    Record("measure", {}, {}, arrays=arrays).save(tmp_path / "run")
    for target in (tmp_path / "run", str(tmp_path / "run" / "record.json"), f"{tmp_path}/run:measured/jacobian"):
        np.testing.assert_array_equal(resolve_target(target).influence, one)
    np.testing.assert_array_equal(resolve_target(f"{tmp_path}/run:theories/rollout").influence, other)
    arrays["measured/logprob/influence"] = other
    Record("measure", {}, {}, arrays=arrays).save(tmp_path / "two")
    with pytest.raises(UsageError, match=r"has 3 profiles; as a target write .*two:NAME with one of measured/jacobian"):
        resolve_target(str(tmp_path / "two"))
    with pytest.raises(UsageError, match="with one of measured/jacobian"):
        resolve_target(f"{tmp_path}/run:logit".replace("/run", "/two"))
    with pytest.raises(UsageError, match="holds no posbias run"):
        resolve_target("runs/nowhere")


def test_models_whose_logits_are_large_are_flat_in_full_mean_field():
    """Norms of queries and keys, which need sampled heads."""
    model = born_model("qwen3", 0, times_wider=1)
    found = design("flat", model=model, options=DesignOptions(theory="mean_field", n_positions=16, starts=1))
    after, before = found.distances[16]
    again = mean_field(Initialisation(model).keyed(found.architecture), 16, seed=1)  # other heads
    assert after < 0.3 * before
    assert distance_apart(again.profile, found.targets[16]) < 0.5 * before


def test_lengths_beyond_a_model_are_refused():
    model = born_model("llama", 0, times_wider=2)
    with pytest.raises(UsageError, match="mean field of this model reaches 64 positions, got 65"):
        design("flat", model=model, options=DesignOptions(theory="mean_field", n_positions=65))


def test_a_stored_design_has_the_numbers_of_the_fresh_one(tmp_path):
    fresh = design("u_shape", options=DesignOptions(depth=4, mixing=0.9, n_positions=[16, 24], starts=1))
    stored = load_record(fresh.save(tmp_path))
    assert isinstance(stored, Design)
    same = ("over", "theory", "exact", "met", "lengths", "parameters", "residual", "range_nats", "distances", "at_ends")
    for name in (*same, "flat"):
        assert getattr(stored, name) == getattr(fresh, name), name
    for n, profile in fresh.profiles.items():
        np.testing.assert_array_equal(stored.profiles[n].influence, profile.influence)
        np.testing.assert_array_equal(stored.targets[n], fresh.targets[n])
    assert list(stored.targets) == list(stored.profiles) == list(fresh.targets)  # files sort names of arrays as text
    assert stored.architecture.describe() == fresh.architecture.describe()
    assert str(stored.target) == str(fresh.target)
    assert stored.verdict[0].startswith("The target is not met")
    assert stored.intervention == fresh.intervention
    del stored.record.scalars["exact"]
    with pytest.raises(UsageError, match=r"the record of run \w+ is damaged: ValueError exact: Field required"):
        result_of(stored.record)
