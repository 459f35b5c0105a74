"""The report of runs that hold profiles (audit, measure, predict, compare): one run, or several side by side."""

from collections.abc import Iterator, Sequence

import numpy as np

from posbias.comparison import STATISTICS, Depth, Subject
from posbias.profiles import Profile
from posbias.records import Record
from posbias.report.figures import (
    MEASURED,
    RUNS,
    Curve,
    Figure,
    Stroke,
    profile_curve,
    profile_figure,
    ramp,
    run_strokes,
    theory_strokes,
)
from posbias.report.findings import grouped_findings
from posbias.report.layout import THEORIES, RunView, view_of
from posbias.report.names import (
    is_measured,
    kind_name,
    names_beside,
    state_of,
    theory_name,
    told_apart,
)
from posbias.report.page import PROFILES, REPORTS, Report, Section
from posbias.report.tables import Table, detailed_tables, ingredient_table, overview_tables, shown_rows
from posbias.report.wording import GLOSSARY, KINDS, MIXINGS, SUBJECTS, label
from posbias.report.wording import THEORIES as NAMED

PREDICTED = "predicted influence"
KICKER = "posbias · how a language model weighs the positions of its context"
NOTE = (
    'In brackets: 95 % intervals over prompts or seeds. W1 is a distance, 0 is equality; "flat" is the distance of the '
    'flat line to the same measurement, "noise" that of one half of the prompts to the other.'
)


@REPORTS.register(PROFILES)
def profiles_report(*records: Record) -> Report:
    """What the profiles of a run show; of several runs, what they show side by side, and then each by itself."""
    views = [view_of(record) for record in records]
    if len(views) == 1:
        return _report_of_one(views[0], records[0])
    views = told_apart(views)  # every line of a legend names one run
    sections = [
        Section(
            view.title,
            anchor=f"run-{number}",
            statements=grouped_findings(view),
            caveats=view.caveats,
            figures=figures_of(view),
            tables=[*_ingredients(view), *detailed_tables(view)],
            left_out=view.scalars.get("left_out", ()),
            record=record,
        )
        for number, (view, record) in enumerate(zip(views, records, strict=True), start=1)
    ]
    return Report(
        f"Position bias: {' beside '.join(view.title for view in views)}",
        kicker=KICKER,
        figures=side_by_side(views),
        note=NOTE,
        tables=overview_tables(views),
        sections=sections,
        glossary=GLOSSARY,
    )


def _report_of_one(view: RunView, record: Record) -> Report:
    overview, details = overview_tables([view]), detailed_tables(view)
    ingredients = _ingredients(view)
    if ingredients:  # what was asked for comes first, and is all that a terminal shows
        overview, details = ingredients, [*overview, *details]
    return Report(
        f"Position bias: {view.title}",
        kicker=KICKER,
        statements=grouped_findings(view),
        caveats=view.caveats,
        figures=figures_of(view),
        note=NOTE,
        tables=overview,
        left_out=view.scalars.get("left_out", ()),
        sections=[Section("In detail", anchor="details", tables=details)] if details else [],
        record=record,
        glossary=GLOSSARY,
    )


def _ingredients(view: RunView) -> list[Table]:
    found = view.scalars.get("ingredients")
    return [ingredient_table(found)] if found else []


def figures_of(view: RunView) -> list[Figure]:
    """Profiles per subject and measured kind, predictions without a measurement, depth, and mixing per layer."""
    figures: list[Figure] = []
    if len(view.subjects) > 1:
        figures.extend(_initialisation_figure(view, *view.subjects[:2]))
    for subject in view.subjects:
        figures.extend(_subject_figures(view, subject))
    figures.extend(
        _depth_figure(view, subject, subject.depth) for subject in view.subjects if subject.depth is not None
    )
    if any(subject.mixing for subject in view.subjects):
        figures.append(_mixing_figure(view))
    return figures


def side_by_side(views: Sequence[RunView]) -> list[Figure]:
    """One figure per measured kind that several runs share, and one of the predictions of runs without measurement."""
    drawn: list[tuple[str, str, list[tuple[str, Profile, Stroke]]]] = []
    for kind in dict.fromkeys(kind for view in views for subject in view.subjects for kind in subject.measured):
        entries = [
            (state_of(view, subject), subject.measured[kind].profile, _run_stroke(number, state))
            for number, view in enumerate(views)
            for state, subject in enumerate(view.subjects)
            if kind in subject.measured
        ]
        name = label(KINDS, kind)
        title = f"{name[0].upper()}{name[1:]} influence of {len(entries)} measurements, side by side"
        drawn.append((f"runs-{kind}", title, entries))
    predictions = [
        (view.curves.get(THEORIES + name, {"theory": name, "model": view.title}), theory.profile)
        for view in views
        for subject in view.subjects
        if not subject.measured
        for name, theory in subject.theories.items()
    ]
    names = names_beside([settings for settings, _ in predictions])
    curves = [
        (name, profile, _run_stroke(number, 0))
        for number, (name, (_, profile)) in enumerate(zip(names, predictions, strict=True))
    ]
    drawn.append(("runs-predicted", f"{len(curves)} predictions, side by side", curves))
    return [
        profile_figure(
            slug,
            title,
            [profile_curve(name, profile, stroke, relative=True) for name, profile, stroke in entries],
            x_label="position as a fraction of the context",
        )
        for slug, title, entries in drawn
        if len(entries) > 1
    ]


def _run_stroke(run: int, state: int) -> Stroke:
    """A colour per run, a dash per state of its model."""
    return Stroke(RUNS[run % len(RUNS)].colour, ("solid", "dot", "dashdot")[state % 3])


def _subject_figures(view: RunView, subject: Subject) -> Iterator[Figure]:
    """The theories beside each measured kind; alone where nothing was measured."""
    theories = {name: theory.profile for name, theory in subject.theories.items()}
    strokes = theory_strokes(list(theories)) if set(theories) <= set(NAMED) else run_strokes(list(theories))
    curves = [profile_curve(theory_name(view, name), profile, strokes[name]) for name, profile in theories.items()]
    title = state_of(view, subject)
    for kind, measured in subject.measured.items():
        name = kind_name(view, kind)
        if is_measured(view, kind):
            legend, seen = f"measured ({name})", f"{title}: {_shares_sentence([measured.profile], f'{name} influence')}"
        else:
            legend, seen = f"compared to: {name}", f"{name}: {_shares_sentence([measured.profile], PREDICTED)}"
        own = profile_curve(legend, measured.profile, MEASURED, emphasis=True)
        yield profile_figure(f"{subject.name}-{kind}", seen, [own, *curves], measured=[own])
    if not subject.measured and theories:
        seen = f"{title}: {_shares_sentence(list(theories.values()), PREDICTED)}"
        yield profile_figure(f"{subject.name}-predicted", seen, curves)


def _shares_sentence(profiles: Sequence[Profile], what: str) -> str:
    """Shares of the tenths; of several profiles the least and the largest."""
    shown = []
    for name in ("first_tenth", "middle_tenth", "last_tenth"):
        shares = [100 * float(STATISTICS[name](profile.influence)) for profile in profiles]
        shown.append(" to ".join(dict.fromkeys(f"{share:.0f}" for share in (min(shares), max(shares)))) + " %")
    first, middle, last = shown
    return f"{first} of the {what} on the first tenth, {middle} on the middle, {last} on the last"


def _initialisation_figure(view: RunView, first: Subject, second: Subject) -> list[Figure]:
    """As trained and at initialisation in one figure, for the first kind that both have."""
    kind = next((kind for kind in first.measured if kind in second.measured), None)
    if kind is None or first.n_positions != second.n_positions:
        return []
    names = [label(SUBJECTS, subject.name) for subject in (first, second)]
    profiles = [subject.measured[kind].profile for subject in (first, second)]
    curves = [
        profile_curve(name, profile, stroke, emphasis=True)
        for name, profile, stroke in zip(names, profiles, (RUNS[0], RUNS[3]), strict=True)
    ]
    shares = [100 * float(STATISTICS["first_tenth"](profile.influence)) for profile in profiles]
    title = (
        f"{view.title}: the first tenth of the context carries {shares[0]:.0f} % {names[0]} and {shares[1]:.0f} %"
        f" {names[1]}"
    )
    return [profile_figure(f"initialisation-{kind}", title, curves)]


def _depth_figure(view: RunView, subject: Subject, depth: Depth) -> Figure:
    """The profile after a few layers, from pale (near the input) to dark."""
    rows = shown_rows(len(depth.layers))
    curves = []
    for row, stroke in zip(rows, ramp(len(rows)), strict=True):
        low, high = (None if end is None else end[row] for end in (depth.low, depth.high))
        profile = Profile(depth.influence[row], low, high)
        curves.append(profile_curve(f"after layer {int(depth.layers[row])}", profile, stroke))
    shares = [100 * float(STATISTICS["last_tenth"](depth.influence[row])) for row in (0, -1)]
    title = (
        f"{state_of(view, subject)}: the last tenth carries {shares[0]:.0f} % of the influence after layer"
        f" {int(depth.layers[0])} and {shares[1]:.0f} % after layer {int(depth.layers[-1])}"
    )
    return profile_figure(f"{subject.name}-depth", title, curves)


def _mixing_figure(view: RunView) -> Figure:
    curves = []
    means = []
    for number, subject in enumerate(view.subjects):
        state, colour = label(SUBJECTS, subject.name), (RUNS[0], RUNS[3], RUNS[2])[number % 3].colour
        for place, (definition, mixing) in enumerate(subject.mixing.items()):
            if place == 0:
                means.append(f"{mixing.value.mean():.2f} {state}")
            stroke = Stroke(colour, "dash" if place else "solid")
            layers = np.arange(mixing.value.size, dtype=np.float64)
            name = f"{state}, {label(MIXINGS, definition)}"
            curves.append(Curve(name, layers, mixing.value, stroke, low=mixing.low, high=mixing.high))
    title = f"{view.title}: attention contributes a share of {' and '.join(means)} to a layer's output, on average"
    return Figure("mixing", title, "layer (0 is nearest the input)", "mixing coefficient", tuple(curves), markers=True)
