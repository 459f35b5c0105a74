"""`posbias verify`, its record and its page, end to end."""

import json

import pytest
import torch

from posbias import Architecture, load_record
from posbias.models.reference.network import ReferenceTransformer, save_reference
from posbias.results.result import report_of
from posbias_papers import claims_record, spelled_mask
from posbias_papers.claims import selected
from published_networks import retrieval_network


@pytest.fixture
def run(posbias):
    return lambda *arguments: posbias("verify", *arguments)


def test_json_is_a_list_of_verdicts_and_nothing_else(run):
    document = json.loads(run("wu2025/theorem-4.5", "--json").stdout)
    assert [entry["claim"] for entry in document] == ["wu2025/theorem-4.5"]
    assert {"claim", "source", "statement", "value", "verdict"} <= set(document[0])
    assert document[0]["verdict"] == "holds with a correction"


def test_text_names_statement_source_number_and_verdict(run):
    text = run("birth-2603.10123/claim-2-dead-zone").stdout
    for part in ("FAILS AS STATED", "dead zone", "abstract", "0.1337", "sharper", "fails as stated: 1"):
        assert part in text


def test_report_has_every_claim_with_the_numbers_behind_it(run, tmp_path):
    out = tmp_path / "claims"
    assert run("birth-2603.10123", "--out", str(out)).returncode == 0
    record = load_record(out).record
    assert record.verb == "verify"
    assert record.status == "done"
    assert record.seeds == {"claims": 0}
    verdicts = record.scalars["verdicts"]
    assert len(verdicts) == 6
    page = (out / "report.html").read_text()
    for entry in verdicts:
        assert entry["claim"] in page
        assert all(name.replace("_", " ") in page for name in entry["numbers"])


def test_a_mask_by_its_spelling(run):
    assert spelled_mask("prefix(length=3)", 6).sum() == 6 * 7 // 2 + 3
    document = json.loads(run("--mask", "causal", "--length", "5", "--json").stdout)
    assert (document[0]["claim"], document[0]["verdict"]) == ("wu2025/centre-nodes", "holds")
    assert "centre nodes: 0)" in document[0]["computed"]


@pytest.fixture(scope="module")
def member(tmp_path_factory):
    """A saved model of vector inputs, as training leaves them."""
    config = retrieval_network(Architecture(2), width=8)
    parameters = dict(ReferenceTransformer(config).network.named_parameters())
    return save_reference(
        tmp_path_factory.mktemp("members") / "0000",
        config,
        parameters=parameters,
        items=torch.eye(8),
        provenance={"study": "a study", "member": 0},
    )


def test_claims_on_a_model_are_linked_to_it(run, member, tmp_path):
    out = tmp_path / "verified"
    flags = ("--model", str(member), "--prompts", "synthetic", "--length", "9", "--count", "2")
    done = run("wu2025", *flags, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "wu2025/theorem-4.1: HOLDS" in done.stdout
    assert "premise NOT MET: mask prefix in every layer (causal)" in done.stdout
    record = load_record(out).record
    assert record.resolved["model"]["provenance"] == {"study": "a study", "member": 0}
    assert len(record.resolved["model"]["weights_sha256"]) == 64
    assert record.resolved["prompts"]["count"] == 2
    assert record.resolved["title"] == "Published claims put to the test on 0000"
    page = (out / "report.html").read_text()
    assert "Premises on this model" in page
    report = report_of(record)
    assert report.verdict[0].startswith("Of 5 published statements: ")
    document = json.loads(run("wu2025/theorem-4.1", *flags, "--json").stdout)
    assert [premise["met"] for premise in document[0]["premises"]] == [True, True, True]
    double = run("wu2025", *flags, "--device", "cpu", "--dtype", "float64", "--out", str(out), "--overwrite")
    assert double.stderr == "model 0000: float64 on cpu\n"
    assert load_record(out).record.resolved["model"]["dtype"] == "float64"


def test_the_page_opens_with_what_fails(verdicts):
    birth = [verdicts[name] for name in selected("birth-2603.10123")]
    record = claims_record(birth, seed=0)
    report = report_of(record)
    assert report.verdict[0] == "Of 6 published statements: 5 hold with a correction and 1 fails as stated."
    assert report.verdict[1].startswith("Fails: With residual connections the middle is a factorial dead zone")
    assert report.sections[0].statements[0].startswith("1/(H-1)! is the k = H term alone")
    assert [row[1] for row in report.summary[0].cells] == ["fails as stated", *["holds with a correction"] * 5]
    for entry in record.scalars["verdicts"]:
        entry["verdict"] = "holds"
    assert report_of(record).verdict == ["All 6 published statements hold."]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["wu2025/theorem-4.1", "--mask", "causal"], "centre-nodes"),
        (["nobody2020"], "posbias: unknown claim or paper 'nobody2020'; known papers"),
        (["--count", "3"], "--count needs --model"),
        (["--model", "demo", "--mask", "causal"], "--mask cannot go with --model"),
        (["--dtype", "float64"], "--dtype needs --model"),
        (["--model", "demo", "--dtype", "bfloat16"], "dtype must be one of float32, float64, got 'bfloat16'"),
        (["nobody", "--model", "demo"], "unknown claim or paper 'nobody'"),
    ],
)
def test_flags_that_do_not_go_together_are_refused_before_a_model_is_loaded(run, flags, complaint):
    assert complaint in run(*flags).stderr
