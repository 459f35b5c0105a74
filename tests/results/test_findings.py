"""A claim needs its interval: what may be said from given numbers, and what must be left open."""

import math
from dataclasses import replace

import numpy as np
import pytest

from posbias import Profile, Record, compare
from posbias.comparison.distances import PromptComparison, SplitHalf
from posbias.comparison.page import verdict_of
from posbias.comparison.stored import KindComparison, ProfileRun, Subject, SubjectProfile
from posbias.statistics import Interval

NEUTRAL = {
    "first_tenth": Interval(0.1, 0.08, 0.12),
    "middle_tenth": Interval(0.1, 0.08, 0.12),
    "last_tenth": Interval(0.1, 0.08, 0.12),
    "last_token": Interval(0.01, 0.008, 0.012),
    "first_over_middle": Interval(0.0, -0.02, 0.02),
    "last_over_middle": Interval(0.0, -0.02, 0.02),
    "minimum_position": Interval(math.nan, -math.inf, math.inf),
}


def view(
    *, summary: dict[str, Interval] | None = None, prompts: PromptComparison | None = None, count: int = 16
) -> ProfileRun:
    """A run whose numbers are given outright; the profiles behind them play no part."""
    flat = Profile.uniform(64)
    same = compare(flat, flat)
    measured = SubjectProfile(flat, np.tile(flat.influence, (count, 1)))
    block = KindComparison("jacobian", "rollout", same.metrics, same.flat, prompts)
    subject = Subject(
        "trained",
        {"jacobian": measured},
        {"rollout": SubjectProfile(flat)},
        summaries={"jacobian": NEUTRAL | (summary or {})},
        comparisons=(block,) if prompts else (),
    )
    return ProfileRun(Record("audit", {}), "demo", (subject,))


def distances(difference: Interval, **changes: object) -> PromptComparison:
    base = PromptComparison(
        distance=Interval(0.05, 0.04, 0.06),
        flat=Interval(0.10, 0.09, 0.11),
        difference=difference,
        noise=SplitHalf(0.01, 0.005, 0.02),
        per_prompt=Interval(0.06, 0.05, 0.07),
        per_prompt_flat=Interval(0.12, 0.11, 0.13),
        n_units=16,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


UP, DOWN = Interval(0.1, 0.05, 0.15), Interval(-0.1, -0.15, -0.05)
LEADS = {
    (UP, UP): "It loses the middle: ",
    (UP, DOWN): "It does not lose the middle: ",
    (UP, Interval(0.1, -0.01, 0.2)): "Whether it loses the middle is not decided: ",
}


@pytest.mark.parametrize("ends", LEADS)
def test_the_middle_is_lost_only_where_both_intervals_say_so(ends: tuple[Interval, Interval]) -> None:
    first, last = ends
    said = verdict_of(view(summary={"first_over_middle": first, "last_over_middle": last}))
    assert len(said) == 4
    assert said[0].startswith(LEADS[ends])
    assert "its middle tenth has 10 % [8, 12] of the influence" in said[0]
    few = verdict_of(view(summary={"first_over_middle": first, "last_over_middle": last}, count=5))
    assert few[0].startswith("Whether it loses the middle is not decided by 5 prompts or seeds: ")


def leaning(share: float, spread: float) -> ProfileRun:
    """A run whose last tenth has `share` more than its first, give or take."""
    units = np.full((8, 100), 0.01)
    units[:, 80:90] -= share / 10
    units[:, 90:] += share / 10 * (1 + spread * np.linspace(-1, 1, 8))[:, None]
    measured = SubjectProfile(Profile.mean_of(units / units.sum(1, keepdims=True)), units / units.sum(1, keepdims=True))
    run = view()
    (subject,) = run.subjects
    return replace(run, subjects=(replace(subject, measured={"jacobian": measured}),))


def turned(run: ProfileRun) -> SubjectProfile:
    """What was measured, from the other end."""
    rows = run.subjects[0].measured["jacobian"].per_prompt
    assert rows is not None
    return SubjectProfile(Profile.mean_of(rows[:, ::-1]), np.ascontiguousarray(rows[:, ::-1]))


def test_an_end_is_favoured_by_as_much_as_its_interval_says() -> None:
    """Answers may be best where influence is not; the second line says how to find out, on the reader's own file."""
    run = leaning(0.08, 0.1)
    said = verdict_of(run)
    assert said[1].startswith("Influence is not use: place nothing by it before you have tested answers")
    assert "`posbias evaluate demo --task \"documents(file='questions.jsonl')\"`" in said[1]
    assert said[2].startswith("It favours the end, by 8 percentage points [")
    other_way = replace(run, subjects=(replace(run.subjects[0], measured={"jacobian": turned(run)}),))
    assert verdict_of(other_way)[2].startswith("It favours the beginning, by 8 percentage points [")
    noisy = verdict_of(leaning(0.002, 30.0))
    assert noisy[2].startswith("Which end it favours is not decided: ")


def test_a_theory_explains_only_what_it_is_shown_to_be_nearer_to() -> None:
    shown = verdict_of(view(prompts=distances(Interval(-0.05, -0.06, -0.04))))[-1]
    assert shown.startswith(
        "Nearest theory: published residual rollout, at W1 0.050 [0.040, 0.060]; a flat line is at 0."
    )
    for open_question in (Interval(-0.05, -0.1, 0.0), Interval(0.05, 0.04, 0.06)):
        assert verdict_of(view(prompts=distances(open_question)))[-1].startswith("No theory is shown to be nearer")


def test_the_verdict_says_which_end_random_weights_favour() -> None:
    trained = leaning(0.08, 0.1)

    def beside(measured: SubjectProfile) -> str:
        first = trained.subjects[0]
        second = replace(first, name="initialised", measured={"jacobian": measured})
        return verdict_of(replace(trained, subjects=(first, second)))[3]

    lead = "Before training, with random weights, it favoured the"
    assert beside(trained.subjects[0].measured["jacobian"]).startswith(f"{lead} end, too, by 8 percentage points [")
    assert beside(turned(trained)).startswith(f"{lead} beginning by 8 percentage points [")
    noise = leaning(0.002, 30.0).subjects[0].measured["jacobian"]
    assert "training" not in beside(noise)


def test_the_verdict_states_the_last_position_before_training_where_it_has_more_than_its_share() -> None:
    run = leaning(0.08, 0.1)
    (first,) = run.subjects
    told = {}
    for name, last in {"anchor": Interval(0.16, 0.15, 0.17), "even": Interval(0.012, 0.009, 0.015)}.items():
        start = replace(first, name="initialised", summaries={"jacobian": NEUTRAL | {"last_token": last}})
        told[name] = [line for line in verdict_of(replace(run, subjects=(first, start))) if "alone" in line]
    assert told == {
        "anchor": ["Before training its last position alone had 16 % [15, 17] of the influence; an even share is 1 %."],
        "even": [],
    }


def test_a_comparison_says_what_its_paired_interval_decides() -> None:
    for interval, words in {
        (-0.05, -0.06, -0.04): "closer than a flat line",
        (0.05, 0.04, 0.06): "farther than a flat line",
        (-0.01, -0.03, 0.01): "not decided",
    }.items():
        run = view(prompts=distances(Interval(*interval)))
        run = replace(run, subjects=(replace(run.subjects[0], name="comparison"),))
        assert verdict_of(run) == (
            f"Published residual rollout: W1 0.050 [0.040, 0.060] to Jacobian, a flat line 0.000; {words}.",
        )
