"""Inputs made to take all memory or never to end are refused by a stated limit, and errors are one short line."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import posbias as pb
from conftest import without_notes
from posbias.cli.output import LONGEST, error_line
from posbias.prompts.tokens import rendered

UNASKED = "--server http://127.0.0.1:9/v1 --served-model m"
"""Whom nothing is asked: the task is refused before."""
STUDY = "task: position_copy(target=0, context={context}, vocabulary=5)\nmodel: {{depth: {depth}, width: {width}}}\n"
LAUGHS = "a: &a [lol, lol]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefghijklmnopqrstuvw", "bcdefghijklmnopqrstuvwx", strict=True)
)


def refused(result, *said, code=2):
    assert result.returncode == code, (result.stdout, result.stderr)
    assert result.stdout == ""
    (line,) = without_notes(result.stderr)
    assert len(line) <= LONGEST
    for words in said:
        assert words in line


# --- files that are too large, or none ---


@pytest.mark.parametrize(
    ("byte", "said"),
    [(b"a", "line 1 is too long"), (b"\0", "line 1 is too long"), (b"\n", "100,000 blank lines")],
)
def test_gzip_that_holds_far_more_than_it_takes(posbias, tmp_path, byte, said):
    packed = tmp_path / "bomb.jsonl.gz"
    packed.write_bytes(gzip.compress(byte * 5 * 10**7, compresslevel=1))
    for task in (f"pairwise(file='{packed}')", f"documents(file='{packed}')"):
        refused(posbias("evaluate", *UNASKED.split(), "--task", task), said)


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
        (".jsonl", f"evaluate {UNASKED} --task pairwise(file='{{}}')"),
        (".jsonl.gz", f"evaluate {UNASKED} --task documents(file='{{}}')"),
        (".txt", f"evaluate {UNASKED} --tokenizer {{model}} --task needle(tokens=64,corpus='{{}}')"),
    ],
)
def test_only_files_are_read(posbias, tiny_llama, tmp_path, monkeypatch, sort, suffix, command):
    monkeypatch.chdir(tmp_path)
    path = endless(tmp_path / f"file{suffix}", sort)
    words = [word.replace("{model}", str(tiny_llama)).replace("{}", str(path)) for word in command.split()]
    refused(posbias(*words), path.name)


def test_aliases_of_yaml_are_counted_as_what_they_stand_for(posbias, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(LAUGHS)
    refused(posbias("train", path), "an alias for a list or mapping; write it out")
    path.write_text("#" * 2_000_000)
    refused(posbias("train", path), "at most 1,000,000 bytes")


# --- numbers that are too large ---


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["predict", "--depth", 10**9], "depth x heads: 1,000,000,000 heads; at most 30,000 are allowed"),
        (["predict", "--heads", 10**9], "at most 30,000 are allowed"),
        (["predict", "--length", 10**12], "n_positions 1,000,000,000,000 with 1 heads"),
        (["predict", "--depth", 10**4, "--length", 10**7], "steps; at most 10,000,000,000 are allowed"),
        (["predict", "--mixing", f"constant(value={'9' * 400})"], "value"),
        (["predict", "--mask", f"prefix(length={'9' * 400})"], ">= 1, got a number of 1329 bits"),
        (["verify", "--mask", "causal", "--length", 10**9], "--length 2 to 256"),
        (
            ["evaluate", *UNASKED.split(), "--task", "key_value(pairs=1000000000)"],
            "pairs must be a whole number >= 2 and",
        ),
        (
            ["evaluate", *UNASKED.split(), "--task", "documents(documents=10)", "--count", 10**12],
            "should be less than or equal to 1000000, got '1000000000000'",
        ),
        (["evaluate", *UNASKED.split(), "--task", "needle(depths=1000000000)"], "depths must be a whole"),
    ],
)
def test_sizes_beyond_every_machine_are_refused(posbias, command, said):
    refused(posbias(*command), said)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--count", 10**12], "count x n_positions"),
        (["--kinds", "jacobian(probes=1000000000)"], "jacobian: probes must be a whole number >= 1 and <= 1,000,000"),
        (["--kinds", "integrated_gradients(steps=1000000000)"], "steps must be a whole"),
        (["--kinds", "perturbation(draws=1000000000)"], "draws must be a whole"),
    ],
)
def test_sizes_of_a_measurement(posbias, tiny_llama, flags, said):
    refused(posbias("measure", tiny_llama, "--length", 8, "--prompts", "synthetic", *flags), said)


@pytest.mark.parametrize(
    ("values", "train", "said"),
    [
        ({"depth": 10**9}, "{steps: 2}", "depth x heads"),
        ({"width": 10**9}, "{steps: 2}", "reference weights"),
        ({"context": 10**9}, "{steps: 2}", "context must be a whole"),
        ({}, "{steps: 2, batch: 1000000000}", "batch must be a whole"),
        ({}, "{steps: 1000000000000}", "steps must be a whole"),
    ],
)
def test_sizes_of_a_study(posbias, tmp_path, values, train, said):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(**{"context": 6, "depth": 1, "width": 8, **values}) + f"train: {train}\n")
    refused(posbias("train", path), said)


# --- chat templates ---


class Templated:
    """A tokenizer, as far as rendering goes."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        from transformers.utils.chat_template_utils import render_jinja_template

        return render_jinja_template(conversations=[messages], chat_template=self.chat_template)[0][0]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses it"),
        ("{{ 'a' * 5 * 10**7 }}", "bytes; at most 33,554,432 are allowed"),
        ("{{ '\\ud800' }}", "alone is no character"),
    ],
)
def test_templates_are_bounded(template, said):
    with pytest.raises(ValueError, match=r"^conversation 0") as caught:
        rendered([{"role": "user", "content": "x"}], Templated(template))
    assert said in str(caught.value)


# --- records ---


@pytest.fixture
def predicted(tmp_path):
    pb.predict(pb.Architecture(depth=1), 8).record.save(tmp_path / "run")
    return tmp_path / "run"


def rewritten(run: Path, change) -> None:
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = run / "arrays.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
    document, arrays = json.loads(metadata["record"]), load_file(path)
    change(document, arrays)
    metadata["record"] = json.dumps(document)
    save_file(arrays, path, metadata=metadata)


@pytest.mark.parametrize(
    "change",
    [
        lambda document, arrays: document.update(status=["done"]),
        lambda document, arrays: arrays.update({"profile/influence": np.zeros((2, 3))}),
    ],
)
def test_a_record_that_was_changed_is_known_by_its_checksum(posbias, predicted, change):
    rewritten(predicted, change)
    refused(posbias("report", predicted), "arrays.safetensors' is damaged or not a posbias run")


def test_a_record_without_a_checksum_is_refused(posbias, predicted):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    path = predicted / "arrays.safetensors"
    with safe_open(path, framework="numpy") as file:
        record = file.metadata()["record"]
    save_file(load_file(path), path, metadata={"record": record})
    refused(
        posbias("report", predicted), "arrays.safetensors' is damaged or not a posbias run: its content is not what"
    )


# --- the line ---


def test_error_lines_are_short_keep_the_remedy_and_can_be_printed():
    line = error_line("no such thing: " + "x" * 5000 + "\n\x1b[31m\ud800; give --out DIR")
    assert len(line) == LONGEST
    assert line.startswith("posbias: no such thing: xxx")
    assert line.endswith("\\x1b[31m\\ud800; give --out DIR")
    assert line.isprintable()
    assert error_line("short") == "posbias: short"


def test_arguments_are_unicode(posbias, tmp_path):
    refused(posbias("predict", "--out", f"{tmp_path}/\udcff"), r"the command line: '\udcff' alone is no character")
    assert not list(tmp_path.iterdir())


def command(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """A shell line in which $POSBIAS is the command."""
    environment = {**os.environ, "POSBIAS": f"{sys.executable} -m posbias"}
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )


def test_nothing_is_printed_to_stdout_where_stderr_is_closed(tmp_path):
    for closed in ("2>&-", "0<&- 2>&-"):
        ended = command(f"$POSBIAS list nosuch {closed}", tmp_path)
        assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "")


def test_a_stdout_that_takes_nothing_is_one_error(tmp_path):
    ended = command("$POSBIAS models --help > /dev/null; $POSBIAS --version > /dev/full", tmp_path)
    assert (ended.returncode, ended.stderr) == (1, "posbias: No space left on device\n")
