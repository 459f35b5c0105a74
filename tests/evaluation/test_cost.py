"""What requests will take is said before they begin: near what they take, and refused where it cannot fit."""

from dataclasses import replace

import numpy as np
import pytest

import posbias as pb
from posbias import EvaluateOptions, LocalResponder, ServerResponder, UsageError
from posbias.evaluation import cost as cost_module
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.responders import LocalOptions
from posbias.evaluation.samples import request_samples, samples_of
from posbias.measurement.work import peak_tensor_bytes
from posbias.models.loading import load_tokenizer
from posbias.tasks.language import LANGUAGE_TASKS

TASK = LANGUAGE_TASKS.parse("example_order(shots=12)")
OPTIONS = EvaluateOptions(count=4, positions=(0, 5, 11), max_tokens=4)


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch, long_model):
    """The process of the tests holds hundreds of megabytes beside models of kilobytes, and not always the same."""
    monkeypatch.setattr("posbias.measurement.work.beside_weights", lambda weights: 0)
    monkeypatch.setattr(long_model, "loading_bytes", 0)


@pytest.fixture(scope="module")
def samples(long_model):
    return list(samples_of(TASK, long_model.tokenizer, OPTIONS))


@pytest.mark.parametrize("batch", [1, 8])
def test_the_estimate_is_near_what_requests_take(long_model, samples, batch):
    responder = LocalResponder(long_model, LocalOptions(batch=batch))
    cost = preflight_answers(samples, TASK, OPTIONS, responder)
    taken = peak_tensor_bytes(lambda: request_samples(samples, TASK, OPTIONS, responder), long_model.device)
    expected = (cost["peak_bytes"] - cost["weights_bytes"]) / 1.2
    assert 0.5 * taken < expected < 3 * taken
    assert cost["prompts"] == 12
    assert responder.processed > 0


@pytest.mark.parametrize("max_tokens", [1, 40])
def test_the_answer_counts_once(long_model, samples, monkeypatch, max_tokens):
    lengths, passed = [], []
    calibrate, read = cost_module.calibrate, cost_module.Runner.read

    def calibrating(model, n_positions, work, **rest):
        monkeypatch.setattr(cost_module.Runner, "read", reading)
        work(np.zeros(n_positions, dtype=np.int64))
        monkeypatch.setattr(cost_module.Runner, "read", read)
        lengths.append(n_positions)
        return calibrate(model, n_positions, work, **rest)

    def reading(runner, sequences, origins, **rest):
        passed.append(max(map(len, sequences)))
        return read(runner, sequences, origins, **rest)

    monkeypatch.setattr(cost_module, "calibrate", calibrating)
    preflight_answers(samples, TASK, replace(OPTIONS, max_tokens=max_tokens), LocalResponder(long_model))
    examples = [example for sample in samples for example in sample.examples]
    answer = max(len(long_model.tokenizer(example.target)["input_ids"]) for example in examples)
    longest = max(example.n_tokens for example in examples)
    assert 1 < answer < 40
    assert lengths == [longest + max(0, max_tokens - answer)]
    # The last token of an answer is scored but never run.
    assert max(passed) == longest + max(answer, max_tokens) - 1


def test_prompts_that_will_be_skipped_decide_nothing(long_model, samples):
    longer = LANGUAGE_TASKS.parse("example_order(shots=16)")
    added = list(samples_of(longer, long_model.tokenizer, EvaluateOptions(count=1, positions=(0, 5, 15))))
    alone = preflight_answers(samples, TASK, OPTIONS, LocalResponder(long_model))
    responder = LocalResponder(long_model)
    # Room for the longer prompts, and for all but the last token of what follows them.
    shortest = min(added[0].examples, key=lambda example: example.n_tokens)
    answer = len(long_model.tokenizer(shortest.target)["input_ids"])
    responder.max_positions = shortest.n_tokens + max(4, answer) - 1
    both = preflight_answers([*samples, *added], TASK, OPTIONS, responder)
    assert both["peak_bytes"] == alone["peak_bytes"]
    found = request_samples([*samples, *added], TASK, OPTIONS, responder)
    assert both["prompts"] == sum(int((piece["too_long"] == 0).sum()) for piece in found) == 12
    responder.max_positions += 1
    assert preflight_answers([*samples, *added], TASK, OPTIONS, responder)["prompts"] > 12
    responder.max_positions = 10
    assert preflight_answers(samples, TASK, OPTIONS, responder) == {}


def test_what_cannot_fit_is_refused_before_anything_is_asked(long_model, samples, tmp_path):
    responder = LocalResponder(long_model)
    needed = preflight_answers(samples, TASK, OPTIONS, responder)["peak_bytes"]
    with pytest.raises(UsageError, match=r"are allowed; try prompts of at most \d+ tokens .*or --batch 1") as caught:
        preflight_answers(samples, TASK, replace(OPTIONS, max_memory=needed * 9 // 10), responder)
    assert "\n" not in str(caught.value)
    options = EvaluateOptions(count=2, max_tokens=4, max_memory=1000)
    with pytest.raises(UsageError, match="are allowed; try"):
        pb.evaluate(responder, TASK, options=options)
    assert responder.processed == 0


def test_the_record_tells_the_estimate_and_a_resumed_run_has_nothing_to_estimate(long_model):
    found = pb.evaluate(long_model, "example_order(shots=4)", options=EvaluateOptions(count=1))
    assert found.cost["seconds"] > 0
    assert preflight_answers([], TASK, OPTIONS, LocalResponder(long_model)) == {}


def test_a_servers_tokenizer_counts_lengths_and_finds_places(long_llama):
    tokenizer = load_tokenizer(long_llama)
    server = ServerResponder("http://localhost:9/v1", "none", tokenizer=tokenizer)
    task = LANGUAGE_TASKS.parse("needle(tokens=600, depths=2)")
    options = EvaluateOptions(count=1, max_tokens=2, score=False)
    (sample,) = samples_of(task, server.tokenizer, options)
    lengths = [len(tokenizer(str(example.prompt))["input_ids"]) for example in sample.examples]
    assert [example.n_tokens for example in sample.examples] == lengths
    assert all(540 <= length <= 600 for length in lengths)
    assert preflight_answers([sample], task, options, server) == {}
    told = server.describe()["tokenizer"]
    assert told != ServerResponder("http://localhost:9/v1", "none").describe()["tokenizer"]
    assert len(told) == 64


def test_no_tokenizer_is_one_line(tmp_path):
    with pytest.raises(UsageError, match="has no readable tokenizer"):
        load_tokenizer(tmp_path)
