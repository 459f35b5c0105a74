"""Items of one's own, evaluated: by a server and by a model, in clusters, and by code that must be permitted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posbias as pb
from conftest import json_lines, refused
from evaluation.replies import Says
from evaluation.serving import Reply, chat, evaluated, stand_in
from posbias import EvaluateOptions, MitigateOptions, ServerResponder, evaluate, mitigate
from posbias.evaluation.comparison import compare_evaluations
from posbias.evaluation.curve import independent
from posbias.evaluation.page import statements_of
from posbias.evaluation.responders import Response, ServerOptions
from posbias.results.result import report_of
from posbias.tasks.language import LANGUAGE_TASKS

TRANSCRIPTS = str(Path(__file__).parents[2] / "examples/transcripts.jsonl")


def written(path: Path, count: int, **beside: Any) -> str:
    units = [["Tom owns a van.", f"Ann owns {n} boats.", "Ida owns a bike."] for n in range(count)]
    asked = {"moved": 1, "question": "How many boats?", **beside}
    return json_lines(path, *({"units": each, "answer": n, **asked} for n, each in enumerate(units)))


READS_THE_FIRST_UNIT = Says(lambda request: request.text.split("\n")[0][4:])
"""Right if the moved unit stands first."""


def test_a_server_gets_transcripts_as_they_are() -> None:
    """Calls and their results are sent in the server's own fields, paired at every position."""

    def answer(_: int, __: str, body: dict[str, Any]) -> Reply:
        first = next(json.loads(message["content"]) for message in body["messages"] if message["role"] == "tool")
        return chat(" ".join(map(str, first.values())))

    records = [json.loads(line) for line in Path(TRANSCRIPTS).read_text().splitlines()]
    with stand_in(answer) as server:
        options = EvaluateOptions(count=6, score=False)
        result = evaluate(ServerResponder(server.address, "m"), f"items(file={TRANSCRIPTS!r})", options=options)
    np.testing.assert_array_equal(result.tables["correct"], np.tile([1.0, 0, 0, 0], (6, 1)))
    for body in server.asked:
        assert body["tools"] == records[0]["tools"]
        called = [message["tool_calls"][0]["id"] for message in body["messages"] if "tool_calls" in message]
        assert called == [message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"]
        assert isinstance(body["messages"][2]["tool_calls"][0]["function"]["arguments"], str)


def test_entries_of_ones_own_are_put_through_a_models_chat_template(
    long_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which a line, the title and the record say; what papers published, own templates and `chat=False` stay text."""
    model = pb.load_model(long_llama)
    file, template = written(tmp_path / "own.jsonl", 2), tmp_path / "own.txt"
    template.write_text("{units} {question}")

    def asked(parameters: str, name: str = "items") -> tuple[str, float]:
        options = EvaluateOptions(count=2, positions=(0,), max_tokens=1, score=False)
        result = evaluate(model, f"{name}({parameters})", options=options)
        assert result.title.endswith(result.task)
        return result.task, float(result.tables["prompt_tokens"].sum())

    plain = asked(f"file={file!r}")
    assert "chat template" not in capsys.readouterr().err
    model.tokenizer.chat_template = "{% for m in messages %}<u>{{ m.content }}{% endfor %}<a>"
    assert asked(f"file={file!r}") == asked(f"file={file!r}, chat=True")
    assert capsys.readouterr().err.count("prompts go through the model's chat template (chat=False in the task") == 1
    assert "chat=True" in asked(f"file={file!r}")[0]
    assert asked(f"file={file!r}, chat=False")[1] == plain[1] != asked(f"file={file!r}")[1]
    passages = [{"title": "T", "text": "It is x.", "isgold": True}, {"title": "S", "text": "Not.", "isgold": False}]
    pair = {"question": "q", "response_A": "x", "response_B": "y", "label": "A>B", "pair_id": "1"}
    rows = {"documents": {"question": "q", "answers": ["x"], "ctxs": passages}}
    rows["pairwise"] = {**pair, "original_id": "1", "source": "s", "response_model": "m"}  # as JudgeBench has them
    text = [(f"file={json_lines(tmp_path / f'{name}.jsonl', row, row)!r}", name) for name, row in rows.items()]
    text += [(f"file={file!r}, template={str(template)!r}", "items"), ("pairs=3", "key_value")]
    for parameters, name in text:
        assert "chat=True" not in asked(parameters, name)[0]
        assert "chat=True" in asked(f"{parameters}, chat=True", name)[0]
    json_lines(tmp_path / "pairwise.jsonl", pair, pair)
    assert "chat=True" in asked(*text[1])[0]


def test_samples_of_one_group_count_once(tmp_path: Path) -> None:
    grouped = written(tmp_path / "own.jsonl", 12)
    lines = [{**json.loads(line), "group": n // 2} for n, line in enumerate(Path(grouped).read_text().splitlines())]
    Path(grouped).write_text("\n\n" + "\n".join(map(json.dumps, lines)))
    options = EvaluateOptions(count=12, score=False)
    result = evaluate(READS_THE_FIRST_UNIT, f"items(file={grouped!r}, rule='contains')", options=options)
    assert result.tables["correct"].shape == (12, 3)
    assert result.measures["accuracy"].shape == (6, 3)
    assert result.curves["accuracy"].n_samples == 6
    assert any("12 samples form 6 groups" in statement for statement in statements_of(result))
    told = [[row[name] for name in ("file", "line", "question", "judged", "correct")] for row in result.outputs[3:5]]
    assert told == [["own.jsonl", 4, "How many boats?", "contains", right] for right in (1.0, 0.0)]
    task = f"items(file={grouped!r}, rule='contains')"
    fewer = evaluate(READS_THE_FIRST_UNIT, task, options=EvaluateOptions(count=8, score=False))
    assert compare_evaluations([result, result]).n_samples == 6
    with refused("samples form groups are compared if they have as many samples"):
        compare_evaluations([result, fewer])


def test_the_mean_of_a_cluster_stands_for_it() -> None:
    scores = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, np.nan], [np.nan, np.nan]])
    tables = {"cluster": np.repeat([[5.0], [2.0], [5.0], [9.0]], 2, axis=1)}
    np.testing.assert_array_equal(independent(scores, tables), [[0.5, 0.0], [0.0, 1.0], [np.nan, np.nan]])
    assert independent(scores, {}) is scores


def test_own_code_runs_only_if_it_is_permitted(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def half(text, answers):\n    return 0.5\n")
    rule = f'python(function="{tmp_path}/judge.py:half")'
    task, options = f"items(file={written(tmp_path / 'own.jsonl', 2)!r}, rule={rule!r})", {"count": 2, "score": False}
    with refused("code of one's own, ", "judge.py:half', which allow_code=True"):
        evaluate(READS_THE_FIRST_UNIT, task, options=EvaluateOptions(**options))
    result = evaluate(READS_THE_FIRST_UNIT, task, options=EvaluateOptions(**options, allow_code=True))
    assert (result.tables["correct"] == 0.5).all()


def test_the_place_of_a_tool_among_twenty_may_decide_whether_it_is_called(tmp_path: Path) -> None:
    """A server that calls the tool asked for only if it is among the first ten."""
    names = [f"open_{number}" for number in range(20)]
    tools = [{"name": name, "description": f"Opens {name[5:]}.", "parameters": {"type": "object"}} for name in names]
    record = {
        "messages": [{"role": "user", "content": "Open 7, please."}],
        "tools": tools,
        "moved": "open_7",
        "answer": {"name": "open_7", "arguments": {"how": "wide"}},
    }

    def answer(_index: int, _path: str, body: dict[str, Any]) -> Any:
        listed = [tool["function"]["name"] for tool in body["tools"]]
        assert [message["role"] for message in body["messages"]] == ["user"]
        called = "open_7" if listed.index("open_7") < 10 else listed[0]
        function = {"name": called, "arguments": '{"how": "wide"}'}
        return chat(None, "tool_calls", tool_calls=[{"id": "c", "function": function}])

    task = f"items(file={json_lines(tmp_path / 't.jsonl', *[record] * 6)!r}, among='tools', rule='call')"
    options: dict[str, Any] = {"count": 6, "positions": "0,9,10,19", "score": False}
    result = evaluated(answer, task, **options)
    with refused("takes prompts as text, got a conversation"):
        evaluated(answer, task, ServerOptions(kind="text"), **options)
    assert result.tables["correct"].mean(axis=0).tolist() == [1, 1, 0, 0]
    assert result.unjudged == ()
    assert result.cut_off == 0
    assert result.outputs[0]["text"] == '<tool_call>\n{"name": "open_7", "arguments": {"how": "wide"}}\n</tool_call>'


def test_every_answer_that_cannot_be_judged_has_its_reason(tmp_path: Path) -> None:
    """Too long for the first unit's prompts, empty for the second's, and no number for the third's."""

    def curt(request: Any) -> Response:
        place = next(slot for slot, line in enumerate(request.text.split("\n")) if "Ann" in line)
        skipped = "9 tokens; the model takes 8" if place == 0 else None
        return Response(["", " ", "several"][place], ["skipped", "stop", "stop"][place], skipped=skipped)

    task = f"items(file={written(tmp_path / 'own.jsonl', 2)!r}, rule='number')"
    result = evaluate(Says(curt), task, options=EvaluateOptions(count=2, score=False))
    assert [(entry.sample, entry.position, entry.reason) for entry in result.unjudged] == [
        (sample, place, reason)
        for sample in ("0-0", "0-1")
        for place, reason in enumerate(["too_long", "empty", "unread"])
    ]
    assert result.unjudged[0].detail == "9 tokens; the model takes 8"
    assert type(result).from_record(result.record).unjudged == result.unjudged
    page = report_of(result.record)
    assert "2 of 6 prompts are longer than the model's context (position 0: 2)" in page.left_out
    assert any(caveat.startswith("4 of 4 answers count as wrong because nothing") for caveat in page.caveats)


def passages(path: Path, *counts: int) -> str:
    told = [[{"text": f"{n} is {place}", "is_gold": place == 1} for place in range(m)] for n, m in enumerate(counts)]
    lines = [{"question": f"q{n}", "answers": [str(n)], "documents": each} for n, each in enumerate(told)]
    return json_lines(path, *lines)


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    """As many samples as it has lines, and as many documents as every line has; what is asked for is held against it
    before any model is opened."""
    path = passages(tmp_path / "own.jsonl", 6, 5, *[6] * 16)
    task = f"documents(file={path!r})"
    found = evaluate(READS_THE_FIRST_UNIT, task, options=EvaluateOptions(score=False))
    assert (found.count, found.n_items, found.task) == (18, 5, "documents(documents=5, file='own.jsonl')")
    assert evaluate(READS_THE_FIRST_UNIT, "documents", options=EvaluateOptions(score=False, positions=[0])).count == 50
    with refused("holds 18 examples; 19 asked"):
        evaluate("no/such/model", task, options=EvaluateOptions(count=19))
    with refused("line 2 has 5 documents; 6 were asked"):
        evaluate("no/such/model", f"documents(documents=6, file={path!r})")
    settings = MitigateOptions().following(LANGUAGE_TASKS.parse(task))
    assert (settings.calibration, settings.evaluation.count) == (6, 12)
    with refused("holds 18 examples; 22 asked"):
        mitigate("no/such/model", task, options=MitigateOptions(evaluation=EvaluateOptions(count=16)))
    json_lines(Path(path), {"question": "q", "answers": ["a"]})
    with refused("line 1: need one of the fields 'documents' and, as published, 'ctxs'"):
        evaluate("no/such/model", task)
