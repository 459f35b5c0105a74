"""`posbias predict` with theories of a model: their parameters, intervals, what they find, and the ingredient table.

Every number of the command line is the library's.
"""

import numpy as np
import pytest

import posbias as pb
from posbias import UsageError
from posbias.comparison import Sample, compare_with_prompts
from posbias.comparison.metrics import wasserstein
from posbias.prompts.prompts import PromptSource
from posbias.runs.records import read_record
from posbias.theory import parse_theory
from posbias.theory.power_rollout import INGREDIENTS, ingredients
from theory_calls import power_rollout

LENGTH, COUNT, SEED = 12, 3, 5
FLAGS = ("--length", LENGTH, "--count", COUNT, "--seed", SEED)


@pytest.fixture(scope="module")
def loaded(tiny_llama):
    """The tiny model and the prompts that the flags ask for."""
    model = pb.load_model(str(tiny_llama))
    return model, pb.load_prompts("default", model, n_positions=LENGTH, count=COUNT, seed=SEED)


def run(posbias, tmp_path, *flags):
    """The record of a prediction and what was printed."""
    done = posbias("predict", *flags, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    return read_record(tmp_path / "run"), done.stdout


def assert_profile(record, found):
    """Profile, prompts and the interval's bounds as the library computes them."""
    np.testing.assert_allclose(record.arrays["profile/influence"], found.profile.influence, rtol=1e-10)
    np.testing.assert_allclose(record.arrays["profile/per_prompt"], found.per_prompt, rtol=1e-10)
    assert np.all(record.arrays["profile/low"] <= record.arrays["profile/influence"])
    assert np.all(record.arrays["profile/influence"] <= record.arrays["profile/high"])


def test_parameters_and_intervals_of_the_power_rollout(posbias, tiny_llama, loaded, tmp_path):
    spelled = "power_rollout(form=isotropic,key_path=False,target=probability)"
    record, printed = run(posbias, tmp_path, "--model", tiny_llama, "--theory", spelled, *FLAGS)
    assert_profile(record, power_rollout(*loaded, form="isotropic", key_path=False, target="probability"))
    assert record.resolved["parameters"] == {"form": "isotropic", "key_path": False, "target": "probability"}
    assert record.resolved["theory"] == "power_rollout"
    assert "% [" in printed


def test_scrambled_tokens_in_another_type(posbias, tiny_llama, tmp_path):
    flags = ("--shuffle", "--windows", "starts", "--prompts", "default", "--dtype", "float64", "--device", "cpu")
    record, _ = run(posbias, tmp_path, "--model", tiny_llama, "--theory", "power_rollout", *FLAGS, *flags)
    model = pb.load_model(str(tiny_llama), dtype="float64")
    source = PromptSource("default", "starts", True)
    prompts = pb.load_prompts(source, model, n_positions=LENGTH, count=COUNT, seed=SEED)
    assert record.resolved["prompts"]["sha256"] == prompts.describe()["sha256"]
    assert_profile(record, power_rollout(model, prompts))


def test_ingredients_are_measured_and_set_beside_the_flat_line(posbias, tiny_llama, loaded, tmp_path):
    record, printed = run(posbias, tmp_path, "--model", tiny_llama, "--ingredients", *FLAGS)
    table, measurement = ingredients(*loaded), pb.measure(*loaded, seed=SEED)
    assert record.arguments["theory"] == "power_rollout"
    assert list(record.scalars["ingredients"]) == ["jacobian", "probability"]
    for kind, found in record.scalars["ingredients"].items():
        assert list(found["left_out"]) == ["whole", *INGREDIENTS]
        sample = Sample.of(measurement.per_prompt[kind])
        whole = wasserstein(table["whole"].mean(axis=0), sample.average)
        for name, row in found["left_out"].items():
            theory = "power_rollout" if name == "whole" else f"without_{name}"
            stored = record.arrays[f"trained/theories/{theory}/influence"]
            np.testing.assert_allclose(stored, table[name].mean(axis=0), rtol=1e-10)
            gap = wasserstein(table[name].mean(axis=0), sample.average)
            assert row["distance"]["value"] == pytest.approx(float(gap))
            assert row["distance"]["low"] <= row["distance"]["value"] <= row["distance"]["high"]
            assert row["cost"] is None or row["cost"]["value"] == pytest.approx(float(gap - whole), abs=1e-12)
        expected = compare_with_prompts(table["whole"], sample, generator=np.random.default_rng(0))
        assert found["flat"]["value"] == pytest.approx(expected.flat.value)
    assert "(flat line)" in printed
    assert "is not decided by 3 prompts or seeds" in printed
    assert "without" not in record.resolved["title"]


def test_one_prompt_has_no_interval(posbias, tiny_llama, tmp_path):
    flags = ("--model", tiny_llama, "--theory", "power_rollout", "--length", LENGTH, "--count", 1)
    record, printed = run(posbias, tmp_path, *flags)
    assert "profile/low" not in record.arrays
    assert "[" not in printed.split("report:")[0]


@pytest.mark.parametrize(
    ("theory", "complaint"),
    [
        ("power_rollout(shape=round)", "parameters of power_rollout: form, key_path, target"),
        ("power_rollout(form=round)", "unknown form 'round' of the power rollout; known: diagonal, isotropic"),
        ("power_rollout(target=logits)", "unknown target 'logits' of the power rollout; known: jacobian"),
        ("mean_field(level=last)", "unknown mean-field level 'last'"),
        ("rollout(mixing=1)", "theory rollout takes no parameters"),
        ("astrology(sign=leo)", "unknown theory 'astrology'"),
        ("power_rollout(", "is not a name or a literal call"),
    ],
)
def test_wrong_theories_are_one_line_before_anything_is_loaded(posbias, theory, complaint):
    with pytest.raises(UsageError):
        parse_theory(theory)
    done = posbias("predict", "--model", "no-such-model", "--theory", theory)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--shuffle"], "--shuffle is read with --model only"),
        (["--windows", "starts"], "--windows is read with --model only"),
        (["--dtype", "float64"], "--dtype is read with --model only"),
        (["--device", "cpu"], "--device is read with --model only"),
        (["--ingredients"], "--ingredients is read with --model only"),
        (["--model", "config:demo", "--theory", "mean_field", "--shuffle"], "--shuffle is read with --prompts only"),
        (["--model", "demo", "--ingredients", "--theory", "rollout"], "got theory 'rollout'; allowed: power_rollout"),
        (
            ["--model", "demo", "--ingredients", "--theory", "power_rollout(form=isotropic)"],
            "allowed: power_rollout or power_rollout(target=...)",
        ),
    ],
)
def test_flags_that_would_be_ignored_are_refused(posbias, flags, complaint):
    done = posbias("predict", *flags)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
