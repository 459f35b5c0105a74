"""A claim needs its interval: what may be said from given numbers, and what must be left open."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from posbias import Profile, Record, compare
from posbias.comparison import (
    UNITS_FOR_CLAIM,
    Contrast,
    KindComparison,
    MeasuredKind,
    PromptComparison,
    SplitHalf,
    Subject,
    TheoryProfile,
)
from posbias.comparison.stored import ProfileRun
from posbias.report import Finding, grouped_findings, verdict
from posbias.report.findings import verdict_of
from posbias.statistics import Interval

Build = Callable[..., Any]

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
    measured = MeasuredKind(flat, np.tile(flat.influence, (count, 1)))
    block = KindComparison("jacobian", "rollout", same.metrics, same.flat, prompts)
    subject = Subject(
        "trained",
        {"jacobian": measured},
        {"rollout": TheoryProfile(flat)},
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


def findings_of(run: ProfileRun) -> list[Finding]:
    return [finding for group in grouped_findings(run) for finding in group]


def text_of(run: ProfileRun) -> str:
    return " ".join(finding.text for finding in findings_of(run))


def sentence(run: ProfileRun, word: str) -> Finding:
    (found,) = [finding for finding in findings_of(run) if word in finding.text]
    return found


def claims(run: ProfileRun) -> list[str]:
    return [finding.text for finding in findings_of(run) if finding.sort == "claim"]


def test_a_share_is_claimed_only_when_the_interval_excludes_the_flat_tenth() -> None:
    more = sentence(view(summary={"first_tenth": Interval(0.31, 0.28, 0.35)}), "first tenth")
    assert more == Finding(
        "The first tenth of the context carries 31 % [28, 35] of the influence, more than the flat 10 %.", "claim"
    )
    less = sentence(view(summary={"first_tenth": Interval(0.031, 0.02, 0.04)}), "first tenth")
    assert less.sort == "claim"
    assert "3.1 % [2.0, 4.0] of the influence, less than" in less.text


@pytest.mark.parametrize("interval", [(0.12, 0.1, 0.14), (0.09, 0.08, 0.1), (0.3, -math.inf, math.inf)])
def test_an_interval_that_touches_the_flat_tenth_decides_nothing(interval: tuple[float, float, float]) -> None:
    found = sentence(view(summary={"first_tenth": Interval(*interval)}), "first tenth")
    assert found.sort == "undecided"
    assert "not decided" in found.text


def test_neutral_numbers_support_no_claim_at_all() -> None:
    assert claims(view(prompts=distances(Interval(0.0, -0.01, 0.01)))) == []


def test_a_u_needs_both_ends_above_the_middle() -> None:
    up, down = Interval(0.1, 0.05, 0.15), Interval(-0.1, -0.15, -0.05)
    assert "U shape" in claims(view(summary={"first_over_middle": up, "last_over_middle": up}))[0]
    assert "no U shape" in claims(view(summary={"first_over_middle": up, "last_over_middle": down}))[0]
    assert claims(view(summary={"first_over_middle": up})) == []


def test_the_minimum_is_called_interior_only_where_its_interval_is() -> None:
    inside = sentence(view(summary={"minimum_position": Interval(30, 20, 40)}), "smallest")
    assert inside.sort == "claim"
    assert "position 30 [20, 40] of 64" in inside.text
    edge = sentence(view(summary={"minimum_position": Interval(30, 3, 40)}), "smallest")
    assert edge.sort == "statement"


def test_a_theory_is_closer_only_when_the_paired_interval_says_so() -> None:
    closer = sentence(view(prompts=distances(Interval(-0.05, -0.06, -0.04))), "residual rollout")
    assert closer.sort == "claim"
    assert "is closer to the measurement than a flat line (W1 0.050 [0.040, 0.060] against 0.100)." in closer.text
    farther = sentence(view(prompts=distances(Interval(0.05, 0.04, 0.06))), "residual rollout")
    assert farther.sort == "claim"
    assert "is farther from the measurement than a flat line" in farther.text
    for borderline in (Interval(-0.05, -0.1, 0.0), Interval(-0.01, -0.03, 0.01), Interval(-0.05, -math.inf, math.inf)):
        open_question = sentence(view(prompts=distances(borderline)), "residual rollout")
        assert open_question.sort == "undecided"
        assert "is not decided (W1 0.050" in open_question.text


def test_noise_and_single_prompts_qualify_a_claim() -> None:
    closer = Interval(-0.05, -0.06, -0.04)
    within = distances(closer, noise=SplitHalf(0.07, 0.05, 0.09))
    assert "half of the prompts is from the other half" in sentence(view(prompts=within), "residual").text
    shaky = distances(closer, per_prompt=Interval(0.11, 0.09, 0.13))
    assert "on single prompts the gain is not established" in sentence(view(prompts=shaky), "residual").text


@pytest.mark.parametrize("count", [1, UNITS_FOR_CLAIM - 1])
def test_few_prompts_support_nothing_however_clear_the_numbers(count: int) -> None:
    clear = {"first_tenth": Interval(0.9, 0.89, 0.91)}
    run = view(summary=clear, prompts=distances(Interval(-0.05, -0.06, -0.04), n_units=count), count=count)
    assert claims(run) == []
    assert f"with {count} independent" in text_of(run).lower()


def test_without_single_prompts_no_claim_is_made() -> None:
    falling = Profile.normalised(np.linspace(2, 1, 64))
    run = ProfileRun(Record("audit", {}), "demo", (Subject("trained", {"jacobian": MeasuredKind(falling)}),))
    assert claims(run) == []
    assert "not recorded" in text_of(run)


def contrast_of(change: Interval, difference: Interval, n_units: int = 16) -> Contrast:
    statistics = {"first_tenth": change, "last_tenth": Interval(0.0, -0.1, 0.1)}
    return Contrast(Interval(0.05, 0.04, 0.06), Interval(0.1, 0.09, 0.11), difference, n_units, statistics)


def test_what_training_changed_is_claimed_only_when_shown() -> None:
    shown = contrast_of(Interval(0.12, 0.08, 0.16), Interval(-0.05, -0.06, -0.04))
    text = [finding.text for finding in findings_of(replace(view(), contrasts={"jacobian": shown}))]
    assert "The share of the first tenth is larger in the trained model (+12.0 points [+8.0, +16.0])." in text
    assert any("part of it was there before training" in entry for entry in text)
    hidden = contrast_of(Interval(0.12, -0.01, 0.25), Interval(-0.05, -0.11, 0.01))
    assert claims(replace(view(), contrasts={"jacobian": hidden})) == []
    few = contrast_of(Interval(0.12, 0.08, 0.16), Interval(-0.05, -0.06, -0.04), n_units=3)
    assert claims(replace(view(), contrasts={"jacobian": few})) == []


def test_the_synthetic_audit_is_told_as_it_was_made(audit_record: Build) -> None:
    text = text_of(ProfileRun.from_record(audit_record()))
    assert "a U shape" in text
    assert "The power rollout is closer to the measurement than a flat line" in text
    assert "The attention-only rollout is farther from the measurement than a flat line" in text
    assert "The share of the last tenth is larger in the trained model" in text


def test_the_same_audit_with_three_prompts_claims_nothing_about_the_trained_model(
    audit_record: Build, subjects: Build
) -> None:
    found = findings_of(ProfileRun.from_record(audit_record(count=3)))
    birth = next(number for number, finding in enumerate(found) if "at initialisation (" in finding.text)
    assert all(finding.sort != "claim" for finding in found[:birth])


"""Words."""
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
    measured = MeasuredKind(Profile.mean_of(units / units.sum(1, keepdims=True)), units / units.sum(1, keepdims=True))
    run = view()
    (subject,) = run.subjects
    return replace(run, subjects=(replace(subject, measured={"jacobian": measured}),))


def test_an_end_is_favoured_by_as_much_as_its_interval_says() -> None:
    said = verdict_of(leaning(0.08, 0.1))
    assert said[2].startswith("It favours the end, by 8 percentage points [")
    turned = leaning(0.08, 0.1)
    rows = turned.subjects[0].measured["jacobian"].per_prompt
    assert rows is not None
    measured = MeasuredKind(Profile.mean_of(rows[:, ::-1]), np.ascontiguousarray(rows[:, ::-1]))
    turned = replace(turned, subjects=(replace(turned.subjects[0], measured={"jacobian": measured}),))
    assert verdict_of(turned)[2].startswith("It favours the beginning, by 8 percentage points [")
    noisy = verdict_of(leaning(0.002, 30.0))
    assert noisy[2].startswith("Which end it favours is not decided: ")


def test_no_end_is_advised_from_influence_alone() -> None:
    """Answers may be best where influence is not; the second line says how to find out, on the reader's own file."""
    for lean in (0.08, -0.08):
        lines = verdict_of(leaning(lean, 0.1))
        assert lines[1].startswith("Influence is not use: place nothing by it before you have tested answers")
        assert "`posbias evaluate demo --task \"documents(file='questions.jsonl')\"`" in lines[1]
        assert not any(" near the " in line for line in lines)


def test_a_theory_explains_only_what_it_is_shown_to_be_nearer_to() -> None:
    shown = verdict_of(view(prompts=distances(Interval(-0.05, -0.06, -0.04))))[-1]
    assert shown.startswith(
        "Nearest theory: published residual rollout, at W1 0.050 [0.040, 0.060]; a flat line is at 0."
    )
    for open_question in (Interval(-0.05, -0.1, 0.0), Interval(0.05, 0.04, 0.06)):
        assert verdict_of(view(prompts=distances(open_question)))[-1].startswith("No theory is shown to be nearer")


def test_the_verdict_says_which_end_random_weights_favour() -> None:
    trained, start = leaning(0.08, 0.1), leaning(0.08, 0.1).subjects[0].measured["jacobian"]
    rows = start.per_prompt
    assert rows is not None
    turned = MeasuredKind(Profile.mean_of(rows[:, ::-1]), np.ascontiguousarray(rows[:, ::-1]))

    def beside(measured: MeasuredKind) -> str:
        first = trained.subjects[0]
        second = replace(first, name="initialised", measured={"jacobian": measured})
        return verdict_of(replace(trained, subjects=(first, second)))[3]

    lead = "Before training, with random weights, it favoured the"
    assert beside(start).startswith(f"{lead} end, too, by 8 percentage points [")
    assert beside(turned).startswith(f"{lead} beginning by 8 percentage points [")
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


def test_an_audit_answers_in_lines(audit_record: Build) -> None:
    middle, advice, end, *_, nearest = verdict(audit_record())
    assert middle.startswith("It loses the middle: ")
    assert advice.startswith("Influence is not use: ")
    assert end.startswith("It favours the beginning, by ")
    assert nearest.startswith("Nearest theory: power rollout, at W1 ")
