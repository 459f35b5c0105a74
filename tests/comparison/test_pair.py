"""`compare` takes profiles, predictions, measurements and runs; its numbers are those of the parts below it."""

import numpy as np
import pytest

import posbias as pb
from posbias.comparison.subject import Contrast, Sample, compare_with_prompts, contrast, decided, undecided
from posbias.designing import DesignOptions
from posbias.statistics import Interval

READING = {"n_positions": 24, "count": 6}


@pytest.fixture(scope="module")
def model(tiny_llama):
    return pb.load_model(tiny_llama)


@pytest.fixture(scope="module")
def other(tiny_llama):
    return pb.load_model(tiny_llama, init_seed=1)


@pytest.fixture(scope="module")
def both(model, other):
    """The two models measured."""
    prompts = pb.load_prompts("default", model, **READING)
    return [pb.measure(each, prompts, kinds=["jacobian", "logit"]) for each in (model, other)]


def test_two_measurements_are_contrasted(both):
    first, second = both
    found = pb.compare(first, second)
    samples = [Sample.of(each.per_prompt["jacobian"]) for each in both]
    expected = contrast(*samples, generator=np.random.default_rng(0))
    assert isinstance(found.intervals, Contrast)
    assert found.intervals.distance == expected.distance
    assert found.intervals.statistics == expected.statistics
    assert found.wasserstein == pytest.approx(found.intervals.distance.value)
    one, other = found.profiles
    assert f"last tenth, {one} less {other}" in found.shown().facts


def test_which_kind_was_compared_is_named_wherever_there_were_several(both, tmp_path):
    first, second = both
    found = pb.compare(first, second)
    one, other = found.profiles
    assert found.kinds == {one: ("jacobian", "logit"), other: ("jacobian", "logit")}
    assert (one, other) == ("jacobian of tiny-llama", "jacobian of tiny-llama, initialised")
    assert repr(found).startswith(f"Comparison({one} beside {other}: W1 ")
    assert found.facts()[f"beside {one}, not compared"] == "logit"
    page = found.save(tmp_path / "found.html").read_text()
    assert f"beside {one}, not compared" in page
    by_logit = pb.compare(first, pb.predict(pb.Architecture(depth=2), 24), kind="logit")
    assert list(by_logit.kinds.values()) == [("logit", "jacobian"), ("rollout",)]
    assert not any("not compared" in name and "rollout" in name for name in by_logit.facts())
    assert pb.compare(first.profiles["logit"], second.profiles["logit"]).kinds == {}


def test_a_prediction_has_intervals_over_the_prompts_of_the_measurement(both):
    prediction, measurement = pb.predict(pb.Architecture(depth=2, mixing=0.1), 24), both[0]
    found = pb.compare(prediction, measurement, kind="logit")
    sample = Sample.of(measurement.per_prompt["logit"])
    expected = compare_with_prompts(prediction.profile, sample, generator=np.random.default_rng(0))
    assert found.intervals == expected
    plain = pb.compare(prediction.profile, measurement.profiles["logit"])
    assert found.values == plain.values
    assert str(found.flat.values) == str(plain.flat.values)
    assert plain.intervals is None
    assert repr(plain).startswith("Comparison(profile (1) beside profile (2): W1 ")


@pytest.mark.parametrize(
    ("difference", "n_units", "told"),
    [
        (Interval(0.1, 0.05, 0.2), 3, "3 prompts or seeds are too few to decide, which takes 6"),
        (Interval(0.1, -0.05, 0.2), 3, "the data do not decide"),
        (Interval(0.1, -0.05, 0.2), 30, "the data do not decide"),
    ],
)
def test_why_nothing_is_decided_is_the_interval_or_the_number(difference, n_units, told):
    assert decided(difference, n_units) == 0
    assert undecided(difference, n_units) == told


def test_a_theory_that_read_the_same_prompts_is_compared_on_each(model, both):
    measurement = both[0]
    theory = pb.predict(model, 24, theory="power_rollout", prompts=measurement.prompts)
    sample = Sample.of(measurement.per_prompt["logit"])
    profiles = Sample.of(theory.per_prompt).units  # as compare holds them: to normalise them again moves last digits
    expected = compare_with_prompts(profiles, sample, generator=np.random.default_rng(0))
    assert pb.compare(theory, measurement, kind="logit").intervals.difference == expected.difference
    others = pb.load_prompts("default", model, n_positions=24, count=6, seed=1)
    elsewhere = pb.predict(model, 24, theory="power_rollout", prompts=others)
    assert isinstance(pb.compare(elsewhere, measurement, kind="logit").intervals, Contrast)


def test_a_model_under_an_intervention_is_named_by_it(model, both, tmp_path):
    prompts = pb.load_prompts("default", model, **READING)
    options = pb.MeasureOptions(directory=tmp_path / "run")
    with pb.intervened(model, "no_rope") as changed:
        without = pb.measure(changed, prompts, kinds="logit", options=options)
    found = pb.compare(without, both[0], kind="logit")
    assert list(found.profiles) == ["logit of tiny-llama, no_rope", "logit of tiny-llama"]
    assert "last tenth, logit of tiny-llama, no_rope less logit of tiny-llama" in found.facts()


def test_runs_are_compared_as_what_was_saved(both, tmp_path):
    first, second = both
    saved = [each.save(tmp_path / name) for name, each in (("one", first), ("two", second))]
    found, alive = pb.compare(saved[0], str(saved[1]), kind="logit"), pb.compare(first, second, kind="logit")
    assert found.values == alive.values
    assert found.intervals.statistics == alive.intervals.statistics


def test_of_an_audit_the_trained_state_is_taken(model):
    audit = pb.audit(model, n_positions=24, prompts=2, options=pb.AuditOptions(kinds=("logit",)))
    found = pb.compare(audit, audit.record, kind="logit")
    assert found.wasserstein == 0
    trained = audit.record.arrays["trained/measured/logit/influence"]
    np.testing.assert_array_equal(next(iter(found.profiles.values())).influence, trained)
    assert pb.compare(audit, audit, kind="power_rollout").wasserstein == 0


def test_what_cannot_be_compared_is_refused_in_one_line(both):
    measurement = both[0]
    for arguments, said in (
        (
            (measurement, [1, 2]),
            "compare takes profiles, predictions, measurements and runs; a model is measured",
        ),
        ((measurement, pb.design("flat", options=DesignOptions(depth=1, n_positions=24))), "compare takes profiles"),
        ((measurement, measurement, "fisher"), "neither side has kind 'fisher'; known: jacobian, logit"),
        ((measurement, pb.uniform_profile(25)), "24 positions with one of 25"),
        ((measurement, pb.Record("train", {})), "a run of train holds no profile"),
        ((measurement, "nowhere/at/all"), "compare takes profiles"),
    ):
        with pytest.raises(pb.UsageError, match=said):
            pb.compare(*arguments[:2], kind=((*arguments, None))[2])
