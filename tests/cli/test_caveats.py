"""A family's word on its models, and a theory's on its limits, stand in what every verb prints and in its report."""

import html

import pytest

from posbias import load_model
from posbias.models.networks import random_network
from posbias.results.records import read_record
from tiny_families import CONFIGS

SHORT = ("--length", "8", "--count", "2", "--kinds", "probability")
COMMANDS = {
    "measure": SHORT,
    "audit": (*SHORT, "--initialisations", "1"),
    "decompose": (*SHORT, "--interventions", "attention_scaled(factor=0.5)"),
}


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    """A tiny Falcon with ALiBi and token ids to measure it on."""
    directory = tmp_path_factory.mktemp("models") / "falcon"
    random_network(CONFIGS["falcon-alibi"](), seed=0).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A tiny Llama whose initialiser draws large weights: logits of variance 4."""
    directory = tmp_path_factory.mktemp("models") / "large"
    config = CONFIGS["llama"]()
    config.initializer_range, config.architectures = 0.25, ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    return f"config:{directory}"


@pytest.mark.parametrize("verb", ["predict", "audit"])
def test_mean_field_says_what_large_logits_leave_to_chance(posbias, large, tmp_path, verb):
    asked = {
        "predict": ("--model", large, "--theory", "mean_field", "--length", "12"),
        "audit": (large, *SHORT, "--initialisations", "2", "--prompts", "synthetic"),
    }
    result = posbias(verb, *asked[verb], "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    (caveat,) = read_record(tmp_path).scalars["caveats"]
    assert f"the mean of {2 if verb == 'audit' else 100} about 0." in caveat
    assert f"\n- {caveat}\n" in result.stdout
    assert f">{caveat}<" in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.mark.parametrize("verb", COMMANDS)
def test_caveats_are_printed_and_reported(posbias, falcon, tmp_path, verb):
    result = posbias(verb, falcon, *COMMANDS[verb], "--prompts", "synthetic", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    caveats = load_model(falcon).describe()["caveats"]
    assert caveats
    for caveat in caveats:
        assert f"\n- {caveat}\n" in result.stdout
        assert f">{caveat}<" in page
