"""Names that steer a terminal or turn the direction of writing reach neither terminal, page nor `repr` as they are."""

import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import posbias as pb
from evaluation.serving import chat, stand_in
from posbias import Record, RunError, UsageError
from posbias.cli.options import _quoted
from posbias.results.page import show_report
from posbias.results.records import read_record
from posbias.results.result import report_of, result_of, verdict

EVIL = "m\x1b[31m\x9b2J\u202e\u2066\x07\r[/b]"
"""Colour, a cleared screen, writing turned round, a bell, a line begun anew, the end of markup that never began."""
NAME = EVIL.removesuffix("[/b]")
"""What a file may be called."""
STEERING = "\x1b\x9b\u202e\u2066\x07\r"


def clean(text: str) -> bool:
    return not set(text) & set(STEERING)


def check(result: Any, *pages: Path) -> None:
    assert result.returncode == 0, result.stderr
    assert clean(result.stdout)
    assert clean(result.stderr)
    for page in pages:
        text = page.read_text()
        assert clean(text)
        assert "\\x1b[31m" in text


def test_a_directory_of_a_model(posbias: Any, tiny_llama: Path, tmp_path: Path) -> None:
    model = tmp_path / NAME
    shutil.copytree(tiny_llama, model)
    out = tmp_path / f"out {NAME}"
    for verb in (["measure", model, "--kinds", "logit"], ["attention", model, "--overwrite"]):
        check(posbias(*verb, "--length", 12, "--count", 2, "--out", out), out / "report.html")
    assert clean(repr(pb.load_model(model)))
    check(posbias("report", out), out / "report.html")
    record = read_record(out)
    assert clean(repr(record))
    assert all(map(clean, verdict(record)))


def test_a_served_name_and_a_file_of_a_task(posbias: Any, tmp_path: Path) -> None:
    rows = tmp_path / f"{NAME}.jsonl"
    rows.write_text('{"question": "q", "response_A": "a", "response_B": "b", "label": "A>B"}\n' * 7)
    with stand_in(lambda *_: chat("[[A]]")) as server:
        command = ["evaluate", "--server", server.address, "--served-model", EVIL, "--count", 7]
        out = tmp_path / "run"
        check(posbias(*command, "--task", f"pairwise(file={str(rows)!r})", "--out", out), out / "report.html")
    refused = posbias(*command[:4], EVIL, "--task", EVIL)
    assert refused.returncode == 2
    assert clean(refused.stderr)


def evil_record() -> Record:
    """Of somebody who wants to be read."""
    record = Record("predict", {"theory": EVIL}, {"title": EVIL, "theory": EVIL, "command": EVIL})
    record.scalars = {"caveats": [EVIL, {"caveat": EVIL}], "left_out": [EVIL], EVIL: {EVIL: EVIL}}
    curve = f"theories/{EVIL.replace('/', '')}"
    record.resolved["curves"] = {curve: {"theory": EVIL}}
    record.arrays = {f"{curve}/influence": np.full(8, 1 / 8)}
    record.run_id = record.error = EVIL
    return record


def test_a_record(posbias: Any, tmp_path: Path) -> None:
    record = evil_record()
    record.save(tmp_path / "run")
    check(posbias("report", tmp_path / "run"), tmp_path / "run" / "report.html")
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, color_system=None, width=200)
        show_report(report_of(record), console)
        printed = console.file.getvalue()  # type: ignore[attr-defined]
        assert clean(printed)
        assert r"m\x1b[31m\x9b2J\u202e\u2066\x07\r[/b]" in printed
    assert clean(repr(record))
    run = result_of(record)
    assert clean(repr(run))
    assert clean(run._repr_html_())
    for ending in ("csv", "html", "svg"):
        assert clean(run.save(tmp_path / f"a.{ending}").read_text().replace("\r\n", "\n"))


@pytest.mark.parametrize("error", [UsageError, RunError])
def test_an_error(error: type[Exception]) -> None:
    assert clean(str(error(f"no {EVIL}")))


@pytest.mark.parametrize("word", [EVIL, "a b", "it's\n", "\\x\x7f'", "", "$(x)\x1b", "é\u202e"])
def test_a_command_is_printable_and_says_the_same_to_a_shell(word: str) -> None:
    assert _quoted(word).isprintable()
    command = ["bash", "-c", f"printf %s {_quoted(word)}"]
    assert subprocess.run(command, capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"}).stdout == word.encode()
