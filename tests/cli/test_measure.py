"""`posbias attention` and `train` leave what the library finds; every verb says what bounds the trust in a model."""

import dataclasses
import html
import json
from collections.abc import Mapping

import numpy as np
import pytest

import posbias as pb
from conftest import save_byte_tokenizer
from posbias import AttentionOptions, load_model, train
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from posbias.results.records import read_record
from posbias.statistics import Interval
from posbias.training.study import load_study
from tiny_families import CONFIGS, HYBRIDS, VOCABULARY, shaken_model

ROLLOUTS = {"rollout", "attention_only", "norm_weighted"}


@pytest.mark.parametrize("name", ["jamba", "qwen3_next"])
def test_attention_of_a_hybrid_is_measured_without_its_rollouts(posbias, tmp_path, name):
    model, run = tmp_path / "hybrid", tmp_path / "run"
    config = HYBRIDS[name]()
    config.vocab_size = 300
    random_network(config, seed=0).save_pretrained(model)
    save_byte_tokenizer(model)
    result = posbias("attention", model, "--length", 24, "--count", 1, "--out", run)
    assert result.returncode == 0, result.stderr
    assert "[" not in result.stdout.split("mean [95 %]")[1].split("Layer by layer")[0], "one prompt has no intervals"
    record = pb.load_record(run).record
    assert record.scalars["rollouts"] == []
    assert any("in some layers linear layers mix positions too" in reason for reason in record.scalars["left_out"])
    assert record.arrays["distance/per_prompt"].shape == (1, 1, 4)


def plain_of(value):
    """A statistic with those within it, as plain values."""
    if isinstance(value, Interval):
        return value.as_record()  # an open end takes the other with it
    if dataclasses.is_dataclass(value):
        return {name: plain_of(part) for name, part in vars(value).items()}
    return {name: plain_of(part) for name, part in value.items()} if isinstance(value, Mapping) else value


ROLLED_OUT = {"jamba": set(), "gpt_oss": {"rollout", "attention_only"}}
"""Families that lack rollouts, and what they have."""


@pytest.mark.parametrize("family", ["llama", *ROLLED_OUT])
@pytest.mark.parametrize("count", [1, 3])
def test_stored_statistics_are_the_fresh_ones_field_by_field(family, count, tmp_path):
    model, prompts = shaken_model(family), Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (count, 16)))
    directory = tmp_path / "run"
    options = AttentionOptions(sink_thresholds=(0.1,), directory=directory)
    fresh = pb.attention(model, prompts, options=options)
    stored = pb.load_record(directory)
    assert type(stored) is type(fresh)
    assert stored.rollout_shares.keys() == fresh.rollout_shares.keys() == ROLLED_OUT.get(family, ROLLOUTS)
    np.testing.assert_equal(plain_of(stored), plain_of(fresh))
    assert stored.facts() == fresh.facts()
    assert stored.verdict == fresh.verdict != ()
    with pytest.raises(pb.UsageError, match="holds a finished run of posbias attention"):
        pb.attention(model, prompts, options=options)
    alone = pb.attention(model, prompts, options=AttentionOptions(rollouts=False, directory=directory, overwrite=True))
    assert alone.rollouts == {}
    assert pb.load_record(directory).rollouts == {}


STUDY = """
task: position_copy(target=0, context=6, vocabulary=5)
model: {depth: 1, width: 8, residual: none}
optimiser: adam(learning_rate=1e-2)
train: {steps: 20, batch: 8, window: 5, evaluate_every: 10, examples: 10}
grid: {task.target: [0, 5]}
seeds: 2
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def test_a_study_leaves_a_record_and_models_that_can_be_measured(posbias, study, tmp_path):
    out = tmp_path / "run"
    result = posbias("train", study, "--out", out)
    assert result.returncode == 0, result.stderr
    record = read_record(out)
    assert record.scalars["counts"] == {"done": 4}
    done = train(load_study(study))
    np.testing.assert_array_equal(record.arrays["losses"], [each.losses for each in done.trained.members])
    assert record.arrays["evaluation_steps"].tolist() == [[0, 10, 20]] * 4
    assert record.arrays["evaluations/loss"].shape == (4, 3)
    entry = record.scalars["members"][3]
    assert (entry["name"], entry["model"]) == ("target=5 seed=1", "models/0003")
    flags = ["--prompts", "synthetic", "--length", "6", "--count", "2", "--kinds", "jacobian", "--json"]
    measured = posbias("measure", out / entry["model"], *flags)
    assert measured.returncode == 0, measured.stderr
    described = json.loads(measured.stdout)["resolved"]["model"]
    assert described["provenance"]["name"] == "target=5 seed=1"


def test_the_table_has_a_row_per_point_with_an_interval_over_seeds(posbias, study):
    result = posbias("train", study)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "4 members in 1 stack: 4 done."
    assert lines[1].startswith("Loss at the end: from ")
    header = next(number for number, line in enumerate(lines) if line.split() == ["task.target", "seeds", "loss"])
    assert lines[header + 1].split()[:4] == ["0", "2", "of", "2"]


def test_a_study_of_which_nothing_came_fails_with_a_record(posbias, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("adam(learning_rate=1e-2)", "adam(learning_rate=1e30)"))
    result = posbias("train", path, "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "none of 4 members ended well; the first diverged: the mean loss over steps 0 ... 4 was" in result.stderr
    record = read_record(tmp_path / "run")
    assert record.status == "failed"
    assert record.scalars["counts"] == {"diverged": 4}
    assert [entry["model"] for entry in record.scalars["members"]] == [None] * 4
    assert not (tmp_path / "run" / "models").exists()


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
