"""The page of `posbias explore`: the residual rollout of any architecture, live in a browser, without a server.

Its arithmetic, `templates/rollout.js`, is held to the library's numbers by `tests/report/test_explorer.py`; the page is
one file that loads nothing, with presets and measured profiles written into it (docs/theory, sections 1 and 7).
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any

from posbias.comparison.stored import ProfileRun
from posbias.errors import UsageError
from posbias.profiles import SUM_TOLERANCE, Profile
from posbias.report.layout import shown_record
from posbias.runs.records import FORMAT_VERSION, Record
from posbias.version import __version__

MOST_POSITIONS = 1_000_000
"""Positions of a profile that is dropped on the page: as many as its own context may have."""
MOST_BYTES = 1 << 29
"""Size of a file that is dropped on the page, which a browser reads whole."""
DIGITS = 7
"""Significant digits of a measured influence on the page: more than any picture shows, or any interval has."""


def explorer_page(presets: Mapping[str, Mapping[str, Any]], runs: Sequence[Record] = ()) -> str:
    """The page as text.

    Args:
        presets: Entries by name: `settings` of the page, `mixing` by layer, a `note`, and a `measured` curve of
            `curve_of`; all but the settings may be missing.
        runs: Finished runs, whose measured profiles are drawn beside the theory.

    Raises:
        UsageError: a run without a measured profile.
    """
    folder = resources.files("posbias.report") / "templates"
    page, arithmetic, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("explorer.html", "rollout.js", "explorer_charts.js", "explorer_files.js", "explorer.js")
    )
    script = "\n".join([arithmetic, "// ---- the page ----", *scripts])  # the worker takes what stands above the line
    rules = {
        "format_version": FORMAT_VERSION,
        "sum_tolerance": SUM_TOLERANCE,
        "most_positions": MOST_POSITIONS,
        "most_bytes": MOST_BYTES,
    }
    content = {"presets": presets, "measured": [curve for run in runs for curve in _measured(run)], "rules": rules}
    data = json.dumps(content, allow_nan=False).replace("<", "\\u003c")  # nothing in it ends the script that holds it
    return Template(page).substitute(given=data, script=script, version=__version__)


def curve_of(name: str, profile: Profile) -> dict[str, Any]:
    """A profile as the page takes it."""
    return {"name": name, "values": [float(f"{value:.{DIGITS}g}") for value in profile.influence.tolist()]}


def _measured(record: Record) -> list[dict[str, Any]]:
    run = ProfileRun.from_record(shown_record(record))
    curves = [
        {**curve_of(f"{run.label}, {subject.name}, {kind}", measured.profile), "run": record.run_id}
        for subject in run.subjects
        for kind, measured in subject.measured.items()
    ]
    if not curves:
        raise UsageError(f"the {record.verb} run {record.run_id} holds no measured profile")
    return curves
