"""Whatever is wrong is said in one short line that names it, with exit code 1 or 2, and nothing is left half-written;
inputs made to take all memory or never to end are refused by a stated limit.

What each value may be is held where it is declared (`test_limits.py`, and the tests of every room); here are the ways
in which a command line, a file, a model or a disk comes to be refused.
"""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import posbias as pb
from conftest import without_notes
from posbias.cli.output import error_line
from posbias.errors import LONGEST
from posbias.prompts.tokens import rendered
from posbias.results.records import read_record

SERVER = "http://127.0.0.1:9/v1"
"""Nothing is asked of it: the request is refused before."""
SERVED = f"evaluate --server {SERVER} --served-model m"
FIT = "mitigate LONG --no-generate --calibration 4 --count 6 --documents 0 --no-short"
OWN = "predict --model none --theory"
NAMES = "allowed: NAME=VALUE, such as enable_thinking=False"
DEEP = 100_000
"""Brackets that no parser of Python follows."""


def one_line(result, *words, code=2):
    """A refusal of one line; before it, a model that was loaded says so in its own."""
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stdout == ""
    (line,) = without_notes(result.stderr)
    assert len(line) <= LONGEST
    for word in words:
        assert word in line


# --- the command line ---


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fortune", "fortune"),
        ("measure", "MODEL"),
        ("predict --lenght 3", "--lenght"),
        ("predict --length many", "'--length': Input should be a valid integer"),
        ("predict --count 0", "greater than or equal to 1, got '0'; `posbias predict --help` says what is allowed"),
        (f"{SERVED} --count {10**12}", "should be less than or equal to 1000000, got '1000000000000'"),
        ("predict --depth 0", "--depth must be a list that is not empty, each a whole number >= 1"),
        ("predict --depth 2,x", "--depth: '2,x': allowed are whole numbers"),
        ("predict --mixing ' '", "--mixing must be a list that is not empty"),
        ("predict --mixing 1.5", "mixing must lie in [0, 1], got 1.5"),
        ("predict --mixing 0.1,0.10", "--mixing: 0.1 is given twice"),
        ("predict --mask causal,,full", "'causal,,full' has an empty item at place 2"),
        ("predict --depth 1,2,3,4,5 --mixing 0,0.2,0.4,0.6,0.8", "25 curves (--depth 5, --mixing 5 values) do not fit"),
        ("predict --encoding none,alibi --theory closed_form", "mask causal with encoding none only"),
        ("predict --encoding 'alibi(slopes=[1.0])' --heads 2", "1 slopes given for 2 heads"),
        ("predict --encoding \"alibi(slopes='ab')\" --heads 2", "slopes"),
        ("predict --content '[[1, 2], [3]]'", "content"),
        ("predict --content '[[1], [3]]' --depth 2 --heads 2", "content has shape [2, 1]"),
        ("predict --mixing '[{[1]: 2}]'", "is not a list of numbers or quoted names"),
        (f"predict --mixing {'[' * DEEP}", "is not a list of numbers or quoted names"),
        ("measure demo --output 'at(position={[1]: 2})'", "is not a name or a literal call such as"),
        (f"measure demo --output 'at(position={'-' * DEEP}1)'", "is not a name or a literal call such as"),
        ("predict --content 2", "theory rollout ignores content"),
        ("predict --theory rollout,attention_only --mixing 0.2", "theory attention_only ignores mixing"),
        ("predict --prompts default", "--prompts is read with --model only"),
        ("predict --dtype float64", "--dtype is read with --model only"),
        ("predict --model demo --theory rollout,power_rollout", "with --model one at a time"),
        ("predict --model config:demo --theory mean_field --shuffle", "--shuffle is read with --prompts only"),
        ("predict --model config:demo --theory mean_field --mixing 0.1", "--mixing cannot be given with --model"),
        ("predict --model LONG --theory attention_only --prompts synthetic", "attention_only reads no --prompts"),
        ("predict --model LONG --theory attention_only --count 3", "attention_only needs none"),
        (f"{OWN} 'power_rollout(form=round)'", "parameters of power_rollout: key_path, target"),
        (f"{OWN} 'power_rollout(target=logits)'", "target must be one of jacobian, probability"),
        (f"{OWN} 'power_rollout('", "is not a name or a literal call"),
        (f"{OWN} 'mean_field(level=last)'", "unknown mean-field level 'last'"),
        (f"{OWN} 'rollout(mixing=1)'", "theory rollout takes no parameters"),
        (f"{OWN} 'astrology(sign=leo)'", "unknown theory 'astrology'"),
        ("predict --depth 1000000000", "depth x heads: 1,000,000,000 heads; at most 30,000 are allowed"),
        ("predict --length 1000000000000", "n_positions 1,000,000,000,000 with 1 heads"),
        ("predict --depth 10000 --length 10000000", "steps; at most 10,000,000,000 are allowed"),
        (f"predict --mixing 'constant(value={'9' * 400})'", "value"),
        (f"predict --mask 'prefix(length={'9' * 400})'", ">= 1, got a number of 1329 bits"),
        ("verify --mask causal --length 1000000000", "--length 2 to 256"),
        ("audit LONG --length 8 --count 1 --seed 9223372036854775808", "seed must be a whole number >= 0 and < 4,611,"),
        ("audit demo --behaviour-count 3", "--behaviour-count needs a task"),
        ("audit LONG --template-options loud=True", "ask for them by chat=True in the task"),
        ("measure LONG --template-options loud=True", "evaluate, mitigate and audit --behaviour have it"),
        ("measure LONG --output first", "unknown output 'first'"),
        ("measure LONG --kinds telepathy", "unknown influence kind 'telepathy'"),
        ("measure LONG --engine local --ray-address auto", "--ray-address goes with --engine ray"),
        ("measure LONG --prompts synthetic --length 8 --count 100000000000000", "800,000,000,000,000 cells"),
        ("measure demo gpt2", "one model, got demo, gpt2; measure each into a directory of its own"),
        ("measure LONG --max-memory 6GB", "--max-memory left posbias after 0.1.0: what does not fit is refused"),
        ("evaluate demo --max-cost 3", "--max-cost left posbias after 0.1.0: a small --count first"),
        ("evaluate LONG --methods repeat_prompt", "posbias mitigate MODEL --methods RECIPE judges a method beside"),
        ("attention LONG --sink-thresholds a", "--sink-thresholds: 'a': allowed are numbers, such as 0.2,0.3"),
        ("attention LONG --sink-thresholds 0.2,1.5", "a list that is not empty, each a number > 0 and < 1"),
        ("attention LONG --length 2", "at least 3 positions"),
        ("decompose LONG --length 2", "at least 3 positions, got 2"),
        ("decompose LONG --interventions no_rope,no_rope", "given 2 times"),
        ("decompose LONG --interventions no_alibi", "intervention no_alibi left posbias after 0.1.0"),
        ("design flat --over heads", "unknown free parameter 'heads'; known: gamma_key, key_bias"),
        ("design flat --measured-at 64", "--measured-at is read with --model only"),
        ("design flat --model config:x --measured-at all", "--measured-at: 'all': allowed are whole numbers"),
        ("design flat --model config:x --depth 3", "--depth cannot be given with --model"),
        ("design flat --model demo", "write --model config:demo"),
        ("design nowhere.csv", "cannot read the target nowhere.csv"),
        ("design flat --mixing 0", "mixing is 0 in every layer: attention moves nothing"),
        ("design flat --length 2", "--length must be a whole number >= 3"),
        ("train none.yaml", "cannot read 'none.yaml'"),
        ("train none.yaml --engine cloud", "unknown engine 'cloud'; known: local, ray"),
        ("evaluate", "give one of MODEL and --server URL, not both"),
        (f"{SERVED} LONG", "give one of MODEL and --server URL, not both"),
        (f"{SERVED} --server {SERVER} --served-model n --served-model o", "--served-model are given 2 and 3 times"),
        (f"evaluate --server {SERVER}", "--server needs --served-model"),
        (f"{SERVED} --batch 8", "--batch goes with a MODEL"),
        ("evaluate LONG --served-model m", "--served-model goes with --server"),
        ("evaluate LONG --tokenizer LONG", "--tokenizer goes with --server; a MODEL runs here"),
        (f"{SERVED} --server-options speed=3", "--server-options: unknown 'speed'; allowed: "),
        (f"{SERVED} --server-options retries=-1", "--server-options: retries must be a whole number"),
        (f"{SERVED} --server-options \"cache='x'\"", "--server-options: unknown 'cache'; allowed: "),
        (f"{SERVED} --server-options \"key_variable='sk-1'\"", "key_variable must be the name"),
        ("evaluate LONG --task key_valu", "unknown task 'key_valu'"),
        ("evaluate LONG --task 'key_value(pairs=1)'", "pairs must be a whole number >= 2"),
        ("evaluate LONG --task 'key_value(chat=True)'", "no chat template"),
        ("evaluate LONG --positions 99", "positions must be whole numbers"),
        ("evaluate LONG --no-generate --no-score", "nothing to do"),
        ("evaluate LONG --answer-pattern 'Answer: .*'", "'Answer: .*' has 0 groups in brackets; allowed: 1"),
        ("evaluate LONG --thinking-tokens -1", "--thinking-tokens"),
        ("evaluate LONG --template-options enable_thinking=False", "ask for them by chat=True in the task"),
        ("evaluate LONG --template-options thinking", f"--template-options: 'thinking': {NAMES}"),
        ("evaluate LONG --require worst>=80", "accuracies lie in 0 ... 1, and so must the bound"),
        ("evaluate LONG demo --lengths 300", "evaluate: lengths and orders take one subject, got long-llama, demo"),
        ("evaluate nowhere --summary run.txt", "--summary 'run.txt': allowed: FILE.md and, of a bound (--require), "),
        ("evaluate nowhere --summary run.xml", "--summary 'run.xml': allowed: FILE.md and, of a bound (--require), "),
        (f"{FIT} --require best>=1", "requirement 'best>=1': allowed: worst, mean, spread"),
        (f"{FIT} --require worst>=0.6", "log-probabilities, as nothing is generated, lie in -inf ... 0"),
        (f"{FIT} --methods nosuch", "unknown mitigation 'nosuch'"),
        (f"{FIT} --methods key_bias --calibration 0", "key_bias is fitted and needs calibration samples"),
        (f"{FIT} --methods key_bias --calibration 2", "needs calibration samples, at least 4; got 2"),
        (f"{FIT} --methods nofile.json", "there is no file 'nofile.json'; allowed: all, names or spellings of methods"),
        (f"{FIT} --by rank", "--by must be one of accuracy, logprob"),
        (f"{FIT} --by accuracy", "by accuracy needs generate, which is switched off"),
        (f"{FIT} --fit steps", "'steps': allowed: NAME=VALUE, such as steps=600, rate=0.02, texts in quotes"),
        (f"{FIT} --fit stepz=3", "unknown argument 'stepz'; allowed: steps, batch, rate"),
        ("report nowhere", "holds no posbias run"),
        ("compare nowhere nowhere", "holds no posbias run"),
        ("predict --out ''", "Invalid value for '--out': allowed: the name of a directory, '.' for this one"),
        ("models get --out ''", "'--out'"),
    ],
    ids=lambda given: given[:60],
)
def test_a_wrong_request_is_one_line_and_leaves_nothing(posbias, long_llama, tmp_path, monkeypatch, given, words):
    monkeypatch.chdir(tmp_path)
    command = [str(long_llama) if word == "LONG" else word for word in shlex.split(given)]
    one_line(posbias(*command, *([] if "--out" in command else ["--out", "run"])), words)
    assert not list(tmp_path.iterdir())


def test_flags_that_change_nothing_are_not_refused(posbias):
    assert posbias("predict", "--length", 16, "--content", "0", "--seed", 3).returncode == 0
    assert posbias("predict", "--length", 16, "--theory", "attention_only", "--mixing", "1").returncode == 0
    nothing = posbias()
    assert nothing.returncode == 2
    assert "audit" in nothing.stdout + nothing.stderr


def test_error_lines_are_short_keep_the_remedy_and_can_be_printed():
    line = error_line("no such thing: " + "x" * 5000 + "\n\x1b[31m\ud800; give --out DIR")
    assert len(line) == LONGEST
    assert line.startswith("posbias: no such thing: xxx")
    assert line.endswith("\\x1b[31m\\ud800; give --out DIR")
    assert line.isprintable()
    assert error_line("short") == "posbias: short"


def test_arguments_are_unicode(posbias, tmp_path):
    one_line(posbias("predict", "--out", f"{tmp_path}/\udcff"), r"the command line: '\udcff' alone is no character")
    assert not list(tmp_path.iterdir())


def shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A shell line in which $POSBIAS is the command."""
    environment = {**os.environ, "POSBIAS": f"{sys.executable} -m posbias"}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )


def test_nothing_is_printed_to_stdout_where_stderr_is_closed(tmp_path):
    for closed in ("2>&-", "0<&- 2>&-"):
        ended = shell(f"$POSBIAS list nosuch {closed}", tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def test_a_stdout_that_takes_nothing_is_one_error(tmp_path):
    ended = shell("$POSBIAS models --help > /dev/null; $POSBIAS --version > /dev/full", tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "posbias: No space left on device\n")


# --- files ---


@pytest.mark.parametrize(
    ("byte", "said"),
    [(b"a", "line 1 is too long"), (b"\0", "line 1 is too long"), (b"\n", "100,000 blank lines")],
)
def test_gzip_that_holds_far_more_than_it_takes(posbias, tmp_path, byte, said):
    packed = tmp_path / "bomb.jsonl.gz"
    packed.write_bytes(gzip.compress(byte * 5 * 10**7, compresslevel=1))
    one_line(posbias(*SERVED.split(), "--task", f"pairwise(file='{packed}')"), said)


def endless(path: Path, sort: str) -> Path:
    if sort == "pipe":
        os.mkfifo(path)
    elif sort == "device":
        path.symlink_to("/dev/zero")
    elif sort == "loop":
        path.symlink_to(path)
    else:
        path.mkdir()
    return path


@pytest.mark.parametrize("sort", ["pipe", "device", "directory", "loop"])
@pytest.mark.parametrize(
    ("suffix", "command"),
    [
        (".txt", "measure {model} --length 8 --prompts {}"),
        (".jsonl", "measure {model} --length 8 --prompts {}"),
        (".yaml", "train {}"),
        (".jsonl", "place --run x --scores {}"),
        (".jsonl", f"{SERVED} --task pairwise(file='{{}}')"),
        (".txt", f"{SERVED} --tokenizer {{model}} --task needle(tokens=64,corpus='{{}}')"),
    ],
)
def test_only_files_are_read(posbias, tiny_llama, tmp_path, monkeypatch, sort, suffix, command):
    monkeypatch.chdir(tmp_path)
    path = endless(tmp_path / f"file{suffix}", sort)
    words = [word.replace("{model}", str(tiny_llama)).replace("{}", str(path)) for word in command.split()]
    one_line(posbias(*words), path.name)


def test_lines_of_files_are_named(posbias, tiny_llama, long_llama, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine, but what follows is not"}\n{"text": "half a \\ud800 character"}\n')
    asked = ["measure", tiny_llama, "--prompts", bad, "--count", 2, "--length", 8]
    one_line(posbias(*asked), "bad.jsonl", "line 2", r"half a character ('\ud800')")
    bad.write_text("#" * 2_000_000)
    one_line(posbias("train", bad), "at most 1,000,000 bytes")
    good = {"question": "q", "answers": ["x"], "documents": [{"text": "x", "is_gold": True}, {"text": "y"}]}
    bad.write_text(json.dumps(good) + "\nnot json\n")
    asked = ["evaluate", long_llama, "--task", f"documents(documents=2, file={str(bad)!r})", "--count", 2]
    one_line(posbias(*asked), "bad.jsonl, line 2: is not JSON")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it"),
        ("{{ 'a' * 5 * 10**7 }}", "bytes; at most 33,554,432 are allowed"),
        ("{{ '\\ud800' }}", "alone is no character"),
    ],
)
def test_templates_are_bounded(template, said):
    class Templated:
        """A tokenizer, as far as rendering goes."""

        chat_template = template

        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
            from transformers.utils.chat_template_utils import render_jinja_template

            return render_jinja_template(conversations=[messages], chat_template=template)[0][0]

    with pytest.raises(ValueError, match=r"^conversation 0") as caught:
        rendered([{"role": "user", "content": "x"}], Templated())
    assert said in str(caught.value)


@pytest.mark.parametrize("kept", [True, False])
def test_a_record_that_was_changed_is_known_by_its_checksum(posbias, tmp_path, kept):
    """And one without a checksum is refused."""
    pb.predict(pb.Architecture(depth=1), 8).record.save(tmp_path / "run")
    path = tmp_path / "run" / "arrays.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
    arrays = load_file(path)
    if kept:
        arrays["profile/influence"] = np.zeros((2, 3))
    else:
        del metadata["sha256"]
    save_file(arrays, path, metadata=metadata)
    said = "arrays.safetensors' is damaged or not a posbias run: its content is not what"
    one_line(posbias("report", tmp_path / "run"), said)


# --- models, disks and memory ---


def test_wrong_models(posbias, tiny_llama, tmp_path):
    one_line(posbias("measure", "no/such/model/anywhere"), "no/such/model/anywhere")
    one_line(posbias("measure", tiny_llama, "--device", "meta"), "device 'meta' cannot be used")
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"]}))
    one_line(posbias("audit", encoder, "--out", tmp_path / "run"), "encoder", "decoder-only")
    assert not (tmp_path / "run").exists()
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 7}))
    said = "weight 'model.layers.0.mlp.down_proj.weight' has shape"
    one_line(posbias("measure", other, "--length", 16, "--count", 2), said, ", 7] by its configuration", code=1)


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


def test_places_that_cannot_be_written_or_hold_what_is_compared(posbias, tiny_llama, tmp_path):
    (tmp_path / "file").write_text("")
    one_line(posbias("predict", "--out", tmp_path / "file" / "run"), "cannot write")
    one_line(posbias("audit", tiny_llama, "--length", 16, "--count", 2, "--out", tmp_path / "file"), "cannot write")
    predicted = tmp_path / "predicted"
    assert posbias("predict", "--length", 8, "--out", predicted).returncode == 0
    one_line(posbias("compare", predicted, predicted, "--out", predicted), "is one of the runs compared")
    assert read_record(predicted).verb == "predict"


def test_memory_that_is_not_there_fails_the_run_and_its_record_says_why(posbias, tmp_path, monkeypatch):
    for limit in ("CELLS", "MOST_STEPS"):
        monkeypatch.setattr(sys.modules["posbias.theory.predict"], limit, 10**18)
    one_line(posbias("predict", "--length", 10**14, "--out", tmp_path / "run"), "allocate", code=1)
    assert "allocate" in read_record(tmp_path / "run").error


def test_where_a_devices_memory_runs_out_the_line_says_what_to_do(posbias, monkeypatch):
    def full(_sort):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nOf the allocated memory ...")

    monkeypatch.setattr("posbias.cli.listing.registered_variants", full)
    one_line(posbias("list", "masks"), "CUDA out of memory. Tried to allocate 2.00 GiB; try", code=1)
