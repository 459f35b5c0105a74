"""Damaged models run, or are refused in one line: a few dozen always, hundreds with `make test-slow`."""

import random
from pathlib import Path

import pytest

import model_inputs


@pytest.mark.parametrize(
    ("families", "count"), [(("llama", "opt"), 30), pytest.param(model_inputs.FAMILIES, 600, marks=pytest.mark.slow)]
)
def test_damaged_models(families: tuple[str, ...], count: int, tmp_path: Path) -> None:
    bases = tmp_path / "bases"
    model_inputs.save_bases(bases, families)
    whole = {path.name: path / "w.gguf" if path.name == "gguf" else path for path in bases.iterdir()}
    assert {name: model_inputs.outcome(path) for name, path in whole.items()} == dict.fromkeys(whole, "ran")
    findings, seen = {}, set()
    for number in range(count):
        draw = random.Random(number)
        path, said = model_inputs.damaged(draw.choice(sorted(bases.iterdir())), tmp_path / "model", draw)
        prefix = "config:" if path.is_dir() and draw.random() < 0.3 else ""
        found = model_inputs.outcome(f"{prefix}{path}")
        seen.add(found)
        if found not in ("ran", "refused"):
            findings[number, said] = found
    assert not findings
    assert seen == {"ran", "refused"}  # a limit that refuses all of them would find nothing
