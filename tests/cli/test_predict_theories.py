"""`posbias predict` with theories of a model: their parameters, intervals and what they find.

Every number of the command line is the library's.
"""

import numpy as np
import pytest

import posbias as pb
from posbias import UsageError
from posbias.prompts.prompts import PromptSource
from posbias.results.records import read_record
from posbias.theory import parse_theory
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
    spelled = "power_rollout(key_path=False,target=probability)"
    record, printed = run(posbias, tmp_path, "--model", tiny_llama, "--theory", spelled, *FLAGS)
    assert_profile(record, power_rollout(*loaded, key_path=False, target="probability"))
    assert record.resolved["parameters"] == {"key_path": False, "target": "probability"}
    assert record.resolved["theory"] == "power_rollout"
    assert "% [" in printed


def test_scrambled_tokens_in_another_type(posbias, tiny_llama, tmp_path):
    flags = ("--shuffle", "--prompts", "default", "--dtype", "float64", "--device", "cpu")
    record, _ = run(posbias, tmp_path, "--model", tiny_llama, "--theory", "power_rollout", *FLAGS, *flags)
    model = pb.load_model(str(tiny_llama), dtype="float64")
    source = PromptSource("default", shuffle=True)
    prompts = pb.load_prompts(source, model, n_positions=LENGTH, count=COUNT, seed=SEED)
    assert record.resolved["prompts"]["sha256"] == prompts.describe()["sha256"]
    assert_profile(record, power_rollout(model, prompts))


def test_one_prompt_has_no_interval(posbias, tiny_llama, tmp_path):
    flags = ("--model", tiny_llama, "--theory", "power_rollout", "--length", LENGTH, "--count", 1)
    record, printed = run(posbias, tmp_path, *flags)
    assert "profile/low" not in record.arrays
    assert "[" not in printed.split("report:")[0]


@pytest.mark.parametrize(
    ("theory", "complaint"),
    [
        ("power_rollout(form=round)", "parameters of power_rollout: key_path, target"),
        (
            "power_rollout(target=logits)",
            "power_rollout: target must be one of jacobian, probability, logprob, got 'logits'",
        ),
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
