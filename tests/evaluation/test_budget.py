"""A budget is kept and resumed from, in requests and tokens, against a server on loopback."""

import pytest

from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.evaluation.responders import ServerOptions, ServerResponder

TASK = "key_value(pairs=3)"


def answered(_index, _path, body):
    """The right value, at 100 tokens a prompt and 10 an answer."""
    prompt = body["messages"][0]["content"]
    key = prompt.split('Key: "')[-1].split('"')[0]
    return chat(prompt.split(f'"{key}": "')[1].split('"')[0], prompt_tokens=100, tokens=10)


def asked_until_done(address, tmp_path, **options):
    """Responders of as many calls as it takes, each with the budget, and what the calls said; then the result."""
    settings, spent, said = ServerOptions(cache=tmp_path / "answers"), [], []
    for sitting in range(10):
        server = ServerResponder(address, "m", settings)
        try:
            chosen = EvaluateOptions(count=12, score=False, directory=tmp_path, resume=sitting > 0, **options)
            return evaluate(server, TASK, options=chosen), spent, said
        except RunError as error:
            spent.append(server.counts())
            said.append(str(error))
    raise AssertionError("no end")


@pytest.mark.parametrize(("max_cost", "most"), [("requests=14", 14), ("tokens=1600", 1600)])
def test_a_budget_is_kept_and_the_run_goes_on_with_as_much_again(max_cost, most, tmp_path):
    with stand_in(answered) as server:
        result, spent, said = asked_until_done(server.address, tmp_path, max_cost=max_cost)
        assert len(server.asked) == 36, "no prompt is paid for twice"
    assert len(spent) >= 2
    for counts in spent:
        taken = counts["requests"] if "requests" in max_cost else counts["prompt_tokens"] + counts["generated_tokens"]
        assert 0.5 * most < taken <= most
    assert "ends here, with" in said[0]
    assert "--resume goes on with as much again" in said[0]
    assert "of 12 samples are missing, the others are kept" in said[0]
    assert result.tables["correct"].all()


def test_a_server_that_counts_no_tokens_has_only_a_budget_of_requests(tmp_path):
    def uncounted(*arguments):
        status, headers, content = answered(*arguments)
        return status, headers, {"choices": content["choices"]}

    with stand_in(uncounted) as server:
        responder = ServerResponder(server.address, "m")
        options = EvaluateOptions(count=12, score=False, directory=tmp_path, max_cost="tokens=3000")
        with pytest.raises(RunError, match=r"does not count tokens.*requests=500"):
            evaluate(responder, TASK, options=options)


@pytest.mark.parametrize("text", ["", "2 USD", "0.5", "requests", "requests=0", "tokens=-5", "cost=3"])
def test_budgets_that_say_nothing_are_refused(text):
    with pytest.raises(UsageError, match=r"allowed: requests=500 or tokens=2e6, above 0; money is to be divided"):
        EvaluateOptions(max_cost=text)


def test_a_model_here_costs_nothing(long_model):
    with pytest.raises(UsageError, match="a model in this process has no price"):
        evaluate(long_model, TASK, options=EvaluateOptions(count=1, max_cost="requests=9"))
