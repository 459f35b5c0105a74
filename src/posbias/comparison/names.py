"""Names of runs, measurements and predictions in legends and tables, by what differs between them.

A curve that stands alone goes by its theory or kind; several of one run, or of runs side by side, by their settings.
Predictions and measurements are named apart, and neither is ever called the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from posbias.comparison.model_profiles import Subject
from posbias.comparison.stored import MEASURED, THEORIES, ProfileRun
from posbias.display.naming import Settings, curve_names, differing, names_beside, numbered, setting_text, worded
from posbias.display.wording import KINDS, SUBJECTS, label
from posbias.display.wording import THEORIES as THEORY_NAMES


def state_of(view: ProfileRun, subject: Subject) -> str:
    """The run and the state its model is in."""
    return f"{view.label} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.label


def is_measured(view: ProfileRun, kind: str) -> bool:
    """True if the curve that others are compared to was measured; a comparison of predictions has none that was."""
    settings = view.curves.get(MEASURED + kind)
    return kind not in THEORY_NAMES if settings is None else "theory" not in settings


def theory_name(view: ProfileRun, name: str) -> str:
    """The name of a theory's curve in a report of its run."""
    if among_several := _names(view).get(THEORIES + name):
        return among_several
    words = {**THEORY_NAMES, **KINDS}  # a kind may be compared like a theory
    chosen_by_name = name not in words and THEORIES + name in view.curves
    return name if chosen_by_name else label(words, name)


def kind_name(view: ProfileRun, kind: str) -> str:
    """The name, in a report of its run, of the curve that others are compared to."""
    return _names(view).get(MEASURED + kind) or label(KINDS if is_measured(view, kind) else THEORY_NAMES, kind)


def predicted_curves(view: ProfileRun) -> dict[str, Settings]:
    """The settings of a run's predictions by their names in the record."""
    return {name: settings for name, settings in view.curves.items() if "theory" in settings}


def told_apart(views: Sequence[ProfileRun]) -> list[ProfileRun]:
    """The runs with titles that each name one of them: what differs is added to titles that do not."""
    titles = [view.label for view in views]
    for title in {title for title in titles if titles.count(title) > 1}:
        places = [place for place, view in enumerate(views) if view.label == title]
        shared = [worded(_shared(list(views[place].curves.values()))) for place in places]
        if differing(shared):
            for place, name in zip(places, curve_names(shared), strict=True):
                titles[place] = f"{title}: {name}"
    return [replace(view, label=title) for view, title in zip(views, numbered(titles), strict=True)]


def settings_table(view: ProfileRun) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Each of several predictions of architectures by name, and its settings as text."""
    curves = predicted_curves(view)
    names = _names(view)
    if len(curves) < 2 or not any("mask" in settings for settings in curves.values()):
        return
    for key, settings in curves.items():
        yield names[key], {name: setting_text(value) for name, value in worded(settings).items()}


def _names(view: ProfileRun) -> dict[str, str]:
    """Names of the predictions if there are several, and of the measurements if there are several."""
    predicted = predicted_curves(view)
    measured = {name: settings for name, settings in view.curves.items() if name not in predicted}
    names: dict[str, str] = {}
    for curves in (predicted, measured):
        if len(curves) > 1:
            names |= zip(curves, names_beside(list(curves.values())), strict=True)
    return names


def _shared(curves: Sequence[Settings]) -> Settings:
    """Settings that all curves of a run have in common, apart from the kind."""
    apart = differing(curves)
    return {name: value for settings in curves for name, value in settings.items() if name not in (*apart, "kind")}
