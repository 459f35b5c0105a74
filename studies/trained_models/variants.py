"""What the experiments on coherence share: variants of back-propagation on the study's prompts, kept and compared.

A variant is a profile of one prompt; every prompt's variants are one file beside its measurement, computed once.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save

from posbias.comparison.distances import compare_with_prompts
from posbias.files import write_atomically
from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import shuffled
from posbias.results.records import Record
from posbias.theory.power_rollout.rollout import Trace, trace_model

SEED = 0
SCRAMBLED = "scrambled"

Profiles = Callable[[Trace, int], Iterator[tuple[str, np.ndarray]]]
"""From a traced prompt and a seed to variants by name, each a profile that sums to 1."""


@dataclass(frozen=True)
class Experiment:
    """Variants of one kind."""

    name: str
    """Of the folder beside the measured prompts where their profiles are kept."""
    variants: Sequence[str]
    draws: int
    profiles: Profiles


def run(experiment: Experiment, description: str) -> None:
    """Every variant on every model and text that the command line names, compared and printed."""
    parser = options(description)
    parser.add_argument("--out", type=Path, help="directory of the record")
    given = parser.parse_args()
    sizes = {"length": given.length, "count": given.count, "draws": experiment.draws, "seed": SEED}
    record = Record(verb="study", arguments=sizes)
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        for text, path in (item.split("=", 1) for item in given.text):
            loaded = load_prompts(path, model, n_positions=given.length, count=32, seed=SEED)
            for kind, prompts in ((text, loaded), (SCRAMBLED, shuffled(loaded, SEED))):
                folder = given.parts / name / str(given.length) / kind
                rows = [
                    _prompt(experiment, folder, model, prompts.token_ids[index], index) for index in range(given.count)
                ]
                measured = [load_file(sorted(folder.glob(f"{index:03d}-*"))[0]) for index in range(given.count)]
                record.scalars.setdefault(name, {})[kind] = _compare(experiment, measured, rows)
                print(_line(name, kind, record.scalars[name][kind]), flush=True)
    if given.out is not None:
        record.save(given.out, overwrite=True)


def options(description: str, *, count: int = 8) -> argparse.ArgumentParser:
    """What every experiment beside the measured prompts is told; `count` is the default number of prompts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE", help="scrambled as well")
    parser.add_argument("--parts", type=Path, required=True, help="where `run.py` kept the measured prompts")
    parser.add_argument("--count", type=int, default=count, help="most prompts of each text")
    parser.add_argument("--length", type=int, default=256)
    return parser


@torch.no_grad()
def _prompt(
    experiment: Experiment, folder: Path, model: Model, token_ids: np.ndarray, index: int
) -> dict[str, np.ndarray]:
    """Every variant's profile of one prompt, computed once."""

    def compute() -> dict[str, np.ndarray]:
        return dict(experiment.profiles(trace_model(model, token_ids), SEED + index))

    return computed_once(folder / experiment.name / f"{index:03d}.safetensors", compute)


def computed_once(path: Path, compute: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One prompt's arrays: as kept there, or computed and kept."""
    if path.is_file():
        return load_file(path)
    rows = {name: np.ascontiguousarray(array) for name, array in compute().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(rows))
    return rows


def _compare(
    experiment: Experiment, measured: list[dict[str, np.ndarray]], rows: list[dict[str, np.ndarray]]
) -> dict[str, object]:
    target = np.stack([prompt["norms/jacobian"] for prompt in measured])
    found: dict[str, object] = {}
    for variant in (*experiment.variants, "theory"):
        predicted = np.stack(
            [prompt["theory/diagonal_key"] for prompt in measured]
            if variant == "theory"
            else [row[variant] for row in rows]
        ).astype(np.float64)
        compared = compare_with_prompts(predicted, target, generator=np.random.default_rng(SEED))
        found[variant] = compared.distance.as_record()
        found["flat"], found["noise"] = compared.flat.as_record(), compared.noise.mean
    return found


def _line(name: str, kind: str, found: dict[str, object]) -> str:
    cells = " ".join(
        f"{variant} {value['value']:.3f} [{value['low']:.3f},{value['high']:.3f}]"
        for variant, value in found.items()
        if isinstance(value, dict)
    )
    return f"{name} {kind}: {cells} noise {found['noise']:.3f}"


def draw_signs(shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """+1 or -1 with equal chance, independently, in the type and place of `like`."""
    bits = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device=generator.device)
    return bits.to(like).mul_(2).sub_(1)
