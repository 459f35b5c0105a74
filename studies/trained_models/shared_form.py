"""The power rollout with a shared direction on the study's prompts, beside the diagonal form and the flat line.

Reads the measured prompts under --parts and adds this form's profiles beside them, prompt by prompt (resumable).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from summary import meets_target
from variants import arguments, computed_once

from posbias.comparison.sampling import compare_with_prompts
from posbias.models import load_model
from posbias.models.model import Model
from posbias.prompts import load_prompts, shuffled
from posbias.records import Record
from posbias.theory.power_rollout.probes import draw_signs, generators
from posbias.theory.power_rollout.prompt_trace import trace_model
from posbias.theory.power_rollout.shared_direction import shared_direction_of

SEED, PROBES, DRAWN = 0, 2, 32
KINDS = ("jacobian", "probability")
OWN, SHARED = "own", "shared"
"""Shares of the energy that the last position and the shared direction hold; SHARED is also the form's name."""


def main() -> None:
    given = arguments(__doc__, count=DRAWN)
    record = Record(verb="study", arguments={"length": given.length, "count": given.count, "probes": PROBES})
    texts = dict(item.split("=", 1) for item in given.text)
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        loaded = {
            text: load_prompts(path, model, n_positions=given.length, count=DRAWN, seed=SEED)
            for text, path in texts.items()
        }
        loaded["scrambled"] = shuffled(next(iter(loaded.values())), SEED)
        for text, prompts in loaded.items():
            folder = given.parts / name / str(given.length) / text
            files = sorted(folder.glob("*.safetensors"))[: given.count]
            rows = [_prompt(folder, model, prompts.token_ids[index], index) for index in range(len(files))]
            found = _compare([load_file(file) for file in files], rows)
            record.scalars.setdefault(name, {})[text] = found
            for kind in KINDS:
                record.arrays[f"{name}/{given.length}/{text}/{kind}"] = np.mean([row[kind] for row in rows], axis=0)
            for line in _lines(name, given.length, text, found):
                print(line, flush=True)
    if given.out is not None:
        record.save(given.out)


def _prompt(folder: Path, model: Model, token_ids: np.ndarray, index: int) -> dict[str, np.ndarray]:
    """Both kinds' profiles and what the direction holds, block by block; computed once."""

    def compute() -> dict[str, np.ndarray]:
        trace = trace_model(model, token_ids, target="probability")
        assert trace.score_gradient is not None
        generator = next(generators(SEED + index, 1, model.device))
        jacobian = shared_direction_of(trace, draw_signs((PROBES, len(trace.state)), trace.state, generator))
        probability = shared_direction_of(trace, trace.score_gradient[None].to(trace.state))
        profiles = {"jacobian": jacobian.profile, "probability": probability.profile}
        return profiles | {OWN: jacobian.own, SHARED: jacobian.shared}

    return computed_once(folder / "shared_form" / f"{index:03d}.safetensors", compute)


def _compare(measured: list[dict[str, np.ndarray]], rows: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Both forms against both kinds of influence, and the mean shares of the energy by block."""
    found: dict[str, Any] = {"prompts": len(rows)}
    for kind in KINDS:
        target = np.stack([prompt[f"norms/{kind}"] for prompt in measured])
        forms = {
            SHARED: np.stack([row[kind] for row in rows]),
            "diagonal": np.stack([prompt["theory/diagonal_key"] for prompt in measured]),
        }
        compared = {
            form: compare_with_prompts(profiles.astype(np.float64), target, generator=np.random.default_rng(SEED))
            for form, profiles in forms.items()
        }
        shared = compared[SHARED]
        found[kind] = {form: comparison.distance.as_record() for form, comparison in compared.items()} | {
            "flat": shared.flat.as_record(),
            "noise": shared.noise.mean,
            "per_prompt": shared.per_prompt.as_record(),
            "meets_target": meets_target(shared),
        }
    found["shares"] = {name: np.stack([row[name] for row in rows]).mean(0).tolist() for name in (OWN, SHARED)}
    return found


def _lines(model: str, n_positions: int, text: str, found: dict[str, Any]) -> Iterator[str]:
    """Markdown: model, N, text, kind, prompts, flat, noise, diagonal, shared [interval], per prompt, target."""
    for kind in KINDS:
        row = found[kind]
        shared, diagonal = row[SHARED], row["diagonal"]
        yield (
            f"| {model} | {n_positions} | {text} | {kind} | {found['prompts']} | {row['flat']['value']:.3f} "
            f"| {row['noise']:.3f} | {diagonal['value']:.3f} | **{shared['value']:.3f}** "
            f"| {shared['low']:.3f} to {shared['high']:.3f} | {row['per_prompt']['value']:.3f} "
            f"| {'met' if row['meets_target'] else 'missed'} |"
        )


if __name__ == "__main__":
    main()
