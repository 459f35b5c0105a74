"""Whatever is wrong is said in one line that names it, with exit code 1 or 2, and nothing is left half-written."""

import json
import shutil
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from posbias.results.records import read_record


def refused(result, *words, code=2):
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
    return result.stderr


def one_line(result, *words, code=2):
    """A refusal of one line; before it, a model that was loaded says so in its own."""
    lines = refused(result, *words, code=code).splitlines()
    assert len([line for line in lines if not line.startswith("model ")]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mixing", "1.5"], ["mixing must lie in [0, 1], got 1.5"]),
        (["--mixing", "[0.1, 0.2, 0.3]", "--depth", "2"], ["mixing has shape [3]; give a number, 2 values"]),
        (["--mask", "casual"], ["unknown mask 'casual'", "causal, full, prefix, sliding_window"]),
        (["--encoding", "alibi(slopes=[1.0])", "--heads", "2"], ["1 slopes given for 2 heads"]),
        (["--theory", "astrology"], ["unknown theory 'astrology'", "rollout"]),
        (["--theory", "closed_form", "--encoding", "alibi"], ["mask causal with encoding none only"]),
        (["--content", "[[1, 2], [3]]"], ["content"]),
        (["--content", "[[1], [3]]", "--depth", "2", "--heads", "2"], ["content has shape [2, 1]"]),
        (["--content", "nan"], ["content must be a finite number or a list or ndarray, got nan"]),
        (["--encoding", "alibi(slopes='ab')", "--heads", "2"], ["alibi", "slopes", "'ab'"]),
        (["--mixing", ","], ["',' has an empty item at place 1"]),
        (["--mixing", " "], ["--mixing must be a list that is not empty", "got ' '"]),
        (["--mask", "causal,,full"], ["'causal,,full' has an empty item at place 2"]),
        (["--theory", "rollout,"], ["'rollout,' has an empty item at place 2"]),
        (["--mixing", "0.1,0.10"], ["--mixing: 0.1 is given twice"]),
        (["--depth", "2,x"], ["--depth: '2,x': allowed are whole numbers"]),
        (["--depth", "1,2,3,4,5", "--mixing", "0,0.2,0.4,0.6,0.8"], ["25 curves (--depth 5, --mixing 5", "at most 24"]),
        (["--encoding", "none,alibi", "--theory", "closed_form"], ["mask causal with encoding none only"]),
    ],
)
def test_wrong_architectures(posbias, flags, words):
    one_line(posbias("predict", *flags), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--content", "2"], ["theory rollout ignores content"]),
        (["--theory", "rollout,attention_only", "--mixing", "0.2"], ["theory attention_only ignores mixing"]),
        (["--model", "demo", "--theory", "rollout,power_rollout"], ["with --model one at a time"]),
        (["--content", "[1, 0]", "--depth", "2", "--theory", "closed_form"], ["theory closed_form ignores content"]),
        (["--content", "2", "--theory", "continuous"], ["theory continuous ignores content"]),
        (["--prompts", "default"], ["--prompts is read with --model only"]),
        (["--init-seed", "3"], ["--init-seed is read with --model only"]),
        (["--shuffle"], ["--shuffle is read with --model only"]),
        (["--dtype", "float64"], ["--dtype is read with --model only"]),
        (["--device", "cpu"], ["--device is read with --model only"]),
        (
            ["--model", "config:demo", "--theory", "mean_field", "--shuffle"],
            ["--shuffle is read with --prompts only"],
        ),
        (
            ["--model", "config:demo", "--theory", "mean_field", "--mixing", "0.1"],
            ["--mixing cannot be given with --model"],
        ),
        (
            ["--model", "config:demo", "--theory", "mean_field", "--depth", "12"],
            ["--depth cannot be given with --model"],
        ),
        (["--model", "config:demo", "--theory", "mean_field", "--count", "3"], ["--count is read with --prompts only"]),
    ],
)
def test_flags_that_nothing_reads_are_refused(posbias, flags, words, tmp_path):
    one_line(posbias("predict", *flags, "--length", 16, "--out", tmp_path / "run"), *words)
    assert not (tmp_path / "run").exists()


DEEP = 100_000
"""Brackets that no parser of Python follows."""


@pytest.mark.parametrize(
    "output",
    ["at(position={[1]: 2})", "at(position={{}})", f"at(position={'-' * DEEP}1)", f"at(position={'(' * DEEP})"],
)
def test_literals_that_python_cannot_build_are_bad_usage(posbias, output):
    one_line(posbias("measure", "demo", "--output", output), "is not a name or a literal call such as")


@pytest.mark.parametrize("mixing", ["[{[1]: 2}]", "[" * DEEP, f"[{'-' * DEEP}1]"])
def test_lists_that_python_cannot_build_are_bad_usage(posbias, mixing):
    one_line(posbias("predict", "--mixing", mixing), "is not a list of numbers or quoted names")


@pytest.mark.parametrize("flag", [["--behaviour-count", "3"], ["--behaviour-kinds", "logprob"]])
def test_flags_of_a_task_need_a_task(posbias, flag, tmp_path):
    one_line(posbias("audit", "demo", *flag, "--out", tmp_path / "run"), "behaviour-", "needs a task")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("verb", [["predict"], ["models", "get"], ["audit", "demo"]])
def test_an_empty_directory_name_is_not_the_current_one(posbias, verb):
    one_line(posbias(*verb, "--out", ""), "'--out'", "the name of a directory")


def test_flags_that_change_nothing_are_not_refused(posbias):
    assert posbias("predict", "--length", 16, "--content", "0", "--seed", 3).returncode == 0
    assert posbias("predict", "--length", 16, "--theory", "attention_only", "--mixing", "1").returncode == 0


def test_wrong_values_of_flags_are_bad_usage(posbias):
    one_line(posbias("predict", "--depth", "0"), "--depth must be a list", "each a whole number >= 1", "got '0'")
    one_line(posbias("predict", "--count", "0"), "--count", "got '0'", "greater than or equal to 1")
    one_line(posbias("predict", "--length", "many"), "--length", "got 'many'")
    one_line(posbias("predict", "--lenght", "3"), "--lenght", "posbias predict --help")
    one_line(posbias("measure"), "MODEL")
    one_line(posbias("fortune"), "fortune")
    nothing = posbias()
    assert nothing.returncode == 2
    assert "audit" in nothing.stdout + nothing.stderr


def test_wrong_models(posbias, tiny_llama, tmp_path):
    one_line(posbias("measure", "no/such/model/anywhere"), "no/such/model/anywhere")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    one_line(posbias("audit", encoder, "--out", tmp_path / "run"), "encoder", "decoder-only")
    assert not (tmp_path / "run").exists()

    silent = tmp_path / "silent"
    shutil.copytree(tiny_llama, silent)
    for file in silent.glob("tokenizer*"):
        file.unlink()
    one_line(posbias("measure", silent, "--length", 16, "--count", 2), "no tokenizer")

    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    said = "weight 'model.layers.0.mlp.down_proj.weight' has shape"
    one_line(posbias("measure", other, "--length", 16, "--count", 2), said, ", 7] by its configuration", code=1)
    one_line(posbias("measure", tiny_llama, "--device", "meta"), "device 'meta' cannot be used")

    pickled = tmp_path / "pickled"
    shutil.copytree(tiny_llama, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    one_line(posbias("measure", pickled, "--length", 16, "--count", 2), "pickled weights", "safetensors")

    remote = tmp_path / "remote"
    shutil.copytree(tiny_llama, remote)
    config = json.loads((remote / "config.json").read_text())
    config |= {"model_type": "sorcery", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (remote / "config.json").write_text(json.dumps(config))
    (remote / "evil.py").write_text("raise SystemExit('remote code ran')")
    one_line(posbias("measure", remote, "--length", 16, "--count", 2), "remote")


def test_nan_weights_fail_the_run_and_its_record_says_why(posbias, tiny_llama, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_llama, broken)
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    one_line(posbias("audit", broken, "--length", 16, "--count", 2, "--out", tmp_path / "run"), name, code=1)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record["status"] == "failed"
    assert name in record["error"]


def test_wrong_prompts(posbias, tiny_llama, tmp_path):
    def measure(prompts, *flags):
        return posbias("measure", tiny_llama, "--prompts", prompts, "--count", 2, *flags)

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine, but what follows is not"}\n{"text": "half a \\ud800 character"}\n')
    one_line(measure(bad, "--length", 8), "bad.jsonl", "line 2", r"half a character ('\ud800')")
    one_line(
        measure("synthetic", "--length", 8, "--count", 10**14),
        "count x n_positions = 100000000000000 x 8: 800,000,000,000,000 cells",
    )
    one_line(posbias("measure", tiny_llama, "--kinds", "telepathy"), "unknown influence kind 'telepathy'", "jacobian")


def test_places_that_cannot_be_written(posbias, tiny_llama, tmp_path):
    (tmp_path / "file").write_text("")
    one_line(posbias("predict", "--out", tmp_path / "file" / "run"), "cannot write")
    one_line(posbias("audit", tiny_llama, "--length", 16, "--count", 2, "--out", tmp_path / "file"), "cannot write")


def test_runs_that_are_no_runs(posbias, tmp_path):
    one_line(posbias("report", tmp_path / "nothing"), "holds no posbias run")
    one_line(posbias("compare", tmp_path, tmp_path), "holds no posbias run")
    predicted = tmp_path / "predicted"
    assert posbias("predict", "--length", 8, "--out", predicted).returncode == 0
    one_line(posbias("compare", predicted, predicted, "--out", predicted), "is one of the runs compared")
    assert read_record(predicted).verb == "predict"


def test_memory_that_is_not_there_fails_the_run_and_its_record_says_why(posbias, tmp_path, monkeypatch):
    run = ["predict", "--length", 10**14, "--out", tmp_path / "run"]
    one_line(posbias(*run), "n_positions", "at most 50,000,000 are allowed")
    assert not (tmp_path / "run").exists()
    for limit in ("CELLS", "MOST_STEPS"):
        monkeypatch.setattr(sys.modules["posbias.theory.predict"], limit, 10**18)
    one_line(posbias(*run), "allocate", code=1)
    assert "allocate" in read_record(tmp_path / "run").error


def test_a_seed_too_large_for_the_births_is_refused_before_any_work(posbias, tiny_llama, tmp_path):
    result = posbias("audit", tiny_llama, "--length", 8, "--count", 1, "--seed", 2**63, "--out", tmp_path / "run")
    one_line(result, "seed must be a whole number >= 0 and < 2^62")
    assert not (tmp_path / "run").exists()


def test_what_left_says_what_to_do_instead(posbias):
    one_line(posbias("measure", "demo", "gpt2"), "one model, got demo, gpt2", "posbias report DIRECTORY... --out BOTH")
    one_line(posbias("evaluate", "demo", "--max-cost", "3"), "--max-cost left posbias", "more with --resume")
