"""Transcripts of agents: what moves keeps every call with its result, and the question stays the question."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import save_byte_tokenizer
from posbias import UsageError
from posbias.tasks.language import Example, Items, encode
from posbias.tasks.language.calls import read_messages

TRANSCRIPTS = str(Path(__file__).parents[2] / "examples/transcripts.jsonl")
NATIVE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} "
    "{{ c.function.arguments.order }}]{% endfor %}</>\n{% endfor %}<assistant>\n"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"order": "1"}'}}
USER, RESULT = {"role": "user", "content": "Look."}, {"role": "tool", "tool_call_id": "c1", "content": "a van"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One token per byte, and a chat template that knows calls."""
    directory = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = NATIVE
    return tokenizer


def without_tools(path: Path, **changed: Any) -> str:
    """The first example transcript without descriptions of tools, changed."""
    record = {**json.loads(Path(TRANSCRIPTS).read_text().split("\n")[0]), **changed}
    path.write_text(json.dumps({name: value for name, value in record.items() if name != "tools"}))
    return str(path)


def moved_text(example: Example, tokenizer: Any) -> str:
    return str(tokenizer.decode(encode(example.prompt, tokenizer).token_ids[example.gold_token : example.gold_end]))


def check_pairs(messages: Any) -> None:
    assert read_messages(messages, "arranged") == list(messages)


@pytest.mark.parametrize("calls", ["native", "text"])
def test_a_result_moves_with_its_call_over_the_places_of_calls(calls: str, tokenizer: Any, tmp_path: Path) -> None:
    file = TRANSCRIPTS if calls == "text" else without_tools(tmp_path / "t.jsonl")
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
    record = json.loads(Path(TRANSCRIPTS).read_text().split("\n")[0])
    record |= {"messages": record["messages"][:2], "moved": "search_help", "answer": "search_help"}
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    examples = list(Items(file=str(tmp_path / "t.jsonl"), among="tools", calls="text").examples(tokenizer, count=1))
    for place, example in enumerate(examples):
        names = ["get_order", "get_customer"]
        names.insert(place, "search_help")
        told = example.prompt[0]["content"]  # type: ignore[index]
        begins = [told.index(f'"name": "{name}"') for name in names]
        assert begins == sorted(begins)
        assert json.loads(moved_text(example, tokenizer)) == record["tools"][1]
    record["moved"] = "fly"
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    with pytest.raises(
        UsageError, match="field 'moved' must name one of the tools get_order, search_help, get_customer"
    ):
        list(Items(file=str(tmp_path / "t.jsonl"), among="tools", calls="text").examples(None, count=1))


def test_a_description_moves_among_native_tools(tokenizer: Any, tmp_path: Path) -> None:
    """Templates and servers take descriptions beside the messages; places are read off the rendered text."""
    record = json.loads(Path(TRANSCRIPTS).read_text().split("\n")[0])
    record |= {"messages": record["messages"][:2], "moved": "search_help", "answer": "search_help"}
    record["tools"][2] = record["tools"][2]["function"]  # as some write them
    (tmp_path / "t.jsonl").write_text(json.dumps(record))
    task = Items(file=str(tmp_path / "t.jsonl"), among="tools", rule="call")
    with pytest.raises(UsageError, match=r"passes descriptions of tools over; items\(calls='text'\) writes them out"):
        list(task.examples(tokenizer, count=1))
    knows = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    knows.chat_template = "{% for tool in tools or [] %}[{{ tool | tojson }}]\n{% endfor %}" + NATIVE
    for place, example in enumerate(task.examples(knows, count=1)):
        text = encode(example.prompt, knows).text
        names = ["get_order", "get_customer"]
        names.insert(place, "search_help")
        assert [json.loads(line[1:-1])["function"]["name"] for line in text.split("\n")[:3]] == names
        assert moved_text(example, knows) == 'search_help", "description": "Search the help pages.'
        assert (example.gold_position, example.n_tokens, example.target) == (place, len(text), "")
    (both,) = Items(file=TRANSCRIPTS).examples(knows, count=1, positions=[0])
    assert moved_text(both, knows).startswith('{"order": "7041"')


def test_turns_move_whole_and_results_within_their_call(tokenizer: Any, tmp_path: Path) -> None:
    calls = [{**CALL, "id": name} for name in ("a", "b", "c")]
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in ("a", "b", "c")]
    messages = [USER, {**CALLED, "tool_calls": calls}, *results]
    file = without_tools(tmp_path / "t.jsonl", messages=messages, moved="c")
    examples = list(Items(file=file, among="results").examples(tokenizer, count=1))
    contents = [[message["content"][-1] for message in example.prompt[2:]] for example in examples]  # type: ignore[index]
    assert contents == [["c", "a", "b"], ["a", "c", "b"], ["a", "b", "c"]]
    for example in examples:
        check_pairs(example.prompt)
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    file = without_tools(tmp_path / "t.jsonl", messages=turns, moved=2, question="Well?")
    said = [
        "".join(message["content"][-1] for message in example.prompt)
        for example in Items(file=file, among="turns").examples(tokenizer, count=1)
    ]
    assert said == ["110022?", "001122?", "002211?"]
    assert moved_text(next(Items(file=file, among="turns").examples(tokenizer, count=1)), tokenizer) == "assistant 1"


def test_messages_of_one_text_are_told_apart(tokenizer: Any, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": text} for text in ("yes", "yes yes", "yes", "yes?")]
    file = without_tools(tmp_path / "t.jsonl", messages=messages, moved=2)
    examples = list(Items(file=file).examples(tokenizer, count=1))
    begins = [example.gold_token for example in examples]
    texts = [encode(example.prompt, tokenizer).text for example in examples]
    assert begins == [len("<user>"), len("<user>yes</>\n<user>"), texts[2].rindex("yes</>")]


def test_fillers_are_further_calls(tokenizer: Any, tmp_path: Path) -> None:
    filler = [
        [
            {**CALLED, "tool_calls": [{**CALL, "id": f"f{n}"}]},
            {"role": "tool", "tool_call_id": f"f{n}", "content": f"box {n}"},
        ]
        for n in range(3)
    ]
    (tmp_path / "fillers.jsonl").write_text("\n".join(map(json.dumps, filler)))
    task = Items(file=without_tools(tmp_path / "t.jsonl"), fillers=str(tmp_path / "fillers.jsonl"), filled=2)
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
def test_broken_transcripts_are_refused_in_one_line(messages: Any, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(Items(file=without_tools(tmp_path / "t.jsonl", messages=messages)).examples(None, count=1))
    assert complaint in str(caught.value)
    assert "t.jsonl, line 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_that_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    file = without_tools(tmp_path / "t.jsonl", moved="call_1")
    with pytest.raises(UsageError, match=r"field 'moved' must name one message, by its index \(0 ... 11\)"):
        list(Items(file=file).examples(None, count=1))
    with pytest.raises(UsageError, match="message 11 is the question; move another"):
        list(Items(file=without_tools(tmp_path / "t.jsonl", moved=11)).examples(None, count=1))


def test_a_template_that_passes_calls_over_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    plain.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match=r"template passes calls of tools over; items\(calls='text'\) writes them out"):
        list(Items(file=without_tools(tmp_path / "t.jsonl")).examples(plain, count=1))
