"""`posbias decompose` end to end: what it prints is what it saved, and a report can be redrawn from that."""

import json

import numpy as np

import posbias as pb
from conftest import without_notes
from posbias import DecomposeOptions
from posbias.decomposition.decomposition import decompose
from posbias.registry import split_literals
from posbias.results.records import read_record

FLAGS = ["--length", 8, "--count", 2, "--kinds", "probability"]


def test_decompose_saves_what_the_library_finds_and_its_report_can_be_redrawn(posbias, tiny_llama, tmp_path):
    chosen = "no_rope,window(width=3)"
    result = posbias("decompose", tiny_llama, *FLAGS, "--interventions", chosen, "--out", tmp_path / "run", "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    record = read_record(tmp_path / "run")
    model = pb.load_model(tiny_llama)
    prompts = pb.load_prompts("default", model, n_positions=8, count=2, seed=0)
    options = DecomposeOptions(interventions=split_literals(chosen), kinds=("probability",))
    found = decompose(model, prompts, options=options)
    for entry in found.counterfactuals:
        for kind, rows in entry.profiles.items():
            name = f"changed/{entry.name}/measured/{kind}"
            np.testing.assert_array_equal(record.arrays[name], rows)
            np.testing.assert_array_equal(printed["arrays"][name], rows)
    assert record.verb == "decompose"
    assert [entry["name"] for entry in record.scalars["interventions"]] == split_literals(chosen)
    assert record.resolved["command"].startswith("posbias decompose")
    assert not (tmp_path / "run" / "parts").exists()
    (tmp_path / "run" / "report.html").unlink()
    assert posbias("report", tmp_path / "run").returncode == 0
    assert 'class="chart"' in (tmp_path / "run" / "report.html").read_text()
    together = posbias("report", tmp_path / "run", tmp_path / "run", "--out", tmp_path / "both")
    assert together.returncode == 2
    assert "one at a time" in together.stderr


def test_bad_use_is_one_line_and_leaves_nothing(posbias, tiny_llama, tmp_path):
    for flags, message in (
        (["--interventions", "no_rop"], "unknown intervention 'no_rop'"),
        (["--interventions", ""], "no intervention given"),
        (["--interventions", "no_rope,no_rope"], "given 2 times"),
        (["--interventions", "window(width=0)"], "width must be a whole number >= 1"),
        (["--length", 2], "at least 3 positions, got 2"),
        (["--interventions", "no_alibi"], "intervention no_alibi left posbias after 0.1.0"),
    ):
        result = posbias("decompose", tiny_llama, *FLAGS, *flags, "--out", tmp_path / "run")
        assert result.returncode == 2, result.stderr
        assert message in result.stderr
        assert len(without_notes(result.stderr)) == 1
        assert not (tmp_path / "run").exists()
