"""How many samples a fit takes, and what carries over: `python studies/mitigation/curves.py OUT.json [DEVICE]`.

`context_bias` with one number per head, 200 steps, judged by the log-probability per token of right answers to samples
that no fit has seen; an hour on one core. What is done is kept, another call goes on with the rest, and at the end the
tables of key_bias.md are printed.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import posbias as pb
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import LocalResponder, Request
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.options import FitOptions
from posbias.tasks.language import LANGUAGE_TASKS
from posbias.tasks.language.base import Example

TASKS = {
    "key_value(pairs=4)": (0, 1, 3),
    "documents(documents=4)": (0, 1, 3),
    "example_order(shots=8)": (0, 3, 7),
}
LABELS = dict(zip(TASKS, ("key-value", "documents", "example order"), strict=True))
SIZES = (5, 10, 20, 40, 80)
MIXED, HELD_OUT, STEPS = 20, 12, 200
"""Samples of a task in fits that compare tasks; samples that judge; steps of a fit."""

Scores = dict[str, dict[str, list[list[float]]]]
"""By fit and task: log-probabilities per token, [sample][position]."""


def examples(model: Any, task: str, count: int, seed: int) -> list[Example]:
    """Samples, each at every position, sample by sample."""
    drawn = LANGUAGE_TASKS.parse(task).examples(model.tokenizer, count=count, positions=TASKS[task], seed=seed)
    return list(drawn)


def scores(model: Any, task: str, method: Any) -> list[list[float]]:
    """Log-probability per token of the right answers to the held-out samples, [sample][position]."""
    requests = [
        Request(prompt=item.prompt, answer=item.target, passages=item.passages)
        for item in examples(model, task, HELD_OUT, seed=7)
    ]
    responder = LocalResponder(model, LocalOptions())
    replies = (responder if method is None else answering_under(method, responder)).respond(
        requests, generate=False, score=True
    )
    found = [reply.score.logprob / reply.score.n_tokens for reply in replies]
    return np.reshape(found, (HELD_OUT, -1)).tolist()


def fits() -> dict[str, list[tuple[str, int]]]:
    """By name: tasks and how many samples of each."""
    first, *_ = TASKS
    found = {f"{first}: {size}": [(first, size)] for size in SIZES}
    found |= {f"{task} alone": [(task, MIXED)] for task in TASKS if task != first}
    found |= {f"without {left}": [(task, MIXED) for task in TASKS if task != left] for left in TASKS}
    return found


def tables(found: Scores) -> None:
    """Of sizes and of mixtures: mean change from the unchanged model, with its 95 % bootstrap interval over samples."""
    first, *_ = TASKS
    print(f"| calibration samples | {' | '.join(map(str, SIZES))} |\n|{'---|' * (len(SIZES) + 1)}")
    for task in TASKS:
        name = "the same task" if task == first else LABELS[task]
        level = without_zeros(f"{np.mean(found['unchanged'][task]):.2f}")
        print(f"| {name} ({level}) | {' | '.join(change(found, f'{first}: {n}', task) for n in SIZES)} |")
    print(f"\n| fitted to | {' | '.join(LABELS.values())} |\n|{'---|' * (len(TASKS) + 1)}")
    for name, drawn in fits().items():
        fitted = [task for task, size in drawn if size == MIXED]
        if fitted:
            mark = {task: "**" if task in fitted else "" for task in TASKS}
            cells = [f"{mark[task]}{change(found, name, task)}{mark[task]}" for task in TASKS]
            print(f"| {' and '.join(LABELS[task] for task in fitted)} | {' | '.join(cells)} |")


def change(found: Scores, name: str, task: str) -> str:
    """Of one fit on one task."""
    by_sample = np.mean(found[name][task], axis=1) - np.mean(found["unchanged"][task], axis=1)
    size = len(by_sample)
    draws = by_sample[np.random.default_rng(0).integers(0, size, (4000, size))].mean(axis=1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return without_zeros(f"{by_sample.mean():+.3f} [{low:.3f}, {high:.3f}]")


def without_zeros(numbers: str) -> str:
    """Before the point."""
    return re.sub(r"\b0\.", ".", numbers)


def main(out: Path, device: str = "cpu") -> None:
    """Fit, judge on every task, and print."""
    model = pb.load_model("demo", dtype="bfloat16", device=device)
    found: Scores = json.loads(out.read_text()) if out.exists() else {}
    pending: Sequence[tuple[str, Any]] = [("unchanged", None), *fits().items()]
    for name, drawn in pending:
        if name in found:
            continue
        method = None
        if drawn is not None:
            calibration = [item for task, size in drawn for item in examples(model, task, size, seed=100)]
            options = FitOptions(steps=STEPS, scales=False)
            method = pb.fit("context_bias", model, calibration, options=options).method
        found[name] = {task: scores(model, task, method) for task in TASKS}
        out.write_text(json.dumps(found))
    tables(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
