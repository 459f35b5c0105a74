"""Rules at turn N: a model that forgets after some turns is found out, and the place of the rule that mends it."""

import pytest

import posbias as pb
from conftest import json_lines, refused
from evaluation.serving import chat, stand_in
from posbias import EvaluateOptions
from posbias.errors import RunError, UsageError
from posbias.evaluation.levels import Requirement
from posbias.evaluation.responders import ServerOptions
from posbias.tasks.language.adherence import CHECKS

LOWER, NEVER = "Write in lower case.", "Say zzz."
RULES = f"""- {{say: "{LOWER}", check: lower_case}}
- {{say: "{NEVER}", check: "contains(text='zzz')"}}
"""


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.yaml").write_text(RULES)
    return tmp_path / "rules.yaml"


def forgetful(after: int):
    """Keeps to lower case while the rule was told within so many questions; never says what NEVER asks for."""

    def answer(index, path, body):
        users = 0
        for message in reversed(body["messages"]):
            if LOWER in message["content"]:
                return chat("fine, as you wish.")
            users += message["role"] == "user"
            if users > after:
                break
        return chat("Fine, as you wish.")

    return answer


def ask(server, task, **options):
    responder = pb.ServerResponder(server.address, "stand-in", ServerOptions(concurrency=4))
    return pb.evaluate(responder, task, options=EvaluateOptions(**options))


def asked(after, task, **options):
    with stand_in(forgetful(after)) as server:
        return ask(server, task, **options)


def test_a_rule_that_is_forgotten_is_found_with_its_turn_and_the_cheapest_place(rules, tmp_path):
    task = "rules(file='rules.yaml')"
    found = asked(4, task, turns=(3, 7), count=24, threshold=0.7, directory=tmp_path / "run")
    assert found.left_out == (NEVER,)
    assert (found.lasting["system"].kept_until, found.lasting["system"].lost_by) == (3, 7)
    assert all(found.lasting[place].kept_until == 7 for place in ("both", "last", "every(5)"))
    lost, cheapest, left_out = found.verdict
    assert lost.startswith("Lost by turn 7: with the rule in the system message alone it holds in 0.00 [0.00, ")
    assert cheapest.startswith("Cheapest place that keeps it better: behind the last question alone, in 1.00 [")
    assert NEVER in left_out
    prices = found.prices
    assert prices["system"].unit == "characters"  # no tokenizer of the server's model is known
    assert prices["last"].added == prices["first"].added < prices["both"].added
    assert prices["system"].kept > prices["last"].kept > 0.5
    assert prices["last"].added == len(f"\n\n{LOWER}")  # of the rule that is judged
    again = pb.load_record(tmp_path / "run")
    assert again.verdict == found.verdict
    page = pb.write_report(again, out=tmp_path / "page").read_text()
    assert "Lost by turn 7" in page
    assert "What each place costs" in page


def test_what_is_required_is_required_of_rules_that_are_judged(rules):
    task = "rules(file='rules.yaml', placements=['last', 'both'])"
    met = asked(4, task, turns=(2,), count=40, require=Requirement.parse("mean>=0.7"))
    assert met.left_out == (NEVER,)
    assert met.record.scalars["requirement"]["met"]
    assert met.record.scalars["requirement"]["value"] == 1.0


def test_a_rule_that_lasts_needs_no_other_place(rules):
    found = asked(100, "rules(file='rules.yaml', placements=['system', 'last'])", turns=(1, 4), count=24, threshold=0.7)
    assert found.verdict[0].startswith("Kept through turn 4: ")
    assert found.verdict[1] == "No other place is needed."


def test_replies_are_made_once_and_a_run_goes_on_where_it_ended(rules, tmp_path):
    task = "rules(file='rules.yaml', placements=['system', 'every(2)'])"
    options = {"turns": (1, 4), "count": 6, "directory": tmp_path / "run"}
    with stand_in(forgetful(2)) as server:
        first = ask(server, task, **options)
        # Replies to three turns, the rule just told, two placements at two turns of the rule that is then kept; what is
        # the same is asked once.
        asked = 6 * 3 + 6 + 2 * 2 * 3 - 3
        assert len(server.asked) == asked
        again = ask(server, task, **options, resume=True)
        assert len(server.asked) == asked
    assert again.verdict == first.verdict


def test_the_replies_of_a_transcript_stand_for_the_models(rules, tmp_path):
    turns = [{"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")]
    systems = [{"role": "system", "content": f"Number {number}."} for number in range(8)]
    json_lines(tmp_path / "talks.jsonl", *({"messages": [system, *turns]} for system in systems))
    task = "rules(file='rules.yaml', conversations='talks.jsonl', replies='transcript', placements=['system', 'both'])"
    with stand_in(forgetful(1)) as server:
        found = ask(server, task, turns=(1, 3), count=16)
    longest = max((body["messages"] for body in server.asked), key=len)
    assert [message["role"] for message in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[0]["content"].startswith("Number ")
    assert found.lasting["system"].lost_by == 3


@pytest.mark.parametrize(
    ("text", "task", "turns", "message"),
    [
        ("- {say: Be brief.}", "rules(file='rules.yaml')", (1,), "rule 1, field 'check'"),
        ("- {say: Be brief., check: short}", "rules(file='rules.yaml')", (1,), "unknown check 'short'"),
        ("{", "rules(file='rules.yaml')", (1,), "rules 'rules.yaml' is not YAML of plain values"),
        ("- {say: Be brief., say: So., check: lower_case}", "rules(file='rules.yaml')", (1,), "'say' is given twice"),
        (RULES, "rules(file='rules.yaml')", (1, 21), "rules: positions must be whole numbers 1 ... 20, got 21"),
        (RULES, "rules(file='rules.yaml', placements=['middle'])", (1,), "placement 'middle'; allowed: system, first"),
        (RULES, "rules(file='rules.yaml', placements=['system'])", (1,), "give at least 2"),
        (RULES, "key_value(pairs=4)", (1,), "turns are of conversations"),
        (RULES, "rules(file='rules.yaml', replies='transcript')", (1,), "takes conversations="),
    ],
)
def test_what_cannot_be_judged_is_refused_in_one_line(text, task, turns, message, rules):
    rules.write_text(text)
    with refused(message):
        asked(1, task, turns=turns, count=2)


def test_other_uses_of_the_task_are_refused(rules):
    with stand_in(forgetful(1)) as server:
        with pytest.raises(UsageError, match="turns stand for lengths"):
            ask(server, "rules()", lengths=(512, 1024), count=2)
        pair = [pb.ServerResponder(server.address, name, ServerOptions()) for name in ("a", "b")]
        with pytest.raises(UsageError, match="made by evaluate, of one model"):
            pb.evaluate(pair, "rules()", options=EvaluateOptions(count=2))


def test_a_model_that_keeps_no_rule_when_told_is_not_judged(rules):
    rules.write_text(f'- {{say: "{NEVER}", check: "contains(text=\'zzz\')"}}')
    none = "none of 1 rules is kept by half of the replies even when it has just been told"
    with refused(none, error=RunError):
        asked(9, "rules(file='rules.yaml')", turns=(1, 2), count=4)


def test_own_code_judges_if_it_is_allowed(rules, tmp_path):
    (tmp_path / "own.py").write_text("def kept(text, answers):\n    return text == text.lower()\n")
    rules.write_text(f"- {{say: {LOWER}, check: \"python(function='own.py:kept')\"}}")
    with pytest.raises(UsageError, match="allow_code"):
        asked(1, "rules(file='rules.yaml')", turns=(1,), count=2)
    found = asked(1, "rules(file='rules.yaml')", turns=(1, 4), count=8, allow_code=True)
    assert found.lasting["system"].lost_by == 4


@pytest.mark.parametrize(
    ("check", "kept", "broken"),
    [
        ("lower_case", "all is well, 2 times.", "All is well."),
        ("upper_case", "ALL IS WELL, 2.", "All"),
        ("contains(text='River')", "the river", "the sea"),
        ("lacks(text='the')", "then and there", "In the end"),
        ("starts_with(text='Certainly')", '"Certainly, sir', "Sir, certainly"),
        ("ends_with(text='over')", "It is done. Over.", "Over and out"),
        ("ends_with(text='?')", "Is it?", "It is."),
        ("most_words(words=3)", "one two three", "one two three four"),
        ("matches(pattern='[0-9]')", "7 of them", "seven"),
        ("json_keys(keys=['answer'])", '```json\n{"answer": 1}\n```', '{"other": 1}'),
        ("script(name='cyrillic')", "Привет, Bob", "Hello"),
    ],
)
def test_checks_tell_kept_rules_from_broken_ones(check, kept, broken, rules):
    assert CHECKS.parse(check).kept(kept)
    assert not CHECKS.parse(check).kept(broken)
