"""`posbias mitigate`: from a model to a verdict, and an exit code for pipelines."""

import json

from evaluation.serving import chat, stand_in

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
