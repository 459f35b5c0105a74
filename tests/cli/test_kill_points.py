"""Runs killed (SIGKILL) at chosen points and continued: the bits of an undisturbed run, nothing done twice or left."""

import signal
import subprocess
import sys

import numpy as np
import pytest

import posbias as pb
from posbias.parts import PARTS, PartStore

KILLED_AT = """
import importlib, os, signal, sys
from posbias.cli import main

module, name, call = sys.argv[1], sys.argv[2], int(sys.argv[3])
place, calls = importlib.import_module(module), []
function = getattr(place, name)

def until_then(*given, **named):
    calls.append(name)
    if len(calls) == call:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*given, **named)

setattr(place, name, until_then)
sys.argv = ["posbias", *sys.argv[4:]]
main()
"""
POINTS = {
    "calibrating": ("posbias.measurement.cost", "peak_tensor_bytes", 2),
    "saving": ("posbias.records", "_remove_report", 1),
    "reporting": ("posbias.report.page", "write_atomically", 2),
    "clearing": ("posbias.parts", "clear_parts", 2),
}
"""Module, function and number of the call in which a run dies: in its second short run; between the record's two files;
at the second file of the report; with the record and report there and the parts too (the first call is the start's)."""
SHORT = ("--length", "16", "--count", "2", "--kinds", "probability")
COMMANDS = {
    "measure": (*SHORT, "--threads", "1"),
    "audit": (*SHORT, "--threads", "1", "--births", "1"),
    "decompose": (*SHORT, "--interventions", "no_rope"),
}
CASES = [
    *(("measure", point) for point in POINTS),
    ("audit", "clearing"),
    pytest.param("audit", "reporting", marks=pytest.mark.slow),
    pytest.param("decompose", "clearing", marks=pytest.mark.slow),
]


def run_until(point, *command):
    process = [sys.executable, "-c", KILLED_AT, *map(str, POINTS[point]), *map(str, command)]
    assert subprocess.run(process, stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGKILL


@pytest.fixture
def computed(monkeypatch):
    """Names of the pieces that this process computes and puts on disk; an estimate of the cost puts none there."""
    names, keep = [], PartStore.keep

    def told(store, name, arrays):
        if store._directory is not None:
            names.append(name)
        return keep(store, name, arrays)

    monkeypatch.setattr(PartStore, "keep", told)
    return names


@pytest.fixture(scope="module")
def undisturbed():
    """By verb: the record of a whole run and how many pieces it took."""
    return {}


def assert_same_results(found, wanted):
    assert found.arrays.keys() == wanted.arrays.keys()
    for name, array in wanted.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array, err_msg=name)
    assert found.scalars | {"cost": 0} == wanted.scalars | {"cost": 0}


@pytest.mark.parametrize(("verb", "point"), CASES)
def test_continued_it_is_the_undisturbed_run(posbias, tiny_llama, tmp_path, computed, undisturbed, verb, point):
    command = (verb, tiny_llama, *COMMANDS[verb])
    if verb not in undisturbed:
        assert posbias(*command, "--out", tmp_path / "whole").returncode == 0
        undisturbed[verb] = pb.load_record(tmp_path / "whole"), len(computed)
        computed.clear()
    whole, pieces = undisturbed[verb]
    out = tmp_path / "killed"
    run_until(point, *command, "--out", out)
    assert (out / "arrays.safetensors").is_file() == (point != "calibrating")
    assert len(list((out / PARTS).glob("*"))) == (0 if point == "calibrating" else pieces)
    result = posbias(*command, "--out", out, "--resume")
    assert result.returncode == 0, result.stderr
    assert len(computed) == (pieces if point == "calibrating" else 0)
    assert_same_results(pb.load_record(out), whole)
    assert (out / "report.html").is_file()
    assert not (out / PARTS).exists()


def test_of_several_models_the_one_that_was_done_is_tidied_up(posbias, tiny_llama, long_llama, tmp_path):
    command = ("measure", tiny_llama, long_llama, *COMMANDS["measure"], "--out", tmp_path)
    run_until("reporting", *command)
    done = tmp_path / tiny_llama.name
    before = pb.load_record(done).run_id
    assert posbias(*command, "--resume").returncode == 0
    assert pb.load_record(done).run_id == before
    for name in (tiny_llama.name, long_llama.name):
        assert (tmp_path / name / "report.html").is_file()
        assert not (tmp_path / name / PARTS).exists()
