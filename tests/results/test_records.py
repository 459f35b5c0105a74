"""A run directory holds either the old or the new run, whatever happens in between."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save

from conftest import record_schema
from posbias import Profile, Record, RunError, UsageError, write_report
from posbias.files import TEMPORARY
from posbias.results.records import (
    ARRAYS_FILE,
    FORMAT_VERSION,
    RECORD_FILE,
    commit_of,
    read_record,
)
from posbias.runs.running import LOCK_FILE, held, run_directory
from posbias.theory import Prediction


def example(value: float) -> Record:
    return Record(
        verb="predict",
        arguments={"depth": 2},
        scalars={"value": value, "unbounded": np.inf, "count": np.int64(3), "pair": (1, 2)},
        arrays={"profile/influence": np.full(4, value)},
        seeds={"seed": 0},
    )


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    saved = example(0.25)
    saved.save(tmp_path / "run")
    loaded = read_record(tmp_path / "run")
    assert loaded.as_json() == saved.as_json()
    np.testing.assert_array_equal(loaded.arrays["profile/influence"], np.full(4, 0.25))
    assert loaded.scalars == {"value": 0.25, "unbounded": None, "count": 3, "pair": [1, 2]}


def test_whatever_ends_a_run_is_in_its_record_without_the_directory_of_a_file(tmp_path):
    with pytest.raises(MemoryError), run_directory(tmp_path / "run", verb="predict", arguments={"depth": 2}):
        raise MemoryError("no room\nfor '/a/b c/model.safetensors'")
    failed = read_record(tmp_path / "run")
    assert (failed.status, failed.error) == ("failed", "no room for 'model.safetensors'")
    assert failed.arguments == {"depth": 2}


def test_a_report_that_fails_does_not_cost_the_finished_record(tmp_path):
    example(0.25).save(tmp_path / "run")

    def run():
        with run_directory(tmp_path / "run", verb="predict", arguments={}, overwrite=True) as run:
            run.finish(example(0.5))
            raise RunError("no picture")

    with pytest.raises(RunError, match="no picture"):
        run()
    assert read_record(tmp_path / "run").scalars["value"] == 0.5


def test_the_schema_is_of_this_format_and_knows_every_field():
    schema = record_schema().schema
    assert schema["properties"]["format_version"] == {"const": FORMAT_VERSION}
    assert set(example(0.5).as_json()) == {*schema["required"]}
    assert set(schema["properties"]) == {*schema["required"], "verdict", "behaviour"}


def test_what_is_printed_is_by_the_schema_too(posbias):
    printed = posbias("predict", "--depth", 2, "--mixing", 0.1, "--length", 6, "--json")
    assert printed.returncode == 0, printed.stderr
    document = json.loads(printed.stdout)
    record_schema().validate(document)
    assert document["verdict"]
    assert sum(document["arrays"]["profile/influence"]) == pytest.approx(1)
    record_schema().validate({**document, "behaviour": document})
    stored = example(0.5).as_json()
    for wrong in (
        {**document, "profiles": {}},
        {**document, "arrays": stored["arrays"]},
        {**document, "verdict": "Yes."},
        {**document, "behaviour": stored},
        {name: value for name, value in document.items() if name != "verdict"},
        {**stored, "behaviour": document},
    ):
        assert not record_schema().is_valid(wrong), wrong.keys()


def test_missing_and_damaged_runs_are_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no posbias run"):
        read_record(tmp_path)
    (tmp_path / ARRAYS_FILE).write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="damaged"):
        read_record(tmp_path)
    (tmp_path / ARRAYS_FILE).write_bytes(save({"x": np.zeros(1)}, metadata={"record": "[]"}))
    with pytest.raises(UsageError, match="not what posbias wrote"):
        read_record(tmp_path)
    assert not (tmp_path / RECORD_FILE).exists()
    for name, value, message in (
        ("format_version", 99, "record format 99"),
        ("format_version", None, "record format None"),
        ("new", 1, "damaged or from another"),
    ):
        record = example(0.25)
        setattr(record, name, value)
        record.save(tmp_path)
        with pytest.raises(UsageError, match=message):
            read_record(tmp_path)


def test_a_full_disk_leaves_the_old_run(tmp_path, monkeypatch):
    example(0.25).save(tmp_path / "run")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        example(0.5).save(tmp_path / "run", overwrite=True)
    monkeypatch.undo()
    assert read_record(tmp_path / "run").scalars["value"] == 0.25
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [ARRAYS_FILE, RECORD_FILE]


def with_report(directory):
    """A finished run with its report, and two files of the user's own beside it."""
    record = Prediction(Profile.uniform(8), "rollout").record
    record.save(directory)
    write_report([record], directory)
    (directory / "mine.png").write_bytes(b"\x89PNG drawn elsewhere")
    (directory / "notes.txt").write_text("mine")


OWN_FILES = {"mine.png", "notes.txt"}


def test_runs_that_begin_together_are_refused_for_the_right_reason(tmp_path):
    """The probe of one is not the other's: whoever does not get the directory is told that it is taken."""
    code = """
import sys
from posbias.errors import UsageError
from posbias.runs.running import run_directory

for _ in range(200):
    try:
        with run_directory(sys.argv[1], verb="measure", arguments={}):
            pass
    except UsageError as error:
        assert "another run is writing" in str(error), error
"""
    runs = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")]) for _ in range(3)]
    assert [run.wait(timeout=120) for run in runs] == [0, 0, 0]


def test_what_killed_runs_left_half_written_goes_at_the_next_start(tmp_path):
    mine = {".notes.tmp", ".arrays.safetensors.12.tmp.mine", "deep/.record.json.1.posbias.tmp"}
    left = {f"{place}.record.json.{os.getpid()}.{TEMPORARY}" for place in ("", "parts/", "models/0001/", "answers/ab/")}
    for name in {*left, *mine, f".probe.{TEMPORARY}"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"torn")
    with held(tmp_path):
        pass
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {LOCK_FILE, *mine}


def test_a_file_system_without_locks_is_refused_in_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=r"cannot write to .*: No locks available"), held(tmp_path):
        pass


def test_a_lock_that_was_removed_meanwhile_is_not_held(tmp_path, monkeypatch):
    """The run that had made the directory for nothing removed its lock between our opening and locking it."""
    lock = fcntl.flock

    def slow(file, operation):
        (tmp_path / LOCK_FILE).unlink()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(UsageError, match="another run is writing"), held(tmp_path):
        pass


@pytest.mark.parametrize("name", [LOCK_FILE, ""])
def test_a_directory_and_a_file_in_each_others_places_are_refused(tmp_path, name):
    out = tmp_path / "run"
    if name:
        (out / name).mkdir(parents=True)
    else:
        out.write_text("a file")
    with pytest.raises(UsageError, match="cannot write to"), held(out):
        pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_can_only_be_read_is_refused_and_can_be_read(tmp_path):
    example(0.25).save(tmp_path)
    (tmp_path / RECORD_FILE).write_bytes(b"\xff")
    tmp_path.chmod(0o500)
    with pytest.raises(UsageError, match=r"cannot write to .*: Permission denied"), held(tmp_path):
        pass
    assert read_record(tmp_path).scalars["value"] == 0.25


OLDER = json.dumps(example(0.25).as_json()).encode()
"""What a run leaves that is killed between its two renames."""
DAMAGED = [OLDER, b"\xff\xfe torn", b"", b"{", b"[" * 100_000, b'{"format_version": 99}', b'"\\ud800"']


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_older_readable_copy_is_made_anew(tmp_path, content):
    saved = example(0.5)
    saved.save(tmp_path)
    (tmp_path / RECORD_FILE).write_bytes(content)
    found = read_record(tmp_path)
    assert found.as_json() == saved.as_json()
    assert found.arrays["profile/influence"][0] == 0.5
    assert json.loads((tmp_path / RECORD_FILE).read_text()) == saved.as_json()


@pytest.mark.parametrize(
    ("error", "resume", "status", "report"),
    [(RunError, False, "failed", set()), (UsageError, False, "done", {"report.html"}),
     (RunError, True, "done", {"report.html"})],
)  # fmt: skip
def test_a_run_that_fails_leaves_no_report_of_an_older_one_and_one_that_does_not_begin_leaves_both(
    error, resume, status, report, tmp_path
):
    """A wrong request does not begin, nor does one to resume a finished run that cannot be resumed."""
    with_report(tmp_path)
    settings = {"verb": "measure", "arguments": {}, "resume": resume, "overwrite": not resume}
    with pytest.raises(error, match="it ended"), run_directory(tmp_path, **settings):
        raise error("it ended")
    assert read_record(tmp_path).status == status
    assert {path.name for path in tmp_path.iterdir()} - {LOCK_FILE} == {ARRAYS_FILE, RECORD_FILE} | report | OWN_FILES


def test_a_run_killed_before_its_readable_copy_keeps_no_older_report(tmp_path):
    with_report(tmp_path / "run")
    example(0.5).save(tmp_path / "newer")
    shutil.copy(tmp_path / "newer" / ARRAYS_FILE, tmp_path / "run" / ARRAYS_FILE)
    assert read_record(tmp_path / "run").scalars["value"] == 0.5
    assert {path.name for path in (tmp_path / "run").iterdir()} == {ARRAYS_FILE, RECORD_FILE} | OWN_FILES


def test_neither_file_of_a_record_names_a_machine(tmp_path):
    model = f"{tmp_path}/deep directory/gemma"
    record = Record("measure", {"model": model, "out": tmp_path / "run"})
    record.resolved["command"] = f"posbias measure '{model}' --out {tmp_path}/run"
    record.save(tmp_path / "run")
    for told in (read_record(tmp_path / "run"), Record(**vars(record))):
        assert told.arguments == {"model": "gemma", "out": "run"}
        assert told.resolved["command"] == "posbias measure 'gemma' --out run"
    assert all(str(tmp_path).encode() not in path.read_bytes() for path in (tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("[Errno 2] No such file: '/a/b c/model.safetensors'", "[Errno 2] No such file: 'model.safetensors'"),
        ("cannot open /a/b.txt: broken", "cannot open b.txt: broken"),
        ('File "/a/b/c.py", line 3', 'File "c.py", line 3'),
        ("C:\\Users\\me\\x.bin is bad", "x.bin is bad"),
        ("~/models/x missing, path=/y/z.bin,/q/r", "x missing, path=z.bin,r"),
        ("see https://example.org/a/b, and/or 3 / 4 of 1/2", "see https://example.org/a/b, and/or 3 / 4 of 1/2"),
        ("Qwen/Qwen3-0.6B at a/b/c", "Qwen/Qwen3-0.6B at a/b/c"),
        ("config:/x/y/z", "config:z"),
        ("/a/b.jsonl#field", "b.jsonl#field"),
        ("documents(file='/a/b c/d.jsonl.gz')", "documents(file='d.jsonl.gz')"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("hf:owner/name:split", "hf:owner/name:split"),
        ({"a": ["/b/c", 3, None]}, {"a": ["c", 3, None]}),
        ({"stop": ["</s>", "</think>"]}, {"stop": ["</s>", "</think>"]}),
        ("/data/it's/run", "run"),
        ("[bold]odd[/bold]", "[bold]odd[/bold]"),
        ("[/a/b, 3]", "[b, 3]"),
    ],
)
def test_a_record_keeps_of_a_path_the_last_part_and_what_is_none_as_it_was_passed(value, kept):
    assert Record("measure", {"given": value}).arguments["given"] == kept


def _git(*arguments, cwd):
    """What git prints."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_commit_is_that_of_the_checkout(tmp_path):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    assert commit_of(checkout) is None
    commit_of.cache_clear()
    _git("init", "-q", cwd=checkout)
    assert commit_of(checkout) is None
    commit_of.cache_clear()
    _git("commit", "-q", "--allow-empty", "-m", "first", cwd=checkout)
    commit = _git("rev-parse", "HEAD", cwd=checkout).strip()
    _git("worktree", "add", "-q", "-b", "other", "../other", cwd=checkout)
    assert commit_of(checkout) == commit_of(tmp_path / "other") == commit
