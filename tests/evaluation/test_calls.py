"""Calls of tools, thoughts, token counts and log-probabilities as servers, files and models give them in the wild."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posbias as pb
from conftest import json_lines
from evaluation.replies import encoded, ending_of
from evaluation.serving import ONE_BY_ONE, chat, echo, evaluated, replied, stand_in
from posbias import EvaluateOptions, ServerResponder, evaluate
from posbias.evaluation.responders import Request, ServerOptions
from posbias.evaluation.responders.base import MARKED, UNFINISHED
from posbias.results.result import report_of
from posbias.tasks.language import RULES

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "UTC", "count": 2}}\n</tool_call>'
ARGUMENTS = '{"zone": "UTC", "count": 2}'
FORMS = {
    "Hermes, Qwen 2.5 and 3": CALL,
    "Llama 3.1": f'{{"name": "get_time", "parameters": {ARGUMENTS}}}',
    "Llama 3.1 behind words": f'I look at the clock.\n{{"name": "get_time", "parameters": {ARGUMENTS}}}',
    "a fence": f'```json\n{{"name": "get_time", "arguments": {ARGUMENTS}}}\n```',
    "Qwen 3.5, Qwen3-Coder": "<tool_call>\n<function=get_time>\n<parameter=zone>\nUTC\n</parameter>\n"
    "<parameter=count>\n2\n</parameter>\n</function>\n</tool_call>",
    "GLM": "<tool_call>get_time\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>",
    "Mistral": f"[TOOL_CALLS]get_time[ARGS]{ARGUMENTS}",
    "Mistral with an id": f"[TOOL_CALLS]get_time[CALL_ID]Ab1[ARGS]{ARGUMENTS}",
    "Mistral, older": f'[TOOL_CALLS] [{{"name": "get_time", "arguments": {ARGUMENTS}}}]',
    "Llama 3.2 and 4": '[get_time(zone="UTC", count=2)]',
    "Llama 4, marked": '<|python_start|>[get_time(zone="UTC", count=2)]<|python_end|>',
    "Granite, Phi 4 mini": f'<|tool_call|>[{{"name": "get_time", "arguments": {ARGUMENTS}}}]',
    "DeepSeek V3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": f"<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    "Kimi K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_time:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|>",
    "gpt-oss": "<|channel|>analysis<|message|>The time.<|end|><|start|>assistant<|channel|>commentary "
    f"to=functions.get_time <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "gpt-oss, the tool named first": "<|channel|>analysis<|message|>The time.<|end|><|start|>assistant "
    f"to=functions.get_time<|channel|>commentary<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "gpt-oss without its marks": f"analysisThe time.assistantcommentary to=functions.get_time json{ARGUMENTS}",
}  # fmt: skip
UNREAD = {
    "<tool_call>": '<tool_call>\n{"name": "get_time", "argum',  # cut off
    "<|tool_call>": '<|tool_call>call:get_time{zone:<|"|>UTC<|"|>}<tool_call|>',
    "<｜DSML｜function_calls>": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_time">',
    "<start_function_call>": "<start_function_call>call:get_time{zone:<escape>UTC<escape>}<end_function_call>",
    "": "I would look at the clock.",
}


@pytest.fixture
def tools(tmp_path: Path) -> Any:
    """The task of calling the tool that moves among two, with the right arguments."""
    described = [
        {"name": name, "parameters": {"type": "object", "properties": {}}} for name in ("get_time", "get_user")
    ]

    def task(answer: Any = None) -> str:
        answer = answer or {"name": "get_time", "arguments": json.loads(ARGUMENTS)}
        asked = {"messages": [{"role": "user", "content": "What time is it?"}], "tools": described}
        file = json_lines(tmp_path / "tools.jsonl", *2 * [{**asked, "moved": "get_time", "answer": answer}])
        return f"items(file={file!r}, among='tools', rule='call')"

    return task


def asked(reply: Any, task: str) -> Any:
    return evaluated(reply, task, count=2, score=False)


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_in_the_form_of_its_family(form: str, tools: Any) -> None:
    assert (asked(chat(FORMS[form]), tools()).tables["correct"] == 1).all()
    other = {"name": "get_time", "arguments": {"zone": "UTC", "count": 3}}
    assert (asked(chat(FORMS[form]), tools(other)).tables["correct"] == 0).all()


@pytest.mark.parametrize("mark", UNREAD)
def test_a_form_that_is_not_read_is_named(mark: str, tools: Any) -> None:
    result = asked(chat(UNREAD[mark]), tools())
    assert (result.tables["correct"] == 0).all()
    (said,) = [line for line in report_of(result.record).caveats if "nothing in them can be judged" in line]
    assert said.startswith("4 of 4 answers count as wrong")
    assert said.endswith(f"; 4 with {mark}, a form of calls that is not read." if mark else "letter, number or call).")


def test_a_call_that_the_prompt_does_not_offer_is_said(tools: Any) -> None:
    page = report_of(asked(chat(CALL.replace("get_time", "get_weather")), tools()).record)
    assert page.notices == [
        "In 2 of 2 samples (number 0, 1) an answer calls a tool that the prompt does not offer ('get_weather' 4 times):"
        " it counts as wrong."
    ]
    for offered in (CALL, CALL.replace("get_time", "get_user"), "I would look at the clock."):
        assert report_of(asked(chat(offered), tools()).record).notices == []


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        *(({"arguments": text}, "get_time") for text in ("{}", "", " ", None, {})),
        ({}, "get_time"),
        ({"arguments": json.loads(ARGUMENTS)}, None),
    ],
)
def test_arguments_may_be_missing_or_an_object(given: dict[str, Any], answer: Any, tools: Any, tmp_path: Path) -> None:
    """Of a server, and in a transcript; further fields of its function do not matter."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", **given, "parsed_arguments": None}}
    assert (asked(chat(None, tool_calls=[call]), tools(answer)).tables["correct"] == 1).all()
    meant = {} if answer else given["arguments"]
    sent = transcript(tmp_path, call)[1]["tool_calls"][0]["function"]
    assert (sent["name"], json.loads(sent["arguments"])) == ("get_time", meant)
    told = json.dumps({"name": "get_time", "arguments": meant})
    assert transcript(tmp_path, call, calls="text")[1]["content"] == f"<tool_call>\n{told}\n</tool_call>"


def transcript(path: Path, call: Any, *, calls: str = "native", **beside: Any) -> list[Any]:
    """The messages that a server gets of a conversation with two calls."""
    results = [
        {"role": "tool", "tool_call_id": name, "content": text} for name, text in (("c1", "noon"), ("c2", "Ann"))
    ]
    called = [
        {"role": "assistant", "content": None, "tool_calls": [{**call, "id": name}], **beside} for name in ("c1", "c2")
    ]
    asked = [{"role": "user", "content": text} for text in ("Time and user, please.", "What time is it?")]
    messages = [asked[0], called[0], results[0], called[1], results[1], asked[1]]
    file = json_lines(path / "agent.jsonl", {"messages": messages, "moved": "c1", "answer": "noon"})
    with stand_in(chat("noon")) as server:
        options = EvaluateOptions(count=1, score=False)
        responder = ServerResponder(server.address, "m", ONE_BY_ONE)
        result = evaluate(responder, f"items(file={file!r}, calls={calls!r})", options=options)
    assert (result.tables["correct"] == 1).all()
    sent: list[Any] = server.asked[0]["messages"]
    return sent


@pytest.mark.parametrize("calls", ["native", "text"])
@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        ({"reasoning_content": "I look."}, "I look."),
        ({"reasoning": "I look."}, "I look."),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "I look."}]}, "I look."),
        ({"reasoning": "I look.", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, "I look."),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}, None),
        ({"reasoning_content": None, "refusal": None, "annotations": []}, None),
    ],
)
def test_thoughts_in_a_transcript_are_passed_on(
    given: Any, passed_on: str | None, calls: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    sent = transcript(tmp_path, call, calls=calls, **given)
    assert [message.get("reasoning_content") for message in sent if message["role"] == "assistant"] == 2 * [passed_on]
    allowed = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
    assert {name for message in sent for name in message} <= allowed
    hidden = "encrypted" in str(given) and passed_on is None
    assert ("its thoughts are encrypted, and left out" in capsys.readouterr().err) == hidden


SPOKEN = "{% for message in messages %}{{ message.role }}: THOUGHTS{{ message.content }} {% endfor %}"


@pytest.mark.parametrize("told", ["", "{{ message.reasoning_content or '' }}"])
def test_thoughts_that_a_chat_template_leaves_out_are_noticed(told: str, long_llama: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "Where is Ann?"},
        {"role": "assistant", "content": "In Rome.", "reasoning_content": "I look."},
        {"role": "user", "content": "And Bob?"},
        {"role": "assistant", "content": "In Oslo."},
        {"role": "user", "content": "Where is Ann?"},
    ]
    file = json_lines(tmp_path / "talk.jsonl", {"messages": messages, "moved": 1, "answer": "Rome"})
    model = pb.load_model(long_llama)
    model.tokenizer.chat_template = SPOKEN.replace("THOUGHTS", told)
    result = evaluate(model, f"items(file={file!r})", options=EvaluateOptions(count=1, score=False, max_tokens=1))
    said = "In 1 of 1 samples (number 0) the model's chat template leaves out thoughts of earlier answers"
    assert any(line.startswith(said) for line in report_of(result.record).notices) == (not told)


@pytest.mark.parametrize(
    ("counts", "counted"),
    [((10, 3), True), ((10.0, 3.0), True), ((None, None), False), ((10, -35), False), ((14429.92, 37.25), False),
     (("10", "3"), False), ((True, [3]), False)],
)  # fmt: skip
def test_odd_token_counts_cost_no_answer(counts: Any, counted: bool, tools: Any) -> None:
    with stand_in(chat(CALL, prompt_tokens=counts[0], tokens=counts[1])) as server:
        responder = ServerResponder(server.address, "m", ONE_BY_ONE)
        result = evaluate(responder, tools(), options=EvaluateOptions(count=2, score=False))
    assert (result.tables["correct"] == 1).all()
    assert len(server.asked) == 2, "no prompt is asked twice"
    assert (responder.counts()["uncounted"] == 0) is counted


@pytest.mark.parametrize("impossible", [-np.inf, np.nan, np.inf, -3.4e38, -1e308, None])
def test_impossible_alternatives_cost_no_score(impossible: Any) -> None:
    """Python's JSON writes what JSON lacks; the alternative is none of those that are more probable."""

    listed = [None, {" is": -0.5, "zz": impossible}, {" Rome": -0.2, "zz": impossible}, {"!": -0.1}]
    answer = echo(["Town", " is", " Oslo", "!"], [None, impossible, -0.5, -0.1], listed)
    text = ServerOptions(kind="text", retries=0)
    (reply,) = replied(answer, Request("Town is", answer=" Oslo"), asked=text, generate=False, score=True)
    assert (reply.score.logprob, reply.score.ranks) == (-0.5, (2,))


def answered(ending: Any, text: str) -> Any:
    request = Request(({"role": "user", "content": "q"},), max_tokens=500)
    tokens = ending.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ending.response(tokens, encoded(ending, request, "<u>q<a>"))


@pytest.mark.parametrize(
    "form", ["Mistral", "Granite, Phi 4 mini", "Kimi K2", "DeepSeek V3", "gpt-oss", "Llama 4, marked"]
)
def test_a_local_models_call_is_read_though_its_marks_are_special_tokens(form: str, long_llama: Path) -> None:
    marks = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
             "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|channel|>", "<|message|>", "<|call|>", "<|start|>",
             "<|constrain|>", "<|python_start|>", "<|python_end|>")  # fmt: skip
    text = answered(ending_of(long_llama, *marks), FORMS[form]).text
    right = json.dumps({"name": "get_time", "arguments": json.loads(ARGUMENTS)})
    assert RULES.parse("call").right(text, [right]) == 1


def test_a_tokenizers_own_response_template_tells_calls_and_thoughts(long_llama: Path) -> None:
    """Marks that posbias does not know, described by what came with the model."""
    ending = ending_of(long_llama, "<end>")
    ending.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<a>",
        "fields": {
            "reasoning_content": {"open": "((", "close": "))", "content": "text"},
            "tool_calls": {
                "open": "{call:",
                "close": ":call}",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": "<end>", "content": "text"},
        },
    }
    found = answered(ending, "((It may be\nParis.))Rome<end>")
    assert (found.text, found.thoughts, found.thinking) == ("Rome", "It may be\nParis.", MARKED)
    called = answered(ending, f'((I look.)){{call:{{"name": "get_time", "arguments": {ARGUMENTS}}}:call}}<end>')
    assert (called.text, called.thoughts) == (CALL, "I look.")
    assert answered(ending, "Rome<end>").text == "Rome"
    assert answered(ending, "((It may be").thinking == UNFINISHED
    cut_off = answered(ending, '{call:{"name": "get_ti')
    assert (cut_off.text, cut_off.thinking) == ('{call:{"name": "get_ti', None), "read as without a template"
