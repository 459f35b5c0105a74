"""Puts what trained networks do into the record: `python studies/design_training/collect.py RUNS STUDY ...`.

RUNS holds a run directory of `posbias train` for each study, by the name of its file; other studies that the record has
stay as they are. Profiles at initialisation are measured
on the study's own networks with a prompt of their task each; scores by position after training on fresh contexts at
half, the whole and twice the length of training.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posbias.errors import UsageError
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.reference.config import constants_of, draw_parameters, stacked
from posbias.models.reference.forward import forward
from posbias.models.reference.network import ReferenceTransformer, load_parameters
from posbias.results.records import Record, read_record
from posbias.tasks.synthetic import EVALUATION_BATCH, stack_tasks
from posbias.training.members import Member
from posbias.training.study import load_study

HERE = Path(__file__).parent
FRESH = 10_000
"""Added to a network's seed for contexts that it was never evaluated on."""
EXAMPLES = {"half": 200, "whole": 500, "double": 200}
LAST_WINDOWS = 4
SCORE = "accuracy_by_position"
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Arm:
    """The networks of one arm, in the order of their seeds."""

    name: str
    members: list[Member]
    parameters: list[dict[str, Tensor]]
    """After training."""


def scores(arm: Arm, n_targets: int, examples: int) -> np.ndarray | None:
    """[seed, position], every context asked for all of them; None where an encoding does not reach so far."""
    first = arm.members[0]
    task: Any = replace(first.task, context=n_targets)
    try:
        constants = stacked([constants_of(each.config, task.n_positions) for each in arm.members])
    except UsageError:
        return None
    parameters = stacked(arm.parameters)

    def predict(inputs: Tensor) -> Tensor:
        return forward(first.config, parameters, constants, inputs, rows=task.rows)

    stack = stack_tasks([task] * len(arm.members), [FRESH + each.seed for each in arm.members])
    total: Any = 0
    for index, start in enumerate(range(0, examples, EVALUATION_BATCH)):
        # The first scores alone are asked for: what a generator has not reached costs nothing.
        for name, found in stack.scores(predict, index, min(EVALUATION_BATCH, examples - start)):
            if name == SCORE:
                total = total + found
                break
    return np.asarray(total / examples)


def profiles_at_birth(arm: Arm) -> np.ndarray:
    """Jacobian profiles [seed, position] of the last position, before training."""
    (kind,) = resolve_kinds("jacobian(exact=True)")
    rows = []
    for member in arm.members:
        model = ReferenceTransformer(member.config, draw_parameters(member.config, member.generator()))
        prompt = stack_tasks([member.task], [FRESH + member.seed]).batch(0, 1).inputs[0, 0].numpy()
        found = measure_prompt(model, prompt, kinds=[kind], key=(member.seed, 0), options=PassOptions())
        rows.append(found.norms[kind.name] / found.norms[kind.name].sum())
    return np.stack(rows)


def arms_of(study: str, runs: Path) -> Iterator[tuple[Arm, list[int]]]:
    """Arms with their networks' numbers in the record of the run."""
    members = load_study(HERE / f"{study}.yaml").members()
    for name, numbered in groupby(enumerate(members), key=lambda pair: pair[1].coordinates["arm"]):
        indices, chosen = zip(*numbered, strict=True)
        places = [runs / study / "models" / f"{index:04d}" for index in indices]
        parameters = [load_parameters(place, each.config) for place, each in zip(places, chosen, strict=True)]
        yield Arm(name, list(chosen), parameters), list(indices)


def collected(study: str, runs: Path) -> tuple[dict[str, Any], Arrays]:
    """What the record holds of one study: settings, and arrays by arm with an axis of seeds."""
    run = read_record(runs / study)
    arrays: Arrays = {}
    for arm, indices in arms_of(study, runs):
        task: Any = arm.members[0].task
        n_targets, place = task.context, f"{study}/{arm.name}"
        lengths = {"half": n_targets // 2, "whole": n_targets, "double": 2 * n_targets}
        arrays[f"{place}/birth"] = profiles_at_birth(arm).astype(np.float16)
        arrays[f"{place}/loss"] = run.arrays["losses"][indices, -LAST_WINDOWS:].mean(axis=1)
        arrays[f"{place}/curve"] = run.arrays[f"evaluations/{SCORE}"][indices].astype(np.float16)
        for length, count in lengths.items():
            found = scores(arm, count, EXAMPLES[length])
            if found is not None:
                arrays[f"{place}/{length}"] = found.astype(np.float16)
        if "trained_key_bias" in str(list(arm.parameters[0])):
            learnt = [[p[name] for name in p if name.endswith("trained_key_bias")] for p in arm.parameters]
            arrays[f"{place}/learnt"] = np.stack([torch.stack(each).numpy() for each in learnt]).mean(axis=0)
        print(place, flush=True)
    settings = {"task": str(task), "targets": n_targets, "counts": run.scalars["counts"]}
    settings["places"] = list(range(n_targets))
    settings |= {"steps": run.arrays["evaluation_steps"][0].tolist(), "trained_with": run.environment.get("commit")}
    return settings, arrays


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("studies", nargs="+")
    given = parser.parse_args()
    kept = read_record(HERE / "record") if (HERE / "record").is_dir() else Record(verb="study", arguments={})
    record = Record(verb="study", arguments={}, scalars=dict(kept.scalars), arrays=dict(kept.arrays))
    for each in given.studies:
        record.scalars[each], added = collected(each, given.runs)
        record.arrays |= added
    record.save(HERE / "record", overwrite=True)
