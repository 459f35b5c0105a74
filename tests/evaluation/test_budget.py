"""A budget is announced, kept and resumed from, in requests, tokens and money, against a server on loopback."""

import pytest

from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions, RunError, UsageError, evaluate
from posbias.evaluation.options import Budget
from posbias.evaluation.responders import ServerOptions, ServerResponder

TASK = "key_value(pairs=3)"


def answered(_index, _path, body):
    """The right value, at 100 tokens a prompt and 10 an answer."""
    prompt = body["messages"][0]["content"]
    key = prompt.split('Key: "')[-1].split('"')[0]
    return chat(prompt.split(f'"{key}": "')[1].split('"')[0], prompt_tokens=100, tokens=10)


def asked_until_done(address, tmp_path, **options):
    """Responders of as many calls as it takes, each with the budget, and what the calls said; then the result."""
    settings, spent, said = ServerOptions(price_in=3.0, price_out=15.0, cache=tmp_path / "answers"), [], []
    for sitting in range(10):
        server = ServerResponder(address, "m", settings)
        try:
            chosen = EvaluateOptions(count=12, score=False, directory=tmp_path, resume=sitting > 0, **options)
            return evaluate(server, TASK, options=chosen), spent, said
        except RunError as error:
            spent.append(server.counts())
            said.append(str(error))
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("max_cost", "name", "most"),
    [("requests=14", "requests", 14), ("tokens=1600", None, 1600), ("0.006 USD", "cost", 0.006)],
)
def test_a_budget_is_kept_and_the_run_goes_on_with_as_much_again(max_cost, name, most, tmp_path, capsys):
    with stand_in(answered) as server:
        result, spent, said = asked_until_done(server.address, tmp_path, max_cost=max_cost)
        assert len(server.asked) == 36, "no prompt is paid for twice"
    assert len(spent) >= 2
    for counts in spent:
        taken = counts["prompt_tokens"] + counts["generated_tokens"] if name is None else counts[name]
        assert 0.5 * most < taken <= most
    assert f"the budget of {Budget.parse(max_cost).text(most)} ends here" in said[0]
    assert "--resume goes on with as much again" in said[0]
    assert "are missing (about" in said[0]
    announced = capsys.readouterr().err.splitlines()[0]
    assert announced.startswith("12 samples take at most about ")
    assert announced.endswith("it may end before all are answered")
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


@pytest.mark.parametrize("text", ["", "2 dollars", "requests", "requests=0", "0 USD", "tokens=-5", "cost=3", "2,5 USD"])
def test_budgets_that_say_nothing_are_refused(text):
    with pytest.raises(UsageError, match="allowed: requests=500, tokens=2e6, or money such as '2 USD', above 0"):
        EvaluateOptions(max_cost=text)


def test_money_needs_prices_and_a_model_here_costs_nothing(long_model):
    with pytest.raises(UsageError, match="money needs prices per million tokens"):
        evaluate(ServerResponder("http://127.0.0.1:9", "m"), TASK, options=EvaluateOptions(max_cost="2 USD"))
    with pytest.raises(UsageError, match="a model in this process has no price"):
        evaluate(long_model, TASK, options=EvaluateOptions(count=1, max_cost="2 USD"))
