"""The verdict on a run that holds profiles: a line of at most 25 words for each answer, from its numbers.

A line claims something only if its interval excludes the reference and there are enough independent units; otherwise it
says that this is not decided. Negative results are claims like any other.
"""

import math
import shlex
from collections.abc import Iterator, Mapping

from posbias.comparison import STATISTICS, UNITS_FOR_CLAIM, KindComparison, PromptComparison, Subject, decided
from posbias.comparison.names import kind_name, theory_name
from posbias.comparison.stored import ProfileRun
from posbias.display.wording import SUBJECTS, THEORIES
from posbias.profiles import Profile
from posbias.statistics import Interval, jackknife, leave_one_out

FLAT_TENTH = 0.1
PERCENT = 100.0
EVALUATE = """posbias evaluate {model} --task "documents(file='questions.jsonl')\""""
"""What finds where a model uses what its reader gives it, as a shell has it."""


def verdict_of(view: ProfileRun) -> tuple[str, ...]:
    """Does the model lose the middle; what that is worth; which end does it favour, by how much; the nearest theory.

    Without theories nothing is said of them; if nothing was measured, the verdict says what was predicted, and how
    near that is to what it was compared to.
    """
    subject = view.subjects[0]
    kind = next(iter(subject.measured), None)
    if kind is None:
        return tuple(f"Predicted: {line}." for line in _predicted(view))
    if subject.name not in SUBJECTS:
        return _compared(view, subject)
    end, favoured = _favoured(subject, kind)
    advice = [_advice(view)] if subject.name == "trained" else []
    lines = [_middle(subject, kind), *advice, favoured, *_before_training(view, kind, end)]
    return (*lines, _nearest_line(view, subject, kind)) if subject.theories else tuple(lines)


def named_verdict(view: ProfileRun) -> str:
    """The first line of the verdict, with the run's name in its lead, for a page of several."""
    subject, title = view.subjects[0], view.label.replace(": ", ", ")
    kind = next(iter(subject.measured), None)
    if kind is None:
        return f"Predicted, {title}: {_predicted(view, of='')[0]}."
    if subject.name in SUBJECTS:
        return _middle(subject, kind, about=title)
    sentence = _compared(view, subject)[0].replace(": The ", ", the ").replace(": ", ", ")
    return f"{title}: {sentence[0].lower()}{sentence[1:]}"


def _summary(subject: Subject, kind: str) -> Mapping[str, Interval]:
    return subject.summaries.get(kind) or point_statistics(subject.measured[kind].profile)


def _predicted(view: ProfileRun, *, of: str = " of the influence") -> list[str]:
    """Shares of the tenths; of several predictions which has least and which most of each."""
    profiles = {
        theory_name(view, name): theory.profile
        for subject in view.subjects
        for name, theory in subject.theories.items()
    }
    if len(profiles) == 1:
        return [f"{shares_sentence(next(iter(profiles.values())), of)}{' (even: 10 %)' * bool(of)}"]
    lines = []
    for statistic in ("first_tenth", "middle_tenth", "last_tenth"):
        shares = {name: float(STATISTICS[statistic](profile.influence)) for name, profile in profiles.items()}
        least, most = (end(shares, key=lambda name: shares[name]) for end in (min, max))
        words = statistic.removesuffix("_tenth")
        lines.append(f"on the {words} tenth {percent(shares[least])} ({least}) to {percent(shares[most])} ({most})")
    return lines


def _middle(subject: Subject, kind: str, *, about: str = "it") -> str:
    """The answer to whether the middle has less than either end."""
    summary, n_units = _summary(subject, kind), subject.measured[kind].n_independent
    share = f"its middle tenth has {_percent(summary['middle_tenth'])} of the influence"
    ends = {"beginning": _sign(summary["first_over_middle"]), "end": _sign(summary["last_over_middle"])}
    name = about[0].upper() + about[1:] if about == "it" else about
    if n_units < UNITS_FOR_CLAIM:
        return f"Whether {about} loses the middle is not decided by {n_units} prompts or seeds: {share}."
    if all(sign == 1 for sign in ends.values()):
        return f"{name} loses the middle: {share} (even share: 10 %), less than either end."
    if -1 in ends.values():
        less = [f"its {end}" for end, sign in ends.items() if sign == -1]
        than = less[0] if len(less) == 1 else "either end"
        return f"{name} does not lose the middle: {share} (even share: 10 %), more than {than}."
    return f"Whether {about} loses the middle is not decided: {share} (even share: 10 %)."


def _favoured(subject: Subject, kind: str) -> tuple[str, str]:
    """The end that has more, "" if that is not decided, and the line that says so."""
    n_units = subject.measured[kind].n_independent
    whole, within = _gaps(subject, kind)
    sign = decided(whole, n_units)
    if not sign:
        summary = _summary(subject, kind)
        numbers = f"the last tenth has {_percent(summary['last_tenth'])}, the first {_percent(summary['first_tenth'])}"
        return "", f"Which end it favours is not decided: {numbers}."
    end, opposite = ("end", "beginning") if sign > 0 else ("beginning", "end")
    alone = {0: "that is not decided", -sign: f"the {opposite} has more"}.get(_sign(within))
    more = f"; without the last position {alone}" if alone else ""
    return end, f"It favours the {end}, by {_points(whole, sign)} over the {opposite}{more}."


def _points(gap: Interval, sign: int) -> str:
    """A difference of shares in percentage points, as seen from the end that has more."""
    size = gap if sign > 0 else Interval(-gap.value, -gap.high, -gap.low)
    return size.text(".0f", scale=PERCENT, unit=" percentage points")


def _gaps(subject: Subject, kind: str) -> tuple[Interval, Interval]:
    """Last tenth minus first tenth, with the very last position and without it."""
    measured = subject.measured[kind]
    sample = measured.sample
    averages = measured.profile.influence[None] if sample is None else sample.averages(leave_one_out(len(sample.units)))
    first, middle, last = (STATISTICS[name](averages) for name in ("first_tenth", "middle_tenth", "last_tenth"))
    inside = STATISTICS["last_over_middle"](averages) + middle
    whole, within = (jackknife(tenth - first).interval(least=-1.0, most=1.0) for tenth in (last, inside))
    return whole, within


def _before_training(view: ProfileRun, kind: str, end: str) -> Iterator[str]:
    """The end that random weights favour, if that is decided, and the last position's share if it has more than its."""
    start = next(
        (subject for subject in view.subjects[1:] if kind in subject.measured and subject.name in SUBJECTS), None
    )
    if start is None:
        return
    gap, _ = _gaps(start, kind)
    n_units, last = start.measured[kind].n_independent, _summary(start, kind)["last_token"]
    sign = decided(gap, n_units)
    if sign:
        favoured = "end" if sign > 0 else "beginning"
        also = ", too," if favoured == end else ""
        yield f"Before training, with random weights, it favoured the {favoured}{also} by {_points(gap, sign)}."
    if n_units >= UNITS_FOR_CLAIM and last.low > 1 / start.n_positions:
        even = f"an even share is {PERCENT / start.n_positions:.2g} %"
        yield f"Before training its last position alone had {_percent(last)} of the influence; {even}."


def _advice(view: ProfileRun) -> str:
    """What influence does not say, and the command that finds it out."""
    command = EVALUATE.format(model=shlex.quote(view.label))
    return f"Influence is not use: place nothing by it before you have tested answers on your own file, `{command}`."


def _nearest_line(view: ProfileRun, subject: Subject, kind: str) -> str:
    """The theory that explains the profile best, with its distance beside the flat line's."""
    nearest = _nearest(subject, kind)
    if nearest is None:
        return "No theory is shown to be nearer to the profile than a flat line."
    block, comparison = nearest
    distances = f"at W1 {comparison.distance}; a flat line is at {comparison.flat.value:.3f}"
    return f"Nearest theory: {theory_name(view, block.theory)}, {distances}."


def _nearest(subject: Subject, kind: str) -> tuple[KindComparison, PromptComparison] | None:
    """The theory that is nearest to a measurement, of those that are shown to be nearer than the flat line."""
    closer = [
        (block, block.prompts)
        for block in subject.comparisons
        if block.kind == kind and block.prompts is not None and block.prompts.decides < 0
    ]
    return min(closer, key=lambda pair: pair[1].distance.value, default=None)


def nearest_theory(subject: Subject, kind: str) -> str | None:
    """The name of the theory that explains a measurement best; without one the nearest of all."""
    nearest = _nearest(subject, kind)
    blocks = [block for block in subject.comparisons if block.kind == kind]
    if nearest is None and not blocks:
        return None
    return nearest[0].theory if nearest else min(blocks, key=lambda block: block.metrics["wasserstein"]).theory


def _compared(view: ProfileRun, subject: Subject) -> tuple[str, ...]:
    """The nearest of what was compared, and how the others fare."""
    blocks = sorted(subject.comparisons, key=lambda block: block.metrics["wasserstein"])
    if not blocks:
        return ("Nothing was compared.",)
    best = blocks[0]
    name = theory_name(view, best.theory)
    theory = f"The {name}" if best.theory in THEORIES else f"{name[0].upper()}{name[1:]}"
    if best.prompts is None:
        distance, flat = best.metrics["wasserstein"], best.flat["wasserstein"]
        numbers = f"W1 {distance:.3f} to {kind_name(view, best.kind)}, a flat line {flat:.3f}"
        first = f"{name[0].upper()}{name[1:]}: {numbers}; no claim without single prompts."
    else:
        numbers = f"(W1 {best.prompts.distance} against {best.prompts.flat.value:.3f})"
        first = {
            -1: f"{theory} is closer to the measurement than a flat line {numbers}.",
            0: f"{theory}: whether it is closer than a flat line is not decided {numbers}.",
            1: f"{theory} is farther from the measurement than a flat line {numbers}.",
        }[best.prompts.decides]
    if len(blocks) == 1:
        return (first,)
    decides = [0 if block.prompts is None else block.prompts.decides for block in blocks]
    counts = [
        (decides.count(-1), "closer than a flat line"),
        (decides.count(1), "farther"),
        (decides.count(0), "undecided"),
    ]
    counted = ", ".join(f"{count} {words}" for count, words in counts if count)
    return (f"Nearest: {first}", f"Of all {len(blocks)} comparisons: {counted}.")


def _percent(share: Interval) -> str:
    return share.text(_digits(share.value), scale=PERCENT, unit=" %")


def percent(share: float) -> str:
    """A share of the influence, with a decimal if it is small."""
    return f"{PERCENT * share:{_digits(share)}} %"


def _digits(share: float) -> str:
    return ".0f" if abs(share) >= FLAT_TENTH else ".1f"


def point_statistics(profile: Profile) -> dict[str, Interval]:
    """Every statistic of a profile, without intervals."""
    return {name: Interval(float(STATISTICS[name](profile.influence)), -math.inf, math.inf) for name in STATISTICS}


def shares_sentence(profile: Profile, of: str) -> str:
    """Shares of the tenths; `of` says of what, such as " of the influence"."""
    first, middle, last = (
        percent(float(STATISTICS[f"{name}_tenth"](profile.influence))) for name in ("first", "middle", "last")
    )
    return f"{first}{of} on the first tenth, {middle} on the middle, {last} on the last"


def _sign(interval: Interval) -> int:
    if not math.isfinite(interval.value) or not interval.excludes(0.0):
        return 0
    return 1 if interval.value > 0 else -1
