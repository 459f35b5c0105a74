"""What runs, measurements and predictions are called in legends and tables, by what differs between them.

A curve that stands alone goes by its theory or kind; several of one run, or of runs side by side, by their settings.
Predictions and measurements are named apart, and neither is ever called the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from posbias.comparison.stored import MEASURED, THEORIES, ProfileRun
from posbias.comparison.subject import Subject
from posbias.display.naming import Settings, curve_names, differing, numbered, setting_text
from posbias.display.wording import KINDS, SUBJECTS, label
from posbias.display.wording import THEORIES as THEORY_NAMES


def state_of(view: ProfileRun, subject: Subject) -> str:
    """The run and the state its model is in."""
    return f"{view.label} {label(SUBJECTS, subject.name)}" if subject.name in SUBJECTS else view.label


def is_measured(view: ProfileRun, kind: str) -> bool:
    """Whether what others are compared to was measured; a comparison may set predictions beside a prediction."""
    settings = view.curves.get(MEASURED + kind)
    return kind not in THEORY_NAMES if settings is None else "theory" not in settings


def theory_name(view: ProfileRun, name: str) -> str:
    """What a theory's curve is called in a report of its run."""
    return _names(view).get(THEORIES + name) or _alone(view, name)


def _alone(view: ProfileRun, name: str) -> str:
    """A theory, or a kind that is compared like one, in words; of several predictions one that was chosen as it is."""
    known = name in THEORY_NAMES or name in KINDS or THEORIES + name not in view.curves
    return label({**THEORY_NAMES, **KINDS}, name) if known else name


def kind_name(view: ProfileRun, kind: str) -> str:
    """What the curve that others are compared to is called in a report of its run."""
    return _names(view).get(MEASURED + kind) or label(KINDS if is_measured(view, kind) else THEORY_NAMES, kind)


def predicted_curves(view: ProfileRun) -> dict[str, Settings]:
    """The settings of a run's predictions by their names in the record."""
    return {name: settings for name, settings in view.curves.items() if "theory" in settings}


def names_beside(settings: Sequence[Settings]) -> list[str]:
    """The curves' names where all of them are drawn together."""
    return curve_names([_worded(each) for each in settings])


def told_apart(views: Sequence[ProfileRun]) -> list[ProfileRun]:
    """The runs with titles that each name one of them: what differs is added to titles that do not."""
    titles = [view.label for view in views]
    for title in {title for title in titles if titles.count(title) > 1}:
        places = [place for place, view in enumerate(views) if view.label == title]
        shared = [_worded(_shared(list(views[place].curves.values()))) for place in places]
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
        yield names[key], {name: setting_text(value) for name, value in _worded(settings).items()}


def _names(view: ProfileRun) -> dict[str, str]:
    """Of the predictions, and of the measurements, where there are several of their sort."""
    predicted = predicted_curves(view)
    measured = {name: settings for name, settings in view.curves.items() if name not in predicted}
    found: dict[str, str] = {}
    for curves in (predicted, measured):
        if len(curves) > 1:
            found |= zip(curves, names_beside(list(curves.values())), strict=True)
    return found


def _worded(settings: Settings) -> Settings:
    """Theories and kinds in the report's words."""
    words = {"theory": THEORY_NAMES, "kind": KINDS, "state": SUBJECTS}
    return {name: label(words[name], value) if name in words else value for name, value in settings.items()}


def _shared(curves: Sequence[Settings]) -> Settings:
    """What all curves of a run have in common, apart from the kind."""
    told = differing(curves)
    return {name: value for each in curves for name, value in each.items() if name not in (*told, "kind")}
