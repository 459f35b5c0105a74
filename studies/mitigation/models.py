"""Verdicts on other models: `models.py run OUT MODEL TASK POSITIONS METHODS [CALIBRATION [DTYPE]]`.

A `context_bias` is fitted to the calibration samples (100 steps), then it and the methods are judged by
`posbias mitigate` on 40 others. One core and ten minutes to an hour. `... models.py table RECORD...` prints the
verdicts of README.md from the records, `... models.py changes RECORD...` the numbers behind them (changes.csv),
`... models.py answers RECORD...` and `answer_changes` those of generated answers (appendix.md, answers.csv),
`... models.py beside RECORD...` methods side by side on several tasks, or at strengths.
`... models.py rejudge RECORD...` settles the verdicts of finished records by today's rule.
"""

import csv
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import posbias as pb
from posbias.evaluation.levels import ALPHA
from posbias.mitigation.judging import (
    EVENS,
    GAINS,
    GREW,
    HARM,
    NOTHING,
    OPEN,
    RAISES,
    SMALL,
    SMALLEST,
    STEADY,
    Judgement,
    Verdict,
    settle,
)
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.options import FitOptions
from posbias.results.records import Record, plain, read_record
from posbias.results.result import from_stored
from posbias.tasks.language import LANGUAGE_TASKS

ENDPOINTS = ("mean", "worst position")
EVEN = "0"
"""Nothing but rounding changes, as of a method that the prompts do not reach."""
ELSEWHERE = (
    "demo_documents",
    "demo_documents_carried",
    "demo_documents_designed",
    "demo_documents_influence",
    "demo_documents_strength",
    "demo_influence",
    "demo_key_value_carried",
    "demo_key_value_carried_20",
    "demo_key_value_ratios",
    "demo_shifted_distances",
    "gemma_key_value_8",
    "qwen_key_value_40_2",
)
"""Records by log-probability that the tables leave to other sections."""
CUE_KEPT_UNTIL = "2026-11-25T15:45"
"""Until then `repeat_prompt` and `question_first` repeated the cue of the answer as well (`cue=True`, which left)."""
POSITION = {GREW: "more", STEADY: "as before", OPEN: "open"}
"""What a rise does to the dependence on position, in a word."""
INTERVALS = [f"{of}{end}" for of in ENDPOINTS for end in ("", ", low", ", high")]
WORDS = {name: f"**{name.split()[0]}**" for name in GAINS} | {HARM: "harm"}
LONGER = {"demo_order": "`context_bias`, 300 steps"}
"""Records whose `context_bias` was fitted for more than 100 steps."""


def run(
    out: str, model: str, task: str, positions: str, methods: str, calibration: str = "8", dtype: str = "float32"
) -> None:
    """Fit the recipe, then judge."""
    recipe = Path(f"{out}.json")
    if not recipe.exists():
        loaded = pb.load_model(model, dtype=dtype)
        drawn = LANGUAGE_TASKS.parse(task).examples(
            loaded.tokenizer, count=int(calibration), positions=[int(place) for place in positions.split(",")], seed=0
        )
        fitted = pb.fit("context_bias", loaded, list(drawn), options=FitOptions(steps=100))
        write_recipe(recipe, fitted.method, loaded, fitted.how)
    asked = ["--task", task, "--positions", positions, "--count", "40", "--calibration", calibration, "--dtype", dtype]
    judged = ["--no-generate", "--by", "logprob", "--documents", "6", "--out", out, "--resume"]
    command = [sys.executable, "-m", "posbias", "mitigate", model, *asked, *judged, "--methods", f"{recipe},{methods}"]
    subprocess.run(command, check=True)


def table(*directories: str) -> None:
    """A row per method: its verdict for each model, task by task."""
    verdicts: dict[str, dict[tuple[str, str], str]] = {}
    models: list[str] = []
    for record, name, entry in _by_log_probability(directories):
        task, model = _cell_of(record)
        models += [] if model in models else [model]
        if name not in LONGER.values():
            verdicts.setdefault(name, {})[task, model] = EVEN if _is_even(entry) else entry["verdict"]
    tasks = list(dict.fromkeys(task for rows in verdicts.values() for task, _ in rows))
    _print(f"verdict for {', '.join(models)}", tasks, _words(verdicts, tasks, models))


def changes(*directories: str) -> None:
    """As CSV a line per task, model and method: the changes of the mean and of the worst position, and the verdict."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for record, name, entry in _by_log_probability(directories):
        task, model = record.arguments["task"], _model(record)
        mean, worst = _levels(record)
        lines.setdefault((task, model, "unchanged"), [mean, "", "", worst, *4 * [""]])
        if (key := (task, model, name.replace("`", ""))) in lines:
            raise ValueError(f"{name} of {model} on {task} is in an earlier record, too")
        lines[key] = [*_interval_ends(entry), _plain_verdict(entry), ", ".join(_harms(entry))]
    _print_csv([*INTERVALS, "verdict", "side effects"], lines)


def _by_log_probability(directories: Iterable[str]) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    """Every verdict of the records by log-probability, all of a model on a task corrected together: record, method,
    verdict."""
    records = {Path(each).name: read_record(each) for each in directories if Path(each).name not in ELSEWHERE}
    judged = {name: record for name, record in records.items() if record.scalars["judgement"]["measure"] == "logprob"}
    correct_together(judged.values())
    for directory, record in judged.items():
        for entry in record.scalars["judgement"]["verdicts"]:
            name = _name(record, entry["name"])
            yield record, LONGER.get(directory, name) if name == "`context_bias`" else name, entry


def correct_together(records: Iterable[Record]) -> None:
    """Judge all methods of a model on a task as one family, also where they come from several runs, by today's rule."""
    together: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        together.setdefault(_cell_of(record), []).append(record)
    for group in together.values():
        found = [(record, _read(record)) for record in group]
        decided, _ = settle([each for _, own in found for each in own], SMALLEST)
        left = iter(decided)
        for record, own in found:
            record.scalars["judgement"]["verdicts"] = [plain(asdict(next(left))) for _ in own]


def _read(record: Record) -> list[Verdict]:
    """The verdicts of a record, with what those from before 2026-11-26 lack."""
    judgement = from_stored(Judgement, record.scalars["judgement"])
    before = np.array([each.value for each in judgement.before])
    found = []
    for verdict in judgement.verdicts:
        rises = np.array([each.value for each in verdict.means]) - before
        best = judgement.positions[int(np.argmax(before))]
        found.append(replace(verdict, formerly_best=best, lowered=int((rises <= -SMALLEST).sum())))
    return found


def rejudge(*directories: str) -> None:
    """Settle the verdicts of records by today's rule, from the changes they hold, each record a family of its own."""
    for each in directories:
        record = read_record(each)
        judgement = record.scalars["judgement"]
        verdicts, recommended = settle(_read(record), SMALLEST)
        judgement |= {"verdicts": plain([asdict(verdict) for verdict in verdicts]), "smallest": SMALLEST}
        judgement["recommended"] = recommended
        record.save(each)


def answer_changes(*directories: str) -> None:
    """As CSV a line per task, model and method: the answers right at each position, their changes, and the verdict."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for record, name, entry, scores in _answered(directories):
        task, model = record.arguments["task"], _model(record)
        before = " ".join(map(_short, record.arrays["scores/accuracy/0"].mean(axis=0)))
        lines.setdefault((task, model, "unchanged"), [before, *7 * [""]])
        if (key := (task, model, name.replace("`", ""))) in lines:
            raise ValueError(f"{name} of {model} on {task} is in an earlier record, too")
        lines[key] = [" ".join(map(_short, scores.mean(axis=0))), *_interval_ends(entry), _plain_verdict(entry)]
    _print_csv(["right by position", *INTERVALS, "verdict"], lines)


def _answered(directories: Iterable[str]) -> Iterator[tuple[Record, str, dict[str, Any], Any]]:
    """Every verdict of records of generated answers, all of a model on a task corrected together, and the scores."""
    records = [read_record(each) for each in directories]
    correct_together(records)
    for record in records:
        for number, entry in enumerate(record.scalars["judgement"]["verdicts"], start=1):
            yield record, _name(record, entry["name"]), entry, record.arrays[f"scores/accuracy/{number}"]


def beside(*directories: str) -> None:
    """As CSV a line per record and method, as it was spelled: changes of mean and worst position, and the verdict."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for directory in directories:
        record = read_record(directory)
        task, judgement = record.arguments["task"], record.scalars["judgement"]
        mean, worst = _levels(record)
        lines[task, Path(directory).name, "unchanged (level)"] = [mean, "", "", worst, "", "", "", ""]
        for entry in judgement["verdicts"]:
            lines[task, Path(directory).name, entry["name"]] = [
                *_interval_ends(entry),
                _plain_verdict(entry),
                "; ".join(_harms(entry)),
            ]
    _print_csv([*INTERVALS, "verdict", "side effects"], lines, second="record")


def _levels(record: Record) -> list[str]:
    """Of the unchanged model: its mean over positions, and its worst position."""
    levels = [each["value"] for each in record.scalars["judgement"]["before"]]
    return [_short(sum(levels) / len(levels)), _short(min(levels))]


def _words(
    verdicts: dict[str, dict[tuple[str, str], str]], tasks: list[str], models: list[str]
) -> dict[str, list[str]]:
    """Each method's verdicts in a word per model, by task; the methods that gain in most places first."""
    word = WORDS | {SMALL: "–", NOTHING: "–", EVEN: EVEN, "": "not tried"}

    def place(name: str) -> tuple[int, int]:
        count = Counter(verdicts[name].values())
        return count[HARM] - sum(count[gain] for gain in GAINS), count[HARM]

    return {
        name: [", ".join(word[verdicts[name].get((task, model), "")] for model in models) for task in tasks]
        for name in sorted(verdicts, key=place)
    }


def _print(title: str, columns: list[str], rows: dict[str, list[str]]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row)} |")


def _print_csv(heads: list[str], lines: dict[tuple[str, str, str], list[str]], second: str = "model") -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["task", second, "method", *heads])
    writer.writerows([*key, *line] for key, line in sorted(lines.items()))


def _interval_ends(entry: dict[str, Any]) -> list[str]:
    return [_short(entry["changes"][each]["value"][end]) for each in ENDPOINTS for end in ("value", "low", "high")]


def _plain_verdict(entry: dict[str, Any]) -> str:
    return _verdict(entry).replace("*", "").strip()


def _cell_of(record: Record) -> tuple[str, str]:
    """Task and model."""
    return record.arguments["task"].partition("(")[0], _model(record)


def _model(record: Record) -> str:
    return Path(record.arguments["model"]).name.removesuffix(".gguf")


def _name(record: Record, arm: str) -> str:
    """Of the method of an arm, in today's words."""
    name = _kept(record.resolved["methods"][arm])
    if name in ("repeat_prompt", "question_first") and record.created < CUE_KEPT_UNTIL:
        name += "(cue=True)"
    return f"`{name}`"


def _kept(name: str) -> str:
    """Of a method that was spelled, without parameters that were fitted or are the default."""
    return name if any(told in name for told in ("draws", "variant", "cue")) else name.partition("(")[0]


def _harms(entry: dict[str, Any]) -> list[str]:
    """The side effects that are harm by themselves, before correction."""
    return [
        f"{_effect(name)} {_change(effect['value'])}"
        for name, effect in entry["effects"].items()
        if name in entry["harms"] and effect["p"] < ALPHA and _matters(entry, name)
    ]


def _verdict(entry: dict[str, Any]) -> str:
    """In the words of a cell: nothing where nothing is established."""
    found = entry["verdict"]
    if found == EVENS:
        return f" **evens out**, best {_short(entry['changes']['formerly best position']['value']['value'])}"
    if found == RAISES:
        return f" **raises {'some' if entry['lowered'] else 'all'}**, position {POSITION[entry['dependence']]}"
    return {NOTHING: "", SMALL: " negligible"}.get(found, f" **{found}**")


def _is_even(entry: dict[str, Any]) -> bool:
    return all(abs(entry["changes"][each]["value"]["value"]) < 1e-6 for each in ENDPOINTS)


def _effect(name: str) -> str:
    """Ordinary text, or a short form of the task, in a word or two."""
    return re.sub(r".*setting='(\w+)'\)", r"\1", name.removeprefix("ordinary ")).replace("closed_book", "closed book")


def _matters(entry: dict[str, Any], name: str) -> bool:
    """Whether an established change, or side effect, is large enough."""
    effect = entry["effects"].get(name)
    if effect is not None:
        return bool(effect["tolerance"]) or abs(effect["value"]["value"]) >= SMALLEST
    return abs(entry["changes"][name]["value"]["value"]) >= SMALLEST


def _change(interval: dict[str, float]) -> str:
    return f"{_short(interval['value'], plus='+')} [{_short(interval['low'])}, {_short(interval['high'])}]"


def _short(value: float, plus: str = "") -> str:
    """Two decimals, halves away from 0; without a zero before the point, and without the sign of what rounds to 0."""
    hundredths = int(abs(value) * 100 + 0.5 + 1e-9)
    sign = ("-" if value < 0 else plus) if hundredths else ""
    return f"{sign}{hundredths // 100 or ''}.{hundredths % 100:02d}"


if __name__ == "__main__":
    verbs = {each.__name__: each for each in (run, finish, table, changes, answer_changes, beside, rejudge)}
    verbs[sys.argv[1]](*sys.argv[2:])
