"""Parts of a paper from finished runs: figures as PDF and SVG, tables as LaTeX and CSV, settings, and whom to cite.

Everything comes from the records alone, as a page does. A variant (theory, encoding, kind, task, method) names its
source in its docstring by the number that arXiv gave it; `references.bib` has the entry.
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from inspect import getdoc
from pathlib import Path
from typing import Any

from posbias.architecture import ENCODINGS, MASKS
from posbias.checks import checked
from posbias.errors import UsageError, printable
from posbias.files import write_file
from posbias.measurement.kinds import KINDS
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.results.drawing import image_of
from posbias.results.page import conditions_of, figures_of, real_name, tables_of
from posbias.results.records import Record
from posbias.results.result import RESULTS, records_of, report_of
from posbias.results.showing import Showing
from posbias.results.tables import Table
from posbias.statistics import MISSING
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.theory import THEORIES
from posbias.theory.power_rollout import attention_rollout_prompt, attention_rollouts
from posbias.version import __version__

DOCUMENT, REFERENCES = "paper.tex", "references.bib"
VARIANTS = (ENCODINGS, MASKS, THEORIES, KINDS, LANGUAGE_TASKS, MITIGATIONS, RESULTS)
"""Registries whose variants name their sources."""
FUNCTIONS = {"attention_rollout": attention_rollout_prompt, "norm_weighted": attention_rollouts}
"""What records name beside registered variants."""
UNSEARCHED = ("command", "model", "prompts", "title", "related", "responder")
"""Parts of a record's resolved arguments whose words are not names of variants."""
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")
INTERVAL = re.compile(r"(?P<value>[-+]?[\d.]+)(?P<unit>(?: \S+)?) \[(?P<low>-?[\d.]+|-inf), (?P<high>-?[\d.]+|inf)\]")
WIDE = 5
"""Columns from which a table is scaled to the width of the text."""
LINE = 40
"""Characters of a cell from which its column is broken into lines."""
_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
LATEX = str.maketrans(_SPECIAL | {sign: f"\\{sign}" for sign in "&%$#_{}"})
SOFTWARE = """@software{{posbias-{version},
  key = {{posbias}},
  title = {{posbias: predict, measure and explain the position bias of transformer language models}},
  version = {{{version}}},
  year = {{{year}}},
  note = {{commit {commit}}},
}}
"""
PREAMBLE = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage{booktabs,graphicx}
\begin{document}
\nocite{*}
"""


def latex_of(result: Showing) -> str:
    """Every table of a run's report in LaTeX, for the packages booktabs and graphicx."""
    return "\n".join(latex_table(table) for table in tables_of(report_of(result)))


def latex_table(table: Table) -> str:
    """One table, its title as its caption."""
    head, *rows = (" & ".join(map(_escaped, row)) + r" \\" for row in (table.header, *table.cells))
    long = [max(map(len, column)) > LINE for column in zip(table.header, *table.cells, strict=True)]
    wrapped = rf"p{{{0.7 / max(1, sum(long)):.2f}\linewidth}}"
    begin = rf"\begin{{tabular}}{{{''.join(wrapped if cell else 'l' for cell in long)}}}"
    end = r"\end{tabular}"
    body = "\n".join([begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", end])
    if len(table.header) > WIDE:
        body = f"\\resizebox{{\\linewidth}}{{!}}{{%\n{body}}}"
    return f"\\begin{{table}}\n\\caption{{{_escaped(table.title)}}}\n{body}\n\\end{{table}}\n"


def csv_table(table: Table) -> str:
    """One table; a column of numbers with intervals becomes three, and what is not known is empty."""
    columns: dict[str, list[str]] = {}
    for place, name in enumerate(table.header):
        cells = ["" if row[place] == MISSING else printable(row[place]) for row in table.cells]
        found = [INTERVAL.fullmatch(cell) for cell in cells]
        if any(found) and all(match or not cell for match, cell in zip(found, cells, strict=True)):
            unit = next(match["unit"] for match in found if match)
            for part in ("value", "low", "high"):
                column = f"{name}{unit}" + ("" if part == "value" else f" {part}")
                columns[column] = [match[part] if match else "" for match in found]
        else:
            columns[name] = cells
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


@checked
def cite(result: Showing | Record) -> str:
    """Settings and versions of a run as comments, then BibTeX of posbias and of the work that the run rests on.

    A result that is no run, such as a profile, names posbias alone.
    """
    run = result.as_run()
    told = {} if run is None else _settings(run)
    comments = [f"% {name}: {printable(' '.join(text.split()))}" for name, text in told.items()]
    return "\n".join([*comments, "", *_entries([run or Record("cite", {})])]).lstrip()


def sources_of(record: Record) -> list[str]:
    """The numbers that arXiv gave to the work behind a run, sorted."""
    documented = [registry[name] for registry in VARIANTS for name in _names_in(record) if name in set(registry)]
    documented += [FUNCTIONS[name] for name in _names_in(record) if name in FUNCTIONS]
    return sorted({number for variant in documented for number in ARXIV.findall(getdoc(variant) or "")})


@cache
def references() -> dict[str, str]:
    """The BibTeX entry of every work that a docstring may name, by the number that arXiv gave it."""
    text = (files("posbias") / REFERENCES).read_text()
    return {ARXIV.findall(entry.partition("eprint")[2])[0]: entry.strip() for entry in text.split("\n\n")}


@checked
def write_paper(runs: Showing | Record | Sequence[Showing | Record], out: Path) -> Path:
    """Write into the directory `out` what a paper takes from finished runs; several are put side by side.

    Args:
        runs: Finished runs, as for `write_report`.
        out: A new directory, or an empty one. It gets `figures/` (PDF, SVG), `tables/` (LaTeX, CSV), `references.bib`
            and a document that shows them all, every figure with a caption and the command that made it.

    Returns:
        The path of the document, `paper.tex`.

    Raises:
        UsageError: as for `write_report`, or the directory holds something.
        RunError: the files cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{str(out)!r} is not empty; figures and tables for a paper go into a new directory")
    records = records_of(runs)
    report = report_of(*records)
    made_by = "; ".join(record.command for record in records)
    tables = tables_of(report)
    for record in records:
        title = f"Settings of {real_name(record.title)}"
        tables.append(Table(title, ["setting", "value"], [*map(list, _settings(record).items())], prose=True))
    contents: dict[str, bytes] = {}
    parts = [f"% {printable(line)}" for line in (real_name(report.title), *(record.command for record in records))]
    for name, figure in figures_of(report).items():
        for sort in ("pdf", "svg"):
            contents[f"figures/{name}.{sort}"] = image_of(figure, sort, about=printable(made_by))
        caption = f"{_escaped(figure.title)}. Made by \\texttt{{{_escaped(made_by)}}}."
        picture = rf"\includegraphics[width=\linewidth]{{figures/{name}}}"
        parts.append(f"\\begin{{figure}}\n{picture}\n\\caption{{{caption}}}\n\\end{{figure}}")
    for number, table in enumerate(tables):
        name = f"tables/{number:02}-{re.sub('[^a-z0-9]+', '-', table.title.lower()).strip('-')[:48]}"
        contents |= {f"{name}.tex": latex_table(table).encode(), f"{name}.csv": csv_table(table).encode()}
        parts.append(rf"\input{{{name}}}")
    contents[REFERENCES] = "\n".join(_entries(records)).encode()
    ending = "\\bibliographystyle{plain}\n\\bibliography{references}\n\\end{document}\n"
    contents[DOCUMENT] = "\n".join([PREAMBLE, *parts, ending]).encode()
    for name, content in contents.items():
        write_file(out / name, content)
    return out / DOCUMENT


def _settings(record: Record) -> dict[str, str]:
    """The command, settings and versions of a run, by name."""
    return {"made by": record.command, **conditions_of(record)}


def _entries(records: Sequence[Record]) -> list[str]:
    """BibTeX of posbias, once for every version that made a run, and of the work behind them all."""
    versions = {record.environment.get("posbias", __version__): record for record in records}
    ours = [
        SOFTWARE.format(version=version, year=record.created[:4], commit=record.environment.get("commit") or "unknown")
        for version, record in versions.items()
    ]
    numbers = sorted({number for record in records for number in sources_of(record)})
    return [*ours, *(f"{references()[number]}\n" for number in numbers)]


def _names_in(record: Record) -> set[str]:
    """Words of a run that may name a variant: its verb, what was asked, what that became, and what its arrays hold."""
    resolved = {name: value for name, value in record.resolved.items() if name not in UNSEARCHED}
    words = [record.verb, *record.arrays, *_texts(record.arguments), *_texts(resolved)]
    return set(re.findall(r"[a-z]\w*", " ".join(words)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts(entry)


def _escaped(text: str) -> str:
    return printable(text).translate(LATEX)
