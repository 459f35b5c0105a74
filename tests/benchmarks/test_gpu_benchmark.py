"""The benchmark of what users do."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

RUN = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "run.py"


@pytest.mark.slow
def test_the_small_table_is_whole_and_everything_is_equal(script, tmp_path):
    out = tmp_path / "table.json"
    command = [sys.executable, str(RUN), "--device", "cpu", "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert document["device"].startswith("cpu")
    assert document["date"]
    rows = document["rows"]
    assert {row["case"]["work"] for row in rows} == set(script("works").WORKS)
    assert {row["case"]["family"] for row in rows} == {"llama", "qwen3", "gemma3", "bloom"}
    for row in rows:
        assert row["equal"]
        if not row["note"].endswith("is not installed"):
            assert row["note"] == "", row
            assert row["ratio"] == pytest.approx(row["seconds"] / row["peer_seconds"])
            assert (row["met"] is None) == (row["target"] is None)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 + len(rows)
    for row, line in zip(rows, lines[2:], strict=True):
        assert line.startswith(row["case"]["work"])


def test_every_work_is_equal_and_runs_on_a_tiny_shape(script, monkeypatch):
    run = script("run")
    monkeypatch.setattr(run, "REPEATS", 0)
    bench = run.Bench(run.CPU, run.torch.float32)
    for name, work in run.WORKS.items():
        # Seconds for the audit, which the slow test holds to the same.
        if name != "audit":
            row = bench.row(run.Case(name, "llama", "tiny", work.load))
            here = not work.package or find_spec(work.package)
            assert row.note == ("" if here else f"{work.package} is not installed"), row
            assert (row.ratio is None) == (not here)


def test_what_is_not_equal_is_not_timed(script, monkeypatch):
    run = script("run")
    name = "attention statistics"

    def wrong(*_):
        raise AssertionError("distances differ")

    monkeypatch.setitem(run.WORKS, name, replace(run.WORKS[name], check=wrong))
    row = run.Bench(run.CPU, run.torch.float32).row(run.Case(name, "llama", "tiny", run.Load(16)))
    assert (row.note, row.ratio, row.met) == ("unequal: distances differ", None, None)
    late = run.Bench(run.CPU, run.torch.float32, seconds=-1).row(row.case)
    assert late.note == "no time left"
