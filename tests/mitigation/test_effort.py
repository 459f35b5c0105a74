"""Tokens that a method takes: every pass of the model counts, a method's own among them, and kept answers as given."""

from dataclasses import replace

import pytest

import posbias as pb
from evaluation.serving import chat, stand_in
from planted import trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, ServerResponder
from posbias.evaluation.responders import ServerOptions, passes
from posbias.evaluation.responders.local import encode_requests
from posbias.evaluation.samples import requests_of, samples_of
from posbias.mitigation import MITIGATIONS
from posbias.report import report_of
from posbias.tasks.language import LANGUAGE_TASKS, locate

TASK = LANGUAGE_TASKS.parse("key_value(pairs=3)")
ASKED = EvaluateOptions(count=2, positions=(0, 2), generate=False)


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch):
    """Every prompt from its first token: then what a method takes has a closed form."""
    monkeypatch.setattr(passes, "FIXED", 1000)


@pytest.fixture(scope="module")
def model(long_llama):
    return pb.load_model(str(long_llama))


@pytest.fixture(scope="module")
def requests(model):
    return requests_of(list(samples_of(TASK, model.tokenizer, ASKED)), TASK, ASKED)


def taken(model, *methods):
    """Tokens of the unchanged model and under each method."""
    given = MitigateOptions(methods=list(methods), calibration=0, evaluation=ASKED, documents=0, short=False)
    record = trial_record(TASK, LocalResponder(model), given)
    assert [effort["requests"] for effort in record.scalars["effort"]] == [4] * (1 + len(methods))
    cells = report_of(record).folded["Every number"][-1].cells
    assert [row[3] for row in cells] == [f"{effort['tokens'] / 4:.4g}" for effort in record.scalars["effort"]]
    return [effort["tokens"] for effort in record.scalars["effort"]]


def lengths(model, requests):
    """Tokens of every prompt, and with all but the last token of its answer, which is not run."""
    encoded = encode_requests(model.tokenizer, requests)
    return [len(one.prompt) for one in encoded], [len(one.prompt) + len(one.answer) - 1 for one in encoded]


ONCE = ("temperature(scale=0.3)", "ms_poe(first_layer=0)")
"""Methods that run a prompt once."""


def test_most_methods_run_every_prompt_once(model, requests, monkeypatch):
    _, whole = lengths(model, requests)
    assert taken(model, *ONCE) == [sum(whole)] * (1 + len(ONCE))
    monkeypatch.setattr(passes, "FIXED", 0)
    shared = taken(model, *ONCE)
    reusing = [True, *(MITIGATIONS.parse(name).shares_cache for name in ONCE)]
    assert reusing == [True, True, False]
    assert [tokens < sum(whole) for tokens in shared] == reusing, "what prompts share is run once, where keys allow it"


@pytest.mark.parametrize("together", [True, False])
def test_calibrated_attention_runs_the_prompt_as_it_is_and_with_dummies(model, requests, together):
    _, whole = lengths(model, requests)
    dummies = 0
    for request, length in zip(requests, whole, strict=True):
        spans, _ = locate(request.prompt, request.passages, model.tokenizer)
        # A pass with dummies goes on from where it first differs.
        dummies += sum(length - begin for begin, _ in (spans[:1] if together else spans))
    method = f"attention_calibration(temperature=0.1, together={together})"
    assert taken(model, method)[1] == 2 * sum(whole) + dummies


def test_generated_tokens_count_with_every_row_that_is_run(model):
    given = MitigateOptions(
        methods=[*ONCE, "self_consistency(draws=3)"],
        calibration=0,
        evaluation=replace(ASKED, generate=True, score=False, max_tokens=3),
        documents=0,
        short=False,
    )
    record = trial_record(TASK, LocalResponder(model), given)
    plain, *once, voted = (effort["tokens"] for effort in record.scalars["effort"])
    assert once == [plain] * len(ONCE)
    assert voted == 3 * plain, "prompts of the same length, three for each"


def test_a_servers_kept_answers_count_as_they_did_when_they_were_given(tmp_path):
    asked = replace(ASKED, generate=True)
    given = MitigateOptions(methods=["question_first(strength=0.0)", "question_first"], calibration=0)
    given = replace(given, evaluation=asked, documents=0, short=False)
    with stand_in(lambda *_: chat("nothing", prompt_tokens=10, tokens=3)) as server:
        responder = ServerResponder(server.address, "m", ServerOptions(cache=tmp_path))
        record = trial_record(TASK, responder, given)
        assert len(server.asked) == 4 + 4, "the first leaves prompts as they are"
    assert [effort["tokens"] for effort in record.scalars["effort"]] == [4 * 13] * 3
    assert responder.usage.prompt_tokens == 8 * 10, "what was paid"
    with stand_in(lambda *_: (200, {}, {"choices": [{"message": {"content": "none"}}]})) as server:
        record = trial_record(TASK, ServerResponder(server.address, "m"), given)
    assert [effort["tokens"] for effort in record.scalars["effort"]] == [None] * 3, "a server that does not count"
