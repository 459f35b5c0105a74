"""Answers by vLLM in this process are those of `LocalResponder`, from a stand-in with vLLM's public interface.

vLLM itself cannot be installed beside the versions that the tests need: what it computes is not tried here.
"""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import posbias as pb
from evaluation import vllm_stub
from evaluation.replies import generated, scored
from posbias import LocalResponder, RunError, UsageError
from posbias.cli.app import app
from posbias.evaluation.responders import Request, VllmResponder
from posbias.evaluation.responders.base import SKIPPED
from posbias.runs.records import read_record


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in under vLLM's name."""
    vllm_stub.calls.clear()
    monkeypatch.setitem(sys.modules, "vllm", vllm_stub)
    monkeypatch.setattr("posbias.evaluation.responders.vllm.find_spec", lambda name: name)
    return vllm_stub


def requests(model: Path, max_tokens: int = 12) -> list[Request]:
    """Prompts of several lengths; stop texts that the model writes at once, later, and never."""
    prompts = ["The moor was wide and dark", "A boat", "Ann went to sea", "x", "Rain, rain"]
    plain = [Request(prompt, answer=f" {prompt[:3]}", max_tokens=max_tokens) for prompt in prompts]
    texts = [response.text for response in generated(LocalResponder(model), plain)]
    stops = [texts[0][:1], texts[1][2:3], "never", texts[3][4:6], texts[4][-1:]]
    stopping = [
        Request(prompt, answer="q", max_tokens=max_tokens, stop=(stop,))
        for prompt, stop in zip(prompts, stops, strict=True)
    ]
    return [*plain, *stopping]


def test_texts_and_scores_are_those_of_the_local_responder(vllm, tiny_llama):
    asked, local, there = requests(tiny_llama), LocalResponder(tiny_llama), VllmResponder(tiny_llama)
    for ours, theirs in zip(there.respond(asked, score=True), local.respond(asked, score=True), strict=True):
        assert ours.response == theirs.response
        assert ours.score.logprobs == pytest.approx(theirs.score.logprobs, abs=1e-4)
        assert ours.score.ranks == theirs.score.ranks
    assert vllm.calls[:2] == [len(asked), len(asked)]  # all prompts at once
    assert sum(vllm.calls[2:]) < len(asked)


def test_an_answer_that_begins_with_blank_lines_or_thoughts_goes_on_behind_them(vllm, tiny_llama, monkeypatch):
    words = iter("")

    def spoken(self, tokens):
        row = vllm_stub.torch.zeros(len(tokens), 300)
        row[-1, self.tokenizer(next(words))["input_ids"][0]] = 1.0
        return row.log_softmax(-1)

    monkeypatch.setattr(vllm_stub.LLM, "_logprobs", spoken)
    there = VllmResponder(tiny_llama)
    words = iter("\n" + "\n\nyes\nno")
    (response,) = generated(there, [Request("Is it?", max_tokens=8, stop=("\n",))])
    assert (response.text, response.finish, response.tokens) == ("\n\nyes", "stop", 6)
    words = iter("<think>a\n" + "<think>a\nb</think> so\n")
    (response,) = generated(there, [Request("Is it?", max_tokens=len("<think>a\nb</think> so\n"), stop=("\n",))])
    assert (response.text, response.thoughts, response.finish) == (" so", "a\nb", "stop")


def test_what_does_not_fit_is_skipped_and_a_scored_answer_needs_a_token_more(vllm, tiny_llama):
    there = VllmResponder(tiny_llama)
    fits, full = Request("a" * 60, answer="bcd", max_tokens=4), Request("a" * 60, answer="bcde", max_tokens=4)
    assert [reply.response.finish for reply in there.respond([fits, full], score=True)] == ["length", SKIPPED]
    assert scored(there, [fits, full])[1] is None
    assert generated(there, [full])[0].finish == "length"


def test_the_command_says_what_ran_and_what_is_missing(vllm, long_llama, tmp_path, monkeypatch):
    command = ["evaluate", str(long_llama), "--task", "key_value(pairs=2)", "--count", "6", "--max-tokens", "4"]
    here, there = tmp_path / "here", tmp_path / "there"
    for more in (["--out", str(here)], ["--vllm", "--dtype", "float32", "--out", str(there)]):
        done = CliRunner().invoke(app, [*command, *more])
        assert done.exit_code == 0, done.output
    local, by_vllm = read_record(here), read_record(there)
    described = by_vllm.resolved["responder"]
    assert (described["vllm"], described["model"]["source"]) == (vllm.__version__, "long-llama")
    assert described["model"]["dtype"] == "float32"
    for name, table in local.arrays.items():
        assert by_vllm.arrays[name] == pytest.approx(table, abs=1e-4, nan_ok=True), name
    refused = CliRunner().invoke(app, [*command, "--vllm", "--device", "cpu"])
    assert str(refused.exception).startswith("--device and --max-memory go without --vllm")
    monkeypatch.setattr("posbias.evaluation.responders.vllm.find_spec", lambda name: None)
    missing = CliRunner().invoke(app, [*command, "--vllm"])
    assert str(missing.exception) == "answers by vLLM need the vllm package: pip install vllm"


def test_what_vllm_raises_is_one_line(vllm, tiny_llama, monkeypatch):
    with pytest.raises(UsageError, match=r"vllm: dtype .*float64"):
        VllmResponder(tiny_llama, dtype="float64")
    with pytest.raises(UsageError, match="allowed: a hub id, a directory or 'demo', got 'config:"):
        VllmResponder(f"config:{tiny_llama}")
    with pytest.raises(UsageError, match=r"vllm cannot run 'tiny-llama': .*unexpected keyword argument"):
        VllmResponder(tiny_llama, engine_options={"no_such": 1})
    there = VllmResponder(tiny_llama)
    monkeypatch.setattr(there._engine, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(RunError, match="vllm fails: division by zero"):
        generated(there, [Request("a")])


def test_methods_inside_a_model_do_not_go_with_it(vllm, long_llama):
    options = pb.EvaluateOptions(count=6, positions="0", max_tokens=2, methods=("temperature(scale=2.0)",))
    with pytest.raises(UsageError, match="acts inside a model"):
        pb.evaluate([VllmResponder(long_llama)], "key_value(pairs=2)", options=options)
