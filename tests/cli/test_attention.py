"""`posbias attention` leaves behind what the library measures, and its report is drawn from that record alone."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

import posbias as pb
from conftest import save_byte_tokenizer
from posbias import AttentionOptions
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from posbias.statistics import Interval
from tiny_families import HYBRIDS, VOCABULARY, shaken_model

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
