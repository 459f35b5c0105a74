"""`posbias mitigate`: from a model to a verdict, an exit code for pipelines, and one line for what is wrong."""

import json

from evaluation.serving import chat, stand_in

ARGUMENTS = (
    "--task",
    "key_value(pairs=3)",
    "--positions",
    "0,2",
    "--no-generate",
    "--count",
    "6",
    "--calibration",
    "4",
)
QUICK = (*ARGUMENTS, "--methods", "temperature(scale=0.3)", "--documents", "0", "--no-short")


def test_a_run_is_saved_printed_and_resumed(posbias, long_llama, tmp_path):
    out = tmp_path / "run"
    done = posbias("mitigate", long_llama, *QUICK, "--out", out, "--require", "worst<=0")
    assert done.returncode == 0, done.stderr
    assert "requests without and with 1 methods" in done.stderr
    assert "temperature(scale=0.3)" in done.stdout
    assert (out / "report.html").is_file()
    record = json.loads((out / "record.json").read_text())
    assert record["verb"] == "mitigate"
    assert record["scalars"]["judgement"]["measure"] == "logprob"
    again = posbias("mitigate", long_llama, *QUICK, "--out", out, "--require", "worst<=0", "--resume", "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout)["run_id"] == record["run_id"]


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
    assert json.loads((out / "record.json").read_text())["status"] == "done"


def test_bad_input_is_one_line(posbias, long_llama):
    for arguments, message in (
        (("--require", "best>=1"), "requirement 'best>=1': allowed: worst, mean, spread"),
        (("--require", "worst>=0.6"), "log-probabilities, as nothing is generated, lie in -inf ... 0"),
        (("--methods", "nosuch"), "unknown mitigation 'nosuch'"),
        (("--methods", "temperature(scale=0.3, strength=2)"), "strength must be a number >= 0 and <= 1"),
        (("--methods", "key_bias", "--calibration", "0"), "key_bias is fitted and needs calibration samples"),
        (("--methods", "key_bias", "--calibration", "2"), "needs calibration samples, at least 4; got 2"),
        (("--methods", "nofile.json"), "there is no file 'nofile.json'; allowed: all, names or spellings of methods"),
        (("--by", "rank"), "--by must be one of accuracy, logprob"),
        (("--by", "accuracy"), "by accuracy needs generate, which is switched off"),
        (("--fit", "steps"), "'steps': allowed: NAME=VALUE, such as steps=600, rate=0.02, texts in quotes"),
        (("--fit", "stepz=3"), "unknown argument 'stepz'; allowed: steps, batch, rate"),
        (
            ("--documents", "2", "--text", "default#homer"),
            "fits read the default corpus, too; give a file, or leave it out",
        ),
    ):
        done = posbias("mitigate", long_llama, *QUICK, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr.splitlines()[-1], done.stderr
        assert "estimate" not in done.stderr, "before any work"


def test_a_server_is_tried_with_methods_around_it_and_asked_for_nothing_twice(posbias, tmp_path):
    out = tmp_path / "run"
    given = ("--task", "key_value(pairs=3)", "--positions", "0,2", "--count", "6", "--calibration", "6")

    def last_pair(_index, _path, body):
        """Answers with the last value, whatever is asked."""
        return chat(body["messages"][0]["content"].rsplit('": "', 1)[1].split('"')[0], prompt_tokens=50, tokens=5)

    with stand_in(last_pair) as server:
        command = ("mitigate", "--server", server.address, "--served-model", "m", *given, "--out", out)
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
