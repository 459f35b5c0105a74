"""Whatever is typed or stands in a file, a command ends soon, with exit code 0, 1 or 2 and at most one line on stderr.

Inputs are mutations of valid ones, drawn from a seed: an option gets a hostile value, a literal call a hostile
parameter, a file is damaged in its bytes or in one of its values, or replaced by something that is no file. Commands
run in this process, which is what makes a thousand of them possible; what needs a process of its own (closed streams)
follows at the end.
"""

import contextlib
import dataclasses
import faulthandler
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from behaviour_runs import saved
from conftest import without_notes
from fuzz_files import FILES, HUGE, NO_FILES, SUFFIXES, TEMPLATE, bytes_changed, record_changed, value_changed
from model_inputs import held, reset_peak
from posbias.architecture import ENCODINGS, MASKS
from posbias.cli import main
from posbias.cli.app import command_of
from posbias.interventions import INTERVENTIONS
from posbias.measurement.kinds import KINDS
from posbias.measurement.outputs import OUTPUTS
from posbias.registry import Registry
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.theory import THEORIES

INPUTS = 1000
SECONDS = 10
"""Of processor time for one command; a busy machine must not make findings."""
MEMORY = 2 * 10**9
LONGEST = 500

LARGE = (str(HUGE), str(-HUGE), str(2**63), "9" * 400, "9" * 5000)
TEXTS = (
    *("", " ", "x" * 5000, "[" * 3000, "{'a': 1}", "é\n\x1b[31m", "\udcff", *LARGE),
    *"- -- nan inf -1 0 1.5 1e400 true None all 0x10 １２ 1,2,,3 [[]] [1e999] a(b=c) f(*x) spread(1000000000)".split(),  # noqa: SIM905
    *"/dev/zero .. / no/such demo#x".split(),  # noqa: SIM905
)
"""What an option is given."""
LITERALS = (
    *"0 -1 1.5 1e999 -1e999 1000000000 True None '' 'x' '\\ud800' b'x' 1j [] [1] [[1],2] {} {1:2} {1} ()".split(),  # noqa: SIM905
    *("-" * 999 + "1", *LARGE),
)
"""What a parameter of a literal call is given."""
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
REGISTRIES: dict[str, Registry[Any]] = {
    "--mask": MASKS,
    "--encoding": ENCODINGS,
    "--theory": THEORIES,
    "--kinds": KINDS,
    "--output": OUTPUTS,
    "--task": LANGUAGE_TASKS,
    "--interventions": INTERVENTIONS,
}
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
        lines = without_notes(self.stderr)
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
    before, begin = held("VmRSS"), time.process_time()
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
    taken = max(0, held("VmHWM") - before)
    return Ending(command, code, output.getvalue(), errors.getvalue(), time.process_time() - begin, taken)


# --- valid files ---


class Ground:
    """Valid files of every kind, each made when it is first asked for."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
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
                saved().save(path)
            else:
                found = ended([*words(RUNS[kind], self), "--out", str(path)])
                assert found.code == 0, found
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
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
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


QUICK = [one for one in COMMANDS if one.startswith(("predict --depth", "verify", UNASKED + " --task"))]

if __name__ == "__main__":
    sys.exit(program(*sys.argv[1:]))
