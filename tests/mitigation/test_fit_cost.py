"""What a fit by gradient takes of memory: announced as an upper bound, kept within what is allowed, or refused."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import FitOptions, UsageError, fit, load_model
from posbias.measurement.work import peak_tensor_bytes
from posbias.mitigation.fitting.base import Calibration, fit_of
from posbias.mitigation.fitting.gradient_fit import GradientFit, StepCost
from posbias.tasks.language import LANGUAGE_TASKS


@pytest.fixture(scope="module")
def model(long_llama):
    return load_model(str(long_llama))


@pytest.fixture(scope="module")
def text():
    generator = np.random.default_rng(1)
    return [generator.integers(40, 80, 32) for _ in range(4)]


def preflight_fit(method, model, calibration, text, **how):
    return fit_of(method).preflight(Calibration(model, calibration, text), **how)


def examples(model, pairs):
    task = LANGUAGE_TASKS.parse(f"key_value(pairs={pairs})")
    return list(task.examples(model.tokenizer, count=4, positions=(0, pairs - 1)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("key_bias", {}),
        ("key_bias", {"penalty": 0.0}),
        ("key_bias", {"checkpointing": True}),
        ("key_bias", {"from_question": True}),
        ("context_bias", {}),
        ("key_bias", {"batch": 6}),
        ("adapter", {"batch": 5}),
        ("adapter(targets='all')", {"batch": 4, "together": 2}),
        ("adapter(rank=16, targets='all')", {"batch": 4, "together": 2, "checkpointing": True}),
    ],
)
def test_the_estimate_is_an_upper_bound_of_what_the_fit_takes(model, text, method, options):
    # Short prompts, to which what does not grow with them matters most, are enough for one fit of each kind.
    for pairs in (2, 8) if options in ({}, {"batch": 5}) else (8,):
        check_bound(model, text, method, options, pairs=pairs)


def check_bound(model, text, method, options, *, pairs):
    calibration, asked = examples(model, pairs), FitOptions(steps=5, **options)
    together = asked.together or fit_of(method).settled(asked).batch
    found = fit_of(method).estimate(Calibration(model, calibration, text), asked).of(together)
    taken = peak_tensor_bytes(lambda: fit(method, model, calibration, text=text, options=asked), model.device)
    assert taken <= found.passes_bytes, "with the headroom"
    assert found.passes_bytes < 4 * taken, "and not far from it"


def test_conversations_are_estimated_with_the_text_that_a_penalty_reads(model, text):
    calibration, options = examples(model, 2), FitOptions(steps=5)
    conversations = [np.arange(40, 80).repeat(10)]
    how = fit_of("key_bias")
    plain, chat = (
        how.estimate(Calibration(model, calibration, text, spoken), options) for spoken in ((), conversations)
    )
    assert chat.window > plain.window, "the longest of both"
    assert chat.windows == plain.windows == 1
    alike = how.estimate(Calibration(model, calibration, text, [text[0]]), options)
    assert (alike.window, alike.windows) == (plain.window, 2), "windows of one length run together"
    assert how.passes(4, 2, options, texts=2) - how.passes(4, 2, options) == 4 * options.steps


def test_a_fit_that_does_not_fit_is_refused_or_computes_layers_again(model, text, capsys):
    calibration, options = examples(model, 8), FitOptions(steps=3)
    plain, again = (
        fit_of("key_bias").estimate(Calibration(model, calibration, text), replace(options, checkpointing=each)).of(1)
        for each in (False, True)
    )
    assert again.passes_bytes < plain.passes_bytes
    asked = {"options": options, "max_memory": plain.needed(1) + 2**27}
    assert preflight_fit("key_bias", model, calibration, text, **asked) == options
    assert "key_bias is fitted in 3 steps, a prompt each with its backward pass:\nestimate: at most" in (
        capsys.readouterr().err
    )
    with pytest.raises(UsageError, match=r"the fit of key_bias: \d+ positions need up to .* are allowed; try"):
        preflight_fit("key_bias", model, calibration, text, options=options, max_memory=10**6)


def test_checkpointing_is_turned_on_where_only_so_the_fit_keeps_its_limit(model, text, monkeypatch, capsys):
    calibration, options = examples(model, 8), FitOptions(steps=3)
    found = {}
    for again in (False, True):
        estimate = fit_of("key_bias").estimate(
            Calibration(model, calibration, text), replace(options, checkpointing=again)
        )
        # which differ from one moment to the next
        found[again] = StepCost(replace(estimate.of(1), process_bytes=0, loading_bytes=0))
    monkeypatch.setattr(GradientFit, "estimate", lambda self, given, options: found[options.checkpointing])
    between = (found[False].of(1).needed(1) + found[True].of(1).needed(1)) // 2
    chosen = preflight_fit("key_bias", model, calibration, text, options=options, max_memory=between)
    assert chosen.checkpointing
    assert "layers computed again in the backward pass:" in capsys.readouterr().err


def test_layers_that_are_computed_again_give_the_same_numbers(model, text):
    calibration = examples(model, 2)
    plain, again = (
        fit("key_bias", model, calibration, text=text, options=FitOptions(steps=4, checkpointing=each))
        for each in (False, True)
    )
    assert again.method == plain.method
    assert again.how["answer_loss"] == plain.how["answer_loss"]
    assert again.how["text_loss"] == plain.how["text_loss"]
