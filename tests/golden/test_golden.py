"""Every verb's results, held to those kept beside this file: a change that means to move code must move no number.

`POSBIAS_GOLDEN=exact` demands 1e-12 and equal texts, which the same machine and libraries give before and after a
change; otherwise the tolerances allow for other processors. `POSBIAS_GOLDEN=keep` writes the results anew: do so only
for a change that means to change them, and say in its commit which ones and why.
"""

import json
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import check_record
from posbias import Record
from posbias.cli import main
from posbias.results.records import read_record

HERE = Path(__file__).parent
MODE = os.environ.get("POSBIAS_GOLDEN", "near")
EXACT, NEAR = 1e-12, 2e-3
"""Relative to the largest entry of an array. Near: float32 passes through 30 layers on another processor."""
UNSTABLE = {"seconds", "peak_bytes", "memory", "cost", "estimate", "estimated_seconds", "timings", "wall_seconds"}
"""Scalars that no two runs share."""
ROUNDING = 4 * sys.float_info.epsilon
"""What arrays that hold rounding errors alone may differ by on another processor."""

SMALL = ["--length", "48", "--count", "4"]
UNMIXED = ["predict", "--depth", "6", "--heads", "4", "--length", "96"]
ARCHITECTURE = [*UNMIXED, "--mixing", "0.2"]
KINDS = "jacobian,probability,logprob,logit,perturbation"
TASKS = {
    "key_value": "key_value(pairs=6)",
    "documents": "documents(documents=4)",
    "needle": "needle(tokens=300)",
}
ARCHITECTURE_THEORIES = {
    "rollout": ["--encoding", "alibi"],
    "rollout_rope": ["--encoding", "rope", "--theory", "rollout"],
    "rollout_window": ["--mask", "sliding_window(width=9)", "--theory", "rollout"],
    "rollout_content": ["--theory", "rollout_content", "--content", "0.3"],
    "closed_form": ["--theory", "closed_form"],
    "continuous": ["--theory", "continuous"],
}
CONFIGURATION_THEORIES = {"mean_field": "config:demo", "rollout": "demo", "attention_only": "demo"}
CASES: dict[str, list[str]] = {
    "audit": ["audit", "demo", "--length", "64", "--count", "6", "--initialisations", "2"],
    "measure": ["measure", "demo", "--length", "24", "--count", "2", "--kinds", KINDS],
    "measure_initialised": ["measure", "demo", *SMALL, "--init-seed", "3", "--kinds", "jacobian,logit"],
    "measure_output": ["measure", "demo", *SMALL, "--output", "mean(last=4)", "--kinds", "jacobian,logit"],
    "attention": ["attention", "demo", "--length", "64", "--count", "3"],
    "decompose": ["decompose", "demo", "--length", "32", "--count", "3"],
    "train": ["train", str(HERE / "study.yaml")],
    "verify": ["verify"],
    "verify_model": ["verify", "wu2025", "--model", "demo", "--length", "32", "--count", "3"],
    "reproduce_rollout": ["reproduce", "rollout-2602.16837"],
    "reproduce_birth": ["reproduce", "birth-2603.10123", "--size", "tiny", "--length", "48", "--initialisations", "3"],
    "reproduce_icl": ["reproduce", "icl-2502.01951", "--size", "smoke"],
    "reproduce_copy": ["reproduce", "position-copy-liu2026", "--size", "smoke"],
    "predict_attention_only": [*UNMIXED, "--encoding", "alibi", "--theory", "attention_only"],
    **{f"predict_{name}": [*ARCHITECTURE, *flags] for name, flags in ARCHITECTURE_THEORIES.items()},
    **{
        f"explain_{name}": ["predict", "--model", model, "--length", "48", "--theory", name]
        for name, model in CONFIGURATION_THEORIES.items()
    },
    "explain_power_rollout": ["predict", "--model", "demo", *SMALL, "--theory", "power_rollout"],
    **{
        f"evaluate_{name}": ["evaluate", "demo", "--task", task, "--count", "4", "--max-tokens", "8"]
        for name, task in TASKS.items()
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_that_are_kept(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["posbias", *CASES[case], "--out", str(tmp_path)])
    with suppress(SystemExit):
        main()
    found = read_record(tmp_path)
    assert found.status == "done", found.error
    check_record(tmp_path / "record.json")
    if MODE == "keep":
        keep(case, found)
        return
    arrays, scalars = kept(case)
    tolerance = EXACT if MODE == "exact" else NEAR
    assert set(arrays) == set(found.arrays)
    for name, array in arrays.items():
        assert near(array, found.arrays[name], tolerance), name
    assert differences(scalars, stable(found.scalars), tolerance) == []


def keep(case: str, record: Record) -> None:
    text = json.dumps(stable(record.scalars), allow_nan=False)
    arrays = {name: np.ascontiguousarray(array) for name, array in record.arrays.items()}
    save_file(arrays, HERE / f"{case}.safetensors", metadata={"scalars": text})


def kept(case: str) -> tuple[dict[str, np.ndarray], Any]:
    from safetensors import safe_open

    path = HERE / f"{case}.safetensors"
    with safe_open(path, framework="numpy") as file:
        return load_file(path), json.loads(file.metadata()["scalars"])


def stable(value: Any) -> Any:
    """Without what no two runs share, as JSON would give it back."""
    if isinstance(value, dict):
        return {str(name): stable(held) for name, held in value.items() if name not in UNSTABLE}
    if isinstance(value, list | tuple):
        return [stable(held) for held in value]
    return value


def near(kept: np.ndarray, found: np.ndarray, tolerance: float) -> bool:
    if kept.shape != found.shape or kept.dtype != found.dtype:
        return False
    if kept.dtype.kind not in "fc":
        return MODE != "exact" or bool(np.array_equal(kept, found))
    scale = float(np.abs(kept[np.isfinite(kept)]).max(initial=0.0))
    least = 0.0 if MODE == "exact" else ROUNDING
    return bool(np.allclose(kept, found, rtol=0.0, atol=max(tolerance * scale, least), equal_nan=True))


def differences(kept: Any, found: Any, tolerance: float, at: str = "") -> list[str]:
    """Where two trees of scalars differ; of texts and whole numbers only where equality is demanded."""
    if isinstance(kept, dict) and isinstance(found, dict):
        missing = [f"{at}/{name}: in one alone" for name in kept.keys() ^ found.keys()]
        shared = [difference for name in kept.keys() & found.keys()
                  for difference in differences(kept[name], found[name], tolerance, f"{at}/{name}")]  # fmt: skip
        return missing + shared
    if isinstance(kept, list) and isinstance(found, list):
        if len(kept) != len(found):
            return [f"{at}: {len(kept)} and {len(found)} entries"]
        pairs = enumerate(zip(kept, found, strict=True))
        return [
            difference for i, (one, other) in pairs for difference in differences(one, other, tolerance, f"{at}/{i}")
        ]
    if isinstance(kept, float) and isinstance(found, float):
        same = math.isclose(kept, found, rel_tol=tolerance, abs_tol=tolerance) or (
            math.isnan(kept) and math.isnan(found)
        )
        return [] if same else [f"{at}: {kept} and {found}"]
    return [] if kept == found or MODE != "exact" else [f"{at}: {kept!r} and {found!r}"]
