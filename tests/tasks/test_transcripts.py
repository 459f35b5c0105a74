"""Transcripts of agents: what moves keeps every call with its result, and the question stays the question."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import json_lines, refused
from posbias.tasks.language import Example, Items, encode
from posbias.tasks.language.calls import read_messages

TRANSCRIPTS = str(Path(__file__).parents[2] / "examples/transcripts.jsonl")
FIRST = json.loads(Path(TRANSCRIPTS).read_text().split("\n")[0])
ABOUT_TOOLS = {**FIRST, "messages": FIRST["messages"][:2], "moved": "search_help", "answer": "search_help"}
"""The first one, in which a description of a tool moves."""
NATIVE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments.order }}]{% endfor %}</>\n{% endfor %}<assistant>\n"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"order": "1"}'}}
USER, RESULT = {"role": "user", "content": "Look."}, {"role": "tool", "tool_call_id": "c1", "content": "a van"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer: Any) -> Any:
    """With a chat template that knows calls."""
    return byte_tokenizer(NATIVE)


@pytest.fixture
def without_tools(tmp_path: Path) -> Any:
    """Writes the first example transcript without descriptions of tools, changed."""

    def written(**changed: Any) -> str:
        record = {**FIRST, **changed}
        return json_lines(tmp_path / "t.jsonl", {name: value for name, value in record.items() if name != "tools"})

    return written


def moved_text(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(encode(example.prompt, tokenizer).token_ids[example.gold_token : example.gold_end]))


def check_pairs(messages: Any) -> None:
    assert read_messages(messages, "arranged") == list(messages)


@pytest.mark.parametrize("calls", ["native", "text"])
def test_a_result_moves_with_its_call_over_the_places_of_calls(calls: str, tokenizer: Any, without_tools: Any) -> None:
    file = TRANSCRIPTS if calls == "text" else without_tools()
    examples = list(Items(file=file, calls=calls).examples(tokenizer, count=1))
    assert [example.gold_position for example in examples] == [0, 1, 2, 3]
    for place, example in enumerate(examples):
        assert moved_text(example, tokenizer) == '{"order": "7041", "customer": "Dana", "carrier": "UPS"}'
        orders = ["7040", "7042", "7043"]
        orders.insert(place, "7041")
        told = json.dumps(example.prompt)
        named = "call_{}" if calls == "native" else '{{\\"order\\": \\"{}\\"}}'
        begins = [told.index(named.format(order)) for order in orders]
        assert begins == sorted(begins)
        assert example.prompt[-1]["content"].endswith("What is the carrier of order 7041?")
        if calls == "native":
            check_pairs(example.prompt)
    assert len({example.n_tokens for example in examples}) == 1


def test_calls_as_text_take_turns_and_hold_descriptions(tokenizer: Any) -> None:
    (example,) = Items(file=TRANSCRIPTS, calls="text").examples(tokenizer, count=1, positions=[0])
    messages: Any = example.prompt
    assert [message["role"] for message in messages] == ["system", "user", *["assistant", "user"] * 5]
    assert messages[0]["content"].count('"type": "function"') == 3
    call = '<tool_call>\n{"name": "get_order", "arguments": {"order": "7041"}}\n</tool_call>'
    assert messages[2]["content"] == call


def test_a_description_moves_among_the_tools(tokenizer: Any, tmp_path: Path) -> None:
    told_of = {"among": "tools", "calls": "text"}
    file = json_lines(tmp_path / "t.jsonl", ABOUT_TOOLS)
    for place, example in enumerate(Items(file=file, **told_of).examples(tokenizer, count=1)):
        names = ["get_order", "get_customer"]
        names.insert(place, "search_help")
        told = example.prompt[0]["content"]  # type: ignore[index]
        begins = [told.index(f'"name": "{name}"') for name in names]
        assert begins == sorted(begins)
        assert json.loads(moved_text(example, tokenizer)) == FIRST["tools"][1]
    json_lines(tmp_path / "t.jsonl", {**ABOUT_TOOLS, "moved": "fly"})
    with refused("field 'moved' must name one of the tools get_order, search_help, get_customer"):
        list(Items(file=file, **told_of).examples(None, count=1))


def test_a_description_moves_among_native_tools(tokenizer: Any, byte_tokenizer: Any, tmp_path: Path) -> None:
    """Templates and servers take descriptions beside the messages; places are read off the rendered text."""
    order, search, customer = FIRST["tools"]
    record = {**ABOUT_TOOLS, "tools": [order, search, customer["function"]]}  # as some write them
    task = Items(file=json_lines(tmp_path / "t.jsonl", record), among="tools", rule="call")
    with refused("passes descriptions of tools over; items(calls='text') writes them out"):
        list(task.examples(tokenizer, count=1))
    knows = byte_tokenizer("{% for tool in tools or [] %}[{{ tool | tojson }}]\n{% endfor %}" + NATIVE)
    for place, example in enumerate(task.examples(knows, count=1)):
        text = encode(example.prompt, knows).text
        names = ["get_order", "get_customer"]
        names.insert(place, "search_help")
        assert [json.loads(line[1:-1])["function"]["name"] for line in text.split("\n")[:3]] == names
        assert moved_text(example, knows) == 'search_help", "description": "Search the help pages.'
        assert (example.gold_position, example.n_tokens, example.target) == (place, len(text), "")
    (both,) = Items(file=TRANSCRIPTS).examples(knows, count=1, positions=[0])
    assert moved_text(both, knows).startswith('{"order": "7041"')


def test_turns_move_whole_and_results_within_their_call(tokenizer: Any, without_tools: Any) -> None:
    calls = [{**CALL, "id": name} for name in ("a", "b", "c")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ("a", "b", "c")]
    messages = [USER, {**CALLED, "tool_calls": calls}, *results]
    file = without_tools(messages=messages, moved="c")
    examples = list(Items(file=file, among="results").examples(tokenizer, count=1))
    contents = [[message["content"][-1] for message in example.prompt[2:]] for example in examples]  # type: ignore[index]
    assert contents == [["c", "a", "b"], ["a", "c", "b"], ["a", "b", "c"]]
    for example in examples:
        check_pairs(example.prompt)
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    file = without_tools(messages=turns, moved=2, question="Well?")
    said = [
        "".join(message["content"][-1] for message in example.prompt)
        for example in Items(file=file, among="turns").examples(tokenizer, count=1)
    ]
    assert said == ["110022?", "001122?", "002211?"]
    assert moved_text(next(Items(file=file, among="turns").examples(tokenizer, count=1)), tokenizer) == "assistant 1"


def test_messages_of_one_text_are_told_apart(tokenizer: Any, without_tools: Any) -> None:
    messages = [{"role": "user", "content": text} for text in ("yes", "yes yes", "yes", "yes?")]
    file = without_tools(messages=messages, moved=2)
    examples = list(Items(file=file).examples(tokenizer, count=1))
    begins = [example.gold_token for example in examples]
    texts = [encode(example.prompt, tokenizer).text for example in examples]
    assert begins == [len("<user>"), len("<user>yes</>\n<user>"), texts[2].rindex("yes</>")]


def test_fillers_are_further_calls(tokenizer: Any, without_tools: Any, tmp_path: Path) -> None:
    filler = [
        [{**CALLED, "tool_calls": [{**CALL, "id": name}]}, {**RESULT, "tool_call_id": name, "content": f"box {name}"}]
        for name in ("f0", "f1", "f2")
    ]
    task = Items(file=without_tools(), fillers=json_lines(tmp_path / "fillers.jsonl", *filler), filled=2)
    examples = list(task.examples(tokenizer, count=1))
    assert [example.gold_position for example in examples] == list(range(6))
    for example in examples:
        check_pairs(example.prompt)
        assert sum("box" in str(message["content"]) for message in example.prompt) == 2  # type: ignore[index]
        assert example.prompt[-1]["content"] == "What is the carrier of order 7041?"  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        (
            [USER, {"role": "tool", "tool_call_id": "c1", "content": "x"}],
            "message 1: no call before it has the 'tool_call_id' 'c1'",
        ),
        ([USER, CALLED, USER], "message 2: the call 'c1' has no result before it"),
        ([USER, CALLED], "the call 'c1' has no result"),
        ([{"role": "robot", "content": "x"}], "message 0: need an object with a 'role' of system"),
        ([{"role": "user", "content": "x", "mood": 1}], "message 0: unknown field 'mood'; allowed: role, content"),
        ([{"role": "user", "content": ""}], "message 0: field 'content' is empty, and there are no 'tool_calls'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "field 'content' must be text or parts of text"),
        ([{**USER, "tool_calls": False}], "field 'tool_calls' must be a list, of the assistant, got False"),
        ([USER, {**CALLED, "tool_calls": [{"id": "c1"}]}], "message 1: a call needs 'id', and 'function'"),
        (
            [USER, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}],
            "the 'arguments' of 'f': is not JSON",
        ),
        (
            [USER, CALLED, RESULT, {"role": "assistant", "content": "Done."}],
            "must end with a message of the user or a result",
        ),
    ],
)
def test_broken_transcripts_are_refused_in_one_line(messages: Any, complaint: str, without_tools: Any) -> None:
    with refused(complaint, "t.jsonl, line 1"):
        list(Items(file=without_tools(messages=messages)).examples(None, count=1))


def test_a_message_that_cannot_be_moved_is_refused(without_tools: Any) -> None:
    with refused("field 'moved' must name one message, by its index (0 ... 11)"):
        list(Items(file=without_tools(moved="call_1")).examples(None, count=1))
    with refused("message 11 is the question; move another"):
        list(Items(file=without_tools(moved=11)).examples(None, count=1))


def test_a_template_that_passes_calls_over_is_refused(byte_tokenizer: Any, without_tools: Any) -> None:
    plain = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with refused("template passes calls of tools over; items(calls='text') writes them out"):
        list(Items(file=without_tools()).examples(plain, count=1))
