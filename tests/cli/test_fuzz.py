"""Whatever is typed or stands in a file, a command ends soon, with exit code 0, 1 or 2 and at most one line on stderr.

Inputs are mutations of valid ones, drawn from a seed: an option gets a hostile value, a file is damaged in its bytes or
in one of its values, or replaced by something that is no file (hostile parameters of variants: `test_limits.py`).
Commands run in forks of one process (`crashing.py`), which is what makes a thousand of them possible, and without the
type checks of the tests, which would refuse what users can pass.
"""

import gzip
import json
import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from behaviour_runs import saved
from conftest import without_notes
from crashing import Nursery
from fuzz_files import HUGE, bytes_changed, node_changed
from posbias.cli.app import command_of
from posbias.errors import LONGEST

INPUTS = 1000
SECONDS = 10
"""Of processor time for one command; a busy machine must not make findings."""
MEMORY = 4 * 10**9
"""Bytes that a command may reserve beyond what it begins with."""

LARGE = (str(HUGE), str(-HUGE), str(2**63), "9" * 400, "9" * 5000)
TEXTS = (
    *("", " ", "x" * 5000, "[" * 3000, "{'a': 1}", "é\n\x1b[31m", "\udcff", *LARGE),
    *"- -- nan inf -1 0 1.5 1e400 true None all 0x10 １２ 1,2,,3 [[]] [1e999] a(b=c) f(*x) spread(1000000000)".split(),  # noqa: SIM905
    *"/dev/zero .. / no/such demo#x".split(),  # noqa: SIM905
)
"""What an option is given."""
RUNS = {
    "predicted": "predict --depth 2 --length 8",
    "measured": "measure {model} --length 8 --count 6 --kinds probability",
    "evaluated": "evaluate {model} --task key_value(pairs=3) --count 7 --max-tokens 1",
    "trained": "train {study}",
    "verified": "verify wu2025/theorem-4.5",
    "attended": "attention {model} --length 8 --count 2",
    "decomposed": "decompose {model} --length 8 --count 2 --interventions no_rope --kinds probability",
}
UNASKED = "evaluate --server http://127.0.0.1:9/v1 --served-model m --server-options retries=0"
"""Reads a task, and fails at a server that is not there."""
COMMANDS = (
    "predict --depth 2 --heads 2 --length 12 --mask prefix(length=3) --encoding alibi --mixing 0.5 --content 1 "
    "--theory rollout_content",
    "predict --model {model} --theory power_rollout(key_path=False) --prompts {text} --count 2 --length 8",
    "measure {model} --prompts {records} --length 8 --count 2 --kinds jacobian(probes=1) --output last",
    "measure {model} --prompts {token_ids} --length 8 --count 2 --kinds probability --depth-profiles 0",
    "measure {model} --prompts {text} --length 8 --count 2 --kinds logprob --output at(position=-1)",
    "attention {model} --prompts {text} --length 8 --count 1 --sink-thresholds 0.2,0.3",
    "decompose {model} --prompts {records} --length 8 --count 1 --interventions no_rope --kinds probability",
    UNASKED + " --task pairwise(file='{pairs}') --count 2 --positions spread(2)",
    UNASKED + " --task documents(documents=2,file='{documents}') --count 2 --positions 0,1",
    "evaluate {model} --task key_value(pairs=4) --count 1 --max-tokens 1 --positions 0",
    UNASKED + " --tokenizer {model} --task needle(tokens=256,depths=2,corpus='{text}') --count 1",
    "audit {model} --prompts {text} --length 8 --count 1 --initialisations 0 --kinds probability --out {new}",
    "verify --mask prefix(length=4) --length 12",
    "train {study}",
    "place --run {evaluated} --scores {scores}",
    "place --run {evaluated} --scores 0.9,0.4,0.1 --by probability",
    *(f"report {{{run}}} --out {{new}}" for run in RUNS),
    "compare {predicted} {measured}",
    "compare {measured} {measured} --kind probability",
    "correlate {tied}",
    "list masks",
    "models get other",
    "reproduce birth-2603.10123 --size tiny --length 20 --initialisations 2 --probes 1",
)
"""Valid commands; what stands in braces is a file of `Ground`, or a directory that does not exist yet."""
QUICK = [one for one in COMMANDS if one.startswith(("predict --depth", "verify", UNASKED + " --task"))]

# --- valid files ---

STUDY: dict[str, Any] = {
    "task": {"name": "position_copy", "target": 0, "context": 6, "vocabulary": 5},
    "model": {"depth": 1, "width": 8, "residual": "none", "mask": "causal", "mixing": 1.0},
    "optimiser": {"name": "adam", "learning_rate": 0.01},
    "train": {"steps": 4, "batch": 8, "window": 2, "evaluate_every": 2, "examples": 4, "stopping": "below(loss=0.1)"},
    "grid": {"task.target": [0, 5]},
    "seeds": 1,
}
PAIRS = {"question": "who", "response_A": "Ada", "response_B": "Bob", "label": "A>B"}
DOCUMENTS = {
    "question": "who",
    "answers": ["Ada"],
    "ctxs": [{"title": "A", "text": "Ada did.", "isgold": True}, {"title": "B", "text": "Bob.", "isgold": False}],
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. Winston walked home; it rained. "


def json_lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


FILES: dict[str, tuple[str, bytes]] = {
    "text": (".txt", (PROSE * 40).encode()),
    "records": (".jsonl", json_lines({"text": PROSE, "id": 1}, {"text": PROSE.upper(), "id": 2})),
    "token_ids": (".jsonl", json_lines({"token_ids": list(range(40))}, {"token_ids": list(range(50, 90))})),
    "pairs": (".jsonl.gz", gzip.compress(json_lines(PAIRS, PAIRS))),
    "documents": (".jsonl", json_lines(DOCUMENTS, DOCUMENTS)),
    "scores": (".jsonl", json_lines({"score": 0.5}, 0.25, {"score": 1})),
    "study": (".yaml", json.dumps(STUDY).encode()),
}


class Ground:
    """Valid files of every kind, each made when it is first asked for, and the process whose forks read them."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        self.nursery = Nursery(draws=True)
        self.model = directory / "model"
        shutil.copytree(model, self.model)
        # The valid evaluations have longer prompts than the tiny model takes.
        for name, settings in (
            ("tokenizer_config.json", {"chat_template": TEMPLATE}),
            ("config.json", {"max_position_embeddings": 512}),
        ):
            file = self.model / name
            file.write_text(json.dumps(json.loads(file.read_text()) | settings))
        self.count = 0

    def findings(self, command: list[str]) -> list[str]:
        """What must not be, of a command that is run."""
        done = self.nursery.run(command, directory=self.directory, seconds=SECONDS, memory=MEMORY)
        if not done.ended:
            return [f"signal {-done.status}"]
        (ending,) = done.ended
        lines = without_notes(ending.stderr)
        checks = {
            f"exit code {ending.code}": ending.code not in (0, 1, 2),
            "a traceback": "Traceback" in ending.stderr,
            "unexpected": "posbias: unexpected " in ending.stderr,
            "an error that is not one line": ending.code != 0 and len(lines) != 1,
            "a long line": any(len(line) > LONGEST for line in lines),
            "unprintable": any(not line.isprintable() for line in lines),
            "output beside an error": ending.code and ending.stdout and "models failed" not in ending.stderr,
            "noise beside a result": ending.code == 0 and lines != [],
            "no memory": "allocate" in ending.stderr or "out of memory" in ending.stderr,
        }
        return [what for what, found in checks.items() if found]

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
        suffix, content = FILES.get(kind, ("", b""))
        path = self.directory / f"{kind}{suffix}"
        if not path.exists():
            if kind in FILES:
                path.write_bytes(content)
            elif kind == "tied":
                saved().save(path)
            else:
                command = [*words(RUNS[kind], self), "--out", str(path)]
                assert not self.findings(command), command
        return path


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
    verb: Any = command_of(given[0])
    verb = getattr(verb, "commands", {}).get(given[1], verb)
    known = [each.opts[0] for each in verb.params if each.param_type_name == "option" and not each.is_flag]
    known = [name for name in known if name not in {"--engine", "--server", "--ray-address"}]
    if not known:
        return argument(command, ground, source)
    here = [name for name in given if name in known]
    name, value = source.choice(here if here and source.random() < 0.5 else known), source.choice(TEXTS)
    if name not in given:
        return [*given, name, value]
    place = given.index(name)
    return [*given[: place + 1], value, *given[place + 2 :]]


def argument(command: str, ground: Ground, source: random.Random) -> list[str]:
    """One word of the command is replaced, left out or said twice."""
    given = words(command, ground)
    place = source.randrange(len(given))
    return [*given[:place], *source.choice([[source.choice(TEXTS)], [], [given[place]] * 2]), *given[place + 1 :]]


def file(command: str, ground: Ground, source: random.Random) -> list[str]:
    """One file of the command is damaged, or one value in it, or it is no file."""
    kinds = [kind for kind in [*FILES, *RUNS, "tied"] if f"{{{kind}}}" in command]
    if not kinds:
        return option(command, ground, source)
    kind = source.choice(kinds)
    before, after = ground.path(kind), ground.new().with_suffix("".join(ground.path(kind).suffixes))
    if before.is_dir():
        shutil.copytree(before, after)
        damaged = after / "arrays.safetensors"
        damaged.write_bytes(source.choice([bytes_changed, record_changed, record_changed])(damaged, source))
    elif source.random() < 0.2:
        source.choice(NO_FILES)(after)
    elif source.random() < 0.35 or kind == "text":
        after.write_bytes(bytes_changed(before, source))
    else:
        after.write_bytes(value_changed(before, source))
    return words(command, ground, **{kind: after})


def value_changed(path: Path, source: random.Random) -> bytes:
    """A valid file of its kind, with one value of another sort."""
    content, packed = path.read_bytes(), path.suffix == ".gz"
    lines = (gzip.decompress(content) if packed else content).splitlines()
    place = source.randrange(len(lines))
    lines[place] = json.dumps(node_changed(json.loads(lines[place]), source)).encode()
    text = b"\n".join(lines) + b"\n"
    return gzip.compress(text) if packed else text


def record_changed(path: Path, source: random.Random) -> bytes:
    """A run's file with another value in its record, an array less, or one of another shape or sort."""
    with safe_open(path, framework="numpy") as opened:
        document = json.loads(opened.metadata()["record"])
        metadata = dict(opened.metadata())
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if source.random() < 0.5:
        metadata.pop("sha256", None)  # which is refused as well
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
        "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    ),
)
"""What stands where a file is expected."""
MUTATIONS = (option, option, argument, file, file)


@pytest.fixture
def ground(tmp_path: Path, tiny_llama: Path) -> Iterator[Ground]:
    made = Ground(tmp_path, tiny_llama)
    yield made
    made.nursery.close()


def found(ground: Ground, commands: Sequence[str], count: int, *, seed: int) -> list[str]:
    """What `count` inputs lead to that must not be, each on a line."""
    source, lines = random.Random(seed), []
    for number in range(count):
        given = source.choice(MUTATIONS)(commands[number % len(commands)], ground, source)
        if findings := ground.findings(given):
            lines.append(f"{', '.join(findings)}: {' '.join(f'{word!r:.90}' for word in given)}")
    return lines


def test_some_inputs_end_in_at_most_one_line(ground: Ground) -> None:
    assert not found(ground, QUICK, 40, seed=1)


@pytest.mark.slow
def test_a_thousand_inputs_end_in_at_most_one_line(ground: Ground) -> None:
    assert not found(ground, COMMANDS, INPUTS, seed=int(os.environ.get("POSBIAS_FUZZ_SEED", "0")))
