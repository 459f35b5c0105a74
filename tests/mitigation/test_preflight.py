"""What a run will take is said before it begins, and what cannot be done is refused before anything is."""

import re

import pytest

import posbias as pb
from evaluation.serving import chat, stand_in
from planted import trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, ServerResponder, UsageError
from posbias.evaluation.responders import ServerOptions
from posbias.mitigation.trial import preflight
from posbias.mitigation.trial.plan import plan_trial
from posbias.tasks.language import LANGUAGE_TASKS

TASK = LANGUAGE_TASKS.parse("key_value(pairs=3)")


def options(*methods, **further):
    evaluation = EvaluateOptions(count=2, positions=(0, 2), generate=further.pop("generate", False), max_tokens=4)
    return MitigateOptions(methods=list(methods), evaluation=evaluation, **{"calibration": 0, **further})


def said(responder, given, capsys):
    capsys.readouterr()
    preflight.announce(plan_trial(responder, TASK, given))
    return capsys.readouterr().err.splitlines()[-1]


def test_ordinary_text_and_short_forms_are_in_the_estimate(long_llama, monkeypatch, capsys):
    responder = LocalResponder(pb.load_model(str(long_llama)))
    longest = max(example.n_tokens for example in TASK.examples(responder.tokenizer, count=2))
    cost = {"seconds": 1000.0, "seconds_per_prompt": 100.0, "seconds_per_pass": float(longest)}
    monkeypatch.setattr(preflight, "preflight_answers", lambda *_, **__: cost)
    given = options(
        "temperature(scale=0.3)", "attention_calibration(together=True)", documents=5, length=32, generate=True
    )
    line = said(responder, given, capsys)
    # One second a token: the unchanged model and a method read text, and nobody decodes longer than he reads.
    assert f"ordinary text: {5 * 32 * (1 + 1) / 60:.0f} min" in line
    short = max(
        example.n_tokens
        for example in LANGUAGE_TASKS.parse("key_value(pairs=2)").examples(responder.tokenizer, count=2)
    )
    assert short < longest
    assert f"short forms of the task: {2 * 2 * short * (1 + 1 + 3) / 60:.0f} min" in line
    line = said(responder, options("attention_calibration(together=True)", documents=0, short=False), capsys)
    assert "text" not in line
    assert "short" not in line


def test_requests_and_tokens_of_a_server_are_said_before_and_are_those_that_come(long_llama, capsys):
    tokenizer = pb.load_model(str(long_llama)).tokenizer
    methods = ("repeat_prompt", "self_consistency(draws=2)")
    given = options(*methods, generate=True)
    with stand_in(lambda *_: chat("nothing")) as server:
        answers = ServerOptions(price_in=1e6, price_out=2e6)
        trial_record(TASK, ServerResponder(server.address, "m", answers, tokenizer=tokenizer), given)
        asked = [body["messages"][0]["content"] for body in server.asked]
        told = capsys.readouterr().err.splitlines()[0]
        plain = said(ServerResponder(server.address, "m"), given, capsys)
    total, unchanged, tokens, generated = (
        int(found.replace(",", ""))
        for found in re.match(
            r"estimate: at most (\d+) requests \(unchanged (\d+), .*\), about ([\d,]+) tokens of prompts and at most "
            r"([\d,]+) tokens of answers, which cost at most about",
            told,
        ).groups()
    )
    assert total == len(asked) == len(set(asked)), "each different request once, short forms among them"
    assert unchanged == 2 * 2 + 2 * 2
    exact = sum(len(tokenizer(prompt)["input_ids"]) for prompt in asked)
    assert tokens == pytest.approx(exact, rel=0.02)
    assert generated == 4 * total
    assert f"{sum(map(len, asked)):,} characters of prompts (their tokens are known with" in plain
    assert "cost" not in plain


def test_what_cannot_be_done_is_refused_before_anything_is(long_llama, monkeypatch):
    responder = LocalResponder(pb.load_model(str(long_llama)))
    monkeypatch.setattr("posbias.mitigation.trial.run.preflight", None)
    with pytest.raises(UsageError, match="temperature is fitted: 3 calibration samples given; at least 4 are needed"):
        trial_record(TASK, responder, options("temperature", calibration=3))
    assert responder.processed == 0
    with pytest.raises(UsageError, match=r"by accuracy needs generated answers \(generate\), which are switched off"):
        options("temperature", by="accuracy")
    with pytest.raises(UsageError, match=r"by logprob needs scores of right answers \(score\), which are switched off"):
        MitigateOptions(by="logprob", evaluation=EvaluateOptions(score=False))
    with pytest.raises(UsageError, match="by logprob needs scores, which this server does not give"):
        trial_record(TASK, ServerResponder("http://127.0.0.1:9", "m"), options("repeat_prompt", by="logprob"))
