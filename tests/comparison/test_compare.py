"""`compare` takes profiles, predictions, measurements and runs; its numbers are those of the parts below it."""

import numpy as np
import pytest

import posbias as pb
from posbias import CompareOptions, DesignOptions
from posbias.comparison.distances import Contrast, Sample, compare_with_prompts, statistic_differences
from posbias.statistics import Interval

READING = {"n_positions": 24, "count": 6}
LOGIT = CompareOptions(kind="logit")


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
    paired = compare_with_prompts(samples[0].units, samples[1], generator=np.random.default_rng(0))
    assert found.intervals.distance == paired.distance
    assert found.intervals.difference == paired.difference
    expected = statistic_differences(*samples, generator=np.random.default_rng(0), paired=True)
    for name in ("first_tenth", "middle_tenth", "last_tenth", "mean_position"):
        assert found.statistics[name] == expected[name]
    assert found.wasserstein == pytest.approx(found.intervals.distance.value)
    assert (found.pair.theory, found.pair.kind) == ("jacobian", "jacobian")
    # A kind is compared to the same kind alone, and one distance has one interval wherever it stands.
    assert [(block.theory, block.kind) for block in found.comparisons] == [("jacobian",) * 2, ("logit",) * 2]
    for block in found.comparisons:
        again = found.contrasts[block.kind]
        assert (again.distance, again.flat) == (block.prompts.distance, block.prompts.flat)
    crossed = pb.compare(first, second, options=CompareOptions(theory="jacobian", kind="logit"))
    assert [(block.theory, block.kind) for block in crossed.comparisons] == [("jacobian", "logit")]


def test_profiles_are_named_by_what_differs_and_every_distance_is_shown(both, tmp_path):
    first, second = both
    found = pb.compare(first, second)
    one, other = "Jacobian, as trained", "Jacobian, at initialisation"
    assert repr(found).startswith(f"ComparisonRun({one} beside {other}: W1 ")
    facts = found.facts()
    assert f"last tenth, {one} less {other}" in facts
    assert sum(name.startswith("W1 of ") for name in facts) == 3
    assert [line.partition(",")[0] for line in facts["verdict"].splitlines()] == ["Jacobian", "Logit gradient"]
    assert f"W1 of {one} to {other}" in found.save(tmp_path / "found.html").read_text()
    by_logit = pb.compare(first, pb.predict(pb.Architecture(depth=2), 24), options=CompareOptions(theory="logit"))
    assert list(by_logit.profiles) == ["logit gradient", "published residual rollout"]
    assert by_logit.statistics == {}


def test_a_saved_comparison_comes_back_as_the_same_result(both, tmp_path):
    found = pb.compare(*both)
    loaded = pb.load_record(found.save(tmp_path / "found"))
    assert loaded.metrics == found.metrics
    assert loaded.intervals == found.intervals
    assert loaded.statistics == found.statistics
    assert loaded.facts() == found.facts()


def test_a_prediction_has_intervals_over_the_prompts_of_the_measurement(both):
    prediction, measurement = pb.predict(pb.Architecture(depth=2, mixing=0.1), 24), both[0]
    found = pb.compare(prediction, measurement, options=LOGIT)
    sample = Sample.of(measurement.per_prompt["logit"])
    expected = compare_with_prompts(prediction.profile, sample, generator=np.random.default_rng(0))
    assert found.intervals.difference == expected.difference
    plain = pb.compare(prediction.profile, measurement.profiles["logit"])
    assert found.metrics == plain.metrics
    assert str(found.flat) == str(plain.flat)
    assert plain.intervals is None
    assert repr(plain).startswith("ComparisonRun(profile (1) beside profile (2): W1 ")


@pytest.mark.parametrize(
    ("difference", "n_units", "told"),
    [
        (Interval(0.1, 0.05, 0.2), 3, "3 prompts or seeds are too few to decide, which takes 6"),
        (Interval(0.1, -0.05, 0.2), 3, "the data do not decide"),
        (Interval(0.1, -0.05, 0.2), 30, "the data do not decide"),
    ],
)
def test_why_nothing_is_decided_is_the_interval_or_the_number(difference, n_units, told):
    found = Contrast(difference, difference, difference, n_units, {})
    assert (found.decides, found.said) == (0, told)


def test_a_theory_that_read_the_same_prompts_is_compared_on_each(model, both):
    measurement = both[0]
    theory = pb.predict(model, 24, theory="power_rollout", prompts=measurement.prompts)
    sample = Sample.of(measurement.per_prompt["logit"])
    profiles = Sample.of(theory.per_prompt).units  # as compare holds them: to normalise them again moves last digits
    expected = compare_with_prompts(profiles, sample, generator=np.random.default_rng(0))
    assert pb.compare(theory, measurement, options=LOGIT).intervals.difference == expected.difference
    others = pb.load_prompts("default", model, n_positions=24, count=6, seed=1)
    elsewhere = pb.predict(model, 24, theory="power_rollout", prompts=others)
    apart = compare_with_prompts(Sample.of(elsewhere.per_prompt), sample, generator=np.random.default_rng(0))
    assert pb.compare(elsewhere, measurement, options=LOGIT).intervals.difference == apart.difference


def test_a_model_under_an_intervention_is_named_by_it(model, both, tmp_path):
    prompts = pb.load_prompts("default", model, **READING)
    options = pb.MeasureOptions(directory=tmp_path / "run")
    with pb.intervened(model, "no_rope") as changed:
        without = pb.measure(changed, prompts, kinds="logit", options=options)
    found = pb.compare(without, both[0], options=LOGIT)
    assert list(found.profiles) == ["no rope", "as trained"]
    assert "last tenth, no rope less as trained" in found.facts()


def test_runs_are_compared_as_what_was_saved(both, tmp_path):
    first, second = both
    saved = [each.save(tmp_path / name) for name, each in (("one", first), ("two", second))]
    found, alive = pb.compare(saved[0], str(saved[1])), pb.compare(first, second)
    assert found.metrics == alive.metrics
    assert found.statistics == alive.statistics


def test_what_cannot_be_compared_is_refused_in_one_line(both):
    measurement, design = both[0], pb.design("flat", options=DesignOptions(depth=1, n_positions=24))
    for first, second, kind, said in (
        (measurement, [1, 2], None, "compare takes profiles, predictions, measurements and runs; a model is measured"),
        (measurement, design, None, "a run of design cannot be compared"),
        (
            measurement,
            measurement,
            "probability",
            "second run holds no profile 'probability'; it holds: jacobian, logit",
        ),
        (measurement, pb.Profile.uniform(25), None, "24 positions with one of 25"),
        (measurement, pb.Record("design", {}), None, "a run of design cannot be compared"),
        (measurement, "nowhere/at/all", None, "compare takes profiles"),
    ):
        with pytest.raises(pb.UsageError, match=said):
            pb.compare(first, second, options=CompareOptions(kind=kind))
