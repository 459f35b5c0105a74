"""`posbias evaluate`, `mitigate`, `place` and `audit --behaviour`: what is printed is saved, errors are one line."""

import json
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import posbias as pb
from evaluation.hostile import spoken
from evaluation.serving import Reply, chat, stand_in
from posbias import PlaceOptions
from posbias.cli import main
from posbias.results.records import read_record
from posbias.tasks.language import LANGUAGE_TASKS

FLAGS = ["--task", "key_value(pairs=4)", "--count", 7, "--max-tokens", 2]
COMPARED = [16 if each == 7 else each for each in FLAGS]
"""With as many samples as a difference of log-probabilities needs; tokens of random models are cut off."""


@pytest.fixture(scope="module")
def finished(long_llama, tmp_path_factory):
    """A run of the command in a process like a user's, shared by the tests below."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["posbias", "evaluate", str(long_llama), *map(str, FLAGS), "--out", str(out)])
        with pytest.raises(SystemExit) as end:
            main()
    assert not end.value.code
    return out


def test_evaluate_saves_what_the_library_finds(finished, long_llama):
    record = read_record(finished)
    found = pb.evaluate(long_llama, "key_value(pairs=4)", options=pb.EvaluateOptions(count=7, max_tokens=2))
    for name, table in found.tables.items():
        np.testing.assert_allclose(record.arrays[f"scores/{name}"], table, rtol=1e-4)
    assert record.resolved["command"].startswith("posbias evaluate ")
    assert record.scalars["curves"]["logprob"]["n_complete"] == 7
    assert len((finished / "outputs.jsonl").read_text().splitlines()) == 28
    assert not (finished / "parts").exists()


def test_lengths_are_evaluated_each_in_its_directory_and_a_requirement_sets_the_exit_code(
    posbias, long_llama, tmp_path
):
    out = tmp_path / "run"
    flags = ["--task", "key_value()", "--lengths", "400,800", "--positions", "spread(2)", "--count", 6]
    flags += ["--max-tokens", 2, "--no-score", "--out", out]
    failed = posbias("evaluate", long_llama, *flags, "--require", "effective_length>=400")
    assert failed.returncode == 3
    assert failed.stderr.splitlines()[-1] == (
        "posbias: Required effective_length>=400 is not met: at least 0 tokens are established, 0 tokens estimated."
    )
    assert "key_value: accuracy by length and depth" in failed.stdout
    result = pb.load_record(out)
    assert result.lengths == (400, 800)
    assert result.effective_length.at_least == 0
    for length in result.lengths:
        assert (out / f"length-{length}" / "outputs.jsonl").exists()
    assert "length-400/report.html" in (out / "report.html").read_text()
    again = posbias("evaluate", long_llama, *flags, "--resume", "--json", "--require", "effective_length>=0")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["scalars"]["effective_length"]["threshold"] == 0.8


def test_several_models_are_evaluated_on_the_same_samples_and_compared(posbias, long_llama, tmp_path):
    other, out = tmp_path / "other", tmp_path / "run"
    shutil.copytree(long_llama, other)
    done = posbias("evaluate", long_llama, other, *COMPARED, "--out", out, "--require", "worst>=0.5")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("posbias: Required worst>=0.5 is not met: ")
    assert "cut off too early (long-llama)" in " ".join(done.stderr.split())
    result = pb.load_record(out)
    assert [entry.name for entry in result.compared] == ["long-llama", "other"]
    assert result.n_samples == 16
    assert "No difference between" in result.verdict[-1]
    for name in ("long-llama", "other"):
        assert (out / name / "report.html").exists()
        assert f"{name}/report.html" in (out / "report.html").read_text()
    again = posbias("evaluate", long_llama, other, *COMPARED, "--out", out, "--resume")
    assert again.returncode == 0, again.stderr
    drawn = posbias("compare", out / "long-llama", out / "other", "--out", tmp_path / "page")
    assert drawn.returncode == 0, drawn.stderr
    assert "Less long-llama, 16 samples" in (tmp_path / "page" / "report.html").read_text()


def test_several_servers_are_asked_the_same_samples(posbias, tmp_path):
    def answer(right):
        def answered(_index, _path, body):
            prompt = body["messages"][0]["content"]
            key = prompt.split('Key: "')[-1].split('"')[0]
            return chat(prompt.split(f'"{key}": "')[1].split('"')[0] if right else "unknown")

        return answered

    flags = ["--task", "key_value(pairs=3)", "--count", 10, "--no-score", "--out", tmp_path / "run"]
    with stand_in(answer(True)) as good, stand_in(answer(False)) as bad:
        servers = ["--server", good.address, "--server", bad.address, "--served-model", "m"]
        done = posbias("evaluate", *servers, *flags)
        assert done.returncode == 0, done.stderr
        assert sorted(map(str, good.asked)) == sorted(map(str, bad.asked))
        assert len(good.asked) == 30
        refused = posbias("mitigate", *servers, "--task", "key_value(pairs=3)", "--methods", "repeat_prompt")
        assert "one server is asked here, got 2; evaluate takes several" in refused.stderr
    result = pb.load_record(tmp_path / "run")
    _, second = result.compared
    assert second.changes["worst position"].value.value == -1
    assert "worse at worst" in result.verdict[0]
    addresses = [server.address.partition("//")[2] for server in (good, bad)]
    assert [entry.name for entry in result.compared] == [f"m at {address}/v1" for address in addresses]


def test_every_place_of_a_rule_has_its_page_and_its_check(posbias, tmp_path):
    def keeps_what_was_just_told(_index, _path, body):
        return chat("fine." if "lower case" in body["messages"][-1]["content"] else "Fine.")

    (tmp_path / "rules.yaml").write_text("- {say: Write in lower case., check: lower_case}")
    task, out = f"rules(file='{tmp_path / 'rules.yaml'}', placements=['last', 'every(2)'])", tmp_path / "run"
    with stand_in(keeps_what_was_just_told) as server:
        flags = ["--server", server.address, "--served-model", "m", "--task", task, "--turns", "1,2", "--count", 12]
        failed = posbias("evaluate", *flags, "--out", out, "--require", "worst>=0.5")
        met = posbias("evaluate", *flags, "--out", out, "--resume", "--require", "worst>=0")
    assert failed.returncode == 3, failed.stderr
    assert failed.stdout.splitlines()[-1].endswith("(accuracy, last).")
    assert "posbias: Required worst>=0.5 is not met: 0.000 [" in failed.stderr
    assert failed.stderr.endswith("(accuracy, every(2)).\n")
    for name in ("last", "every_2_"):
        assert (out / name / "report.html").exists()
        assert f"{name}/report.html" in (out / "report.html").read_text()
        assert pb.load_record(out / name).requirement.met
    assert met.returncode == 0, met.stderr


def test_a_gate_fails_where_answers_decide_nothing_and_the_record_says_so(posbias, tmp_path):
    def answered(index, _path, body):
        status, headers, content = chat("Let me look at all passages: the first", tokens=body["max_tokens"])
        return status, headers, content

    with stand_in(answered) as server:
        flags = ["--server", server.address, "--served-model", "m", "--task", "key_value(pairs=3)", "--no-score"]
        flags += ["--count", 8, "--require", "spread<=0.3", "--out", tmp_path / "run", "--json"]
        done = posbias("evaluate", *flags)
    assert done.returncode == 3
    reason = "24 of 24 answers cannot be judged, more than 10%: 24 cut off too early"
    assert done.stderr.splitlines()[-1] == f"posbias: Required spread<=0.3 is not met: {reason} (m)."
    printed = json.loads(done.stdout)
    stored = json.loads((tmp_path / "run" / "record.json").read_text())
    for scalars in (printed["scalars"], stored["scalars"]):
        required = scalars["requirement"]
        assert [required[name] for name in ("text", "met", "low", "high")] == ["spread<=0.3", False, None, None]
        assert scalars["verdict"][0] == f"No conclusion from the generated answers: {reason}."
    assert printed["verdict"] == stored["scalars"]["verdict"]


def test_place_orders_by_the_run_and_saves_what_it_prints(posbias, finished, tmp_path):
    scores = tmp_path / "scores.txt"
    scores.write_text("0.5\n\n0.3\n0.2\n0.1\n")
    command = ["place", "--run", finished, "--scores", scores, "--by", "reciprocal_rank"]
    result = posbias(*command, "--out", tmp_path / "placed", "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    record = read_record(tmp_path / "placed")
    expected = pb.place([0.5, 0.3, 0.2, 0.1], finished, options=PlaceOptions(by="reciprocal_rank"))
    assert record.scalars == json.loads(json.dumps(expected.record.scalars))
    assert pb.load_record(tmp_path / "placed").gains == expected.gains
    assert printed["scalars"]["order"] == list(expected.order)
    told = posbias(*command)
    assert "Leave the order: none is shown to be better" in told.stdout
    assert "against" in told.stdout


def test_the_demo_says_what_it_is_finds_what_was_planted_and_what_to_do_next(posbias, tmp_path):
    told = posbias("demo", "--out", tmp_path / "run").stdout.splitlines()
    assert told[0].startswith("No model is asked but a stand-in with a planted bias, which is right 95% of the time at")
    assert told[1].startswith("It loses answers in the middle: accuracy 0.95")
    assert told[-1].startswith("The planted bias was found. Next, of a real model")
    assert "It loses answers in the middle" in (tmp_path / "run" / "report.html").read_text()


def test_a_pipeline_gets_a_summary(posbias, tmp_path):
    """Of a run that does not meet its bound, too."""
    flags = ["--task", "key_value(pairs=2)", "--count", 6, "--require", "worst>=0.5"]
    page, suite = tmp_path / "new" / "run.md", tmp_path / "run.xml"
    with stand_in(lambda *_: chat("1")) as server:
        asked = ["evaluate", "--server", server.address, "--served-model", "a|b", *flags]
        assert posbias(*asked, "--summary", page).returncode == 3
        assert posbias(*asked, "--server", server.address, "--served-model", "c", "--summary", suite).returncode == 3
    not_met = "Required worst>=0.5 is not met: 0.000 [0.000, 0.518] (accuracy, a"
    assert f"**{not_met}\\|b).**\n\n| position | answer's token | samples | accuracy |\n| --- |" in page.read_text()
    cases = ElementTree.parse(suite).getroot()
    assert (cases.get("tests"), cases.get("failures"), len(cases)) == ("2", "2", 2)
    assert [case.get("name") for case in cases] == ["worst>=0.5 a_b", "worst>=0.5 c"]
    assert cases[0][0].text == f"{not_met}|b)."


def test_samples_are_planned_for_a_bound(posbias):
    told = posbias("plan", "worst>=0.8", "--positions", 3).stdout.splitlines()
    assert told[0] == "Samples from which on 80% of runs meet worst>=0.8, at 3 positions"
    assert told[-3].split() == ["1", "+0.2", "17", "51"], "as many as the guide names"
    assert list(json.loads(posbias("plan", "spread<=0.2", "--json").stdout)["samples"]) == ["0.15", "0.1", "0.05", "0"]
    for bound in ("worst<=0.8", "mean>=1", "spread>=0.1", "spread<=0", "effective_length>=512"):
        refused = posbias("plan", bound).stderr
        allowed = "allowed: worst>=, mean>= or spread<=, and a number in 0.01 ... 0.99"
        assert refused == f"posbias: plan {bound}: {allowed}\n"


def test_a_prompt_is_shown_as_it_was_asked(posbias, finished, long_llama, tmp_path):
    task = LANGUAGE_TASKS.parse("key_value(pairs=4)")
    example = list(task.examples(None, count=7))[4 * 3 + 2]
    told = posbias("show", finished, "--sample", 3, "--position", 2).stdout
    head, prompt, rest = re.split("--- prompt\n|\n--- answer", told)
    assert head == "long-llama: key_value(pairs=4): sample 0-3, position 2\n"
    assert prompt == example.prompt
    assert rest.endswith(f"\n--- expected\n{example.target.strip()}\n--- judged\nwrong (rule: contains)\n--- not to be "
                         "judged\ncut off before what the task's rule reads was complete\n")  # fmt: skip
    first = json.loads(posbias("show", finished, "--json").stdout)
    assert (first["sample"], first["position"], first["correct"]) == ("0-0", 0, 0.0)
    for flags, line in (
        (["--sample", 7], "--sample 7: allowed: 0 ... 6"),
        (["--position", 4], "--position 4: allowed: 0, 1, 2, 3"),
        (
            ["--task", "key_value(pairs=5)"],
            "sample 0 of key_value(pairs=5) makes another prompt than the run has asked",
        ),
    ):
        refused = posbias("show", finished, *flags)
        assert (refused.returncode, refused.stderr.count("\n"), line in refused.stderr) == (2, 1, True), refused.stderr
    out, depths = tmp_path / "run", ["--task", "needle(depths=2)", "--count", 2, "--max-tokens", 1]
    assert posbias("evaluate", long_llama, *depths, "--lengths", "600,700", "--out", out).returncode == 0
    parts = ", ".join(str(out / f"length-{length}") for length in (600, 700))
    for verb in (["show", out], ["place", "--run", out, "--scores", "1,2"]):
        assert posbias(*verb).stderr.endswith(f"got 'evaluate_lengths' (done); it has {parts}\n")
    counted = posbias("show", out / "length-700", "--tokenizer", long_llama)
    assert "needle(tokens=700, depths=2): sample 0-0, position 0\n--- prompt\nRead the text" in counted.stdout


def test_what_a_method_an_order_or_a_file_makes_of_a_prompt_is_shown(posbias, tmp_path, monkeypatch):
    """Messages with their roles, thoughts apart; of a file that has changed, nothing."""
    lines = [{"units": ["Tom has 1.", f"Ann has {n}."], "moved": 1, "answer": n, "question": "Ann?"} for n in range(12)]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ["--task", f"items(file={str(tmp_path / 'own.jsonl')!r})", "--count", 6, "--calibration", 6, "--no-short"]
    with stand_in(lambda *_: chat("<think>Two.</think>4")) as server:
        served = ["--server", server.address, "--served-model", "m", "--methods", "question_first"]
        assert posbias("mitigate", *served, *asked, "--out", tmp_path / "run").returncode == 0
        monkeypatch.chdir(tmp_path)
        orders = ["--task", "items(file='own.jsonl')", "--count", 6, "--orders", "given,reversed", "--out", "orders"]
        assert posbias("evaluate", *served[:4], *orders).returncode == 0
    assert "position 0\n--- user\n[1] Ann has 1.\n[2] Tom" in posbias("show", "orders/reversed", "--sample", 1).stdout
    monkeypatch.chdir(tmp_path.parent)
    (arm,) = (tmp_path / "run" / "arms").glob("question-first-*")
    refused = posbias("show", arm)
    assert (refused.returncode, "'own.jsonl': No such file" in refused.stderr) == (2, True), refused.stderr
    told = posbias("show", arm, *asked[:2], "--sample", 7, "--position", 0).stdout
    body = "--- user\nQuestion: Ann?\n\n[1] Ann has 7.\n[2] Tom has 1.\n\nQuestion: Ann?\nAnswer:\n"
    assert told.endswith(
        f"{body}--- thoughts\nTwo.\n--- answer (stop)\n4\n--- expected\n7\n--- judged\nwrong (rule: contains)\n"
    )
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines[::-1])))
    assert "(its file has changed)" in posbias("show", arm, *asked[:2]).stderr


def test_what_is_odd_about_a_file_is_in_the_record_on_the_page_and_in_the_terminal(posbias, long_llama, tmp_path):
    passages = ["It is Rome.", "It is Rome, </s> they say.", "Nothing."]
    documents = [{"text": text, "is_gold": not place} for place, text in enumerate(passages)]
    lines = [{"question": "where?", "answers": [answer], "documents": documents} for answer in ["Rome", *5 * ["Paris"]]]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task, model = f"documents(documents=3, file='{tmp_path / 'own.jsonl'}')", tmp_path / "model"
    shutil.copytree(long_llama, model)
    PreTrainedTokenizerFast.from_pretrained(model, eos_token="</s>").save_pretrained(model)
    result = posbias("evaluate", model, "--task", task, "--count", 6, "--max-tokens", 2, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    record = read_record(tmp_path / "run")
    assert record.scalars["notices"] == {
        "answer_elsewhere": {"samples": [0]},
        "control_tokens": {"samples": [0, 1, 2, 3, 4, 5], "tokens": {"</s>": 6}},
        "gold_without_answer": {"samples": [1, 2, 3, 4, 5]},
    }
    said = [
        "In 1 of 6 samples (number 0) another passage holds an accepted answer, too: a right answer need not come",
        "(number 0, 1, 2, 3, 4, 5) the text spells control tokens ('</s>' 6 times): they were read as ordinary text",
        "In 5 of 6 samples (number 1, 2, 3, 4, 5) the passage marked as the right one holds none of the accepted",
    ]
    page, terminal = unescape((tmp_path / "run/report.html").read_text()), " ".join(result.stdout.split())
    for sentence in said:
        assert sentence in page
        assert sentence in terminal


def test_thoughts_that_a_template_opens_are_said_and_turned_off(posbias, long_llama, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(long_llama, model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    closed = "{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}\n<think>" + closed
    tokenizer.save_pretrained(model)
    asked = ["evaluate", model, "--task", "key_value(pairs=4, chat=True)", "--count", 2, "--max-tokens", 2]
    result = posbias(*asked, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    said = ("more than 10%: 8 still within thoughts.", "not scored: the prompts end where the model's")
    page, terminal = unescape((tmp_path / "run/report.html").read_text()), " ".join(result.stdout.split())
    for sentence in said:
        assert sentence in page
        assert sentence in terminal
    told = [*asked, "--thinking-tokens", 3, "--template-options", "enable_thinking=False", "--out", tmp_path / "told"]
    assert posbias(*told).returncode == 0
    record = read_record(tmp_path / "told")
    assert record.resolved["responder"]["model"]["template_options"] == {"enable_thinking": False}
    assert record.resolved["thinking_tokens"] == 3
    assert "unfinished" not in record.scalars["reading"]["unjudged"]
    assert "logprob" in record.scalars["curves"]
    mistaken = posbias(*asked, "--template-options", "enable_think=False")
    assert (mistaken.returncode, mistaken.stderr.count("\n")) == (2, 1)
    assert "'enable_think' does nothing: the model's chat template does not name it" in mistaken.stderr


def test_wrong_use_of_place_is_one_line(posbias, finished, tmp_path):
    wrong = tmp_path / "scores.txt"
    wrong.write_text("0.5\nhigh\n")
    for flags, message in (
        (["--scores", "0.5,often"], "--scores: 'often' is not a number"),
        (["--scores", wrong], "scores.txt, line 2: 'high' is not a number"),
        (["--scores", "1,2", "--by", "beauty"], "has no 'beauty'"),
    ):
        result = posbias("place", "--run", finished, *flags)
        assert result.returncode == 2
        assert message in result.stderr
        assert result.stderr.count("\n") == 1


def test_an_unreachable_server_fails_in_one_line_and_the_record_says_so(posbias, tmp_path):
    server = ["--server", "http://127.0.0.1:9/v1", "--served-model", "none"]
    short = ["--server-options", "retries=0, timeout=2.0"]
    result = posbias("evaluate", *server, *short, *FLAGS, "--out", tmp_path / "run")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "127.0.0.1:9" in result.stderr
    record = read_record(tmp_path / "run")
    assert record.status == "failed"
    assert "127.0.0.1:9" in record.error


@pytest.mark.slow
def test_audit_ties_influence_to_behaviour(posbias, long_llama, tmp_path):
    audit = ["audit", long_llama, "--length", 16, "--count", 2, "--initialisations", 0, "--kinds", "probability"]
    behaviour = ["--behaviour", "key_value(pairs=4)", "--behaviour-count", 2, "--behaviour-max-tokens", 2]
    result = posbias(*audit, *behaviour, "--out", tmp_path / "run", "--json")
    assert result.returncode == 0, result.stderr
    printed = json.loads(result.stdout)
    record = read_record(tmp_path / "run" / "behaviour")
    assert printed["behaviour"]["scalars"] == record.scalars
    assert record.scalars["influence"]["series"]
    pages = {name: (tmp_path / "run" / name / "report.html").read_text() for name in (".", "behaviour")}
    assert 'href="behaviour/report.html"' in pages["."]
    assert 'href="../report.html"' in pages["behaviour"]
    passages = [{"text": "It is Rome.", "is_gold": True}, {"text": "Nothing."}]
    line = json.dumps({"question": "where?", "answers": ["Rome"], "documents": passages})
    (tmp_path / "own.jsonl").write_text(4 * f"{line}\n")
    behaviour[1:4] = [f"documents(file={str(tmp_path / 'own.jsonl')!r})"]
    assert posbias(*audit, *behaviour, "--out", tmp_path / "own").returncode == 0
    assert pb.load_record(tmp_path / "own" / "behaviour").count == 4, "all of a file that has fewer than 12"
    placed = posbias("place", "--run", tmp_path / "run", "--scores", "1,2")
    assert placed.returncode == 2
    assert "6 complete samples" in placed.stderr


ASKED = "--task key_value(pairs=3) --positions 0,2 --count 6"
QUICK = f"{ASKED} --no-generate --calibration 4 --methods temperature(scale=0.3) --documents 0 --no-short".split()


def test_options_of_a_fit_and_the_text_that_judges_are_given(posbias, long_llama, tmp_path):
    text, out = tmp_path / "own.txt", tmp_path / "run"
    text.write_text(" ".join(f"line {number} of a text of my own" for number in range(400)))
    asked = ("--methods", "key_bias", "--fit", "steps=3, knots=[0, 8]", "--text", text)
    done = posbias("mitigate", long_llama, *QUICK, *asked, "--documents", "2", "--out", out)
    assert done.returncode == 0, done.stderr
    fitted = json.loads((out / "record.json").read_text())["scalars"]["arms"][1]["fitted"]
    assert (fitted["steps"], fitted["numbers"]) == (3, 8)
    recipe = json.loads(next((out / "arms").glob("key-bias-*/recipe.json")).read_text())
    assert recipe["method"].count("log_spline") == 2, "one for each of two layers"


def test_an_unmet_requirement_sets_the_exit_code_and_keeps_the_run(posbias, long_llama, tmp_path):
    out = tmp_path / "run"
    done = posbias("mitigate", long_llama, *QUICK, "--out", out, "--require", "worst>=-0.6")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].startswith("posbias: Required worst>=-0.6 is not met: -")
    record = json.loads((out / "record.json").read_text())
    assert (record["status"], record["scalars"]["judgement"]["measure"]) == ("done", "logprob")


def test_a_server_is_tried_with_methods_around_it_and_asked_for_nothing_twice(posbias, tmp_path):
    out = tmp_path / "run"

    def last_pair(_index, _path, body):
        """Answers with the last value, whatever is asked."""
        return chat(body["messages"][0]["content"].rsplit('": "', 1)[1].split('"')[0], prompt_tokens=50, tokens=5)

    with stand_in(last_pair) as server:
        given = [*ASKED.split(), "--calibration", 6, "--out", out]
        command = ["mitigate", "--server", server.address, "--served-model", "m", *given]
        done = posbias(*command, "--methods", "question_first,question_first(strength=0.5)")
        assert done.returncode == 0, done.stderr
        assert "36 requests without and with 2 methods" in done.stderr
        asked = len(server.asked)
        record = json.loads((out / "record.json").read_text())
        assert record["scalars"]["judgement"]["measure"] == "accuracy"
        assert [arm["effort"]["requests"] for arm in record["scalars"]["arms"]] == [12] * 3
        assert "not judged: the model is behind a server" in done.stdout
        again = posbias(*command, "--methods", "question_first,question_first(strength=0.5)", "--resume", "--json")
        assert json.loads(again.stdout)["run_id"] == record["run_id"]
        assert len(server.asked) == asked
        other = posbias(*command, "--methods", "question_first,repeat_prompt", "--resume")
        assert other.returncode == 0, other.stderr
        assert asked < len(server.asked) <= asked + 24, "only those that are repeated"
        refused = posbias(*command, "--methods", "temperature(scale=0.3)", "--resume")
        assert refused.returncode == 2
        assert (
            "temperature(scale=0.3) needs the model itself, not one behind a server" in refused.stderr.splitlines()[-1]
        )
    assert (out / "report.html").is_file()


KEY = "sk-very/secret+key_1234567890"


def test_a_run_against_an_echoing_server_keeps_no_key(posbias: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Of a run that ends and of one that fails."""
    monkeypatch.setenv("TEST_KEY", KEY)

    def echo(_index: int, _path: str, _body: dict[str, Any]) -> Reply:
        headers = {"X-Echo": KEY, "Set-Cookie": f"a={KEY}", "Location": KEY}
        body = spoken(f'"it is {KEY}"', extra=f', "{KEY}": "{KEY}"').replace(b'"stop"', b'"%b"' % KEY.encode())
        return 200, headers, body

    def refuse(index: int, path: str, body: dict[str, Any]) -> Reply:
        return echo(index, path, body) if index < 2 else (403, {"X-Echo": KEY}, {"error": KEY})

    flags = ["--task", "key_value(pairs=4)", "--count", 5, "--max-tokens", 2, "--json"]
    asked = ["--served-model", "m", "--server-options", "key_variable='TEST_KEY', retries=0, concurrency=2"]
    for index, behaviour in enumerate((echo, refuse)):
        run = tmp_path / str(index)
        with stand_in(behaviour) as server:
            result = posbias("evaluate", "--server", server.address, *asked, *flags, "--out", run)
        assert result.returncode == (0, 1)[index], result.stderr
        assert server.authorizations[0] == f"Bearer {KEY}"
        files = [path for path in run.rglob("*") if path.is_file()]
        assert {"record.json"} <= {path.name for path in files}
        for text in (result.stdout, result.stderr, *(path.read_text("utf-8", errors="replace") for path in files)):
            assert KEY not in text
