"""Ordinary text: judged wherever a method may change it, and the page says why where it may not."""

import numpy as np
import pytest

import posbias as pb
from planted import PlantedMethod, PlantedResponder, trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, load_prompts
from posbias.mitigation.fitting import JUDGED_TEXT
from posbias.mitigation.methods.ms_poe import MsPoe
from posbias.mitigation.run import ELSEWHERE, SERVER, UNASKED
from posbias.results.result import report_of

METHODS = {
    "temperature(scale=5.0)": "",
    "ms_poe(first_layer=0)": "",
    "positional_channel(channel=3)": "",
    "repeat_prompt": ELSEWHERE,
    "attention_calibration": ELSEWHERE,
    "key_bias(biases='gamma_key(alpha=1.5)', from_question=True)": ELSEWHERE,
    "context_bias(values=[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])": ELSEWHERE,
}


def options(*methods, documents):
    evaluation = EvaluateOptions(count=2, positions=(0, 1), generate=False)
    return MitigateOptions(
        methods=list(methods), calibration=0, evaluation=evaluation, documents=documents, length=32, short=False
    )


def test_text_is_judged_or_the_page_says_why_not(long_llama):
    record = trial_record(
        "key_value(pairs=2)", LocalResponder(pb.load_model(str(long_llama))), options(*METHODS, documents=16)
    )
    assert {arm["name"]: arm["text_reason"] for arm in record.scalars["arms"][1:]} == METHODS
    before = record.arrays["text/0"]
    shown = [row[5] for row in report_of(record).summary[1].cells][1:]
    for number, (why, cell) in enumerate(zip(METHODS.values(), shown, strict=True), start=1):
        assert (f"text/{number}" in record.arrays) is (not why)
        assert cell == why if why else cell.endswith("]")
        assert why or not np.array_equal(record.arrays[f"text/{number}"], before), "it acts on text"


def test_ms_poe_is_given_a_whole_window_as_one_passage(long_llama):
    model, method = pb.load_model(str(long_llama)), MsPoe(first_layer=0)
    record = trial_record("key_value(pairs=2)", LocalResponder(model), options(method, documents=2))
    text = load_prompts(JUDGED_TEXT, model, n_positions=32, count=2, seed=0)
    found = record.arrays["text/1"]
    for window, nats in zip(text.token_ids, found, strict=True):
        with pb.mitigated(model, method, passages=[(0, len(window))]) as changed:
            logits = changed.outputs(changed.embed(changed.token_tensor([window.tolist()])), list(range(31))).logits[0]
        logprobs = logits.log_softmax(-1).numpy()[np.arange(31), window[1:]]
        assert nats == pytest.approx(-logprobs.mean(), rel=1e-5)


def test_without_windows_or_behind_a_server_the_page_says_so(long_llama):
    responder = LocalResponder(pb.load_model(str(long_llama)))
    record = trial_record("key_value(pairs=2)", responder, options("temperature(scale=5.0)", documents=0))
    assert {arm["text_reason"] for arm in record.scalars["arms"]} == {UNASKED}
    planted = MitigateOptions(methods=[PlantedMethod()], calibration=0, evaluation=EvaluateOptions(count=6))
    record = trial_record("key_value(pairs=2)", PlantedResponder((0.5, 0.5)), planted)
    assert {arm["text_reason"] for arm in record.scalars["arms"]} == {SERVER}
