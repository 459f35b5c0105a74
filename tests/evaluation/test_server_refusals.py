"""A server that refuses prompts: a few are named, counted and left out; many end the run in its words."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import refused
from evaluation.replies import generated
from evaluation.serving import ONE_BY_ONE, Reply, chat, echo, evaluated, stand_in
from posbias import EvaluateOptions, RunError, ServerResponder, evaluate
from posbias.evaluation.curve import position_curve
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.responders import Request, ServerOptions
from posbias.tasks.language import LANGUAGE_TASKS

FAST = ServerOptions(retries=1, timeout=5.0)
TASK = "key_value(pairs=4)"
FILTER = {"error": {"message": "The prompt triggers the content management policy", "code": "content_filter"}}


def prompts(count: int) -> dict[tuple[str, int | None], str]:
    """Prompts of the task by sample and position of the answer."""
    examples = LANGUAGE_TASKS.parse(TASK).examples(None, count=count, seed=0)
    return {(example.sample, example.gold_position): str(example.prompt) for example in examples}


def at_the_ends(unwanted: set[str], refusal: Reply = (400, {}, FILTER)) -> Callable[[int, str, dict[str, Any]], Reply]:
    """Knows the value of a key that stands first or last, and refuses some prompts."""

    def answer(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][0]["content"]
        if prompt in unwanted:
            return refusal
        key = prompt.rpartition('Key: "')[2].partition('"')[0]
        pairs = json.loads(prompt[prompt.index("{") : prompt.rindex("}") + 1])
        return chat(pairs[key] if list(pairs).index(key) in (0, 3) else "unknown")

    return answer


def found_of(unwanted: set[str], count: int, refusal: Reply = (400, {}, FILTER)) -> Evaluation:
    return evaluated(at_the_ends(unwanted, refusal), TASK, FAST, count=count, together=5)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((400, {}, FILTER), "HTTP 400: The prompt triggers the content management policy; content_filter"),
        ((403, {}, {"error": {"message": "your input was flagged"}}), "HTTP 403: your input was flagged"),
        ((422, {}, {"detail": [{"msg": "no"}]}), "HTTP 422: no"),
        ((200, {}, {"error": {"message": "refused", "code": 400}, "choices": []}),
         "HTTP 200 with an error: refused; 400"),
        (chat("", "content_filter"),
         "HTTP 200 with an error: the answer was ended by a content filter (content_filter)"),
        ((200, {}, {"choices": [{"message": {"role": "assistant"}, "finish_reason": "content_filter: SAFETY"}]}),
         "HTTP 200 with an error: the answer was ended by a content filter (content_filter: safety)"),
        ((200, {}, {"object": "error", "message": "blocked as unsafe content", "code": 400}),
         "HTTP 200 with an error: blocked as unsafe content; error; 400"),
    ],
)  # fmt: skip
def test_refused_prompts_are_named_counted_and_left_out(refusal: Reply, reason: str) -> None:
    texts = prompts(12)
    names = [name for name in texts if name[1] == 1][3:6:2]
    found = found_of({texts[name] for name in names}, 12, refusal)
    rows = [[*dict.fromkeys(sample for sample, _ in texts)].index(sample) for sample, _ in names]
    expected = np.tile([1.0, 0.0, 0.0, 1.0], (12, 1))
    expected[rows, 1] = np.nan
    np.testing.assert_array_equal(found.tables["correct"], expected)
    assert [(row.sample, row.position, row.detail) for row in found.refused] == [
        (sample, 1, reason) for sample, _ in names
    ]
    assert not found.skipped
    curve, complete = found.curves["accuracy"], position_curve(np.delete(expected, rows, axis=0), positions=range(4))
    assert curve.counts == (12, 10, 12, 12)
    assert (curve.n_complete, curve.comparison, curve.shape) == (10, complete.comparison, complete.shape)
    assert curve.middle_loss == complete.middle_loss


def test_past_a_share_refused_prompts_end_the_run() -> None:
    texts = prompts(12)
    names = [name for name in texts if name[1] == 2]
    with pytest.raises(RunError, match=r"refuses 5 of 48 prompts so far; at most 10% .*position 2: HTTP 400"):
        found_of({texts[name] for name in names[:5]}, 12)
    assert len(found_of({texts[name] for name in names[:4]}, 12).refused) == 4  # 8 %
    assert len(found_of({texts[name] for name in names[:2]}, 2).refused) == 2  # 25 %, but two
    with pytest.raises(RunError, match="refuses 3 of 12"):
        found_of({texts[name] for name in names[:3]}, 3)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((429, {}, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}), "quota"),
        ((401, {}, {"error": {"message": "wrong key"}}), "wrong key; OPENAI_API_KEY is not set, so no key"),
        ((402, {}, {"error": {"message": "Insufficient Balance"}}), "Insufficient Balance"),
        ((404, {}, {"detail": "The model `m` does not exist."}), "The model `m` does not exist."),
        ((200, {}, {"error": {"message": "no credits", "code": 402}}), "HTTP 200 with an error: no credits"),
        ((307, {"Location": "/v1/chat/completions/"}, {}), "it sends requests on to /v1/chat/completions/"),
    ],
)
def test_what_no_prompt_will_change_ends_the_run_at_once(refusal: Reply, words: str) -> None:
    with stand_in(refusal) as server, refused("refuses: HTTP", words, error=RunError):
        responder = ServerResponder(server.address, "m", ONE_BY_ONE)
        generated(responder, [Request(f"q{index}") for index in range(5)])
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ((500, {}, {"error": {"message": "System role not supported"}}), "HTTP 500: System role not supported"),
        ((503, {}, {"error": {"message": "Loading model"}}), "HTTP 503: Loading model"),
        ((502, {}, b"<html>Bad gateway</html>"), "HTTP 502: <html>Bad gateway</html>"),
        ((429, {}, {"error": {"message": "Rate limit reached"}}), "HTTP 429: Rate limit reached"),
        ((500, {}, b""), "failed 2 times: HTTP 500;"),
        ((200, {}, {"error": {"message": "Provider returned error"}}), "with an error: Provider returned error"),
        ((200, {}, {"choices": [{"error": {"message": "upstream"}}]}), "with an error: upstream"),
        ((200, {}, {"error": "overloaded"}), "with an error: overloaded"),
        ((200, {}, {"detail": "still loading"}), "with an error: still loading"),
        (chat("half", "error"), "the answer was ended by an error"),
        ((408, {}, {}), "HTTP 408"),
        ((200, {}, b"<html>"), "malformed answer"),
        ((200, {}, {}), "malformed answer"),
    ],
)
def test_what_may_pass_is_tried_again_and_ends_in_the_servers_words(failure: Reply, words: str) -> None:
    def answer(index: int, _path: str, _body: dict[str, Any]) -> Reply:
        return failure if index < 3 else chat("to all")

    with stand_in(answer) as server:
        responder = ServerResponder(server.address, "m", FAST)
        with refused(words, error=RunError):
            generated(responder, [Request("q")])
        assert len(server.asked) == 2
        assert generated(responder, [Request("q")])[0].text == "to all"
        assert len(server.asked) == 4
    assert responder.describe()["retried"] == 2


def test_a_server_that_asks_to_wait_too_long_is_not_asked_again() -> None:
    failure = (429, {"Retry-After": "9999"}, {"error": {"message": "later"}})
    with stand_in(failure) as server, refused("HTTP 429: later; it asks to wait (Retry-After 9999)", error=RunError):
        generated(ServerResponder(server.address, "m", FAST), [Request("q")])
    assert len(server.asked) == 1


def test_one_refused_prompt_does_not_end_scoring() -> None:
    scores = echo(["q", " x", "!"], [None, -0.5, -0.1], [None, {}, {}])

    def answer(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        return (400, {}, FILTER) if body["prompt"].startswith("bad") else scores

    asked = [Request(prompt, answer=" x") for prompt in ("bad", "q", "bad too", "q")]
    with stand_in(answer) as server:
        responder = ServerResponder(server.address, "m", replace(ONE_BY_ONE, kind="text"))
        replies = responder.respond(asked, generate=False, score=True)
    assert [None if reply.score is None else reply.score.logprob for reply in replies] == [None, -0.5, None, -0.5]
    assert [reply.response and reply.response.finish for reply in replies] == ["refused", None, "refused", None]
    assert responder.scores is True


def test_a_server_that_was_never_reached_is_given_up_within_seconds() -> None:
    with stand_in(chat("x")) as server:
        responder = ServerResponder(server.address, "m", FAST)
        generated(responder, [Request("q")])
    begin = time.monotonic()
    with pytest.raises(RunError, match=r"failed \d+ times: cannot be reached"):  # by the clock
        generated(ServerResponder(server.address, "m", ServerOptions(retries=1000)), [Request("q")])
    assert time.monotonic() - begin < 10
    all_retries = ("failed 2 times: cannot be reached", "of 2 answers asked together 0 are")  # it was there
    with refused(*all_retries, error=RunError):
        generated(responder, [Request("another"), Request("and more")])


def test_refused_prompts_stay_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    texts = prompts(8)
    first = {text for (_, position), text in texts.items() if position == 0}
    options = EvaluateOptions(count=8, together=2, directory=tmp_path, resume=True)
    with stand_in(at_the_ends(first)) as server:
        with pytest.raises(RunError, match="refuses 4 of 32"):
            evaluate(ServerResponder(server.address, "m", FAST), TASK, options=options)
        server.answer = at_the_ends(set())
        found = evaluate(ServerResponder(server.address, "m", FAST), TASK, options=options)
    assert found.reused == 2  # of the chunk before the one that ended the run
    assert len(found.refused) == 2


def test_refused_prompts_stand_first_on_paper_and_past_a_share_end_the_command(posbias: Any, tmp_path: Path) -> None:
    texts = prompts(8)
    first = {text for (_, position), text in texts.items() if position == 0}
    names = list(texts)[:2]
    flags = ["--served-model", "m", "--task", TASK, "--count", 8, "--out"]
    with stand_in(at_the_ends({texts[name] for name in names})) as server:
        result = posbias("evaluate", "--server", server.address, *flags, tmp_path / "few")
        assert result.returncode == 0, result.stderr
        at = "(position 0: 1, position 1: 1)"
        notice = f"2 of 32 prompts were refused by the server and are left out of every curve {at}."
        assert " ".join(result.stdout.split()).startswith(f"Notice: {notice}")
        document = json.loads((tmp_path / "few" / "record.json").read_text())
        assert [(row["sample"], row["position"]) for row in document["scalars"]["unjudged"]] == names
        page = (tmp_path / "few" / "report.html").read_text()
        assert 0 < page.index(notice) < page.index('<ol class="verdict">')
        assert f"sample {names[0][0]}, position 0: HTTP 400: The prompt triggers" in page
        server.answer = at_the_ends(first)
        result = posbias("evaluate", "--server", server.address, *flags, tmp_path / "many")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "the server refuses 8 of 32 prompts so far" in result.stderr
    error = json.loads((tmp_path / "many" / "record.json").read_text())["error"]
    assert "position 0: HTTP 400: The prompt triggers the content management policy" in error
