"""Which coherence the power rollout misses: exact back-propagation with random signs on one kind of junction at a time.

The theory adds energies wherever paths meet. Here the local maps are exact and the paths signed, and random signs are
put on chosen junctions only: between a branch and the stream, between heads, between the value, key and query paths, or
between positions. The measured profile is lost at the junction whose coherence matters (docs/trained_models).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save

from posbias.comparison.sampling import compare_with_prompts
from posbias.models import load_model
from posbias.models.attention import BLOCK_QUERIES
from posbias.models.model import Model
from posbias.prompts import load_prompts, shuffled
from posbias.records import Record, write_atomically
from posbias.theory.power_rollout.description import Description, describe_model
from posbias.theory.power_rollout.diagonal import pull_layers, pull_to_stream
from posbias.theory.power_rollout.probes import covectors, draw_signs, generators
from posbias.theory.power_rollout.trace import trace_prompt
from posbias.theory.power_rollout.walk import Walk

SEED, DRAWS, DRAWS_AT_ONCE = 0, 16, 4
JUNCTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "branches": ("branches",),
    "heads": ("branches", "heads"),
    "paths": ("branches", "paths"),
    "positions": ("branches", "positions"),
    "all but positions": ("branches", "heads", "paths"),
    "all": ("branches", "heads", "paths", "positions"),
}
"""Variant -> the junctions with random signs. A sign on a branch's terms also parts the branch from the stream."""
SCRAMBLED = "scrambled"


@dataclass
class JunctionSigns:
    """Random signs in the shapes a walk asks for, one factor for each kind of junction.

    A layer's walk asks for its MLP's signs, then, block by block of queries, for values, keys and queries. Products of
    independent factors are uncorrelated between terms that differ at any junction with a factor, which is all that a
    second moment sees.
    """

    junctions: tuple[str, ...]
    group: int
    """Query heads that share a key head."""
    blocks: int
    """Blocks of queries in a layer."""
    generator: torch.Generator
    _asked: int = 0
    _shared: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if not self.junctions:
            return torch.ones((1,) * len(shape)).to(like)
        step, self._asked = self._asked % (1 + 3 * self.blocks), self._asked + 1
        if step == 0:
            self._shared = {}
            return self._mlp(shape, like)
        block, path = divmod(step - 1, 3)
        return self._attention(shape, like, block=block, path=path)

    def _mlp(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        positions = shape[-2] if "positions" in self.junctions else 1
        return draw_signs((*shape[:-2], positions, 1), like, self.generator)

    def _attention(self, shape: tuple[int, ...], like: torch.Tensor, *, block: int, path: int) -> torch.Tensor:
        """Values (path 0), keys (1) and queries (2): [draw, key head, group x query, key or 1]."""
        draws, heads, rows, keys = shape
        queries = rows // self.group
        signs = self._factor("branches", (draws, 1, 1, 1, 1), like)
        if "heads" in self.junctions:
            signs = signs * self._factor("heads", (draws, heads, self.group, 1, 1), like)
        if "paths" in self.junctions:
            signs = signs * self._factor(f"path {path}", (draws, 1, 1, 1, 1), like)
        if "positions" in self.junctions:
            name = "queries" if path == 2 else "pairs"
            signs = signs * self._factor(f"{name} {block}", (draws, 1, 1, queries, keys), like)
        return signs.expand(draws, heads, self.group, queries, keys).reshape(shape)

    def _factor(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """One draw per layer and name."""
        if name not in self._shared:
            self._shared[name] = draw_signs(shape, like, self.generator)
        return self._shared[name]


def main() -> None:
    given = _arguments()
    sizes = {"length": given.length, "count": given.count, "draws": DRAWS, "seed": SEED}
    record = Record(verb="study", arguments=sizes)
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        for text, path in (item.split("=", 1) for item in given.text):
            loaded = load_prompts(path, model, n_positions=given.length, count=32, seed=SEED)
            for kind, prompts in ((text, loaded), (SCRAMBLED, shuffled(loaded, SEED))):
                folder = given.parts / name / str(given.length) / kind
                rows = [
                    _prompt(folder, model, prompts.token_ids[index], index=index, given=given.length)
                    for index in range(given.count)
                ]
                measured = [load_file(sorted(folder.glob(f"{index:03d}-*"))[0]) for index in range(given.count)]
                record.scalars.setdefault(name, {})[kind] = _compare(measured, rows)
                print(_line(name, kind, record.scalars[name][kind]), flush=True)
    if given.out is not None:
        record.save(given.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=SOURCE")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--parts", type=Path, required=True, help="where `run.py` kept the measured prompts")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, help="directory of the record")
    return parser.parse_args()


def _prompt(folder: Path, model: Model, token_ids: np.ndarray, *, index: int, given: int) -> dict[str, np.ndarray]:
    """Every variant's profile of one prompt, computed once."""
    path = folder / "coherence" / f"{index:03d}.safetensors"
    if path.is_file():
        return load_file(path)
    description = describe_model(model, n_positions=given)
    rows = dict(_variants(model, description, token_ids, seed=SEED + index))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(rows))
    return rows


@torch.no_grad()
def _variants(
    model: Model, description: Description, token_ids: np.ndarray, *, seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    trace = trace_prompt(model, description, model.token_tensor([token_ids.tolist()])[0], target="jacobian")
    parts = description.layers[0].attention.parts
    for variant, junctions in JUNCTIONS.items():
        generator = next(generators(seed, 1, model.device))
        blocks = -(-len(token_ids) // BLOCK_QUERIES)
        signs = JunctionSigns(junctions, parts.heads // parts.key_heads, blocks, generator)
        walk = Walk(power=1, query=True, signs=signs)
        energy = np.zeros(len(token_ids))
        for _ in range(DRAWS // DRAWS_AT_ONCE):
            vectors = covectors(trace, DRAWS_AT_ONCE, generator)
            gradients = pull_layers(description, trace, pull_to_stream(description, trace, vectors, 1), walk)
            energy += gradients.double().square().sum((0, -1)).numpy()
        profile = np.sqrt(energy)
        yield variant, profile / profile.sum()


def _compare(measured: list[dict[str, np.ndarray]], rows: list[dict[str, np.ndarray]]) -> dict[str, object]:
    target = np.stack([prompt["norms/jacobian"] for prompt in measured])
    found: dict[str, object] = {}
    for variant in (*JUNCTIONS, "theory"):
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


if __name__ == "__main__":
    main()
