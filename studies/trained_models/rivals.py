"""Is the power rollout nearer to a measured profile than profiles measured elsewhere are?

`rivals.py measure` measures and predicts the demo model on single prompts of four kinds and writes `rivals_record`;
`rivals.py` alone reads that record, the study's own and the kept prompts, and writes `rivals.csv`, `rivals_prompts.csv`
and the tables of the page.

- `rivals.csv`: the mean measured profile of a cell beside the power rollout, the mean measured profile of the two other
  models on the same text, the same model's on the other text, and the uniform baseline.
- `rivals_prompts.csv`: the measured profile of a single prompt, mean over prompts of W1, beside the prompt's own power
  rollout, the mean measured profile of the other prompts of its text, of the model's other texts of language, and of
  the two other models (on the same text; for the demo model on novels and technical prose). Intervals of paired
  differences over prompts, power rollout less rival.
"""

import itertools
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cells import KEPT, KEPT_HERE, KINDS, cells
from run import CHOSEN, FORMS
from summary import _csv, _head, _number, with_tables
from variants import SCRAMBLED, SEED

import posbias as pb
from posbias.comparison.metrics import wasserstein
from posbias.files import write_atomically
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.prompt import measure_prompt
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.results.records import Record, read_record
from posbias.statistics import Interval, mean_of
from posbias.theory.power_rollout import trace_model

LEAD = ("model", "n_positions", "text", "kind")
OF_MODELS = ("power rollout", "two other models", "the other text", "uniform baseline")
OF_PROMPTS = ("power rollout", "other prompts", "other texts", "two other models", "uniform baseline")
ENDS = ("", ", low", ", high")
DEMO = ("smollm2-135m", 256)
LANGUAGE = ("novels", "technical")
REPEATED = "a sentence repeated"
NO_LANGUAGE = (REPEATED, SCRAMBLED)
STUDY = Path(__file__).parent
ROOT = STUDY.parents[1]
N, COUNT = DEMO[1], 6
MEASURED = "jacobian"
"""Kind of influence of the demo model's single prompts."""
LIBRARY = ("argparse", "csv", "doctest", "heapq", "inspect", "shutil")
"""Modules of Python's standard library."""
PAGES = ("audit", "design", "evaluate", "measure", "predict", "theory")
"""Pages of `docs`."""
RECORDS = ("behaviour/demo-documents", "behaviour/demo-needle", "design_training/record")
RECORDS += ("experiments/recall", "hybrids/record", "trained_models/record")


def texts(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Token ids [prompt position] of every kind of text, one window of each file."""
    files = {
        "code": [Path(sysconfig.get_path("stdlib")) / f"{name}.py" for name in LIBRARY],
        "Markdown": [ROOT / "docs" / f"{name}.md" for name in PAGES],
        "JSON": [ROOT / "studies" / name / "record.json" for name in RECORDS],
    }
    novels = load_prompts("default#austen", model, n_positions=N, count=COUNT, seed=SEED).token_ids
    for name, paths in files.items():
        yield name, np.concatenate([_window(path.read_text(), model) for path in paths])
    yield REPEATED, np.stack([np.resize(row[:16], N) for row in novels])


def _window(text: str, model: Model) -> np.ndarray:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text.replace("\f", ""))
        file.flush()
        return load_prompts(file.name, model, n_positions=N, count=1, seed=SEED).token_ids


def measure() -> None:
    """Write the record of the demo model's single prompts."""
    model, form, kinds = pb.load_model("demo"), FORMS[CHOSEN], resolve_kinds([f"{MEASURED}(probes=2)"])
    record = Record(verb="study", arguments={"model": "demo", "length": N, "count": COUNT}, seeds={"prompts": SEED})
    for text, token_ids in texts(model):
        rows = {f"norms/{MEASURED}": [], f"theory/{CHOSEN}": []}
        for index, prompt in enumerate(token_ids):
            measured = measure_prompt(model, prompt, kinds=kinds, key=(SEED, index)).norms
            predicted = form.profile_of(trace_model(model, prompt, target=form.target))
            for name, row in zip(rows, (measured[MEASURED], predicted), strict=True):
                rows[name].append(np.asarray(row / row.sum(), dtype=np.float32))
            print(text, index, flush=True)
        record.arrays |= {f"{text}/{name}": np.stack(found) for name, found in rows.items()}
        record.arrays[f"{text}/token_ids"] = token_ids.astype(np.int32)
        record.save(STUDY / "rivals_record", overwrite=True)


Arrays = dict[str, np.ndarray]
"""Rows by prompt: measured `norms/KIND`, predicted `theory/FORM`."""


def of_record(record: Record, model: str, n_positions: int, text: str, name: str) -> np.ndarray:
    """A mean profile of the study's record."""
    return np.asarray(record.arrays[f"{model}/{n_positions}/{text}/{name}"], dtype=float)


def of_other_models(record: Record, model: str, n_positions: int, text: str, kind: str) -> np.ndarray:
    """The mean measured profile of the study's two other models."""
    others = [other for other in record.arguments["models"] if other != model]
    return np.mean([of_record(record, other, n_positions, text, f"norms/{kind}") for other in others], axis=0)


def model_rows() -> list[dict[str, Any]]:
    """Every comparison on language: W1 to the mean measured profile."""
    record, rows = read_record(STUDY / "record"), []
    for row in record.scalars["rows"]:
        model, n_positions, text, kind = place = tuple(row[name] for name in LEAD)
        if text == SCRAMBLED:
            continue
        other_text = next(other for other in LANGUAGE if other != text)
        profiles = (
            of_record(record, model, n_positions, text, f"theory/{CHOSEN}"),
            of_other_models(record, *place),
            of_record(record, model, n_positions, other_text, f"norms/{kind}"),
            np.full(n_positions, 1 / n_positions),
        )
        measured = of_record(record, model, n_positions, text, f"norms/{kind}")
        distances = [float(wasserstein(profile, measured)) for profile in profiles]
        rows.append(dict(zip((*LEAD, *OF_MODELS), (*place, *distances), strict=True)))
    return rows


def prompt_rows() -> list[dict[str, Any]]:
    """Every model, text and kind of which single prompts are kept: mean W1 to the single prompt."""
    found: dict[tuple[str, int], dict[str, Arrays]] = {DEMO: {}}
    for name, rows in read_record(STUDY / "rivals_record").arrays.items():
        text, array = name.split("/", 1)
        found[DEMO].setdefault(text, {})[array] = rows.astype(float)
    for cell in cells(Path("nowhere"), KEPT_HERE, least=2):
        of_cell = {name: cell.stacked(name) for name in KEPT}
        found.setdefault((cell.model, cell.n_positions), {})[cell.text] = of_cell
    return [
        dict(zip(LEAD, (*model, text, kind), strict=True)) | beside(model, texts, text, kind)
        for model, texts in found.items()
        for text, kind in itertools.product(texts, KINDS)
        if len(texts) > 1 and f"norms/{kind}" in texts[text]
    ]


def beside(model: tuple[str, int], texts: dict[str, Arrays], text: str, kind: str) -> dict[str, Any]:
    """The power rollout of each prompt and its rivals, and paired differences over prompts."""
    measured, predicted = texts[text][f"norms/{kind}"], texts[text][f"theory/{CHOSEN}"]
    count, n_positions = measured.shape
    others = [rows[f"norms/{kind}"].mean(axis=0) for name, rows in texts.items() if name not in (text, *NO_LANGUAGE)]
    record, read_by_others = read_record(STUDY / "record"), (text,)
    if model == DEMO:  # whose texts other models have not read; the study has its means on two more
        others += [of_record(record, *model, name, f"norms/{kind}") for name in LANGUAGE]
        read_by_others = LANGUAGE
    profiles = {
        "other prompts": (measured.sum(axis=0) - measured) / (count - 1),
        "other texts": np.mean(others, axis=0),
        "uniform baseline": np.full(n_positions, 1 / n_positions),
        "two other models": np.mean([of_other_models(record, *model, name, kind) for name in read_by_others], axis=0),
    }
    own = np.asarray(wasserstein(predicted, measured))
    rivals = {name: np.asarray(wasserstein(np.atleast_2d(rows), measured)) for name, rows in profiles.items()}
    told = {name: float(rivals[name].mean()) for name in OF_PROMPTS[1:]}
    less = {name: mean_of(own - rivals[name]).interval() for name in OF_PROMPTS[1:]}
    ends = {
        f"less {name}{end}": value
        for name, each in less.items()
        for end, value in zip(ENDS, ends_of(each), strict=True)
    }
    return {"prompts": count, OF_PROMPTS[0]: float(own.mean()), **told, **ends}


def ends_of(interval: Interval) -> tuple[float, float, float]:
    """The value and both ends, as sheets have them."""
    return interval.value, interval.low, interval.high


def sheet(rows: list[dict[str, Any]]) -> str:
    """CSV of the rows."""
    return _csv(
        [
            [f"{each:.4f}" if isinstance(each, float) else str(each) for each in row]
            for row in (rows[0], *map(dict.values, rows))
        ]
    )


def tables_of(of_models: list[dict[str, Any]], of_prompts: list[dict[str, Any]]) -> dict[str, str]:
    """The page's tables by the names of their markers."""
    shown = (*OF_MODELS[:2], OF_MODELS[3])
    lengths = _head("N", *shown, "nearer than two others")
    for n_positions in sorted({row["n_positions"] for row in of_models}):
        own = [row for row in of_models if row["n_positions"] == n_positions]
        nearer = sum(row[OF_MODELS[0]] < row[OF_MODELS[1]] for row in own)
        means = " | ".join(_number(float(np.mean([row[name] for row in own]))) for name in shown)
        lengths.append(f"| {n_positions} | {means} | {nearer} of {len(own)} |")
    shown = (*OF_PROMPTS[:3], OF_PROMPTS[4])
    prompts = _head("text", *shown, "less other prompts")
    for row in of_prompts:
        if (row["model"], row["n_positions"]) == DEMO:
            values = " | ".join(_number(row[name]) for name in shown)
            prompts.append(f"| {row['text']} | {values} | {less_of(row, OF_PROMPTS[1])} |")
    return {"rivals": "\n".join(lengths), "prompts": "\n".join(prompts)}


def less_of(row: dict[str, Any], rival: str) -> str:
    """The paired difference to a rival, with its interval."""
    return Interval(*(row[f"less {rival}{end}"] for end in ENDS)).text("+.3f")


def main() -> None:
    """Write both sheets and the page's tables from the records."""
    of_models, of_prompts = model_rows(), prompt_rows()
    write_atomically(STUDY / "rivals.csv", sheet(of_models).encode())
    write_atomically(STUDY / "rivals_prompts.csv", sheet(of_prompts).encode())
    tables, page = tables_of(of_models, of_prompts), STUDY / "README.md"
    print("\n\n".join(tables.values()))
    write_atomically(page, with_tables(page.read_text(), tables).encode())


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    main()
