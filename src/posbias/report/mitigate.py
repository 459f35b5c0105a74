"""Methods against position bias, judged: the recommendation first, one table, curves before and after, the rest folded.

Everything comes from the record (layout: posbias/mitigation/run.py).
"""

from collections.abc import Mapping, Sequence
from inspect import getdoc
from typing import Any

from posbias.comparison import UNITS_FOR_CLAIM
from posbias.display.figures import MEASURED, Curve, Figure, interval_curves, run_strokes
from posbias.evaluation.evaluation import MEASURES
from posbias.memory import show_bytes
from posbias.mitigation.judging.endpoints import JUDGED, change_text
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation
from posbias.mitigation.methods.recipe import PASSAGES_SNIPPET, QUESTION_TOLD, SNIPPET
from posbias.mitigation.trial.arms import UNCHANGED
from posbias.mitigation.trial.influence import OVER_POSITIONS
from posbias.report.layout import caveats_of, sample_notices, title_of
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, interval_text, number_text
from posbias.report.wording import label
from posbias.runs.records import Record
from posbias.statistics import MISSING, Interval

MOST_DRAWN = 6
"""Methods drawn beside the unchanged model: the recommended one and those after it by their worst position."""
NOTE = (
    "Every method answers the same test samples at the same positions as the unchanged model; no fit saw them. Changes "
    "are paired over samples, with 95 % intervals. The interval of the worst position holds whichever positions are "
    "truly worst, before and after. Verdicts are corrected (Holm) for the number of methods and endpoints. Do not "
    "apply: mean, worst position, the position that was best, ordinary text or a short form of the task is harmed. "
    "Otherwise, if mean or worst position rises: apply, if position matters less than before; evens out, if the "
    "position that was best pays for that; raises, if it is not established that position matters less. Established "
    "changes below what matters are reported but decide nothing. Otherwise nothing is established, which does not mean "
    "that there is no effect."
)
FORM = (
    "The log-probability of right answers also rises where answers merely take the form that is scored; "
    "generated answers (--by accuracy) tell the two apart."
)
ENDPOINTS = {
    "mean": "mean",
    "worst position": "worst position",
    "spread": "spread, best minus worst",
    "formerly best position": "position that was best",
}

Stored = Mapping[str, Any]


@REPORTS.register("mitigate")
def mitigation_report(record: Record) -> Report:
    """Which method to apply, if any, and why."""
    found = record.scalars["judgement"]
    return Report(
        title_of(record),
        kicker="posbias · methods against position bias, judged",
        notices=sample_notices(record),
        verdict=[found["recommendation"], *_required(record), *_influence_sentences(record)],
        caveats=[*caveats_of(record), *found["warnings"], *([FORM] if found["measure"] == "logprob" else [])],
        summary=[_verdict_table(record)],
        picture=_figures(record),
        note=NOTE,
        folded={
            "Why each verdict": [_reason_table(found)],
            "Every number": [_change_table(found), _effect_table(found), _level_table(found), _effort_table(record)],
            **_ending_table(record),
            **_influence_tables(record),
            **_use(record),
        },
        left_out=record.scalars["left_out"],
        record=record,
    )


def _required(record: Record) -> list[str]:
    required = record.scalars["requirement"]
    if required is None:
        return []
    verb = "is met" if required["met"] else "is not met"
    value, measure = interval_text(required["value"]), label(MEASURES, required["measure"])
    why = f"; {required['withheld']}" if required.get("withheld") else ""
    return [f"Required {required['required']} {verb}: {value} ({measure}, {required['arm']}){why}."]


def _influence_sentences(record: Record) -> list[str]:
    """What the recommended method, or the only one, does to the influence of the answer's item, and the tie."""
    found = record.scalars.get("influence", {})
    return [*_moved(found, record.scalars["judgement"]["recommended"]), *_tied(record)]


def _moved(found: Stored, recommended: str | None) -> list[str]:
    average = dict(found.get("average", {}))
    before = average.pop(UNCHANGED, None)
    (name, *others) = [recommended] if recommended in average else [*average, None]
    if name is None or any(others) or found["samples"] < UNITS_FOR_CLAIM:
        return []
    value, low, high = (average[name][key] for key in ("value", "low", "high"))
    verb = "does not demonstrably change the influence of"
    if value == 0 and low is None and high is None:
        return [
            f"{name} leaves the influence of the item that holds the answer exactly as it was: "
            f"{before['value']:.3f} of the prompt's, on average over positions."
        ]
    if (low is not None and low > 0) or (high is not None and high < 0):
        verb = "gives more influence to" if value > 0 else "takes influence from"
    return [
        f"{name} {verb} the item that holds the answer: its share of the prompt's changes by "
        f"{interval_text(average[name], '+.3f')} from {before['value']:.3f}, on average over positions."
    ]


def _tied(record: Record) -> list[str]:
    """Whether scores follow influence, in the measure that decided where that was tied."""
    ties = [tie for tie in record.scalars.get("influence", {}).get("correlations", ()) if tie["what"] == OVER_POSITIONS]
    if not ties:
        return []
    measure = record.scalars["judgement"]["measure"]
    tie = next((one for one in ties if one["measure"] == measure), ties[0])
    found = tie["correlations"][tie["measure"]]
    (plain,) = found["correlations"]
    said = "is not established to follow influence"
    if plain["established"]:
        said = "follows influence" if plain["value"] > 0 else "falls where influence rises"
    name = label(MEASURES, tie["measure"])
    return [
        f"Where methods move influence to or from the answer's item, {name} {said}: rank correlation of both changes "
        f"over positions, within methods, {_tie_text(plain)}, {found['n_samples']} samples."
    ]


def _tie_text(plain: Stored) -> str:
    corrected = plain.get("adjusted_p")
    return f"{interval_text(plain)}" + ("" if corrected is None else f" (p {corrected:.2g}, corrected)")


def _influence_tables(record: Record) -> dict[str, list[Table]]:
    """Influence on the item that holds the answer, before and after, and what its changes go with."""
    found = record.scalars.get("influence")
    if found is None:
        return {}
    header = ["", *(f"at {position}" for position in record.scalars["judgement"]["positions"])]
    rows = {"unchanged": found["before"], "uniform: its share of the tokens": found["uniform"]}
    levels = [[name, *map(interval_text, means)] for name, means in rows.items()]
    changes = [
        [f"{name}, change", *(interval_text(mean, "+.3f") for mean in means)]
        for name, means in found["changes"].items()
    ]
    ties = [
        [tie["what"], label(MEASURES, tie["measure"]), _tie_text(plain), "yes" if plain["established"] else "no"]
        for tie in found["correlations"]
        for plain in tie["correlations"][tie["measure"]]["correlations"]
    ]
    about = f"Influence on the answer's item ({found['kind']}, share of the prompt's, {found['samples']} samples)"
    return {
        "Influence before and after": [
            Table(f"{about}, by the item's position", header, [*levels, *changes]),
            Table(
                "Change of influence beside change of scores",
                ["", "scores", "rank correlation [95 %]", "established"],
                ties,
            ),
        ]
    }


def _verdict_table(record: Record) -> Table:
    """Model x method: what changes, and what follows."""
    found, model = record.scalars["judgement"], _model_of(record)
    measure = label(MEASURES, found["measure"])
    header = [
        "model",
        "method",
        "verdict",
        f"mean, change [95 %] of {measure}",
        "worst position, change",
        "best minus worst, change",
        "ordinary text",
    ]
    header += ["seconds per request"]
    levels = [_level(found, name) for name in ("mean", "worst", "spread")]
    rows = [[model, "unchanged", MISSING, *levels, MISSING, _seconds(record, 0)]]
    for number, verdict in enumerate(found["verdicts"], start=1):
        changes = [
            _changed((verdict["changes"].get(name) or {}).get("value")) for name in ("mean", "worst position", "spread")
        ]
        text = verdict["effects"].get("ordinary text")
        why = record.scalars.get("text_not_judged", {}).get(verdict["name"], MISSING)
        cost = why if text is None else _changed(text["value"], least=4, unit=" nats")
        rows.append([model, verdict["name"], _words(verdict), *changes, cost, _seconds(record, number)])
    return Table(f"{record.resolved['task']}: what each method does", header, rows)


def _words(verdict: Stored) -> str:
    """Of one verdict; older records have a single word for it."""
    return str(verdict.get("words") or verdict["verdict"])


def _changed(stored: Stored | None, *, least: int = 3, unit: str = "") -> str:
    """A recorded change, in as many decimals as tell it from none."""
    return MISSING if stored is None else change_text(Interval.of_record(stored), "+", least=least, unit=unit)


def _model_of(record: Record) -> str:
    model = record.resolved["responder"].get("model")
    return str((model.get("source") if isinstance(model, Mapping) else model) or "model")


def _level(found: Stored, name: str) -> str:
    """Of the unchanged model, on the samples of the first method that has enough."""
    levels = next((verdict["before"] for verdict in found["verdicts"] if verdict["before"]), None)
    return MISSING if levels is None else interval_text(levels[name])


def _seconds(record: Record, number: int) -> str:
    effort = record.scalars["effort"][number]
    return number_text(effort["seconds"] / effort["requests"] if effort["requests"] else None)


def _use(record: Record) -> dict[str, list[Table]]:
    """How the recommended method is put on a model of transformers, or what it makes of prompts."""
    name = record.scalars["judgement"]["recommended"]
    spelled = record.resolved["methods"].get(name, "")
    kind = spelled.partition("(")[0]
    if kind not in MITIGATIONS:
        return {}
    if not issubclass(MITIGATIONS[kind], Mitigation):
        summary = " ".join((getdoc(MITIGATIONS[kind]) or "").partition("\n\n")[0].split())
        return {"Use it in your prompts": [Table(spelled, ["What is asked"], [[summary]], prose=True)]}
    by_passages = name in record.resolved.get("needing_passages", ()) or MITIGATIONS[kind].needs_passages is True
    question = record.resolved.get("question")
    by_question = by_passages and question is not None and MITIGATIONS[kind].needs_question
    snippet = PASSAGES_SNIPPET if by_passages and not by_question else SNIPPET
    told = QUESTION_TOLD.format(question=question) if by_question else ""
    fitted = name in record.scalars.get("fits", {})
    given = record.resolved.get("recipes", {}).get(name, name)
    method = f"{record.resolved['directories'][name]}/recipe.json" if fitted else given
    lines = [[line] for line in snippet.format(recipe=method, told=told).splitlines()]
    title = f"{name} on a model of transformers{', from the directory of this run' if fitted else ''}"
    return {"Use it with transformers": [Table(title, ["Python"], lines)]}


def _reason_table(found: Stored) -> Table:
    cells = [[each["name"], _words(each), " ".join(each["reasons"])] for each in found["verdicts"]]
    return Table("Verdicts", ["method", "verdict", "why"], cells, prose=True)


def _change_table(found: Stored) -> Table:
    header = ["method", "endpoint", "change [95 %]", "p", "p of a rise, corrected", "p of a fall, corrected"]
    header += ["smallest detectable rise, 80 % power", "samples"]
    cells = [
        [
            verdict["name"],
            name,
            _changed(change["value"]),
            f"{change['p']:.2g}",
            *(f"{verdict[family][key]:.2g}" if key in verdict[family] else MISSING for family in ("gains", "harms")),
            _detectable(key, change),
            str(verdict["n_samples"]),
        ]
        for verdict in found["verdicts"]
        for key, name in ENDPOINTS.items()
        if (change := verdict["changes"].get(key))
    ]
    return Table("Changes against the unchanged model, paired over samples", header, cells)


def _detectable(endpoint: str, change: Stored) -> str:
    """The smallest rise with that power; none where samples are too few; a dash where nothing changed or was tested."""
    if change["detectable"] is None and endpoint in JUDGED and any(change["value"].values()):
        return "none"
    return number_text(change["detectable"])


def _effect_table(found: Stored) -> Table:
    header = ["method", "side effect", "change [95 %]", "unit", "accepted", "units", "p of harm, corrected"]
    cells = [
        [
            verdict["name"],
            name,
            _changed(effect["value"], least=4),
            effect["unit"],
            f"{effect['tolerance']:g}",
            str(effect["n_units"]),
            f"{verdict['harms'][name]:.2g}" if name in verdict["harms"] else MISSING,
        ]
        for verdict in found["verdicts"]
        for name, effect in verdict["effects"].items()
    ]
    return Table("Side effects", header, cells)


def _level_table(found: Stored) -> Table:
    cells = [
        [verdict["name"], name, *(interval_text(verdict[when][key]) for when in ("before", "after"))]
        for verdict in found["verdicts"]
        if verdict["before"]
        for key, name in {"mean": "mean", "worst": "worst position", "spread": "spread"}.items()
    ]
    return Table("Levels before and after", ["method", "of", "before", "after"], cells)


def _effort_table(record: Record) -> Table:
    cells = []
    for name, effort in zip(record.scalars["arms"], record.scalars["effort"], strict=True):
        requests = effort["requests"] or None
        each = [
            MISSING if requests is None or effort[what] is None else f"{effort[what] / requests:.4g}"
            for what in ("seconds", "tokens")
        ]
        peak = effort.get("peak_bytes")
        cells.append([name, str(effort["requests"]), *each, MISSING if peak is None else show_bytes(peak)])
    header = ["method", "requests", "seconds each", "tokens each", "memory beside the weights"]
    title = "What requests took: tokens that the model was run on, a method's own passes among them"
    return Table(title, header, cells)


def _ending_table(record: Record) -> dict[str, list[Table]]:
    """How generated answers ended, and how many hold the right one, or begin with it; older records do not say."""
    endings = record.scalars.get("endings", [])
    header = ["method", "answers", "hold the right one", "begin with it", "ended by themselves", "ran on, later lines"]
    header += ["cut off in the first line", "of these not right", "ended otherwise"]
    counts = ("finished", "ran_on", "cut", "open", "others")
    cells = [
        [
            name,
            str(each["answers"]),
            *(number_text(each[share]) for share in ("contains", "starts")),
            *(str(each[count]) for count in counts),
        ]
        for name, each in zip(record.scalars["arms"], endings, strict=bool(endings))
        if each["answers"]
    ]
    return {"How answers ended": [Table("Generated answers by method", header, cells)]} if cells else {}


def _figures(record: Record) -> list[Figure]:
    """The measure that decided, before and after; others as they are stored."""
    found, curves = record.scalars["judgement"], record.scalars["curves"]
    if found["measure"] not in curves:
        return []
    ranked = sorted(found["verdicts"], key=lambda each: -_worst(each["means"]))
    first = [each["name"] for each in ranked if each["name"] == found["recommended"]]
    drawn = [*first, *(each["name"] for each in ranked if each["name"] not in first)][:MOST_DRAWN]
    strokes, positions = run_strokes(drawn), found["positions"]
    lines: list[Curve] = list(interval_curves("unchanged", positions, found["before"], MEASURED))
    for name in drawn:
        means = next(each["means"] for each in found["verdicts"] if each["name"] == name)
        lines += interval_curves(name, positions, means, strokes[name])
    rest = len(found["verdicts"]) - len(drawn)
    shown = f" ({rest} methods with lower worst positions are not drawn)" if rest else ""
    measure = label(MEASURES, found["measure"])
    return [
        Figure(
            "before-and-after",
            f"{record.resolved['task']}: {measure} by position, without and with each method{shown}",
            f"position of the answer among {record.resolved['n_items']} (0 is the first)",
            measure,
            tuple(lines),
            markers=True,
        )
    ]


def _worst(means: Sequence[Stored]) -> float:
    return min((each["value"] for each in means if each["value"] is not None), default=float("-inf"))
