"""The record and the tables of the study from the finished prompts, those under --parts and those kept.

Per cell (model, positions, text, kind of influence): W1 of every theory to the average measured profile with its
interval over prompts, beside the flat line, the split-half noise of the measurement and the per-prompt medians. The
form with a shared direction is judged where `shared_form.py` has computed it, on those prompts.

A cell of which the record at --out judged more prompts stays as it is there. Cells of --keep positions are kept.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from cells import KEPT_HERE, KINDS, SHARED, SHARES, Cell, cells, keep

from posbias.comparison import PromptComparison, compare_with_prompts
from posbias.files import write_atomically
from posbias.runs.records import Record, read_record
from posbias.statistics import Interval, mean_of

CHOSEN_ON = "novels"
"""The kind of text on which the form of the theory was chosen; it is judged on the others."""
FORMS = ("diagonal_key", "isotropic_key", "diagonal", "isotropic")
LEAST_PROMPTS = 2


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
    if sum("theory/isotropic" in prompt for prompt in cell.prompts) < LEAST_PROMPTS:
        return None
    compared = {form: cell.comparison(form, kind, on="isotropic") for form in FORMS}
    return {
        **_names(cell, kind),
        "prompts": compared["isotropic"].n_units,
        "flat": compared["isotropic"].flat.as_record(),
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


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per cell."""
    names = ("model", "N", "text", "kind", "prompts", "flat", "noise", "published rollout", "power rollout", "interval")
    lines = _head(*names, "per prompt (flat)", "target")
    for entry in rows:
        low, high = entry["theory"]["low"], entry["theory"]["high"]
        lines.append(
            f"| {_lead(entry)} | {entry['flat']['value']:.3f} | {entry['noise']:.3f} "
            f"| {entry['published']['value']:.3f} | **{entry['theory']['value']:.3f}** | {low:.3f} to {high:.3f} "
            f"| {entry['per_prompt']['value']:.3f} ({entry['flat_per_prompt']['value']:.3f}) "
            f"| {'met' if entry['meets_target'] else 'missed'} |"
        )
    return "\n".join(lines)


def shared_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: the form with a shared direction, a line per cell."""
    names = ("flat", "noise", "power rollout", "with a shared direction", "interval", "per prompt", "target")
    lines = _head("model", "N", "text", "kind", "prompts", *names)
    for entry in rows:
        theory = entry["theory"]
        lines.append(
            f"| {_lead(entry)} | {entry['flat']['value']:.3f} | {entry['noise']:.3f} | {entry['power']['value']:.3f} "
            f"| **{theory['value']:.3f}** | {theory['low']:.3f} to {theory['high']:.3f} "
            f"| {entry['per_prompt']['value']:.3f} | {'met' if entry['meets_target'] else 'missed'} |"
        )
    return "\n".join(lines)


def ends_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what the form with a shared direction gives the first and last position, a line per cell."""
    names = ("first", "predicted less measured", "last", "predicted less measured", "W1", "W1 between them")
    lines = _head("model", "N", "text", "kind", "prompts", *names)
    for entry in rows:
        texts = []
        for end in ("first", "last"):
            off = entry["ends"][end]["off"]
            texts.append(f"{entry['ends'][end]['measured']:.3f}")
            texts.append(f"{off['value']:+.3f} [{off['low']:+.3f}, {off['high']:+.3f}]")
        texts += [f"{entry['theory']['value']:.3f}", str(Interval(**entry["ends"]["inner"]))]
        lines.append(f"| {_lead(entry)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def forms_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: every form where all were computed."""
    lines = _head("model", "N", "text", "kind", "prompts", "flat", *FORMS)
    for entry in rows:
        values = " | ".join(f"{entry['forms'][form]['value']:.3f}" for form in FORMS)
        lines.append(f"| {_lead(entry)} | {entry['flat']['value']:.3f} | {values} |")
    return "\n".join(lines)


def verdicts(rows: list[dict[str, Any]]) -> str:
    """Markdown: in how many cells the target is met, by length and kind of text."""
    lines = _head("N", "text", "prompts", "target met", "farthest: W1 / flat line's")
    for n_positions, text in sorted({(row["n_positions"], row["text"]) for row in rows}):
        own = [row for row in rows if (row["n_positions"], row["text"]) == (n_positions, text)]
        met, prompts = sum(row["meets_target"] for row in own), sorted({row["prompts"] for row in own})
        farthest = max(row["theory"]["value"] / row["flat"]["value"] for row in own)
        shown = str(prompts[0]) if len(prompts) == 1 else f"{prompts[0]} to {prompts[-1]}"
        lines.append(f"| {n_positions} | {text} | {shown} | {met} of {len(own)} | {farthest:.2f} |")
    return "\n".join(lines)


def tables_of(record: Record) -> dict[str, str]:
    """The page's tables by the names of their markers."""
    rows, forms, shared = (record.scalars[name] for name in ("rows", "forms", "shared"))
    tables = {"verdicts": verdicts(rows), "results": table(rows), "forms": forms_table(forms)}
    return tables | {"shared": shared_table(shared), "ends": ends_table(shared)}


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with every table between its two markers replaced."""
    for name, lines in tables.items():
        before, rest = page.split(f"<!-- table {name} -->\n")
        _, after = rest.split("<!-- end of table -->", 1)
        page = f"{before}<!-- table {name} -->\n{lines}\n<!-- end of table -->{after}"
    return page


def _head(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _lead(entry: dict[str, Any]) -> str:
    return " | ".join(str(entry[name]) for name in ("model", "n_positions", "text", "kind", "prompts"))


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
    parser.add_argument("--page", type=Path, help="page whose tables, between their markers, are written anew")
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


if __name__ == "__main__":
    main()
