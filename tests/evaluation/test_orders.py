"""Orders of retrieved passages: a planted effect is found with its price, and an order that gains nothing is left."""

import json
import re

import pytest

import posbias as pb
from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions
from posbias.errors import UsageError
from posbias.evaluation.responders import ServerOptions
from posbias.tasks.language import LANGUAGE_TASKS

PASSAGES, SAMPLES = 6, 24
TASK = "documents(file='retrieved.jsonl')"


@pytest.fixture
def retrieved(tmp_path, monkeypatch):
    """Questions whose answer is in the second or third passage that was retrieved; all share the first passage."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for number in range(SAMPLES):
        gold = 1 + number % 2
        texts = [f"passage {rank} of {number}: code {number * 10 + rank}" for rank in range(PASSAGES)]
        documents = [{"text": text, "is_gold": rank == gold} for rank, text in enumerate(texts)]
        answers = [f"code {number * 10 + gold}"]
        lines.append(json.dumps({"question": f"what is asked {number}", "answers": answers, "documents": documents}))
    (tmp_path / "retrieved.jsonl").write_text("\n".join(lines))
    return tmp_path


def at_ends(index, path, body):
    """Repeats the first passage and the last one, rarely all, and says that it kept half of the prompt."""
    passages = re.findall(r"Document \[\d+\] (.*)", body["messages"][-1]["content"])
    if "of 5:" not in passages[0]:
        passages = [passages[0], passages[-1]]
    status, headers, content = chat(" or ".join(passages))
    content["usage"] = {"prompt_tokens": 200, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 100}}
    return status, headers, content


def ask(server, task, **options):
    responder = pb.ServerResponder(server.address, "stand-in", ServerOptions(concurrency=4))
    return pb.evaluate(responder, task, options=EvaluateOptions(**{"count": SAMPLES, "score": False, **options}))


def test_the_order_that_answers_better_is_found_with_what_it_costs(retrieved):
    with stand_in(at_ends) as server:
        found = ask(server, TASK, orders=("given", "question_first", "ends", "reversed"), directory=retrieved / "run")
    means = {entry.name: entry.means[0].value for entry in found.compared}
    rare = 1 / SAMPLES
    second_is_last = 0.5 + rare
    assert means == {"given": rare, "question_first": rare, "ends": second_is_last, "reversed": rare}
    assert found.verdict[0].startswith("Take the order ends: accuracy 0.542")
    prices = found.prices
    assert prices["given"].unit == "characters"
    assert prices["given"].added == prices["ends"].added == 0 < prices["question_first"].added
    assert prices["question_first"].kept < prices["given"].kept  # the question comes before what prompts share
    assert prices["given"].reported == 0.5
    again = pb.load_record(retrieved / "run")
    assert again.verdict == found.verdict
    page = pb.write_report(again, out=retrieved / "page").read_text()
    assert "the server says it kept" in page


def test_the_measured_order_puts_passages_where_the_model_looks(retrieved):
    with stand_in(at_ends) as server:
        ask(server, TASK, positions="all", directory=retrieved / "curve")
        found = ask(server, TASK, orders=("given", "measured('curve')"))
        ask(server, TASK, positions="all", count=8, directory=retrieved / "few")
        with pytest.raises(UsageError, match="shows no order to be better than the one given"):
            ask(server, TASK, orders=("given", "measured('few')"))
    assert found.compared[1].means[0].value == 0.5 + 1 / SAMPLES
    assert found.verdict[0].startswith("Take the order measured('curve')")


def test_an_order_that_gains_nothing_is_left_with_the_samples_that_would_decide(retrieved):
    with stand_in(
        lambda index, path, body: chat("no idea" if index % 2 else body["messages"][-1]["content"])
    ) as server:
        found = ask(server, TASK, orders=("given", "shuffled"))
    leave = "Leave the order given: none is shown to be better. About N samples (--count) would show a rise of N."
    assert re.sub(r"[\d.]*\d", "N", found.verdict[0]) == leave


def test_money_is_of_tokens_read_and_kept(retrieved, long_model):
    options = EvaluateOptions(count=2, max_tokens=2, score=False, orders=("given", "question_first"), prices=(2.0, 1.0))
    found = pb.evaluate(long_model, TASK, options=options)
    for price in found.prices.values():
        assert price.unit == "tokens"
        assert price.money == pytest.approx(price.read * (2 - price.kept) / 1e3)


def test_units_stand_in_the_order_of_the_file_and_in_others(retrieved):
    record = {"units": ["a", "b", "c", "d"], "moved": 1, "question": "which", "answer": "b"}
    more = {"units": ["e", "f", "g"], "moved": 2, "question": "which", "answer": "g"}
    (retrieved / "own.jsonl").write_text("\n".join(map(json.dumps, [record, more])))

    def told(order):
        task = LANGUAGE_TASKS.parse(f"items(file='own.jsonl', order={order!r}, entry='{{text}}')")
        return [(each.text, each.gold_position) for each in task.examples(None, count=2)]

    ends = "\n\nQuestion: which\nAnswer:"
    assert told("given") == [("a\nb\nc\nd" + ends, 1), ("e\nf\ng" + ends, 2)]
    assert told("reversed") == [("d\nc\nb\na" + ends, 2), ("g\nf\ne" + ends, 0)]
    assert told("ends") == [("a\nc\nd\nb" + ends, 3), ("e\ng\nf" + ends, 1)]
    assert told("question_first")[0] == ("Question: which\n\na\nb\nc\nd" + ends, 1)
    assert sorted(told("shuffled")[1][0][:5].split()) == ["e", "f", "g"]
    with pytest.raises(UsageError, match=re.escape("name each of 4 passages once, from 0, got [0, 1, 2]")):
        told([0, 1, 2])


@pytest.mark.parametrize(
    ("task", "orders", "message"),
    [
        (TASK, ("given",), "orders are at least 2, each once"),
        (TASK, ("given", "best"), "order 'best'; allowed: given, question_first, ends, reversed, shuffled, measured"),
        (TASK, ("given", "measured('no')"), "'no'"),
        ("documents()", ("given", "reversed"), "of generated documents given, question_first; others need a file="),
        ("documents(file='retrieved.jsonl', setting='oracle')", ("given", "ends"), "setting 'oracle' has no others"),
        (
            "documents(file='retrieved.jsonl', template='own.txt')",
            ("given", "question_first"),
            "a template says itself",
        ),
        ("items(file='talks.jsonl')", ("given", "ends"), "messages stay where they are"),
        ("key_value(pairs=4)", ("given", "ends"), "orders are of documents(...) or items(...)"),
        ("documents(file='retrieved.jsonl', order='ends')", ("given", "ends"), "without an order of their own"),
    ],
)
def test_what_has_no_such_order_is_refused_in_one_line(task, orders, message, retrieved):
    (retrieved / "own.txt").write_text("{documents}\n{question}")
    messages = [{"role": "user", "content": text} for text in ("a", "b", "c")]
    (retrieved / "talks.jsonl").write_text(json.dumps({"messages": messages, "moved": 0, "answer": "a"}))
    with stand_in(at_ends) as server, pytest.raises(UsageError, match=re.escape(message)):
        ask(server, task, orders=orders, count=1)


def test_prices_go_with_orders():
    with pytest.raises(UsageError, match=r"prices are two numbers and go with orders or turns, got \[2\.0\]"):
        EvaluateOptions(orders=("given", "ends"), prices=(2.0,))
