"""`posbias predict --model`, `design` and `explore`, run as a user runs them."""

import json
import re

import numpy as np
import pytest
import torch

import posbias as pb
from conftest import without_notes
from posbias import Architecture, load_model
from posbias.architecture import ENCODINGS, MASKS
from posbias.cli.predict import explore
from posbias.designing.result import TARGETS
from posbias.explorer import app, predicted, spelled
from posbias.models.reference.network import ReferenceTransformer, save_reference
from posbias.results.records import read_record
from published_networks import retrieval_network


@pytest.fixture(scope="module")
def member(tmp_path_factory):
    """A network of vector inputs with residual connections, as training leaves it."""
    config = retrieval_network(Architecture(2, encoding="rope"), width=8, residual=True)
    parameters = dict(ReferenceTransformer(config).network.named_parameters())
    directory = tmp_path_factory.mktemp("members") / "0001"
    return save_reference(directory, config, parameters=parameters, items=torch.eye(8), provenance={"member": 1})


def test_theories_that_read_prompts_say_which(posbias, member, tmp_path):
    out = tmp_path / "run"
    flags = ["--model", member, "--prompts", "synthetic", "--count", 2, "--length", 7]
    done = posbias("predict", *flags, "--theory", "rollout", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    influence = json.loads(done.stdout)["arrays"]["profile/influence"]
    assert sum(influence) == pytest.approx(1)
    record = read_record(out)
    assert record.resolved["model"]["weights_sha256"] == load_model(member).describe()["weights_sha256"]
    assert record.resolved["model"]["provenance"] == {"member": 1}
    assert record.resolved["prompts"]["source"] == "synthetic"
    assert record.resolved["architecture"]["encoding"] == "none"
    assert np.all(np.array(record.resolved["architecture"]["mixing"]) < 1)
    refused = posbias("predict", *flags, "--theory", "power_rollout")
    assert refused.returncode == 2
    assert "no local maps for ReferenceTransformer; give a Hugging Face model, or take the rollout" in refused.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--theory", "rollout_content", "--prompts", "synthetic"], "rollout_content needs the diagonal content"),
        (["--theory", "rollout"], "the model has no tokenizer"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(posbias, member, flags, complaint):
    done = posbias("predict", "--model", member, "--length", 7, *flags)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(without_notes(done.stderr)) == 1


def test_a_target_that_is_missed_is_a_sentence_in_record_page_and_terminal(posbias, tmp_path):
    target = "u_shape"
    flags = ["--depth", 12, "--heads", 8, "--mixing", 0.9, "--length", 128, "--starts", 2, "--strict"]
    result = posbias("design", target, *flags, "--out", tmp_path / "run")
    assert result.returncode == 3
    assert "required W1 <= 0.01 to the target, got 0.0" in result.stderr
    record = read_record(tmp_path / "run")
    assert record.status == "done"
    assert record.scalars["met"] is False
    assert record.scalars["distances"][1]["after"] > record.scalars["tolerance"] == 0.01
    assert record.seeds == {"design": 0}
    page = (tmp_path / "run" / "report.html").read_text()
    for said in (" ".join(result.stdout.split()), " ".join(page.split())):
        assert "The target is not met to W1 0.01: the residual rollout leaves W1 0.0" in said
        assert "a key bias meets any target at one length: --over key_bias" in said
    assert "meets the target" not in result.stdout
    assert posbias("design", target, *flags, "--over", "key_bias").returncode == 0


def test_a_target_that_a_flat_line_meets_is_named(posbias):
    flags = ["--depth", 4, "--length", 64, "--json"]
    shallow = posbias("design", "u_shape(middle=0.95)", *flags)
    assert "So does a flat line: W1 0.0022 at 64 positions." in json.loads(shallow.stdout)["verdict"]


def test_a_models_design_is_measured(posbias, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--dtype", "float64", "--length", "32", "--measured-at", "32,48", "--initialisations", "6"]
    result = posbias("design", "flat", "--model", f"config:{tmp_path}", *flags, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert re.findall("model .*", result.stderr) == [f"model config:{tmp_path.name}: float64 on cpu"]
    assert "Measured at 32 positions on 6 fresh initialisations: W1 to the target 0.0" in result.stdout
    record = read_record(tmp_path / "run")
    assert (record.arguments["device"], record.resolved["model"]["dtype"]) == ("auto", "float64")
    assert [found["n_positions"] for found in record.scalars["measured"]] == [32, 48]
    assert all(found["distance"]["value"] < found["before"]["value"] for found in record.scalars["measured"])
    asked = record.scalars["measured"][0]
    assert asked["distance"]["value"] < 0.03 < 0.08 < asked["before"]["value"]
    assert record.arrays["measured/48/networks"].shape == (6, 48)


def test_everything_registered_can_be_chosen_and_what_the_library_predicts_is_shown():
    shown, defined = app.run()
    columns = defined["asked"].elements
    for name in ("A", "B"):
        values = columns[name].value
        built = pb.Architecture(values["depth"], values["heads"], encoding=values["encoding"])
        distance = pb.compare(pb.predict(built, 512).profile, pb.Profile.uniform(512)).wasserstein
        assert f"{distance:.4f}" in shown[-1].text, name
    for column, sort, registry in (("A", "mask", MASKS), ("B", "encoding", ENCODINGS), ("both", "target", TARGETS)):
        parts = columns[column].elements
        assert {*parts[sort].options} - {"none"} == {*registry} - {"none"}
        for name in registry:  # its parameters are on the page, each under its own name
            assert [*parts[f"{sort}={name}"].elements] == [*registry[name].__dataclass_fields__]


def test_a_target_is_designed_for():
    stacks = {name: pb.Architecture(depth=4, encoding=name) for name in ("none", "alibi")}
    page = predicted(stacks, "u_shape(middle=0.5)", "key_bias", 64).text
    design = pb.design("u_shape(middle=0.5)", "key_bias", options=pb.DesignOptions(4, n_positions=64))
    assert "designed over key_bias" in page
    assert f"{pb.compare(design.profiles[64], pb.Profile.uniform(64)).wasserstein:.4f}" in page
    assert f"{pb.compare(pb.predict(stacks['alibi'], 64).profile, design.profiles[64]).wasserstein:.4f}" in page


def test_a_variant_is_spelled_as_on_the_command_line():
    column = {"depth": 4, "encoding": "decay", "encoding=decay": {"rate": 0.9}, "encoding=rope": {"base": 2.0}}
    assert spelled(column) == {"depth": 4, "encoding": "decay(rate=0.9)"}
    assert spelled({"encoding": "alibi", "encoding=alibi": {"slopes": ""}}) == {"encoding": "alibi"}


def test_without_marimo_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pb.UsageError, match=r"pip install 'posbias\[explore\]'$"):
        explore()
