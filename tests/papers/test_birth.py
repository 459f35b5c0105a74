"""arXiv 2603.10123 again, four layers narrow: the pieces of the experiment, and that verdicts follow the numbers."""

import json

import numpy as np
import pytest

from posbias import UsageError, closed_form
from posbias.comparison.metrics import wasserstein
from posbias_papers import reproduce
from posbias_papers.birth2603.experiment import (
    SIZES,
    BirthSettings,
    Bytes,
    birth_prompts,
    ones_probe_share,
    told_of,
)

TINY = BirthSettings(size="tiny", n_positions=40, initialisations=2, probes=2)


@pytest.fixture(scope="module")
def birth():
    return reproduce("birth-2603.10123", settings=TINY)


def by_sort(birth, sort):
    return [row for row in birth.rows if row["sort"] == sort]


def test_every_case_meets_every_theory_and_the_flat_line(birth):
    theories = by_sort(birth, "theory")
    assert len({(row["model"], row["tokens"]) for row in theories}) == 6
    assert len(theories) == 6 * 8
    for row in theories:
        for metric in ("wasserstein", "log_error"):
            assert row[metric]["low"] <= row[metric]["value"] <= row[metric]["high"]
        assert row["noise"]["mean"] > 0


def test_distances_are_those_of_the_stored_profiles(birth):
    for row in by_sort(birth, "theory"):
        if row["theory"] != "flat":
            stem = f"{row['model']}/{row['tokens']}"
            measured = birth.arrays[f"{stem}/per_initialisation"].mean(axis=0)
            predicted = birth.arrays[f"{stem}/theories/{row['theory']}"]
            assert row["wasserstein"]["value"] == pytest.approx(float(wasserstein(predicted, measured)), abs=1e-12)


def test_the_residual_rollout_is_the_exact_form(birth):
    for stem in ("qwen2/random", "gpt2/text"):
        exact = birth.arrays[f"{stem}/theories/closed_form"]
        np.testing.assert_allclose(birth.arrays[f"{stem}/theories/rollout"], exact, rtol=1e-11)
        np.testing.assert_allclose(exact, closed_form(40, np.arange(40), birth.arrays[f"{stem}/mixing"]), rtol=1e-12)


def test_the_ones_probe_is_blind_on_gpt2_only():
    shares = ones_probe_share(TINY)
    assert shares["gpt2"] < 1e-12
    assert 0.2 < shares["qwen2"] < 5


def test_text_is_bytes_of_the_corpus_and_random_ids_are_within_the_vocabulary():
    text = birth_prompts(TINY, "text")["qwen2"].token_ids
    assert text.shape == (2, 40)
    assert text.max() < 256
    bytes(text[0].astype(np.uint8).tolist()).decode(errors="ignore")
    drawn = birth_prompts(TINY, "random")
    assert drawn["gpt2"].token_ids.max() < SIZES["tiny"]["gpt2"]["vocab_size"]
    assert Bytes()(["a", "é"])["input_ids"] == [[97], [195, 169]]


def test_verdicts_follow_the_numbers(birth):
    """With a rise towards the end put into the rows, the verdict on the U-shape turns."""
    for bend, told in (((0.1, 0.05, 0.2), "a U"), ((-0.1, -0.2, -0.05), "a U by the last position alone")):
        turned = {"last_over_middle": dict(zip(("value", "low", "high"), bend, strict=True))}
        shapes = [{**row, **turned} for row in by_sort(birth, "shape")]
        assert told in told_of(by_sort(birth, "theory"), shapes)[0]


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"size": "huge"}, "small"),
        ({"initialisations": 1}, "initialisations"),
        ({"n_positions": 3}, "20"),
    ],
)
def test_settings_are_refused_by_name(wrong, names):
    with pytest.raises(UsageError, match=names):
        BirthSettings(**wrong)


def test_birth_end_to_end_by_its_flags(posbias, tmp_path):
    options = "--size tiny --length 24 --initialisations 2 --probes 1 --seed 1 --json"
    finished = posbias("reproduce", "birth-2603.10123", *options.split(), "--out", tmp_path / "run")
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["resolved"]["initialisations"] == 2
    assert {row["sort"] for row in document["scalars"]["rows"]} == {"theory", "shape", "rope", "probe"}
    assert document["resolved"]["command"].startswith("posbias reproduce birth-2603.10123 --size tiny")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("nobody-2020",), "unknown paper"),
        (("rollout-2602.16837", "--initialisations", 3), "--initialisations belongs to birth-2603.10123"),
        (("birth-2603.10123", "--size", "huge"), "size must be one of"),
    ],
)
def test_bad_requests_are_usage_errors(posbias, arguments, complaint):
    assert complaint in posbias("reproduce", *arguments).stderr.replace("\n", " ")
