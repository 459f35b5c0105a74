"""What every ingredient of the power rollout is worth: W1 to the measured profile with one of them dropped.

Reads the measured prompts under --parts, adds every variant's profile beside them (resumable), the
sign-randomised reference and the value path, and prints a line per model.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from signed_walks import generators, score_path_share, sign_randomised_energies, value_path_squares
from variants import computed_once

from posbias.comparison import compare_with_prompts
from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts
from posbias.runs.records import Record
from posbias.statistics import mean_of
from posbias.theory.power_rollout import ingredients
from posbias.theory.power_rollout.rollout import trace_model

SEED, DRAWS, PROBES = 0, 8, 4
KINDS = ("jacobian", "probability")
SHARE = "score_share"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--text", required=True, metavar="NAME=FILE")
    parser.add_argument("--parts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, help="directory of the record")
    given = parser.parse_args()
    text, path = given.text.split("=", 1)
    record = Record(verb="study", arguments={"text": text, "length": given.length, "count": given.count})
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        prompts = load_prompts(path, model, n_positions=given.length, count=given.count, seed=SEED)
        folder = given.parts / name / str(given.length) / text
        measured = [load_file(sorted(folder.glob(f"{index:03d}-*"))[0]) for index in range(prompts.count)]
        kept = folder / "ingredients"
        rows = [_prompt(kept / f"{index:03d}.safetensors", model, prompts, index) for index in range(prompts.count)]
        record.scalars[name] = _compare(measured, rows)
    print(_table(record))
    if given.out is not None:
        record.save(given.out, overwrite=True)


def _prompt(path: Path, model: Model, prompts: Prompts, index: int) -> dict[str, np.ndarray]:
    """Every variant's profile of one prompt, computed once."""

    def compute() -> dict[str, np.ndarray]:
        one = Prompts(prompts.token_ids[index : index + 1])
        arrays = {name: rows[0] for name, rows in ingredients(model, one).items()}
        trace = trace_model(model, one.token_ids[0])
        signs, probes = (next(generators(SEED + index, 1, model.device)) for _ in range(2))
        energies = sign_randomised_energies(trace, signs, draws=DRAWS)
        squares = value_path_squares(trace, probes, probes=PROBES)
        norms = {"signs": np.sqrt(energies.mean(0)), "value_path": np.sqrt(squares.mean(0)[:, 1])}
        arrays |= {name: values / values.sum() for name, values in norms.items()}
        return arrays | {SHARE: np.array([score_path_share(squares)])}

    return computed_once(path, compute)


def _compare(measured: list[dict[str, np.ndarray]], rows: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """W1 of every variant to each kind of influence, with intervals over prompts; and the score path's share."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        target = np.stack([prompt[f"norms/{kind}"] for prompt in measured])
        for name in rows[0]:
            if name == SHARE:
                continue
            predicted = np.stack([row[name] for row in rows]).astype(np.float64)
            compared = compare_with_prompts(predicted, target, generator=np.random.default_rng(SEED))
            found.setdefault(kind, {})[name] = compared.distance.as_record()
        found[kind]["flat"], found[kind]["noise"] = compared.flat.as_record(), compared.noise.mean
    shares = np.array([row[SHARE] for row in rows], dtype=np.float64).reshape(len(rows))
    found[SHARE] = mean_of(shares).interval(least=0.0).as_record()
    return found


def _table(record: Record) -> str:
    """Markdown: a column per variant."""
    names = ["flat", *(name for name in next(iter(record.scalars.values()))[KINDS[0]] if name not in ("flat", "noise"))]
    lines = ["| model | kind | " + " | ".join(names) + " |", "|" + "---|" * (2 + len(names))]
    for model, found in record.scalars.items():
        for kind in KINDS:
            values = " | ".join(f"{found[kind][name]['value']:.3f}" for name in names)
            lines.append(f"| {model} | {kind} | {values} |")
    shares = [
        f"{model}: {found[SHARE]['value']:.2f} [{found[SHARE]['low']:.2f}, {found[SHARE]['high']:.2f}]"
        for model, found in record.scalars.items()
    ]
    return "\n".join([*lines, "", "share of the score path: " + "; ".join(shares)])


if __name__ == "__main__":
    main()
