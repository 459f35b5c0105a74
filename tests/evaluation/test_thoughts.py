"""Thoughts are told from answers: by marks, by servers, by templates that open them; an answer in thoughts is none."""

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import posbias as pb
from conftest import refused
from evaluation.replies import encoded, ending_of, generated
from evaluation.serving import ONE_BY_ONE, Reply, chat, evaluated, stand_in
from posbias import FitOptions, LocalResponder, RunError, ServerResponder, UsageError
from posbias.evaluation.correlate import encoded_prompt
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.responders import Request, ServerOptions
from posbias.evaluation.responders.base import CLOSED, MARKED, UNFINISHED, opens_thoughts, told_apart
from posbias.mitigation.fits import Calibration, fit_temperature
from posbias.mitigation.teaching import encoded_answers
from posbias.results.page import html_of
from posbias.results.result import report_of
from posbias.tasks.language import Documents

THINKING = (
    "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "answer", "thinking"),
    [
        ("<think>\nParis? No.\n</think>\n\nRome", "\n\nRome", MARKED),
        ("<think>\n\n</think>\n\nRome", "\n\nRome", MARKED),
        ("Paris? No.\n</think>\nRome", "\nRome", CLOSED),
        ("<thinking>Paris?</thinking>Rome", "Rome", MARKED),
        ("<THINK>Paris?</THINK>Rome", "Rome", MARKED),
        ("<reasoning>Paris?</reasoning><answer>Rome</answer>", "Rome", MARKED),
        ("<seed:think>Paris?</seed:think>Rome", "Rome", MARKED),
        ("[THINK]Paris?[/THINK]Rome", "Rome", MARKED),
        ("◁think▷Paris?◁/think▷Rome", "Rome", MARKED),
        ("<|START_THINKING|>Paris?<|END_THINKING|><|START_RESPONSE|>Rome<|END_RESPONSE|>", "Rome", MARKED),
        ("<|begin_of_thought|>Paris?<|end_of_thought|><|begin_of_solution|>Rome<|end_of_solution|>", "Rome", MARKED),
        ("<|channel|>analysis<|message|>Paris?<|end|><|start|>assistant<|channel|>final<|message|>Rome<|return|>",
         "Rome", MARKED),
        ("analysisWe look. Paris?assistantfinalRome", "Rome", MARKED),
        ("<longcat_think>Paris?</longcat_think>Rome", "Rome", MARKED),
        ("<think budget='1'>Paris?</think>Rome", "Rome", MARKED),
        ("<|thinking|>Paris?<|/thinking|>Rome", "Rome", MARKED),
        ("<|thought_start|>Paris?<|thought_end|>Rome", "Rome", MARKED),
        ("<unused94>thought\nParis?<unused95>Rome", "Rome", MARKED),
        ("<|channel>thought\nParis?<channel|>Rome", "Rome", MARKED),
        ("Rome <reason>Since Pari", "Rome <reason>Since Pari", None),  # an explanation behind an answer
        ("Rome <reason>it</reason>", "Rome <reason>it</reason>", None),
        ("It may be Paris.</reasoning>Rome", "Rome", CLOSED),
        ("Sure. <think>Paris?</think>Rome", "Sure. Rome", MARKED),
        ("<think>a</think>b<think>Paris?</think>Rome", "bRome", MARKED),
        # A mark that is only spoken of neither opens nor ends what it stands in.
        ("<think>I write <think> first.</think>Rome", "Rome", MARKED),
        ("<think>I end with </think> then.</think>Rome", "Rome", MARKED),
        ("<think>In [THINK] Paris?[/THINK]</think>Rome", "Rome", MARKED),
        ("<think>Paris", "", UNFINISHED),
        ("Rome <think>or Paris", "", UNFINISHED),
        ("<|channel|>analysis<|message|>Paris", "", UNFINISHED),
        ("analysisWe need Paris", "", UNFINISHED),
        ("Rome", "Rome", None),
        ("analysis of Rome", "analysis of Rome", None),
        ("I think> Rome", "I think> Rome", None),
        ("", "", None),
    ],
)  # fmt: skip
def test_the_answer_stands_outside_of_the_marks(text: str, answer: str, thinking: str | None) -> None:
    told = told_apart(text)
    assert (told.answer, told.thinking) == (answer, thinking)
    assert (told.thoughts is None) is (thinking is None)
    assert "Paris" not in told.answer


@pytest.mark.parametrize(
    ("text", "answer", "thinking"),
    [("Paris?</think>Rome", "Rome", MARKED), ("Paris", "", UNFINISHED), ("<think>Paris?</think>Rome", "Rome", MARKED)],
)
def test_behind_a_prompt_that_opens_thoughts_only_a_closing_mark_ends_them(text: str, answer: str, thinking: str):
    told = told_apart(text, opened=True)
    assert (told.answer, told.thinking) == (answer, thinking)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<a><think>\n", True),
        ("[INST]q[/INST][THINK]", True),
        ("<|start|>assistant<|channel|>analysis<|message|>", True),
        ("<|start|>assistant<|channel|>final<|message|>", False),
        ("<a><think>\n\n</think>\n\n", False),
        ("What does <think> mean?<a>", False),
        ("", False),
    ],
)
def test_a_prompt_opens_thoughts_if_it_ends_with_an_opening_mark(prompt: str, opens: bool) -> None:
    assert opens_thoughts(prompt) is opens


def test_a_pattern_of_ones_own_holds_the_answer_and_all_else_is_thoughts() -> None:
    pattern = r"(?s)Here is my response:\s*(.*)"
    assert told_apart("Here is my thought: Paris. Here is my response: Rome", pattern=pattern).answer == "Rome"
    assert told_apart("Here is my thought: Paris", pattern=pattern).thinking == UNFINISHED


def test_stop_texts_count_behind_thoughts_and_blank_lines_only() -> None:
    assert told_apart("<think>\na\n</think>\n\nRome\nParis").cut(("\n",)).answer == "\n\nRome"
    assert told_apart("\n \nRome\nParis").cut(("\n",)).answer == "\n \nRome"
    assert not told_apart("\n\n").cut(("\n",)).stopped
    for fenced in ("```\nTown\n```", "\n```text\nTown", "Town\n```", "```\nTown"):
        assert told_apart(fenced).cut(("\n",)).answer.strip().endswith("Town"), "a fence is no line of an answer"


def test_a_local_model_goes_on_until_the_answer_behind_its_thoughts_ends(long_llama: Path) -> None:
    ending = ending_of(long_llama, "[THINK]", "[/THINK]")
    started = encoded(ending, Request("q", max_tokens=500, stop=("\n",)))
    tokens = ending.tokenizer("[THINK]It may be\nParis.[/THINK]\nRome\nmore", add_special_tokens=False)["input_ids"]
    reached = [n for n in range(1, len(tokens) + 1) if ending.reached(tokens[:n], started)]
    end = next(n for n in range(1, len(tokens) + 1) if ending.tokenizer.decode(tokens[:n]).endswith("Rome\n"))
    assert reached[0] == end
    response = ending.response(tokens[:end], started)
    assert (response.text, response.thoughts, response.thinking) == ("\nRome", "It may be\nParis.", MARKED)
    assert response.finish == "stop"
    plain = ending.tokenizer("Rome", add_special_tokens=False)["input_ids"]
    assert ending.response(plain, replace(started, thinks=True)).thinking == UNFINISHED


@pytest.fixture
def opening(long_llama: Path) -> Any:
    """Loads the model with a chat template that opens thoughts."""

    def loaded(**how: Any) -> Any:
        model = pb.load_model(long_llama)
        model.tokenizer.chat_template = THINKING
        return pb.load_model(model.network, model.tokenizer, **how)

    return loaded


def test_an_answer_is_not_scored_where_the_template_opens_thoughts_and_is_where_it_is_told_not_to(opening: Any) -> None:
    request = Request(({"role": "user", "content": "q"},), answer="x", max_tokens=2)
    thinking = LocalResponder(opening())
    (reply,) = thinking.respond([request], generate=True, score=True)
    assert reply.score is None
    assert reply.response.thinking == UNFINISHED
    assert "end where the model's thoughts begin" in thinking.describe()["no_scores_because"]
    example = next(Documents(documents=2, chat=True).examples(thinking.tokenizer, count=1))
    with refused("no influence on the answer: the prompts end where the model's thoughts"):
        encoded_prompt(example, thinking.tokenizer)
    with refused("fit: the prompts end where the model's thoughts"):
        encoded_answers(thinking.model, [example])
    with refused("fit: the prompts end where the model's thoughts", error=RunError):
        fit_temperature(Calibration(thinking.model, [example], tuple), FitOptions())
    told = opening(template_options={"enable_thinking": False})
    assert told.describe()["template_options"] == {"enable_thinking": False}
    (reply,) = LocalResponder(told).respond([request], generate=True, score=True)
    assert reply.score is not None
    assert reply.response.thinking is None
    for wrong, complaint in (
        ({"enable_thinkin": False}, "'enable_thinkin' does nothing: the model's chat template does not name it"),
        ({"messages": []}, "template option"),
        ({"no name": 1}, "template option"),
        ({"enable_thinking": float("nan")}, "template option"),
    ):
        with refused(complaint):
            opening(template_options=wrong)


def test_a_server_whose_template_opens_thoughts_is_known_by_its_tokenizer(opening: Any) -> None:
    tokenizer = opening().tokenizer
    with stand_in(lambda index, *_: chat("Is it Rome?", "length" if index else "stop")) as server:
        responder = ServerResponder(server.address, "m", ONE_BY_ONE, tokenizer=tokenizer)
        found = generated(responder, [Request("q1"), Request("q2")])
        options = replace(ONE_BY_ONE, template_options={"enable_thinking": False})
        (answer,) = generated(ServerResponder(server.address, "m", options, tokenizer=tokenizer), [Request("q3")])
    # The first may be what a server left that took the thoughts out; the second was cut off before they ended.
    assert [(each.text, each.thinking) for each in found] == [("Is it Rome?", None), ("", UNFINISHED)]
    assert (answer.text, answer.thinking) == ("Is it Rome?", None)


@pytest.mark.parametrize(
    ("reply", "text", "thoughts", "thinking"),
    [
        (chat("<think>\nParis?\n</think>\n\nRome\nand more"), "\n\nRome", "\nParis?\n", MARKED),
        (chat("Rome", reasoning_content="Paris?"), "Rome", "Paris?", MARKED),
        (chat("Rome", reasoning="Paris?", reasoning_content=None), "Rome", "Paris?", MARKED),
        (chat(None, "length", reasoning_content="Paris"), "", "Paris", UNFINISHED),
        (chat("", "stop", reasoning="Paris"), "", "Paris", UNFINISHED),
        (chat([{"type": "thinking", "thinking": [{"text": "Paris?"}]}, {"type": "text", "text": "Rome"}]),
         "Rome", "Paris?", MARKED),
        (chat([{"type": "thinking", "thinking": "Paris"}], "length"), "", "Paris", UNFINISHED),
        (chat("\n\nRome"), "\n\nRome", None, None),
        (chat(None), "", None, None),
        (chat([{"type": "text", "text": "to "}, {"type": "output_text", "text": "all"}]), "to all", None, None),
    ],
)  # fmt: skip
def test_what_a_chat_server_says_is_told_from_its_thoughts(
    reply: Reply, text: str, thoughts: str | None, thinking: str | None, tmp_path: Path
) -> None:
    options = replace(ONE_BY_ONE, cache=tmp_path, template_options={"enable_thinking": False})
    with stand_in(reply) as server:
        found = [generated(ServerResponder(server.address, "m", options), [Request("q", stop=("\n",))]) for _ in "12"]
    assert found[0] == found[1], "the cache gives what the server gave"
    (response,) = found[0]
    assert (response.text, response.thoughts, response.thinking) == (text, thoughts, thinking)
    (body,) = server.asked
    assert "stop" not in body, "a line may end within thoughts"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_text_server_that_stops_before_the_answer_is_asked_without_the_stop_text() -> None:
    def answer(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        text = "" if "stop" in body else "\n\nRome\nParis"
        return 200, {}, {"choices": [{"text": text, "finish_reason": "stop"}]}

    with stand_in(answer) as server:
        responder = ServerResponder(server.address, "m", replace(ONE_BY_ONE, kind="text"))
        (response,) = generated(responder, [Request("q", stop=("\n",))])
    assert (response.text, response.finish) == ("\n\nRome", "stop")
    assert [("stop" in body) for body in server.asked] == [True, False]


def test_template_options_of_a_server_are_refused_where_they_would_do_nothing() -> None:
    for wrong in ({"kind": "text"}, {"body": {"chat_template_kwargs": {}}}):
        with pytest.raises(UsageError, match="template_options need kind 'chat', and no chat_template_kwargs"):
            ServerOptions(template_options={"enable_thinking": False}, **wrong)  # type: ignore[arg-type]


def of_documents(say: Any) -> Evaluation:
    """What a chat server says of two documents, of which one holds the town that is asked for."""

    def answer(index: int, _path: str, body: dict[str, Any]) -> Reply:
        prompt = body["messages"][-1]["content"]
        person = prompt.split("was ")[-1].split(" born")[0]
        right = prompt.split(f"{person} was born in ")[1].split(" and")[0]
        return say(index, right)

    return evaluated(answer, Documents(documents=2), count=8)


def test_a_right_answer_behind_thoughts_is_right_and_one_within_them_is_not() -> None:
    right = of_documents(lambda _, town: chat(f"<think>\nThe user asks.\n</think>\n\n{town}"))
    assert right.tables["correct"].mean() == 1.0
    within = of_documents(lambda _, town: chat(f"<think>\nIs it {town}?\n</think>\n\nI do not know."))
    assert within.tables["correct"].mean() == 0.0
    record = within.record
    assert (record.scalars["reading"]["thought"], record.scalars["reading"]["unjudged"]) == (16, {})
    assert report_of(record).notices[-1] == "16 of 16 answers came with thoughts, which were taken out."


def test_an_answer_that_never_came_out_of_thoughts_is_wrong_and_shown() -> None:
    found = of_documents(lambda index, town: chat(f"<think>{town}" if index == 0 else town, "length"))
    assert found.reading.unjudged == {"unfinished": 1}
    assert found.tables["correct"].sum() == 15
    assert not found.withheld
    wrong = "1 of 16 answers count as wrong because nothing in them can be judged: 1 still within"
    assert wrong in unescape(html_of(report_of(found.record)))


def test_a_closing_mark_alone_gives_away_thoughts_that_were_cut_off_without_any() -> None:
    """A server that shows no rendered prompt, whose template opens thoughts."""

    def say(index: int, town: str) -> Reply:
        return chat(f"Is it {town}?", "length") if index < 3 else chat(f"It is.\n</think>\n\n{town}")

    found = of_documents(say)
    assert found.tables["correct"].sum() == 13
    assert found.reading.unjudged == {"unfinished": 3}
    cut = of_documents(lambda index, town: chat(f"It is {town}", "length" if index < 3 else "stop"))
    assert (cut.tables["correct"].sum(), cut.reading.unjudged) == (16, {}), "nothing gives thoughts away"
    odd = of_documents(
        lambda index, town: chat(f"</think> {town}" if index == 9 else town, "length" if index else "stop")
    )
    assert odd.tables["correct"].sum() == 16, "one stray mark does not speak of the others"
    assert odd.reading.unjudged == {}


def test_tokens_for_thoughts_are_asked_for_beside_those_of_the_answer() -> None:
    asked: list[int] = []

    def answer(_index: int, _path: str, body: dict[str, Any]) -> Reply:
        asked.append(body["max_tokens"])
        return chat("x")

    options = {"max_tokens": 20, "thinking_tokens": 1000, "answer_pattern": "^(.*)$"}
    found = evaluated(answer, Documents(documents=2), count=1, **options)
    assert set(asked) == {1020}
    assert options.items() <= found.record.resolved.items()


def test_a_message_whose_content_is_left_out_is_an_empty_answer() -> None:
    """As some servers answer if the tokens ended within thoughts; requesting it again would give the same."""
    left_out = {"choices": [{"finish_reason": "length", "message": {"role": "assistant"}}]}
    with stand_in((200, {}, left_out)) as server:
        response = generated(ServerResponder(server.address, "m", ONE_BY_ONE), [Request("q")])[0]
    assert (response.text, response.finish) == ("", "length")
    assert len(server.asked) == 1
