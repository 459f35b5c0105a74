"""Intervals over prompts: what they contain, what they refuse to decide, and that prompts are what is resampled."""

import math

import numpy as np
import pytest

from posbias import Profile, UsageError, compare
from posbias.comparison.distances import (
    UNITS_FOR_CLAIM,
    Sample,
    compare_with_prompts,
    split_half_noise,
    statistic_differences,
    summarise,
)
from posbias.comparison.stored import Subject, SubjectProfile, contrast_subjects
from posbias.statistics import jackknife, leave_one_out


def prompts_around(shape: np.ndarray, *, seed: int, count: int = 16, spread: float = 0.3) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(count, shape.size))
    return shape * np.exp(spread * noise)


def u_shape(n_positions: int = 128) -> np.ndarray:
    relative = np.linspace(0, 1, n_positions)
    return 1 + 6 * np.exp(-20 * relative) + 3 * np.exp(-20 * (1 - relative))


def generator() -> np.random.Generator:
    return np.random.default_rng(7)


def test_a_right_theory_is_closer_than_the_flat_line() -> None:
    measured = prompts_around(u_shape(), seed=0)
    result = compare_with_prompts(Profile.normalised(u_shape()), measured, generator=generator())
    assert result.decides == -1
    assert result.difference.high < 0
    assert result.distance.low <= result.distance.value <= result.distance.high
    assert result.difference.value == pytest.approx(result.distance.value - result.flat.value)
    average = Profile(Sample.of(measured).average)
    assert result.distance.value == pytest.approx(compare(Profile.normalised(u_shape()), average).wasserstein)
    assert result.flat.value == pytest.approx(compare(Profile.uniform(128), average).wasserstein)


def test_a_wrong_theory_is_farther_and_a_flat_one_undecided() -> None:
    measured = prompts_around(u_shape(), seed=1)
    assert compare_with_prompts(Profile.normalised(u_shape()[::-1] ** 2), measured, generator=generator()).decides == 1
    same = compare_with_prompts(Profile.uniform(128), measured, generator=generator())
    assert same.decides == 0
    assert same.difference.value == 0
    assert str(same.difference) == "0.000", "equal by construction: nothing is known, and no width is printed"


@pytest.mark.parametrize("count", [1, 2, UNITS_FOR_CLAIM - 1])
def test_too_few_prompts_never_decide(count: int) -> None:
    measured = prompts_around(u_shape(), seed=2, count=count)
    result = compare_with_prompts(Profile.normalised(u_shape()), measured, generator=generator())
    assert result.decides == 0
    if count == 1:
        assert result.distance.low == -math.inf
        assert math.isnan(result.noise.mean)


def test_paired_prompts_are_left_out_together() -> None:
    """A theory that is right prompt by prompt has distance 0 without any of them, however different the prompts are."""
    measured = prompts_around(u_shape(), seed=3, spread=1.0)
    result = compare_with_prompts(measured * 2, measured, generator=generator())
    assert result.distance.value == pytest.approx(0, abs=1e-12)
    assert result.distance.as_record()["high"] is None, "nothing differs from prompt to prompt"
    assert result.per_prompt.value == pytest.approx(0, abs=1e-12)
    one_for_all = compare_with_prompts(Profile(Sample.of(measured).average), measured, generator=generator())
    assert one_for_all.distance.high > 0.005
    assert one_for_all.per_prompt.value > 0.01


def test_the_interval_is_that_of_the_slow_loop() -> None:
    units = Sample.of(prompts_around(u_shape(), seed=5)).units
    flat = Profile.uniform(128)

    def distance(rows: np.ndarray) -> float:
        return compare(flat, Profile(rows.mean(axis=0))).wasserstein

    values = [distance(units), *(distance(np.delete(units, left_out, axis=0)) for left_out in range(16))]
    wanted = jackknife(np.array(values)).interval()
    fast = compare_with_prompts(flat, units, generator=generator()).flat
    assert (fast.value, fast.low, fast.high) == pytest.approx((wanted.value, wanted.low, wanted.high), abs=1e-12)


def test_split_half_noise_falls_with_the_root_of_the_prompts() -> None:
    few = split_half_noise(Sample.of(prompts_around(u_shape(), seed=6, count=16)), generator=generator())
    many = split_half_noise(Sample.of(prompts_around(u_shape(), seed=6, count=256)), generator=generator())
    assert few.low < few.mean < few.high
    assert few.mean / many.mean == pytest.approx(4, rel=0.25)


def test_summaries_carry_intervals_that_contain_the_estimate() -> None:
    summary = summarise(Sample.of(prompts_around(u_shape(), seed=8)), generator=generator())
    assert summary["first_tenth"].low > 0.1
    assert summary["last_over_middle"].low > 0
    for name, interval in summary.items():
        assert interval.low <= interval.value <= interval.high, name


def test_contrast_finds_what_changed_and_nothing_else() -> None:
    trained, born = prompts_around(u_shape(), seed=9), prompts_around(u_shape()[::-1].copy(), seed=10)
    states = {"trained": trained, "born": born, "alike": prompts_around(u_shape(), seed=11)}
    subjects = {
        state: Subject(state, {"logit": SubjectProfile(Profile(Sample.of(rows).average), rows)})
        for state, rows in states.items()
    }
    first = subjects["trained"]
    changed = contrast_subjects(first, subjects["born"], generator=generator())["logit"]
    assert changed.statistics["first_tenth"].low > 0
    assert changed.statistics["last_tenth"].high < 0
    again = contrast_subjects(first, subjects["alike"], generator=generator())["logit"]
    assert not again.statistics["first_tenth"].excludes(0)
    assert again.decides == -1, "the same shape at birth is closer than a flat line"
    tilted = Sample.of(trained * np.linspace(1.0, 1.1, trained.shape[1]))
    paired, apart = (
        statistic_differences(Sample.of(trained), tilted, generator=generator(), paired=together)["mean_position"]
        for together in (True, False)
    )
    assert paired.value == apart.value
    assert paired.excludes(0), "what the prompts share cancels"
    assert paired.high - paired.low < (apart.high - apart.low) / 3


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from posbias import statistics

    sample = Sample.of(prompts_around(u_shape(), seed=12))
    whole = summarise(sample, generator=generator())
    compared = compare_with_prompts(Profile.uniform(128), sample, generator=generator())
    monkeypatch.setattr(statistics, "BLOCK_VALUES", 128 * 37)
    assert summarise(sample, generator=generator()) == whole
    assert compare_with_prompts(Profile.uniform(128), sample, generator=generator()) == compared


def test_bad_prompts_are_refused() -> None:
    rows = prompts_around(u_shape(), seed=13)
    with pytest.raises(UsageError, match="15 predictions for 16 prompts"):
        compare_with_prompts(rows[:15], rows, generator=generator())
    with pytest.raises(UsageError, match="64 positions with one of 128"):
        compare_with_prompts(Profile.uniform(64), rows, generator=generator())
    rows[3] = 0
    with pytest.raises(UsageError, match="prompt 3 has no profile"):
        Sample.of(rows)
    rows[3] = np.nan
    with pytest.raises(UsageError, match="prompt 3 has no profile"):
        Sample.of(rows)


def test_scaled_units_are_averaged_as_raw_influences_are_and_so_is_every_draw() -> None:
    raw = prompts_around(u_shape(), seed=2, count=9) * np.geomspace(1, 40, 9)[:, None]
    sample = Sample.of(raw, scales=raw.sum(axis=1))
    np.testing.assert_allclose(sample.average, raw.mean(axis=0) / raw.mean(axis=0).sum(), rtol=1e-13)
    predicted = Profile.normalised(u_shape())
    result = compare_with_prompts(predicted, sample, generator=generator())
    averages = leave_one_out(9) @ raw
    by_hand = [compare(predicted, Profile.normalised(row)).wasserstein for row in averages]
    assert vars(result.distance) == pytest.approx(vars(jackknife(np.array(by_hand)).interval(least=0.0)), rel=1e-9)
    shares = averages[:, 0] / averages.sum(axis=1)
    summary = summarise(sample, generator=generator())["first_token"]
    assert vars(summary) == pytest.approx(vars(jackknife(shares).interval(least=0.0)), rel=1e-9)
