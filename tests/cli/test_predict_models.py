"""`posbias predict --model` on a saved reference model: every theory that has to do with it, with its record."""

import json

import numpy as np
import pytest
import torch

from conftest import without_notes
from posbias import Architecture, load_model
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
