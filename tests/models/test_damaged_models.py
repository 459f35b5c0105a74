"""Damaged models run, or are refused in one line: a few dozen always, hundreds with `make test-slow`."""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import model_inputs

FEW, MANY, AT_A_TIME = 30, 600, 100
HARD_LIMIT = 300
"""Seconds for `AT_A_TIME` of them, most of which take less than a tenth of one."""


def test_a_few_damaged_models(tmp_path: Path) -> None:
    bases = tmp_path / "bases"
    model_inputs.save_bases(bases, ("llama", "opt"))
    findings, seen = {}, set()
    for number in range(FEW):
        draw = random.Random(number)
        path, said = model_inputs.damaged(draw.choice(sorted(bases.iterdir())), tmp_path / "model", draw)
        found = model_inputs.outcome(path)
        seen.add(found)
        if found not in ("ran", "refused"):
            findings[number, said] = found
    assert not findings
    assert seen == {"ran", "refused"}  # a limit that refuses all of them would find nothing


@pytest.mark.slow
def test_many_damaged_models(tmp_path: Path) -> None:
    """In processes of their own, as a finding may be an end without a word; seconds and bytes are held to limits."""
    bases = tmp_path / "bases"
    model_inputs.save_bases(bases)
    whole = {path.name: path / "w.gguf" if path.name == "gguf" else path for path in bases.iterdir()}
    assert {name: model_inputs.outcome(path) for name, path in whole.items()} == dict.fromkeys(whole, "ran")
    said: dict[int, str] = {}
    found: dict[int, str] = {}
    for seed in range(0, MANY, AT_A_TIME):
        numbers = map(str, (bases, tmp_path / "model", seed, AT_A_TIME))
        command = [sys.executable, model_inputs.__file__, *numbers]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HARD_LIMIT, check=False)
        for line in done.stdout.splitlines():
            told = json.loads(line)
            if "said" in told:
                said[told["number"]], found[told["number"]] = told["said"], f"the process ended: {done.stderr[-300:]}"
            else:
                found[told["number"]] = told["found"]
    counts = Counter(what if what in ("ran", "refused") else "finding" for what in found.values())
    print(f"{len(found)} damaged models: {dict(counts)}")
    assert len(found) == MANY
    assert not {f"{number}: {said[number]}": what for number, what in found.items() if what not in ("ran", "refused")}
