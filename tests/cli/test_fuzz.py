"""Whatever is typed or stands in a file, a command ends soon, with exit code 0, 1 or 2 and at most one line on stderr.

Inputs are mutations of valid ones, drawn from a seed: an option gets a hostile value, a literal call a hostile
parameter, a file is damaged in its bytes or in one of its values, or replaced by something that is no file. Commands
run in this process, which is what makes a thousand of them possible; what needs a process of its own (closed streams)
follows at the end.
"""

import contextlib
import dataclasses
import faulthandler
import gzip
import io
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import typer
from pyarrow import parquet
from safetensors import safe_open
from safetensors.numpy import save

from posbias.architecture import ENCODINGS, MASKS, SCHEDULES
from posbias.cli import main
from posbias.cli.app import app
from posbias.interventions import INTERVENTIONS
from posbias.measurement import KINDS, OUTPUTS
from posbias.memory import peak_bytes, reset_peak, resident_bytes
from posbias.registry import Registry
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.theory import THEORIES

INPUTS = 1000
SECONDS = 10
"""Of processor time for one command; a busy machine must not make findings."""
MEMORY = 2 * 10**9
LONGEST = 500

HUGE = 10**12
TEXTS = (
    *("", " ", "-", "--", "nan", "inf", "-1", "0", "1.5", "1e400", "true", "None", "all", "x" * 5000, "9" * 400),
    *(
        "9" * 5000,
        str(HUGE),
        str(-HUGE),
        str(2**63),
        "0x10",
        "１２",
        "1,2,,3",
        "[" * 3000,
        "[[]]",
        "[1e999]",
        "{'a': 1}",
    ),
    *("a(b=c)", "f(*x)", "spread(1000000000)", "\udcff", "é\n\x1b[31m", "/dev/zero", "..", "/", "no/such", "demo#x"),
)
"""What an option is given."""
LITERALS = (
    *("0", "-1", "1.5", "1e999", "-1e999", "True", "None", "''", "'x'", "'\\ud800'", "b'x'", "1j", "[]", "[1]"),
    *(
        "[[1], 2]",
        "{}",
        "{1: 2}",
        "{1}",
        "()",
        "9" * 400,
        "9" * 5000,
        str(HUGE),
        str(10**9),
        str(2**63),
        "-" * 999 + "1",
    ),
)
"""What a parameter of a literal call is given."""
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), HUGE, 10**9, 2**63, 10**400, "", "x", "\ud800", "nan"),
    *([], [[]], {}, {"a": 1}, [None], "x" * 3000),
)
"""What stands in place of a value in a file."""

COMMANDS = (
    "predict --depth 2 --heads 2 --length 12 --mask prefix(length=3) --encoding alibi --mixing 0.5 --content 1 "
    "--theory rollout_content",
    "predict --model {model} --theory power_rollout(form=isotropic) --prompts {text} --count 2 --length 8",
    "measure {model} --prompts {records} --length 8 --count 2 --kinds jacobian(probes=1) --output last",
    "measure {model} --prompts {token_ids} --length 8 --count 2 --kinds probability --depth-profiles 0",
    "measure {model} --prompts {table} --length 8 --count 2 --kinds logprob --output at(position=-1)",
    "measure {model} --prompts chat:{chat} --length 12 --count 1 --kinds probability",
    "attention {model} --prompts {text} --length 8 --count 1 --thresholds 0.2,0.3 --kernel-cells 4",
    "decompose {model} --prompts {records} --length 8 --count 1 --interventions no_rope --kinds probability",
    "evaluate --lm-eval {new} --task key_value(pairs=3,file='{pairs}') --count 2 --positions spread(2)",
    "evaluate --lm-eval {new} --task documents(documents=2,file='{documents}') --count 2 --positions 0,1",
    "evaluate {model} --task example_order(shots=4) --count 1 --max-tokens 1 --positions 0",
    "evaluate --lm-eval {new} --tokenizer {model} --task needle(tokens=256,depths=2,corpus='{text}') --count 1",
    "audit {model} --prompts {text} --length 8 --count 1 --births 0 --kinds probability --out {new}",
    "verify --mask {mask_npy}",
    "verify --mask {mask_txt}",
    "verify --mask prefix(length=4) --length 12",
    "train {study}",
    "place --run {evaluated} --scores {scores}",
    "place --run {evaluated} --scores 0.9,0.4,0.1 --by probability",
    "report {predicted} --out {new}",
    "report {measured} --out {new}",
    "report {evaluated} --out {new}",
    "report {trained} --out {new}",
    "report {verified} --out {new}",
    "report {attended} --out {new}",
    "report {decomposed} --out {new}",
    "compare {predicted} {measured}",
    "compare {measured} {measured} --kind probability",
    "tie {tied}",
    "list masks",
)
"""Valid commands; what stands in braces is a file of `Ground`, or a directory that does not exist yet."""
REGISTRIES: dict[str, Registry[Any]] = {
    "--mask": MASKS,
    "--encoding": ENCODINGS,
    "--mixing": SCHEDULES,
    "--theory": THEORIES,
    "--kinds": KINDS,
    "--output": OUTPUTS,
    "--task": LANGUAGE_TASKS,
    "--interventions": INTERVENTIONS,
}
RUNS = {
    "predicted": "predict --depth 2 --length 8",
    "measured": "measure {model} --length 8 --count 6 --kinds probability",
    "evaluated": "evaluate {model} --task example_order(shots=4) --count 7 --max-tokens 1",
    "trained": "train {study}",
    "verified": "verify wu2025/theorem-4.5",
    "attended": "attention {model} --length 8 --count 2",
    "decomposed": "decompose {model} --length 8 --count 2 --interventions no_rope --kinds probability",
}
STUDY: dict[str, Any] = {
    "task": {"name": "position_copy", "target": 0, "context": 6, "vocabulary": 5},
    "model": {"depth": 1, "width": 8, "residual": "none", "mask": "causal", "mixing": 1.0},
    "optimiser": {"name": "adam", "learning_rate": 0.01},
    "train": {"steps": 4, "batch": 8, "window": 2, "evaluate_every": 2, "examples": 4, "stopping": "below(loss=0.1)"},
    "grid": {"task.target": [0, 5]},
    "seeds": 1,
}
PAIRS = {"ordered_kv_records": [["k1", "v1"], ["k2", "v2"], ["k3", "v3"]], "key": "k2", "value": "v2"}
DOCUMENTS = {
    "question": "who",
    "answers": ["Ada"],
    "ctxs": [{"title": "A", "text": "Ada did.", "isgold": True}, {"title": "B", "text": "Bob.", "isgold": False}],
}
CHAT = {"messages": [{"role": "user", "content": "hello you"}]}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. Winston walked home; it rained. "


# --- what happens ---


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a command ended."""

    command: list[str]
    code: int
    stdout: str
    stderr: str
    seconds: float
    taken: int
    """Bytes of memory beyond what this process held before."""

    def findings(self) -> list[str]:
        """What must not be."""
        lines = [line for line in self.stderr.splitlines() if not line.startswith("estimate: ")]
        checks = {
            f"exit code {self.code}": self.code not in (0, 1, 2),
            "a traceback": "Traceback" in self.stderr,
            "unexpected": "posbias: unexpected " in self.stderr,
            "an error that is not one line": self.code != 0 and len(lines) != 1,
            "a long line": any(len(line) > LONGEST for line in lines),
            "unprintable": any(not line.isprintable() for line in lines),
            "output beside an error": self.code != 0 and self.stdout != "" and "models failed" not in self.stderr,
            "noise beside a result": self.code == 0 and lines != [],
            f"{self.seconds:.0f} s": self.seconds > SECONDS,
            f"{self.taken / 1e9:.1f} GB": self.taken > MEMORY,
            "no memory": "allocate" in self.stderr or "out of memory" in self.stderr,
        }
        return [what for what, found in checks.items() if found]

    def __str__(self) -> str:
        command = " ".join(repr(word if len(word) < 90 else word[:80] + "..") for word in self.command)
        return f"{', '.join(self.findings())}: {command}\n    {self.code}: {self.stderr[:300]!r} {self.stdout[:60]!r}"


class TooLong(BaseException):
    """Nothing in the package catches it."""


def ended(command: list[str]) -> Ending:
    """Run a command in this process, as `main` runs it, with bounds on time and memory."""

    def stop(*_: Any) -> None:
        raise TooLong

    output, errors = io.StringIO(), io.StringIO()
    reset_peak()
    before, begin = resident_bytes() or 0, time.process_time()
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 2 * MEMORY, resource.RLIM_INFINITY))
    for alarm, number, most in (
        (signal.ITIMER_PROF, signal.SIGPROF, SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, 6 * SECONDS),
    ):
        signal.signal(number, stop)
        signal.setitimer(alarm, most)
    faulthandler.dump_traceback_later(20 * SECONDS, exit=True, file=sys.__stderr__)
    code: Any = 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["posbias", *command])
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                main()
    except SystemExit as end:
        code = end.code or 0
    except TooLong:
        code = -1
    finally:
        for alarm in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(alarm, 0)
        faulthandler.cancel_dump_traceback_later()
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = max(0, (peak_bytes() or 0) - before)
    return Ending(command, code, output.getvalue(), errors.getvalue(), time.process_time() - begin, taken)


# --- valid files ---


class Ground:
    """Valid files of every kind, each made when it is first asked for."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.model = directory / "model"
        shutil.copytree(model, self.model)
        config = self.model / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        self.count = 0

    def new(self) -> Path:
        """A name that nothing has."""
        self.count += 1
        return self.directory / f"new-{self.count}"

    def path(self, kind: str) -> Path:
        """The file of a kind, or a run directory."""
        if kind == "model":
            return self.model
        if kind == "new":
            return self.new()
        suffix = SUFFIXES.get(kind, "")
        path = self.directory / f"{kind}{suffix}"
        if not path.exists():
            if kind in FILES:
                path.write_bytes(FILES[kind]())
            elif kind == "tied":
                self._tied(path)
            else:
                found = ended([*words(RUNS[kind], self), "--out", str(path)])
                assert found.code == 0, found
        return path

    def _tied(self, path: Path) -> None:
        sys.path.append(str(Path(__file__).parents[1]))
        from tied_runs import saved

        saved().save(path)


def json_lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def table() -> bytes:
    buffer = io.BytesIO()
    parquet.write_table(pa.table({"text": [PROSE, PROSE.upper()], "number": [1, 2]}), buffer)
    return buffer.getvalue()


def mask(write: Callable[..., None], **options: Any) -> Callable[[], bytes]:
    def written() -> bytes:
        buffer = io.BytesIO()
        write(buffer, np.tri(6, dtype=int), **options)
        return buffer.getvalue()

    return written


FILES: dict[str, Callable[[], bytes]] = {
    "text": lambda: (PROSE * 40).encode(),
    "records": lambda: json_lines({"text": PROSE, "id": 1}, {"text": PROSE.upper(), "id": 2}),
    "token_ids": lambda: json_lines({"token_ids": list(range(40))}, {"token_ids": list(range(50, 90))}),
    "table": table,
    "chat": lambda: json_lines(CHAT, {"messages": [{"role": "user", "content": "hello us!"}]}),
    "pairs": lambda: gzip.compress(json_lines(PAIRS, PAIRS)),
    "documents": lambda: json_lines(DOCUMENTS, DOCUMENTS),
    "scores": lambda: json_lines({"score": 0.5}, 0.25, {"score": 1}),
    "study": lambda: json.dumps(STUDY).encode(),
    "mask_npy": mask(np.save),
    "mask_txt": mask(np.savetxt, fmt="%d"),
}
SUFFIXES = {
    **dict.fromkeys(("records", "token_ids", "chat", "documents", "scores"), ".jsonl"),
    **dict.fromkeys(("text", "mask_txt"), ".txt"),
    "table": ".parquet",
    "pairs": ".jsonl.gz",
    "study": ".yaml",
    "mask_npy": ".npy",
}


def words(command: str, ground: Ground, **instead: Path) -> list[str]:
    """A command with its files filled in."""
    kinds = [*FILES, *RUNS, "model", "new", "tied"]
    paths = {kind: instead.get(kind) or ground.path(kind) for kind in kinds if f"{{{kind}}}" in command}
    filled = command
    for kind, path in paths.items():
        filled = filled.replace(f"{{{kind}}}", str(path))
    return [word.replace("\0", "'") for word in shlex.split(filled.replace("'", "\0"))]


# --- mutations ---


def option(command: str, ground: Ground, source: random.Random) -> list[str]:
    """One option of the verb gets a hostile value."""
    given = words(command, ground)
    known = [
        parameter.opts[0]
        for parameter in typer.main.get_command(app).commands[given[0]].params  # type: ignore[attr-defined]
        if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False)
    ]
    known = [name for name in known if name not in {"--engine", "--server", "--ray-address"}]
    here = [name for name in given if name in known]
    name = source.choice(here if here and source.random() < 0.5 else known)
    return with_option(given, name, source.choice(TEXTS))


def with_option(given: list[str], name: str, value: str) -> list[str]:
    if name in given:
        place = given.index(name)
        return [*given[: place + 1], value, *given[place + 2 :]]
    return [*given, name, value]


def argument(command: str, ground: Ground, source: random.Random) -> list[str]:
    """One word of the command is replaced, left out or said twice."""
    given = words(command, ground)
    place = source.randrange(len(given))
    return [*given[:place], *source.choice([[source.choice(TEXTS)], [], [given[place]] * 2]), *given[place + 1 :]]


def literal(command: str, ground: Ground, source: random.Random) -> list[str]:
    """A variant of a registry gets hostile parameters."""
    given = words(command, ground)
    names = [name for name in given if name in REGISTRIES]
    if not names:
        return option(command, ground, source)
    name = source.choice(names)
    registry = REGISTRIES[name]
    variant = source.choice(list(registry))
    of_class = isinstance(registry[variant], type)
    parameters = [field.name for field in dataclasses.fields(registry[variant])] if of_class else []
    chosen = source.sample(parameters, min(len(parameters), source.choice([1, 1, 1, 2])))
    spelled = ", ".join(f"{parameter}={source.choice(LITERALS)}" for parameter in chosen)
    return with_option(given, name, f"{variant}({spelled})" if spelled else variant)


def file(command: str, ground: Ground, source: random.Random) -> list[str]:
    """One file of the command is damaged, or one value in it, or it is no file."""
    kinds = [kind for kind in [*FILES, *RUNS, "tied"] if f"{{{kind}}}" in command]
    if not kinds:
        return literal(command, ground, source)
    kind = source.choice(kinds)
    before, after = ground.path(kind), ground.new().with_suffix("".join(ground.path(kind).suffixes))
    if before.is_dir():
        shutil.copytree(before, after)
        damaged = after / "arrays.safetensors"
        damaged.write_bytes(source.choice([bytes_changed, record_changed, record_changed])(damaged, source))
    elif source.random() < 0.2:
        source.choice(NO_FILES)(after)
    elif source.random() < 0.35:
        after.write_bytes(bytes_changed(before, source))
    else:
        after.write_bytes(value_changed(kind, before, source))
    return words(command, ground, **{kind: after})


def bytes_changed(path: Path, source: random.Random) -> bytes:
    """Cut, bits turned, a part repeated or replaced by what does not belong there."""
    content = path.read_bytes()
    place = source.randrange(len(content))
    odd = source.choice(
        [b"", b"\0" * 50, b"\xff\xfe", b"\xed\xa0\x80", b"\n" * 3, b"[" * 3000, b'"', b"\x1f\x8b", b"9" * 5000]
    )
    return source.choice(
        [
            content[:place],
            content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :],
            content[:place] + odd + content[place:],
            odd + content,
            odd,
            content[place:] + content[:place],
        ]
    )


def value_changed(kind: str, path: Path, source: random.Random) -> bytes:
    """A valid file of its kind, with one value of another sort."""
    content = path.read_bytes()
    if kind == "table":
        return table_changed(source)
    if kind == "mask_npy":
        buffer = io.BytesIO()
        odd = (
            np.zeros((0, 0)),
            np.ones(6),
            np.full((6, 6), np.nan),
            np.eye(6) * 1j,
            np.array([["a"]]),
            np.ones((300, 300)),
        )
        np.save(buffer, source.choice([*odd, np.zeros((2, 2, 2)), np.zeros(3, dtype="i4,f4"), np.array("2020", "M8")]))
        return buffer.getvalue()
    if kind in ("text", "mask_txt"):
        return bytes_changed(path, source)
    packed = kind == "pairs"
    lines = (gzip.decompress(content) if packed else content).splitlines()
    place = source.randrange(len(lines))
    lines[place] = json.dumps(node_changed(json.loads(lines[place]), source)).encode()
    text = b"\n".join(lines) + b"\n"
    return gzip.compress(text) if packed else text


def table_changed(source: random.Random) -> bytes:
    """A Parquet file whose column holds something else."""
    columns = (
        *([None, "a"], [], [b"\xff"], [1.5], [[1, 2]] * 3, [[1, None]], [[2**63 - 1] * 9], [{"a": 1}], [[["x"]]], [""]),
        *([PROSE * 3], ["\0" * 500], [[]], [[-1] * 20], [True], [None]),
    )
    buffer = io.BytesIO()
    name = source.choice(["text", "token_ids", "other"])
    parquet.write_table(pa.table({name: source.choice(columns)}), buffer, compression=source.choice(["gzip", "none"]))
    return buffer.getvalue()


def node_changed(value: Any, source: random.Random) -> Any:
    """A nested value with one node replaced, removed or wrapped."""
    if not isinstance(value, dict | list) or not value or source.random() < 0.15:
        return source.choice([source.choice(VALUES), [value], {"a": value}, deep()])
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = source.choice(keys)
    changed = dict(value) if isinstance(value, dict) else list(value)
    if source.random() < 0.15:
        del changed[key]
    else:
        changed[key] = node_changed(value[key], source)
    return changed


def deep() -> Any:
    """A list in a list, 200 times: JSON reads it, recursive programs may not."""
    value: Any = 1
    for _ in range(200):
        value = [value]
    return value


def record_changed(path: Path, source: random.Random) -> bytes:
    """A run's file with another value in its record, an array less, or one of another shape or sort."""
    with safe_open(path, framework="numpy") as opened:
        document = json.loads(opened.metadata()["record"])
        metadata = dict(opened.metadata())
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if source.random() < 0.5:
        metadata.pop("sha256", None)  # as posbias wrote them before it sealed its records
    if source.random() < 0.6 or not arrays:
        document = node_changed(document, source)
    else:
        name = source.choice(list(arrays))
        array = arrays.pop(name)
        flat, strange = array.reshape(-1), np.array([float("nan")])
        odd = (flat, flat[:1], strange, array.astype(complex).real[..., None], array > 0, -array.astype(float) - 1)
        if source.random() < 0.8:
            arrays[name] = np.ascontiguousarray(source.choice(odd))
    metadata["record"] = json.dumps(document)
    return save(arrays, metadata=metadata)


NO_FILES: tuple[Callable[[Path], object], ...] = (
    lambda path: os.mkfifo(path),
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: path.mkdir(),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(gzip.compress(b"\n" * 10**8)),
    lambda path: path.write_bytes(gzip.compress(b" " * 10**8)),
    lambda path: path.write_bytes(b'{"text": "' + b"a" * 10**8),
    lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 3 * 10**9),
    lambda path: path.write_text(
        "a: &a [1, 1]\n"
        + "".join(
            f"{b}: &{b} [*{a}, *{a}]\n"
            for a, b in zip("abcdefghijklmnopqrstuvwx", "bcdefghijklmnopqrstuvwxy", strict=True)
        )
    ),
)
"""What stands where a file is expected."""
MUTATIONS = (option, option, argument, literal, literal, file, file, file, file)


# --- tests ---


def run(ground: Ground, commands: Sequence[str], count: int, *, seed: int) -> list[Ending]:
    """Endings of `count` inputs; what is found is printed at once, and counts of outcomes at the end."""
    source = random.Random(seed)
    outcomes: Counter[str] = Counter()
    found = []
    for number in range(count):
        command = commands[number % len(commands)]
        os.chdir(ground.directory)
        ending = ended(source.choice(MUTATIONS)(command, ground, source))
        outcomes[f"{command.split()[0]} {ending.code}"] += 1
        if ending.findings():
            found.append(ending)
            print(ending, flush=True)
    print(f"{count} inputs, seed {seed}, {len(found)} findings; verb, exit code: inputs")
    print("\n".join(f"  {name}: {outcomes[name]}" for name in sorted(outcomes)))
    return found


def alone(tmp_path: Path, model: Path, *arguments: object) -> str:
    """Run this file as a program: without the type checks of the tests, which would refuse what users can pass."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path), str(model), *map(str, arguments)]
    ending = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ending.returncode == 0, f"{ending.stdout}\n{ending.stderr}"
    return ending.stdout


@pytest.mark.slow
def test_a_thousand_inputs_end_in_at_most_one_line(tmp_path, tiny_llama, capsys):
    told = alone(tmp_path, tiny_llama, INPUTS, os.environ.get("POSBIAS_FUZZ_SEED", "0"), "all")
    with capsys.disabled():
        print(f"\n{told}")


def test_some_inputs_end_in_at_most_one_line(tmp_path, tiny_llama):
    alone(tmp_path, tiny_llama, 40, 1, "quick")


def program(directory: str, model: str, count: str, seed: str, which: str) -> int:
    """Exit code 1 where something was found."""
    commands = QUICK if which == "quick" else [command for command in COMMANDS if which in ("all", command.split()[0])]
    return bool(run(Ground(Path(directory), Path(model)), commands, int(count), seed=int(seed)))


QUICK = [
    command
    for command in COMMANDS
    if command.startswith(("predict --depth", "verify", "evaluate --lm-eval {new} --task"))
]

if __name__ == "__main__":
    sys.exit(program(*sys.argv[1:]))
