"""Plain sentences from the numbers of a run; a claim only where its interval supports it.

Every sentence is one of three sorts: a claim (the interval excludes the reference and there are enough independent
units), an explicit "not decided", or a bare statement of what was seen. Negative results are claims like any other.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from posbias.comparison import UNITS_FOR_CLAIM, Contrast, KindComparison, Subject
from posbias.report.layout import RunView
from posbias.report.names import is_measured, kind_name, state_of, theory_name
from posbias.report.wording import KINDS, THEORIES, label
from posbias.statistics import Interval

FLAT_TENTH = 0.1


@dataclass(frozen=True)
class Finding:
    """One sentence and what it rests on."""

    text: str
    sort: Literal["claim", "undecided", "statement"]


def paragraph(view: RunView) -> str:
    """The findings as plain text: one line for each measured kind of each subject, and for each contrast."""
    return "\n".join(" ".join(finding.text for finding in group) for group in grouped_findings(view))


def grouped_findings(view: RunView) -> list[list[Finding]]:
    """For each measured kind of each subject its shape and the theories, then what was there at initialisation.

    Every group opens with what it is about (a sentence that ends in a colon); one with nothing else is left out.
    """
    groups = []
    for subject in view.subjects:
        for number, (kind, measured) in enumerate(subject.measured.items()):
            units = "" if measured.per_prompt is None else f"{len(measured.per_prompt)} prompts of "
            text = f"For {state_of(view, subject)} ({kind_name(view, kind)}, {units}{subject.n_positions} positions):"
            groups.append([Finding(text, "statement"), *_of_measurement(view, subject, kind, first=number == 0)])
    groups += [list(_initialisation(kind, entry)) for kind, entry in view.contrasts.items()]
    return [
        [replace(finding, text=finding.text[0].upper() + finding.text[1:]) for finding in group]
        for group in groups
        if len(group) > 1
    ]


def _of_measurement(view: RunView, subject: Subject, kind: str, *, first: bool) -> Iterator[Finding]:
    """What is said of one measured kind; its shape of a subject's first one only."""
    if not is_measured(view, kind):
        text = "this is a prediction, to which others are compared; nothing was measured, so no claim is made."
        yield Finding(text, "undecided")
        return
    n_units = subject.measured[kind].n_independent
    if n_units < UNITS_FOR_CLAIM or kind not in subject.summaries:
        yield _too_few(n_units)
        return
    if first:
        yield from _shape(subject, kind)
    blocks = [block for block in subject.comparisons if block.kind == kind and block.prompts is not None]
    for block in sorted(blocks, key=lambda block: block.comparison.wasserstein):
        yield _theory(theory_name(view, block.theory), block)


def _too_few(n_units: int) -> Finding:
    text = f"with {n_units} independent prompts or seeds no claim is made (at least {UNITS_FOR_CLAIM} are needed)."
    return Finding(text if n_units else "single prompts were not recorded, so no claim is made.", "undecided")


def _shape(subject: Subject, kind: str) -> Iterator[Finding]:
    summary = subject.summaries[kind]
    for name, words in (("first_tenth", "first"), ("middle_tenth", "middle"), ("last_tenth", "last")):
        share = summary[name]
        text = share.text(".0f" if abs(share.value) >= 0.1 else ".1f", scale=100, unit=" %")
        carries = f"the {words} tenth of the context carries {text} of the influence"
        if share.excludes(FLAT_TENTH):
            comparison = "more" if share.value > FLAT_TENTH else "less"
            yield Finding(f"{carries}, {comparison} than the flat 10 %.", "claim")
        else:
            yield Finding(f"{carries}; whether that is more or less than the flat 10 % is not decided.", "undecided")
    yield _ends(summary["first_over_middle"], summary["last_over_middle"])
    minimum, n_positions = summary["minimum_position"], subject.n_positions
    text = f"The smallest influence lies at position {minimum.text('.0f')} of {n_positions}"
    if not math.isfinite(minimum.value):
        return
    if minimum.low >= 0.1 * n_positions and minimum.high < 0.9 * n_positions:
        yield Finding(f"{text}, inside the context and outside its first and last tenth.", "claim")
    else:
        yield Finding(f"{text}.", "statement")


def _ends(first: Interval, last: Interval) -> Finding:
    """Whether each end outweighs the middle; the last position itself is left out of the count."""
    signs = [_sign(first), _sign(last)]
    if signs == [1, 1]:
        return Finding("Both ends outweigh the middle, the last position left out: a U shape.", "claim")
    verbs = {1: "outweighs the middle", -1: "weighs less than the middle", 0: "against the middle is not decided"}
    text = f"The beginning {verbs[signs[0]]}; the end, its last position left out, {verbs[signs[1]]}"
    if -1 in signs:
        return Finding(f"{text}: no U shape.", "claim")
    return Finding(f"{text}.", "undecided")


def _sign(interval: Interval) -> int:
    if not math.isfinite(interval.value) or not interval.excludes(0.0):
        return 0
    return 1 if interval.value > 0 else -1


def _theory(name: str, block: KindComparison) -> Finding:
    prompts = block.prompts
    assert prompts is not None
    theory = f"The {name}" if block.theory in THEORIES else f"{name[0].upper()}{name[1:]}"
    numbers = f"(W1 {prompts.distance} against {prompts.flat.value:.3f})"
    if prompts.decides == 0:
        text = f"the data do not decide whether it is closer to the measurement than a flat line {numbers}."
        return Finding(f"{theory}: {text}", "undecided")
    if prompts.decides > 0:
        return Finding(f"{theory} is farther from the measurement than a flat line {numbers}.", "claim")
    extra = ""
    if prompts.distance.high <= prompts.noise.mean:
        extra = f", no farther than half of the prompts is from the other half ({prompts.noise.mean:.3f})"
    elif prompts.per_prompt.high >= prompts.per_prompt_flat.low:
        extra = ", though on single prompts the gain is not established"
    return Finding(f"{theory} is closer to the measurement than a flat line {numbers}{extra}.", "claim")


def _initialisation(kind: str, entry: Contrast) -> Iterator[Finding]:
    yield Finding(f"Trained against initialised ({label(KINDS, kind)}):", "statement")
    if entry.n_units < UNITS_FOR_CLAIM:
        yield _too_few(entry.n_units)
        return
    for name, words in (("first_tenth", "first"), ("last_tenth", "last")):
        change = entry.statistics[name]
        points = change.text("+.1f", scale=100, unit=" points")
        if change.excludes(0.0):
            verb = "larger" if change.value > 0 else "smaller"
            yield Finding(f"the share of the {words} tenth is {verb} in the trained model ({points}).", "claim")
        else:
            text = f"whether the share of the {words} tenth differs is not decided ({points})."
            yield Finding(text, "undecided")
    numbers = f"(W1 {entry.distance} against {entry.flat.value:.3f})"
    profile = "the profile at initialisation"
    if entry.decides < 0:
        text = f"{profile} is closer to the trained one than a flat line is {numbers}"
        yield Finding(f"{text}: part of it was there before training.", "claim")
    elif entry.decides > 0:
        yield Finding(f"{profile} is farther from the trained one than a flat line is {numbers}.", "claim")
    else:
        text = f"whether {profile} is closer to the trained one than a flat line is not decided {numbers}."
        yield Finding(text, "undecided")
