"""The record and the tables of the study from the finished prompts, those under --parts and those kept.

Per cell (model, positions, text, kind of influence): W1 of every theory to the average measured profile with its
interval over prompts, beside the flat line, the split-half noise of the measurement and the per-prompt medians. The
form with a shared direction is judged where `shared_form.py` has computed it, on those prompts.

A cell of which the record at --out judged more prompts stays as it is there. Cells of --keep positions are kept.
"""

import argparse
import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
from cells import KEPT_HERE, KINDS, SHARED, SHARES, Cell, cells, keep

from posbias.comparison.distances import PromptComparison, compare_with_prompts
from posbias.files import write_atomically
from posbias.results.records import Record, read_record
from posbias.statistics import mean_of

CHOSEN_ON = "novels"
"""The kind of text on which the form of the theory was chosen; it is judged on the others."""
FORMS = ("diagonal_key", "diagonal")
LEAST_PROMPTS = 2
LEAD = ("model", "N", "text", "kind", "prompts")


def row(cell: Cell, kind: str, chosen: str) -> dict[str, Any]:
    """One line of the table."""
    theory, published = cell.comparison(chosen, kind), cell.comparison("published", kind)
    return {
        **_names(cell, kind),
        "prompts": theory.n_units,
        "flat": theory.flat.as_record(),
        "flat_per_prompt": theory.per_prompt_flat.as_record(),
        "noise": theory.noise.mean,
        "published": published.distance.as_record(),
        "theory": theory.distance.as_record(),
        "less_flat": theory.difference.as_record(),
        "per_prompt": theory.per_prompt.as_record(),
        "meets_target": meets_target(theory),
    }


def meets_target(theory: PromptComparison) -> bool:
    """Whether the interval's upper end less the noise lies below half of the flat line's distance."""
    return bool(theory.distance.high - theory.noise.mean < theory.flat.value / 2)


def forms_row(cell: Cell, kind: str) -> dict[str, Any] | None:
    """Every form on the prompts for which all were computed; None where there are too few."""
    if sum("theory/diagonal" in prompt for prompt in cell.prompts) < LEAST_PROMPTS:
        return None
    compared = {form: cell.comparison(form, kind, on="diagonal") for form in FORMS}
    return {
        **_names(cell, kind),
        "prompts": compared["diagonal"].n_units,
        "flat": compared["diagonal"].flat.as_record(),
        "forms": {form: comparison.distance.as_record() for form, comparison in compared.items()},
    }


def shared_row(cell: Cell, kind: str, chosen: str) -> dict[str, Any] | None:
    """The form with a shared direction beside the chosen one, on the same prompts; None where there are too few."""
    name = f"{SHARED}/{kind}"
    if sum(f"theory/{name}" in prompt for prompt in cell.prompts) < LEAST_PROMPTS:
        return None
    shared, power = cell.comparison(name, kind), cell.comparison(chosen, kind, on=name)
    return {
        **_names(cell, kind),
        "prompts": shared.n_units,
        "flat": shared.flat.as_record(),
        "noise": shared.noise.mean,
        "power": power.distance.as_record(),
        "theory": shared.distance.as_record(),
        "less_flat": shared.difference.as_record(),
        "per_prompt": shared.per_prompt.as_record(),
        "meets_target": meets_target(shared),
        "shares": {share: cell.mean(f"shares/{share}").tolist() for share in SHARES},
        "ends": ends(cell, name, kind),
    }


def ends(cell: Cell, theory: str, kind: str) -> dict[str, Any]:
    """The shares of the first and last position, measured and how far off, and the distance between them."""
    measured, predicted = cell.profiles(theory, kind)
    off = predicted[:, [0, -1]] - measured[:, [0, -1]]
    inner = compare_with_prompts(_inner(predicted), _inner(measured), generator=np.random.default_rng(0))
    found: dict[str, Any] = {
        end: {
            "measured": float(measured[:, place].mean()),
            "off": mean_of(off[:, column]).interval(least=-1.0, most=1.0).as_record(),
        }
        for column, (end, place) in enumerate({"first": 0, "last": -1}.items())
    }
    return {**found, "inner": inner.distance.as_record()}


def _inner(profiles: np.ndarray) -> np.ndarray:
    """All positions but the first and last, each row summing to 1."""
    rows = profiles[:, 1:-1]
    return np.asarray(rows / rows.sum(axis=1, keepdims=True))


def choose_form(rows: list[dict[str, Any]]) -> str:
    """The form with the least mean of W1 / flat line's W1 over the cells of the text it may be chosen on."""
    judged = [row for row in rows if row["text"] == CHOSEN_ON]
    means = {form: np.mean([row["forms"][form]["value"] / row["flat"]["value"] for row in judged]) for form in FORMS}
    return min(means, key=lambda form: means[form])


def _names(cell: Cell, kind: str) -> dict[str, Any]:
    return {"model": cell.model, "n_positions": cell.n_positions, "text": cell.text, "kind": kind}


def results_sheet(rows: list[dict[str, Any]]) -> str:
    """CSV, a line per cell; distances are W1 to the mean measured profile."""
    names = ("flat", "noise", "published rollout", "power rollout", "low", "high", "per prompt", "flat per prompt")
    lines = [[*LEAD, *names, "target"]]
    for entry in rows:
        values = [entry["flat"]["value"], entry["noise"], entry["published"]["value"], *_ends_of(entry["theory"])]
        values += [entry["per_prompt"]["value"], entry["flat_per_prompt"]["value"]]
        lines.append([*_lead(entry), *map(_number, values), _target(entry)])
    return _csv(lines)


def shared_sheet(rows: list[dict[str, Any]]) -> str:
    """CSV: the form with a shared direction, a line per cell, and what it gives the first and the last position."""
    names = ["flat", "noise", "power rollout", "with a shared direction", "low", "high", "per prompt", "target"]
    for end in ("first", "last"):
        names += [f"{end} position", f"{end}, predicted less measured", f"{end}, low", f"{end}, high"]
    lines = [[*LEAD, *names, "between the ends", "between, low", "between, high"]]
    for entry in rows:
        values = [entry["flat"]["value"], entry["noise"], entry["power"]["value"], *_ends_of(entry["theory"])]
        ends = [
            value
            for end in ("first", "last")
            for value in (entry["ends"][end]["measured"], *_ends_of(entry["ends"][end]["off"]))
        ]
        texts = [*map(_number, [*values, entry["per_prompt"]["value"]]), _target(entry)]
        lines.append([*_lead(entry), *texts, *map(_number, [*ends, *_ends_of(entry["ends"]["inner"])])])
    return _csv(lines)


def forms_sheet(rows: list[dict[str, Any]]) -> str:
    """CSV: every form where all were computed."""
    forms = list(rows[0]["forms"])
    lines = [[*LEAD, "flat", *forms]]
    for entry in rows:
        values = [entry["flat"]["value"], *(entry["forms"][form]["value"] for form in forms)]
        lines.append([*_lead(entry), *map(_number, values)])
    return _csv(lines)


def summary(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """Markdown: by kind of text and for each length in how many cells the target is met, and ranges of distances."""
    lines = _head("text", "target met", *columns.values())
    for text in sorted({row["text"] for row in rows}):
        own = [row for row in rows if row["text"] == text]
        lengths = sorted({row["n_positions"] for row in own})
        met = [[row["meets_target"] for row in own if row["n_positions"] == length] for length in lengths]
        values = [[row[name]["value"] for row in own] for name in columns]
        ranges = " | ".join(f"{min(each):.3f} to {max(each):.3f}" for each in values)
        told = f"{sum(map(sum, met))} of {len(own)} ({', '.join(str(sum(each)) for each in met)})"
        lines.append(f"| {text} | {told} | {ranges} |")
    return "\n".join(lines)


def tables_of(record: Record) -> dict[str, str]:
    """The page's tables by the names of their markers."""
    return {"verdicts": summary(record.scalars["rows"], {"theory": "power rollout", "flat": "uniform baseline"})}


def sheets_of(record: Record) -> dict[str, str]:
    """The files beside the page, with a line for every cell."""
    rows, forms, shared = (record.scalars[name] for name in ("rows", "forms", "shared"))
    return {
        "results.csv": results_sheet(rows),
        "forms.csv": forms_sheet(forms),
        "shared_direction.csv": shared_sheet(shared),
    }


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with every table between its two markers replaced."""
    for name, lines in tables.items():
        before, rest = page.split(f"<!-- table {name} -->\n")
        _, after = rest.split("<!-- end of table -->", 1)
        page = f"{before}<!-- table {name} -->\n{lines}\n<!-- end of table -->{after}"
    return page


def _head(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _lead(entry: dict[str, Any]) -> list[str]:
    return [str(entry[name]) for name in ("model", "n_positions", "text", "kind", "prompts")]


def _ends_of(interval: dict[str, float]) -> list[float]:
    return [interval[end] for end in ("value", "low", "high")]


def _number(value: float) -> str:
    return f"{value:.3f}"


def _target(entry: dict[str, Any]) -> str:
    return "met" if entry["meets_target"] else "missed"


def _csv(lines: list[list[str]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(lines)
    return written.getvalue()


def judged(found: list[Cell], before: Record | None) -> Record:
    """The record of these cells, and of those that an earlier record judged on more prompts."""
    old = before.scalars if before is not None else {"rows": [], "forms": [], "shared": []}
    forms = merged([line for cell in found for kind in KINDS if (line := forms_row(cell, kind))], old["forms"])
    chosen = choose_form(forms)
    rows = merged([row(cell, kind, chosen) for cell in found for kind in KINDS], old["rows"])
    shared = merged(
        [line for cell in found for kind in KINDS if (line := shared_row(cell, kind, chosen))], old["shared"]
    )
    arrays = dict(before.arrays) if before is not None else {}
    for cell in found:
        counts = {entry["prompts"] for entry in rows if _cell_name(entry) == cell.name}
        arrays |= mean_profiles(cell, chosen) if counts == {len(cell.prompts)} else {}
    return Record(
        verb="study",
        arguments={"models": sorted({entry["model"] for entry in rows})},
        scalars={
            "rows": rows,
            "forms": forms,
            "shared": shared,
            "chosen_form": chosen,
            "chosen_on": CHOSEN_ON,
        },
        arrays=arrays,
        seeds={"prompts": 0, "probes": 0, "bootstrap": 0},
    )


def merged(lines: list[dict[str, Any]], older: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every cell and kind the line that rests on more prompts, the new one where they are equal; in order."""
    best = {key_of(line): line for line in older}
    for line in lines:
        key = key_of(line)
        if key not in best or line["prompts"] >= best[key]["prompts"]:
            best[key] = line
    return [best[key] for key in sorted(best)]


def mean_profiles(cell: Cell, chosen: str) -> dict[str, np.ndarray]:
    """Measured and predicted, by their names in the record."""
    shown = [*(f"norms/{kind}" for kind in KINDS), f"theory/{chosen}", "theory/published"]
    shown += [f"theory/{SHARED}/{kind}" for kind in KINDS]
    return {
        f"{cell.name}/{name}": cell.stacked(name).mean(axis=0)
        for name in shown
        if any(name in prompt for prompt in cell.prompts)
    }


def key_of(line: dict[str, Any]) -> tuple[str, int, str, str]:
    return line["model"], line["n_positions"], line["text"], line["kind"]


def _cell_name(line: dict[str, Any]) -> str:
    return f"{line['model']}/{line['n_positions']}/{line['text']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=Path, required=True, help="directory of the finished prompts")
    parser.add_argument("--kept", type=Path, default=KEPT_HERE, help="directory of the kept profiles")
    parser.add_argument("--keep", type=int, action="append", default=[], metavar="N", help="keep cells of N positions")
    parser.add_argument("--out", type=Path, required=True, help="directory of the record")
    parser.add_argument("--page", type=Path, help="page to write anew: its tables, and the CSV beside it")
    given = parser.parse_args()
    found = list(cells(given.parts, given.kept, least=LEAST_PROMPTS))
    for cell in found:
        if cell.n_positions in given.keep:
            keep(cell, given.kept)
    record = judged(found, read_record(given.out) if given.out.is_dir() else None)
    record.save(given.out, overwrite=True)
    tables = tables_of(record)
    print(f"chosen on {CHOSEN_ON}: {record.scalars['chosen_form']}\n\n" + "\n\n".join(tables.values()))
    if given.page is not None:
        write_atomically(given.page, with_tables(given.page.read_text(), tables).encode())
        for name, lines in sheets_of(record).items():
            write_atomically(given.page.parent / name, lines.encode())


if __name__ == "__main__":
    main()
