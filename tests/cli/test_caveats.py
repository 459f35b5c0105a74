"""A family's word on its models, and a theory's on its limits, stand in what every verb prints and in its report."""

import html

import pytest
import torch
import transformers

from posbias import load_model
from posbias.results.records import read_record

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
    config = transformers.FalconConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, pad_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        transformers.FalconForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A tiny Llama whose initialiser draws large weights: logits of variance 4."""
    directory = tmp_path_factory.mktemp("models") / "large"
    config = transformers.LlamaConfig(
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2),
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        initializer_range=0.25,
    )
    config.architectures = ["LlamaForCausalLM"]
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
