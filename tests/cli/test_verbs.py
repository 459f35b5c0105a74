"""Verbs run end to end, and what they leave behind is read back; help and names."""

import json
import re
import runpy
import sys

import numpy as np
import pytest

import posbias as pb
from behaviour_runs import saved
from conftest import without_notes
from posbias import DesignOptions, UsageError, correlate
from posbias.checks import RESIDUAL_MIXING
from posbias.cli.app import VERBS, command_of
from posbias.evaluation.correlate import InfluenceCorrelation
from posbias.registry import read_literal, split_literals
from posbias.results.records import read_record


def document(result):
    assert result.returncode == 0, result.stderr
    assert without_notes(result.stderr) == []
    return json.loads(result.stdout, parse_constant=pytest.fail)


def test_predict_takes_lists_and_content(posbias):
    printed = document(
        posbias("predict", "--depth", 2, "--heads", 2, "--mask", '["causal", "sliding_window(width=3)"]', "--mixing",
                "[0.5, 0.25]", "--content", "[1.5, -0.5]", "--theory", "rollout_content",
                "--length", 12, "--json")
    )  # fmt: skip
    architecture = pb.Architecture(
        depth=2, heads=2, mask=["causal", "sliding_window(3)"], mixing=[0.5, 0.25], content=[1.5, -0.5]
    )
    expected = pb.predict(architecture, n_positions=12, theory="rollout_content").profile.influence
    np.testing.assert_allclose(printed["arrays"]["profile/influence"], expected, rtol=1e-14)


def test_predict_takes_several_values_and_names_curves_by_what_differs(posbias, tmp_path):
    flags = ["--encoding", "none,rope(base=100.0, head_dim=8)", "--mixing", "0.05,[0.1, 0.3]", "--depth", 2]
    done = posbias("predict", *flags, "--length", 12, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "run")
    names = [
        f"{encoding}, mixing {mixing}"
        for encoding in ("none", "rope(base=100.0, head_dim=8)")
        for mixing in ("0.05", "[0.1, 0.3]")
    ]
    assert list(record.resolved["curves"]) == [f"theories/{name}" for name in names]
    for name in names:
        assert name in done.stdout
        settings = record.resolved["curves"][f"theories/{name}"]
        architecture = pb.Architecture(2, encoding=settings["encoding"], mixing=settings["mixing"])
        expected = pb.predict(architecture, 12).profile.influence
        np.testing.assert_array_equal(record.arrays[f"theories/{name}/influence"], expected)
    assert "RoPE only turns content" in done.stdout
    assert "is the default" not in done.stdout


def test_the_default_mixing_is_a_residual_network_and_is_said(posbias):
    done = posbias("predict", "--depth", 3, "--length", 12)
    printed = document(posbias("predict", "--depth", 3, "--length", 12, "--json"))
    assert "Mixing 0.1 in every layer is the default" in done.stdout
    assert printed["resolved"]["architecture"]["mixing"] == [RESIDUAL_MIXING] * 3
    alone = posbias("predict", "--depth", 3, "--length", 12, "--theory", "attention_only")
    assert "is the default" not in alone.stdout
    designed = pb.design("flat", options=DesignOptions(depth=3, n_positions=12)).architecture
    for stack in (pb.Architecture(depth=3), designed):
        assert stack.layer_mixing.tolist() == [RESIDUAL_MIXING] * 3, "one default wherever it is left out"


def test_measure_then_compare_then_report(posbias, tiny_llama, tmp_path):
    measured, predicted = tmp_path / "measured", tmp_path / "predicted"
    result = posbias("measure", tiny_llama, "--length", 24, "--count", 6, "--kinds", "jacobian(probes=2),logit",
                     "--out", measured)  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Where does the influence lie?" in result.stdout
    found = pb.load_record(measured)
    assert posbias("predict", "--depth", 2, "--length", 24, "--out", predicted).returncode == 0
    compared = document(posbias("compare", predicted, measured, "--kind", "logit", "--json"))
    (block,) = compared["scalars"]["subjects"]["comparison"]["comparisons"]
    expected = pb.compare(pb.predict(pb.Architecture(depth=2, mixing=0.1), 24).profile, found.profiles["logit"])
    assert block["metrics"]["wasserstein"] == pytest.approx(expected.wasserstein, rel=1e-3)
    assert block["flat"]["wasserstein"] == pytest.approx(expected.flat["wasserstein"], rel=1e-3)

    page = (measured / "report.html").read_bytes()
    for flags, reason in (([], "need a directory of their own"), (["--out", measured], "holds a run, whose page")):
        refused = posbias("report", measured, predicted, *flags)
        assert (refused.returncode, reason in refused.stderr) == (2, True), refused.stderr
    assert (measured / "report.html").read_bytes() == page
    both = posbias("report", measured, predicted, "--out", tmp_path / "both")
    assert both.returncode == 0, both.stderr
    assert (tmp_path / "both" / "report.html").is_file()


def test_list_says_which_verbs_a_family_takes(posbias):
    by_name = document(posbias("list", "families", "--json"))["families"]
    assert by_name["llama"] == "every verb"
    assert {"gpt2", "bloom", "gemma3_text"} <= set(by_name)


def test_every_help_has_an_example_and_cuts_no_name_or_sentence(posbias, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert not re.search(r"…|\.\.\.$", posbias("--help").stdout.partition("Commands:")[2], re.M)
    verbs = {(name,): command_of(name) for name in VERBS if name != "models"}
    for words, verb in {**verbs, ("models", "get"): command_of("models").commands["get"]}.items():
        text = posbias(*words, "--help").stdout
        assert "Example" in text
        assert max(map(len, text.splitlines())) <= 80
        assert "…" not in text
        printed = set(text.split())
        for name in (name for parameter in verb.params for name in (*parameter.opts, *parameter.secondary_opts)):
            assert name in printed or not name.startswith("--"), (words, name)


def test_literals_are_parsed_and_never_evaluated():
    assert read_literal("0.5") == 0.5
    assert read_literal("[1, 'a']") == [1, "a"]
    assert read_literal("decay(rate=0.5)") == "decay(rate=0.5)"
    with pytest.raises(UsageError, match="is not a list"):
        read_literal("[__import__('os')]")
    assert split_literals("jacobian(probes=2, probe='ones'),logit") == ["jacobian(probes=2, probe='ones')", "logit"]


def test_the_demo_is_copied_into_a_new_directory(posbias, tmp_path, monkeypatch):
    converted = tmp_path / "cache"
    converted.mkdir()
    (converted / "config.json").write_text("{}")
    monkeypatch.setattr("posbias.models.loading.fetch_demo", lambda: converted)
    got = posbias("models", "get", "demo", "--out", tmp_path / "copy" / "demo", "--json")
    assert json.loads(got.stdout)["directory"] == str(tmp_path / "copy" / "demo")
    assert [path.name for path in (tmp_path / "copy").rglob("*")] == ["demo", "config.json"]
    again = posbias("models", "get", "demo", "--out", tmp_path / "copy" / "demo")
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)


def test_a_record_names_the_command_alike_however_it_was_started(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "posbias.__main__", raising=False)  # another test may have imported it
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python -m posbias", "predict", "--length", "8", "--out", "run"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("posbias", run_name="__main__", alter_sys=True)
    assert read_record(tmp_path / "run").resolved["command"] == "posbias predict --length 8 --out run"


def test_the_command_reads_audits_and_their_behaviour_and_saves_what_it_prints(posbias, tmp_path):
    saved().save(tmp_path / "audit" / "behaviour")
    saved(model="other").save(tmp_path / "other")
    result = posbias("correlate", tmp_path / "audit", tmp_path / "other", "--out", tmp_path / "tied")
    assert result.returncode == 0, result.stderr
    assert "rank correlation" in result.stdout
    record = pb.load_record(tmp_path / "tied")
    again = correlate([saved(), saved(model="other")])
    assert record.pooled == again.pooled
    refused = posbias("correlate", tmp_path, "--out", tmp_path / "none")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("plain", "held", "begins", "says"),
    [
        (0.4, None, "It is not established that", "answered better: rank correlation 0.400 [0.300, 0.500] over 10"),
        (0.6, None, "Positions with more influence are answered better", "position alone may explain it"),
        (0.6, 0.7, "Positions with more influence are answered better", "beyond position and ends: rank correlation"),
        (-0.6, None, "Positions with more influence are answered worse", "-0.600 [-0.700, -0.500]"),
    ],
)
def test_the_verdict_says_whether_what_weighs_is_used(plain, held, begins, says):
    """What is established here has a size of at least .5."""
    result = correlate([saved(), saved(model="other")])
    entry = next(entry for entry in result.record.scalars["pooled"] if entry["source"] == "measured")
    for found in entry["correlations"]["accuracy"]["correlations"]:
        value = {"nothing": plain, "position_and_ends": held}.get(found["controlled"])
        if value is not None:
            interval = {"value": value, "low": value - 0.1, "high": value + 0.1}
            found.update(value=interval, established=abs(value) >= 0.5)
    (verdict,) = InfluenceCorrelation.from_record(result.record).verdict
    assert verdict.startswith(begins)
    assert says in verdict
