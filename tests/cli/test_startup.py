"""Help and shell completion answer at once: they import nothing heavy, and print nothing but the answer."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import chain
from pathlib import Path
from pkgutil import walk_packages

import pytest

import posbias as posbias_package
import posbias_papers
from fresh import run_fresh
from posbias.cli.app import VERBS as NAMES
from posbias.cli.listing import SORTS, described_variant, registered_variants
from posbias.registry import Registry

VERBS = sorted(NAMES)
HEAVY = {"torch", "transformers", "numba", "scipy", "matplotlib", "pyarrow", "jinja2", "httpx2", "openai"}
STAGES = f"""
import contextlib, io, sys

def loaded(stage):
    print(stage, *sorted(({HEAVY} | {{'numpy'}}) & set(sys.modules)))

import posbias
dir(posbias)
loaded("import")
from posbias.cli.app import app
for words in [["list"], *([verb, "--help"] for verb in {VERBS})]:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        app(words)
    assert shown.getvalue()
loaded("help")
"""


def test_import_help_and_the_list_of_sorts_import_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", STAGES], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["import", "help"]


def test_what_is_listed_is_what_is_registered():
    """In a process that has imported nothing else, all that any module registers."""
    live = {}
    core = walk_packages(posbias_package.__path__, "posbias.")
    for module in chain(core, walk_packages(posbias_papers.__path__, "posbias_papers.")):
        if module.name == "posbias.integrations.inspect":
            continue  # its package lives in an environment of its own, and it registers nothing here
        for name, value in list(vars(import_module(module.name)).items()):
            if isinstance(value, Registry):
                live[name] = list(value)
    for sort, home in SORTS.items():
        listed = json.loads(run_fresh(f"posbias list {sort} --json").stdout)[sort]
        assert list(listed) == live[home.partition(":")[2]]


COMPLETED = {
    "posbias mea": {"measure"},
    "posbias re": {"report", "reproduce"},
    "posbias ''": set(VERBS),
    "posbias measure demo --prom": {"--prompts"},
    "posbias models ''": {"get"},
    "posbias predict --nosuch": set(),
}


def test_bash_completes_verbs_and_options():
    asked = [
        f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _posbias_completion posbias; "
        'echo "${COMPREPLY[@]}"'
        for words in COMPLETED
    ]
    # With another command behind it bash stays the shell that posbias is asked from.
    line = "; ".join(['eval "$(posbias --show-completion bash)"', *asked, "exit $?"])
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == ""
    answers = done.stdout.splitlines()
    assert {words: set(answer.split()) for words, answer in zip(COMPLETED, answers, strict=True)} == COMPLETED


@pytest.mark.parametrize("sort", SORTS)
def test_every_variant_is_described_with_its_parameters(posbias, sort):
    assert sort in posbias("list").stdout.split()
    for name in registered_variants(sort):
        found = json.loads(json.dumps(described_variant(sort, name)))
        assert found["name"] == name
        assert found["description"]
        assert all(each["meaning"] for each in found["parameters"].values()), name


def test_parameters_are_those_of_the_class_and_of_what_it_inherits(posbias):
    found = json.loads(posbias("list", "mitigations", "temperature", "--json").stdout)
    assert {name: each["default"] for name, each in found["parameters"].items()} == {"strength": 1.0, "scale": 0.15}
    assert all(each["meaning"] for each in found["parameters"].values())
    printed = posbias("list", "mitigations", "temperature").stdout
    assert printed.startswith("temperature(scale=0.15, strength=1.0)\n")
    assert "\nstrength: 0 (the model as it is) ... 1 (the method as described).\n" in printed
    needed = posbias("list", "mitigations", "positional_channel").stdout
    assert "positional_channel(channel, factor=0.0" in needed, "a parameter without a default is not given one"
    unknown = posbias("list", "tasks", "nosuch")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("posbias: tasks: unknown 'nosuch'; known: documents, ")
    sample = posbias("list", "tasks", "key_value").stdout.partition("its answer in brackets:")[2]
    assert re.search(r"value:\[ [0-9a-f-]{36}\]", sample)
    assert "brackets" not in posbias("list", "tasks", "needle").stdout, "it needs a tokenizer"
