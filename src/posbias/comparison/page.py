"""The report of runs that hold profiles (audit, measure, predict, compare): one run, or several side by side.

Its verdict is a line of at most 25 words for each answer, from the run's numbers. A line claims something only if its
interval excludes the reference and there are enough independent units; otherwise it says that this is not decided.
Negative results are claims like any other.
"""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from posbias.comparison.distances import UNITS_FOR_CLAIM, decided
from posbias.comparison.metrics import STATISTICS
from posbias.comparison.stored import (
    THEORIES,
    WORDS,
    KindComparison,
    ProfileRun,
    Subject,
    is_measured,
    state_of,
    told_apart,
)
from posbias.comparison.tables import OF_HALVES, OF_ONE, TENTHS, detailed_tables, overview_tables, shown_rows
from posbias.profiles import Profile
from posbias.results.figures import (
    MEASURED,
    NEXT,
    RUNS,
    THEORY_STROKES,
    Curve,
    Figure,
    Stroke,
    profile_figure,
    ramp,
)
from posbias.results.naming import MIXINGS, SUBJECTS, label, names_beside
from posbias.results.page import Report, Section
from posbias.results.result import Result
from posbias.results.tables import capital
from posbias.statistics import Interval, jackknife, leave_one_out

PREDICTED = " of the predicted influence"
TEXTS = {
    "default": "excerpts from Austen, Shakespeare, Milton, the King James Bible, the Jargon File, the US Constitution",
    "synthetic": "uniformly random tokens, no language at all",
}
"""Sources of prompts in the words of a page; others are shown as they were given."""
MOST_TABLES = 3
"""Tables that are not folded."""
KICKER = "posbias · how a language model weighs the positions of its context"
NOTE = (
    "In brackets: 95 % intervals over texts or seeds. W1 is a distance between profiles: 0 is equality, 0.1 large; "
    f"{OF_HALVES} it says how well the measurement agrees with itself, {OF_ONE} how near a theory is to one of them."
)

GLOSSARY = {
    "Influence": "How strongly the model's output at the last position reacts to a small change at each position of the"
    " context. All positions together make 100 %: this is the profile that is drawn.",
    "Flat line": "The profile in which every position weighs the same, 1/N. A theory is worth something only if it"
    " is closer to the measurement than this.",
    "First, middle, last tenth": "The share of the influence that falls on the first 10 % of the context, on the 10 %"
    " around its centre, and on the last 10 %. A flat line has 10 % in each.",
    "W1": "Wasserstein-1 distance: the share of influence that must be moved, times how far (as a fraction of the"
    " context), to turn one profile into the other. 0 means identical; 0.1 is large: a tenth of"
    " the influence, moved from one end to the other.",
    "A flat line's distance": "W1 from a flat line to the same measurement: what a theory that knows nothing reaches.",
    "Between halves of the texts": "W1 between the profiles of two random halves of the texts: how well the measurement"
    " agrees with itself. The average of all texts is about twice as near to the truth.",
    "To single texts": "The median W1 from the theory to the profile of one text, instead of to the average of all.",
    "Interval": "In brackets, the 95 % interval over texts, which are the prompts, or over initialisation seeds: where"
    " the number would lie with other ones. Each interval stands alone; of twenty comparisons about one misses by"
    " chance. None is printed if nothing is known, as with a single text.",
    "Against a flat line": "Closer, farther or undecided: whether the interval of the theory's W1 less the flat line's,"
    " on the same texts, lies below zero, above zero, or around it. Named are other distances that rank the two the"
    " other way round. With fewer than 6 independent texts or seeds nothing is decided.",
    "Mixing": "How much of a layer's output at a position comes through attention from all positions rather than"
    " straight through the residual connection: 0 is none, 1 is all. Two published definitions: norms over the whole"
    " sequence (Frobenius, as in the paper), or the mean over tokens of each token's share (as in its code).",
    "At initialisation": "The same configuration with freshly drawn random weights: what the architecture does before"
    " any training.",
    "Power rollout": "Our theory for trained models, given the model's own attention and derivatives on the same"
    " prompts; published theories are given the architecture. The guide (docs/predict.md) has every theory.",
}


def profiles_report(*runs: Result) -> Report:
    """The report of one run with profiles, or of several side by side, whose own pages have their details."""
    views = [run if isinstance(run, ProfileRun) else ProfileRun.from_record(run.record) for run in runs]
    if len(views) == 1:
        return _report_of_one(views[0])
    views = told_apart(views)  # every line of a legend names one run
    sections = [
        Section(view.label, texts=verdict_of(view), left_out=list(view.left_out), record=view.record) for view in views
    ]
    figures = side_by_side(views)
    return Report(
        " beside ".join(view.label for view in views),
        kicker=KICKER,
        verdict=[verdict_of(view, view.label.replace(": ", ", "))[0] for view in views[:3]],
        picture=figures[:1],
        figures=figures[1:],
        note=NOTE,
        summary=overview_tables(views),
        sections=sections,
        glossary=GLOSSARY,
    )


def _report_of_one(view: ProfileRun) -> Report:
    overview, details = overview_tables([view]), detailed_tables(view)
    picture, figures = picture_of(view), figures_of(view)
    return Report(
        view.label,
        kicker=KICKER,
        basis=_basis(view),
        verdict=verdict_of(view),
        picture=picture or figures[:1],
        figures=figures if picture else figures[1:],
        note=NOTE,
        summary=overview[:MOST_TABLES],
        tables=overview[MOST_TABLES:],
        sections=[Section("Every number", tables=details)] if details else [],
        left_out=list(view.left_out),
        glossary=GLOSSARY,
    )


def _basis(view: ProfileRun) -> str:
    """Number, texts and lengths of the prompts that a verdict rests on; "" if nothing was measured."""
    prompts = view.record.prompts
    if prompts is None or view.record.model is None or not view.subject.measured:
        return ""
    longest = view.record.model.get("max_positions")
    text = f"Measured on {prompts['count']} texts of {prompts['n_positions']} tokens: "
    text += TEXTS.get(prompts["source"], prompts["source"])
    for subject in view.subjects[1:]:
        counts = [measured.n_independent for measured in subject.measured.values()]
        text += f"; at initialisation on {max(counts)} of them, with fresh random weights for each" if counts else ""
    if longest and longest > prompts["n_positions"]:
        text += f". To measure longer ones (up to {longest:,} tokens) pass `--length N`"
    return f"{text}. In brackets, and as grey bands: 95 % intervals over texts."


def picture_of(view: ProfileRun) -> list[Figure]:
    """The first measured kind as trained and at initialisation, each with the theory that explains it best.

    Empty if a run does not have both.
    """
    kind = next(iter(view.subject.measured), "")
    if len(view.subjects) < 2 or any(kind not in subject.measured for subject in view.subjects):
        return []
    panels = []
    for subject in view.subjects:
        profile, size, theories = subject.measured[kind].profile, subject.n_positions, []
        if (nearest := _nearest(subject, kind)) is not None:
            name, stroke = nearest.theory, THEORY_STROKES.get(nearest.theory, NEXT)
            theories = [subject.theories[name].profile.curve(view.called("theories", name), stroke)]
        title = f"{capital(label(SUBJECTS, subject.name))}: how much each position of the context weighs"
        panel = profile_figure(f"{subject.name}-{kind}-best", title, theories, measured=[profile.curve("measured")])
        # A position is a cell around its number.
        tenths = tuple(
            (start * size - 0.5, (start + FLAT_TENTH) * size - 0.5, percent(share))
            for start, share in zip((0.0, 0.45, 0.9), _tenths(profile).values(), strict=True)
        )
        panels.append(replace(panel, stretches=tenths, stretches_are="tenths and their shares"))
    lows, highs = zip(*(panel.log_range for panel in panels if panel.log_range), strict=True)
    top = max(panel.linear_range[1] for panel in panels if panel.linear_range)
    return [replace(panel, log_range=(min(lows), max(highs)), linear_range=(0.0, top)) for panel in panels]


def figures_of(view: ProfileRun) -> list[Figure]:
    """Profiles per subject and measured kind, predictions without a measurement, depth, and mixing per layer."""
    figures = [figure for subject in view.subjects for figure in _subject_figures(view, subject)]
    for subject in view.subjects:
        if (depth := subject.depth) is not None:  # profiles after some layers, from pale (near the input) to dark
            rows, curves = shown_rows(len(depth.layers)), []
            for row, stroke in zip(rows, ramp(len(rows)), strict=True):
                low, high = (None if end is None else end[row] for end in (depth.low, depth.high))
                profile, name = Profile(depth.influence[row], low, high), f"after layer {int(depth.layers[row])}"
                curves.append(profile.curve(name, stroke))
            title = f"{state_of(view, subject)}: how the profile forms"
            figures.append(profile_figure(f"{subject.name}-depth", title, curves))
    coefficients = []
    for number, subject in enumerate(view.subjects):
        for place, (definition, mixing) in enumerate(subject.mixing.items()):
            stroke = Stroke((RUNS[0], RUNS[3], RUNS[2])[number % 3].colour, "dash" if place else "solid")
            layers = np.arange(mixing.value.size, dtype=np.float64)
            name = f"{label(SUBJECTS, subject.name)}, {label(MIXINGS, definition)}"
            coefficients.append(Curve(name, layers, mixing.value, stroke, low=mixing.low, high=mixing.high))
    title = f"{view.label}: the share of a layer's output that attention contributes"
    axes = "layer (0 is nearest the input)", "mixing coefficient"
    return figures + ([Figure("mixing", title, *axes, tuple(coefficients), markers=True)] if coefficients else [])


def side_by_side(views: Sequence[ProfileRun]) -> list[Figure]:
    """One figure for each measured kind, of all runs that have it beside the predictions of runs without measurement;
    one of the predictions alone if nothing was measured. Profiles of several lengths are drawn over fractions."""
    theories = [
        (view.curves[THEORIES + name], entry.profile)
        for view in views
        if not view.subject.measured
        for name, entry in view.subject.theories.items()
    ]
    names = names_beside([settings for settings, _ in theories])
    predicted = [profile.curve(name) for name, (_, profile) in zip(names, theories, strict=True)]
    figures = []
    for kind in dict.fromkeys(kind for view in views for subject in view.subjects for kind in subject.measured) or [""]:
        curves = [
            subject.measured[kind].profile.curve(
                state_of(view, subject),
                Stroke(RUNS[number % len(RUNS)].colour, ("solid", "dot", "dashdot")[state % 3]),
            )
            for number, view in enumerate(views)
            for state, subject in enumerate(view.subjects)
            if kind in subject.measured
        ]
        if predicted and len(curves) == 1 and all(is_measured(view, kind) for view in views):
            curves = [replace(curve, name=f"measured: {curve.name}", stroke=MEASURED) for curve in curves]
        curves += predicted
        if len(curves) > 1:
            what = f"{capital(label(WORDS, kind))} influence, {len(curves)} curves"
            title = f"{what if kind else f'{len(curves)} predictions'}, side by side"
            figures.append(profile_figure(f"runs-{kind or 'predicted'}", title, curves))
    return figures


def _subject_figures(view: ProfileRun, subject: Subject) -> Iterator[Figure]:
    """The theories beside each measured kind; alone if nothing was measured."""
    theories = {name: theory.profile for name, theory in subject.theories.items()}
    curves = [
        profile.curve(view.called("theories", name), THEORY_STROKES.get(name, NEXT))
        for name, profile in theories.items()
    ]
    title = state_of(view, subject)
    for kind, measured in subject.measured.items():
        name = view.called("measured", kind)
        if is_measured(view, kind):
            shares = shares_sentence(measured.profile, f" of the {name} influence")
            legend, heading = f"measured ({name})", f"{title}: {shares}"
        else:
            legend, heading = f"compared to: {name}", f"{name}: {shares_sentence(measured.profile, PREDICTED)}"
        measurement = measured.profile.curve(legend)
        yield profile_figure(f"{subject.name}-{kind}", heading, curves, measured=[measurement])
    if not subject.measured and theories:
        (first, *further) = theories.values()
        heading = f"{title}: {'how much each position weighs' if further else shares_sentence(first, PREDICTED)}"
        yield profile_figure(f"{subject.name}-predicted", heading, curves)


FLAT_TENTH = 0.1
PERCENT = 100.0
DECISIONS = {-1: "closer than a flat line", 1: "farther than a flat line", 0: "not decided"}
"""What a distance less the flat line's decides, by its sign."""


def verdict_of(view: ProfileRun, title: str = "") -> tuple[str, ...]:
    """Does the model lose the middle; what that is worth; which end does it favour, by how much; the nearest theory.

    Without theories nothing is said of them; if nothing was measured, the verdict says what was predicted, and how
    near that is to what it was compared to. On a page of several runs the first line has a `title` in its lead.
    """
    subject = view.subjects[0]
    kind = next(iter(subject.measured), None)
    if kind is None:
        lead, of = (f"Predicted, {title}", "") if title else ("Predicted", " of the influence")
        return tuple(f"{lead}: {line}." for line in _predicted(view, of))
    if subject.name not in SUBJECTS:
        said = _compared(view, subject)
        return tuple(f"{title}: {line.replace(': ', ', ')}" for line in said) if title else said
    end, favoured = _favoured(subject, kind)
    lines = [_middle(subject, kind, title or "it")]
    if subject.name == "trained":
        command = f"""posbias evaluate {shlex.quote(view.label)} --task "documents(file='questions.jsonl')\""""
        lines.append(
            f"Influence is not use: place nothing by it before you have tested answers on your own file, `{command}`."
        )
    lines += [favoured, *_before_training(view, kind, end)]
    if subject.theories:
        nearest = _nearest(subject, kind)
        lines.append("No theory is shown to be nearer to the profile than a flat line.")
        if nearest is not None and nearest.sign < 0:
            name, flat = view.called("theories", nearest.theory), nearest.flat["wasserstein"]
            lines[-1] = f"Nearest theory: {name}, at W1 {nearest.distance_text}; a flat line is at {flat:.3f}."
    return tuple(lines)


def _predicted(view: ProfileRun, of: str) -> list[str]:
    """Shares of the tenths; of several predictions which has least and which most of each."""
    profiles = {
        view.called("theories", name): theory.profile
        for subject in view.subjects
        for name, theory in subject.theories.items()
    }
    if len(profiles) == 1:
        return [f"{shares_sentence(next(iter(profiles.values())), of)}{' (even: 10 %)' * bool(of)}"]
    lines = []
    for tenth in TENTHS:
        shares = {name: _tenths(profile)[tenth] for name, profile in profiles.items()}
        by_share = sorted(shares, key=lambda name: shares[name])
        ends = " to ".join(f"{percent(shares[name])} ({name})" for name in (by_share[0], by_share[-1]))
        lines.append(f"on the {tenth.replace('_', ' ')} {ends}")
    return lines


def _middle(subject: Subject, kind: str, about: str) -> str:
    """The answer to whether the middle has less than either end."""
    summary, n_units = subject.summary(kind), subject.measured[kind].n_independent
    share = f"its middle tenth has {percent(summary['middle_tenth'])} of the influence"
    if n_units < UNITS_FOR_CLAIM:
        return f"Whether {about} loses the middle is not decided by {n_units} prompts or seeds: {share}."
    share, name = f"{share} (even share: 10 %)", "It" if about == "it" else about
    ends = {"its beginning": decided(summary["first_over_middle"]), "its end": decided(summary["last_over_middle"])}
    less = [end for end, sign in ends.items() if sign == -1]
    if less:
        # An end is its tenth without the last position, to which the residual stream alone gives much.
        apart = ", the last position left out" if "its end" in less else ""
        return f"{name} does not lose the middle: {share}, more than {'either end' if less[1:] else less[0]}{apart}."
    if all(ends.values()):
        return f"{name} loses the middle: {share}, less than either end."
    return f"Whether {about} loses the middle is not decided: {share}."


def _favoured(subject: Subject, kind: str) -> tuple[str, str]:
    """The end that has more, "" if that is not decided, and the line that says so."""
    sign, points, within = _gap(subject, kind)
    if not sign:
        summary = subject.summary(kind)
        numbers = f"the last tenth has {percent(summary['last_tenth'])}, the first {percent(summary['first_tenth'])}"
        return "", f"Which end it favours is not decided: {numbers}."
    end, opposite = ("end", "beginning") if sign > 0 else ("beginning", "end")
    alone = {0: "that is not decided", -sign: f"the {opposite} has more"}.get(within)
    more = f"; without the last position {alone}" if alone else ""
    return end, f"It favours the {end}, by {points} over the {opposite}{more}."


def _gap(subject: Subject, kind: str) -> tuple[int, str, int]:
    """The sign of the last tenth less the first, 0 if that is not decided, its size in percentage points, and the sign
    without the very last position."""
    measured = subject.measured[kind]
    sample = measured.sample
    averages = measured.profile.influence[None] if sample is None else sample.averages(leave_one_out(len(sample.units)))
    first, middle, last = (STATISTICS[name](averages) for name in TENTHS)
    inside = STATISTICS["last_over_middle"](averages) + middle
    whole, within = (jackknife(tenth - first).interval(least=-1.0, most=1.0) for tenth in (last, inside))
    sign = decided(whole, measured.n_independent)
    size = whole if sign >= 0 else Interval(-whole.value, -whole.high, -whole.low)
    return sign, size.text(".0f", scale=PERCENT, unit=" percentage points"), decided(within)


def _before_training(view: ProfileRun, kind: str, end: str) -> Iterator[str]:
    """The end that random weights favour, if that is decided, and the last position's share if it has more than its."""
    start = next((other for other in view.subjects[1:] if kind in other.measured and other.name in SUBJECTS), None)
    if start is None:
        return
    sign, points, _ = _gap(start, kind)
    last = start.summary(kind)["last_token"]
    if sign:
        favoured = "end" if sign > 0 else "beginning"
        also = ", too," if favoured == end else ""
        yield f"Before training, with random weights, it favoured the {favoured}{also} by {points}."
    if start.measured[kind].n_independent >= UNITS_FOR_CLAIM and last.low > 1 / start.n_positions:
        even = f"an even share is {PERCENT / start.n_positions:.2g} %"
        yield f"Before training its last position alone had {percent(last)} of the influence; {even}."


def _nearest(subject: Subject, kind: str) -> KindComparison | None:
    """The nearest theory to a measurement of those that are shown to be nearer than the flat line; else of all."""
    blocks = [block for block in subject.comparisons if block.kind == kind]
    return min(blocks, key=lambda block: (block.sign >= 0, block.metrics["wasserstein"]), default=None)


def _compared(view: ProfileRun, subject: Subject) -> tuple[str, ...]:
    """One kind of two runs, each kind by itself; of theories the nearest, and how the others fare."""
    blocks = subject.comparisons
    if all(block.theory == block.kind for block in blocks):
        return tuple(f"{capital(_beside(view, block))}." for block in blocks)
    best = min(blocks, key=lambda block: block.metrics["wasserstein"])
    if len(blocks) == 1:
        return (f"{capital(_beside(view, best))}.",)
    decides = Counter(block.sign for block in blocks)
    counted = ", ".join(f"{decides[sign]} {told}" for sign, told in DECISIONS.items() if decides[sign])
    return (f"Nearest is {_beside(view, best)}.", f"Of all {len(blocks)} comparisons: {counted}.")


def _beside(view: ProfileRun, block: KindComparison) -> str:
    """The distance of a theory to a measurement beside the flat line's, and what that decides."""
    name, kind = view.called("theories", block.theory), view.called("measured", block.kind)
    said = "no claim without single prompts" if block.prompts is None else DECISIONS[block.sign]
    return f"{name}: W1 {block.distance_text} to {kind}, a flat line {block.flat['wasserstein']:.3f}; {said}"


def percent(share: Interval | float) -> str:
    """A share of the influence, with a decimal if it is small, and with its interval if it has one."""
    interval = share if isinstance(share, Interval) else Interval(share, -math.inf, math.inf)
    return interval.text(".0f" if abs(interval.value) >= FLAT_TENTH else ".1f", scale=PERCENT, unit=" %")


def _tenths(profile: Profile) -> dict[str, float]:
    """Shares of the first, the middle and the last tenth."""
    return {name: float(STATISTICS[name](profile.influence)) for name in TENTHS}


def shares_sentence(profile: Profile, of: str) -> str:
    """Shares of the tenths; `of` says of what, such as " of the influence"."""
    first, middle, last = map(percent, _tenths(profile).values())
    return f"{first}{of} on the first tenth, {middle} on the middle, {last} on the last"
