"""The record layout that reports read: how subjects go into a `Record`, and how any record becomes a `RunView`.

Arrays (float64; SUBJECT is "trained", "initialised" ...; `low`, `high`, `per_prompt`, `scales` only where they
exist):

    SUBJECT/measured/KIND/{influence,low,high}     [n_positions]
    SUBJECT/measured/KIND/per_prompt               [n_units n_positions]
    SUBJECT/measured/KIND/scales                   [n_units] how much each unit counts, where not all the same
    SUBJECT/theories/NAME/{influence,low,high}     [n_positions]             SUBJECT/theories/NAME/per_prompt
    SUBJECT/mixing/DEFINITION/{value,low,high}     [n_layers]
    SUBJECT/depth/jacobian/layers                  [n_layers] int64          SUBJECT/depth/jacobian/{influence,low,high}

Scalars: `subjects`: {SUBJECT: {measured: [KIND], theories: [NAME], mixing: [DEFINITION], summaries: {KIND: {STATISTIC:
interval}}, comparisons: [{kind, theory, metrics, flat, prompts}]}}, `contrasts`: {KIND: {...}}, `left_out`: [text],
`precision`: {KIND: {LOSS: [one per checked prompt]}}, `details`: {KIND: {NAME: [one per prompt]}}, `found`: {NAME:
interval}, what a theory finds beside its profile, `ingredients`: {KIND: {flat, left_out: {NAME: {distance, cost}}}}.
An interval is {value, low, high}, None where infinite or undefined. `resolved` may hold `title`, `command` and the
tables `model`, `prompts`, and `curves`: {GROUP/NAME: settings}, what each curve of several was computed for, by which
they are named. Records without `subjects` are read too: `profile/influence` (predict), `measured/...`.
"""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np

from posbias.comparison import (
    Comparison,
    Contrast,
    Depth,
    KindComparison,
    MeasuredKind,
    Mixing,
    PromptComparison,
    SplitHalf,
    Subject,
    TheoryProfile,
    finite,
)
from posbias.comparison.subject import Distances
from posbias.display.naming import Settings
from posbias.errors import UsageError, printable
from posbias.profiles import Profile
from posbias.runs.records import Record
from posbias.statistics import Interval
from posbias.tasks.language.base import NOTICES

DEPTH_KIND = "jacobian"
"""The kind that is measured by depth: hidden states have no tokens to score."""
DEMO_NAME = "SmolLM2-135M-Instruct"
NOTICED = {
    "gold_without_answer": "a model that reads only that passage cannot be right there",
    "gold_repeated": "at every position the answer can be had elsewhere, too, so less depends on the position",
    "answer_elsewhere": "a right answer need not come from the passage that moves, so less depends on the position",
    "control_tokens": "they were read as ordinary text, never as the tokens",
}
"""What follows from a notice (`NOTICES` says what it is)."""
LONGEST_LIST = 8
"""Values of a list that the conditions of a run write out; a longer one is cut, with its length given."""
THEORIES, MEASURED = "theories/", "measured/"
"""What the names of a run's curves begin with: predictions, and what they are compared to."""
Entry = TypeVar("Entry", MeasuredKind, TheoryProfile, Mixing, Depth, Profile)


@dataclass(frozen=True, eq=False)
class RunView:
    """One run that holds profiles, as a report shows it."""

    title: str
    """What the run is about: the model, or the architecture."""
    subjects: tuple[Subject, ...]
    contrasts: Mapping[str, Contrast] = field(default_factory=dict)
    """Per kind, the first subject (trained) against the second (at initialisation)."""
    caveats: tuple[str, ...] = ()
    """What a reader must know of the model and of the theories, one sentence each."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Of its record, in the layout above."""
    curves: Mapping[str, Settings] = field(default_factory=dict)
    """By group and name ("theories/rollout"), what each profile was computed or measured for; none of audits."""


def store_subjects(
    record: Record,
    subjects: Sequence[Subject],
    *,
    contrasts: Mapping[str, Contrast] | None = None,
    left_out: Sequence[str] = (),
) -> Record:
    """Write compared subjects, the trained model first, into `record` (in place) in the layout above, and return it.

    `left_out` says what was not measured or does not apply, one sentence each. A name with a slash is refused.
    """
    record.scalars["subjects"] = {}
    for subject in subjects:
        _store_subject(record, subject)
    record.scalars["contrasts"] = _stored(contrasts or {})
    record.scalars["left_out"] = list(left_out)
    return record


def shown_record(record: Record) -> Record:
    """The record as a person may see it: no text in it, nor the name of an array, steers a terminal or a page.

    Everything that is drawn or printed of a record is made of this copy.
    """
    shown = copy.copy(record)
    for name, value in vars(record).items():
        setattr(shown, name, _printable(value))
    return shown


class _Escaped(str):
    """A text as it may be shown; spelled for Python (`repr`) it is still the one that it stands for."""

    text: str

    def __repr__(self) -> str:
        return repr(self.text)


def _printable(value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        escaped = _Escaped(printable(value))
        escaped.text = str(value)
        return escaped
    if isinstance(value, Mapping):
        return {_printable(name): _printable(entry) for name, entry in value.items()}
    return [_printable(entry) for entry in value] if isinstance(value, list | tuple) else value


def view_of(record: Record) -> RunView:
    """What a report shows of a run, from its record alone; refused where that failed or holds no profile."""
    if record.status != "done":
        raise UsageError(f"the run {record.run_id} did not finish ({record.error}); only finished runs can be drawn")
    stored = record.scalars.get("subjects")
    try:
        subjects = tuple(_subject(record, name, scalars) for name, scalars in (stored or {}).items())
        contrasts = {
            kind: Contrast(**_fields_of(Contrast, entry)) for kind, entry in record.scalars.get("contrasts", {}).items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"the record of run {record.run_id} is damaged: {type(error).__name__} {error}") from None
    subjects = subjects or (_bare_subject(record),)
    if not any(subject.n_positions for subject in subjects):
        raise UsageError(f"the {record.verb} run {record.run_id} holds no profile to draw")
    curves = _curves(record, subjects[0])
    return RunView(title_of(record), subjects, contrasts, caveats_of(record), record.scalars, curves)


def _curves(record: Record, subject: Subject) -> dict[str, Settings]:
    """What each profile of a run was computed or measured for, by group and name."""
    resolved = record.resolved
    if isinstance(resolved.get("curves"), Mapping):
        return {str(name): dict(settings) for name, settings in resolved["curves"].items()}
    if record.verb not in ("predict", "measure") or not subject.n_positions:
        return {}
    model, prompts, architecture = ({**(resolved.get(name) or {})} for name in ("model", "prompts", "architecture"))
    of_model = {"model": model.get("source"), "init_seed": model.get("init_seed"), "dtype": model.get("dtype")}
    of_prompts = {"prompts": prompts.get("source"), "windows": prompts.get("windows"), "seed": prompts.get("seed")}
    known = {name: value for name, value in {**of_model, **of_prompts}.items() if value is not None}
    told = {**(known or architecture), "positions": subject.n_positions}
    if model:
        told["state"] = "trained" if model.get("init_seed") is None else "initialised"
    parameters = resolved.get("parameters") or {}
    theories = {THEORIES + name: {"theory": name, **parameters, **told} for name in subject.theories}
    return theories | {MEASURED + kind: {"kind": kind, **told} for kind in subject.measured}


def title_of(record: Record) -> str:
    """What the run is about, in a few words: `resolved["title"]`, or the model, or the theory, or the verb."""
    model = record.resolved.get("model")
    source = model.get("source") if isinstance(model, Mapping) else None
    titles = (record.resolved.get("title"), source, record.arguments.get("model"), record.arguments.get("theory"))
    return str(next(filter(None, titles), record.verb))


def real_name(title: str) -> str:
    """A title in which the demo model goes by the name that its makers gave it."""
    return re.sub(r"(?<![\w/-])demo(?![\w/-])", DEMO_NAME, title)


def command_of(record: Record) -> str:
    """The command that repeats the run: the shell line where it was recorded, otherwise the same call in Python."""
    if record.resolved.get("command"):
        return str(record.resolved["command"])
    arguments = ", ".join(f"{name}={value!r}" for name, value in record.arguments.items() if value is not None)
    return f"posbias.{record.verb}({arguments})"


def caveats_of(record: Record) -> tuple[str, ...]:
    """What a reader must know: of the model, such as an encoding that is not the published one, of the theories, and
    of the prompts that were read."""
    responder = record.resolved.get("responder") or {}
    model = record.resolved.get("model") or responder.get("model")
    of_model = model.get("caveats", ()) if isinstance(model, Mapping) else ()
    return tuple(dict.fromkeys((*of_model, *record.scalars.get("caveats", ()), *_spelled_by_prompts(record))))


def sample_notices(record: Record) -> list[str]:
    """What is odd about the samples of an evaluation, or of a run that rests on one."""
    here = (record.resolved.get("responder") or {}).get("kind") == "local"
    return notice_sentences(record.scalars.get("notices") or {}, count=record.resolved.get("count"), here=here)


def notice_sentences(notices: Mapping[str, Any], *, count: int | None, here: bool, of: str = "") -> list[str]:
    """What is odd about samples of a file, one sentence each; the layout is that of `evaluation.samples.notices_of`.

    Args:
        notices: By name, the numbers of samples.
        count: Of all samples; None: not known.
        here: Whether the model ran in this process, where control tokens in texts are ordinary text.
        of: The run, where a record is made of several.
    """
    found = []
    for name, entry in notices.items():
        samples = entry["samples"]
        numbers = ", ".join(map(str, samples[:LONGEST_LIST])) + (" ..." if len(samples) > LONGEST_LIST else "")
        tokens = f" ({_quoted(entry['tokens'])})" if "tokens" in entry else ""
        after = NOTICED[name]
        if name == "control_tokens" and not here:
            after = "whether they are read as ordinary text where the model runs is not known"
        total = "" if count is None else f" of {count}"
        found.append(f"{of}In {len(samples)}{total} samples (number {numbers}) {NOTICES[name]}{tokens}: {after}.")
    return found


def _spelled_by_prompts(record: Record) -> list[str]:
    """Control tokens that the texts of prompts spell, of a measurement or of each subject of an audit."""
    prompts = record.resolved.get("prompts")
    tokens = prompts.get("control_tokens") if isinstance(prompts, Mapping) else None
    return [f"The prompts spell control tokens ({_quoted(tokens)}): {NOTICED['control_tokens']}."] if tokens else []


def _quoted(tokens: Mapping[str, int]) -> str:
    shown = [f"{token!r} {times} times" if times > 1 else repr(token) for token, times in tokens.items()]
    return ", ".join(shown[:LONGEST_LIST]) + (" ..." if len(shown) > LONGEST_LIST else "")


def conditions_of(record: Record) -> dict[str, str]:
    """Model, prompts, seeds and versions as label and text, nested tables written out."""
    resolved = {
        key: value for key, value in record.resolved.items() if key not in ("command", "title", "related", "curves")
    }
    return {
        **_written_out(resolved),
        **{f"seed: {name}": str(seed) for name, seed in record.seeds.items()},
        **_written_out({"environment": record.environment}),
        "finished": record.created,
        "run": record.run_id,
    }


def _written_out(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        label = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            flat.update(_written_out(value, prefix=f"{prefix}{name}: "))
        elif isinstance(value, list | tuple):
            if not value:
                continue
            shown = [f"{entry:.4g}" if isinstance(entry, float) else str(entry) for entry in value[:LONGEST_LIST]]
            flat[label] = ", ".join(shown)
            if len(value) > LONGEST_LIST:
                flat[label] += f", ... ({len(value)} values)"
        elif value is not None and value != "":
            flat[label] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return flat


def _store_subject(record: Record, subject: Subject) -> None:
    groups: dict[str, Mapping[str, Any]] = {
        "measured": subject.measured,
        "theories": subject.theories,
        "mixing": subject.mixing,
        "depth": {} if subject.depth is None else {DEPTH_KIND: subject.depth},
    }
    for group, entries in groups.items():
        for name, entry in entries.items():
            if "/" in name or "/" in subject.name:
                raise UsageError(f"names in a record must not contain a slash: {subject.name!r}, {name!r}")
            parts = {**vars(getattr(entry, "profile", entry)), **vars(entry)}
            stem = f"{subject.name}/{group}/{name}"
            record.arrays |= {f"{stem}/{part}": array for part, array in parts.items() if isinstance(array, np.ndarray)}
    record.scalars["subjects"][subject.name] = {
        **{group: list(groups[group]) for group in ("measured", "theories", "mixing")},
        "summaries": _stored(subject.summaries),
        "comparisons": [
            {
                "kind": block.kind,
                "theory": block.theory,
                "metrics": block.comparison.as_record(),
                "flat": block.comparison.flat.as_record(),
                "prompts": None if block.prompts is None else _stored(block.prompts),
            }
            for block in subject.comparisons
        ],
    }


def _stored(value: Any) -> Any:
    """Intervals, and dataclasses and mappings of them, as plain values; what they decide beside the numbers."""
    if isinstance(value, Interval):
        return value.as_record()
    if isinstance(value, Mapping):
        return {name: _stored(each) for name, each in value.items()}
    if isinstance(value, PromptComparison | Contrast):
        return {**_stored(vars(value)), "decides": value.decides}
    if isinstance(value, SplitHalf):
        return _stored(vars(value))
    return finite(value) if isinstance(value, float) else value


def _read(stored: Any) -> Any:
    """The inverse: intervals, mappings of them, and numbers."""
    if not isinstance(stored, Mapping):
        return stored
    return Interval.of_record(stored) if "value" in stored else {name: _read(each) for name, each in stored.items()}


def _fields_of(sort: type, stored: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: _read(stored[field.name]) for field in fields(sort)}


def _numbers(stored: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else float(value) for name, value in stored.items()}


def _comparison(stored: Mapping[str, Any]) -> KindComparison:
    prompts = None
    if stored["prompts"] is not None:
        noise = SplitHalf(**_numbers(stored["prompts"]["noise"]))
        prompts = PromptComparison(**{**_fields_of(PromptComparison, stored["prompts"]), "noise": noise})
    comparison = Comparison(_numbers(stored["metrics"]), Distances(_numbers(stored["flat"])))
    return KindComparison(stored["kind"], stored["theory"], comparison, prompts)


def _subject(record: Record, name: str, scalars: Mapping[str, Any]) -> Subject:
    def entries(group: str, sort: type[Entry]) -> dict[str, Entry]:
        return {each: _entry(record, f"{name}/{group}/{each}", sort) for each in scalars[group]}

    depth = f"{name}/depth/{DEPTH_KIND}"
    return Subject(
        name=name,
        measured=entries("measured", MeasuredKind),
        theories=entries("theories", TheoryProfile),
        mixing=entries("mixing", Mixing),
        depth=_entry(record, depth, Depth) if f"{depth}/layers" in record.arrays else None,
        summaries=_read(scalars["summaries"]),
        comparisons=tuple(_comparison(block) for block in scalars["comparisons"]),
    )


def _bare_subject(record: Record) -> Subject:
    """Records that hold profiles only: one prediction, or measured kinds without comparisons."""

    def stems(group: str) -> dict[str, str]:
        names = [key.split("/")[1] for key in record.arrays if key.startswith(f"{group}/")]
        return {name: f"{group}/{name}" for name in names}

    theories = stems("theories")
    if "profile/influence" in record.arrays:
        theories[str(record.resolved.get("theory") or record.arguments.get("theory") or "prediction")] = "profile"
    order = [name.removeprefix(THEORIES) for name in record.resolved.get("curves") or ()]  # files sort their arrays
    theories = {name: theories[name] for name in sorted(theories, key=lambda name: [*order, name].index(name))}
    return Subject(
        name=record.verb,
        measured={kind: _entry(record, stem, MeasuredKind) for kind, stem in stems("measured").items()},
        theories={name: _entry(record, stem, TheoryProfile) for name, stem in theories.items()},
        mixing={definition: _entry(record, stem, Mixing) for definition, stem in stems("mixing").items()},
    )


def _entry(record: Record, stem: str, sort: type[Entry]) -> Entry:
    """A dataclass of the arrays below a stem, where those of its profile lie too; the first one is needed."""
    names = [field.name for field in fields(sort)]
    if "profile" not in names and f"{stem}/{names[0]}" not in record.arrays:
        raise UsageError(f"the {record.verb} run {record.run_id} has no array {stem}/{names[0]}")
    parts: dict[str, Any] = {name: record.arrays.get(f"{stem}/{name}") for name in names}
    if "profile" in names:
        parts["profile"] = _entry(record, stem, Profile)
    return sort(**parts)
