"""Cells of the study: the finished prompts of one model, length and kind of text.

`run.py` writes a file per prompt under its parts, with everything that was computed. `keep` puts the profiles that are
judged into one small file per cell, which the repository holds: with it the study is judged again, and gone on with,
where the parts are no longer.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save

from posbias.comparison.distances import PromptComparison, compare_with_prompts
from posbias.files import write_atomically

KINDS = ("jacobian", "probability")
SHARED = "shared"
"""The form with a shared direction; one theory for each kind of influence."""
SHARES = ("own", "shared")
"""What holds the energy in that form: the last position's own gradient, the shared direction."""
KEPT = (*(f"norms/{kind}" for kind in KINDS), "theory/diagonal_key", "theory/published")
"""What is judged in every cell."""

KEPT_HERE = Path(__file__).parent / "kept"
"""Where the repository holds them."""

Name = tuple[str, int, str]
"""Model, positions, kind of text."""
Prompts = dict[str, dict[str, np.ndarray]]
"""Arrays by the prompt's file name: its number and the hash of its token ids."""


@dataclass(frozen=True)
class Cell:
    """Finished prompts of one model, length and text."""

    model: str
    n_positions: int
    text: str
    finished: Prompts

    @property
    def prompts(self) -> list[dict[str, np.ndarray]]:
        return list(self.finished.values())

    @property
    def name(self) -> str:
        return f"{self.model}/{self.n_positions}/{self.text}"

    def stacked(self, name: str, *, like: str = "") -> np.ndarray:
        """One row per prompt that has the array (and `like`), each summing to 1."""
        rows = np.array([prompt[name] for prompt in self.prompts if name in prompt and (like or name) in prompt])
        return np.asarray(rows / rows.sum(axis=1, keepdims=True))

    def mean(self, name: str) -> np.ndarray:
        """Over the prompts that have the array."""
        return np.asarray(np.mean([prompt[name] for prompt in self.prompts if name in prompt], axis=0))

    def profiles(self, theory: str, kind: str, *, on: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """One kind of influence, measured and predicted, on the prompts that have the theory (and the one `on`)."""
        shared = f"theory/{on or theory}"
        return self.stacked(f"norms/{kind}", like=shared), self.stacked(f"theory/{theory}", like=shared)

    def comparison(self, theory: str, kind: str, *, on: str | None = None) -> PromptComparison:
        """One theory against one kind of influence, on the same prompts."""
        measured, predicted = self.profiles(theory, kind, on=on)
        return compare_with_prompts(predicted, measured, generator=np.random.default_rng(0))


def cells(parts: Path, kept: Path, *, least: int) -> Iterator[Cell]:
    """Cells with at least `least` finished prompts, among the parts or kept, in order; the part of a prompt in both."""
    for name in sorted(_names(parts) | set(_kept_names(kept))):
        finished = kept_prompts(kept, *name) | _part_prompts(_folder(parts, *name))
        if len(finished) >= least:
            yield Cell(*name, dict(sorted(finished.items())))


def keep(cell: Cell, kept: Path) -> None:
    """Write the cell's profiles, times its positions, in half precision (to one part in 2,000)."""
    arrays = {name: (cell.stacked(name) * cell.n_positions).astype(np.float16) for name in KEPT}
    kept.mkdir(parents=True, exist_ok=True)
    write_atomically(
        _kept_file(kept, cell.model, cell.n_positions, cell.text),
        save(arrays, metadata={"prompts": json.dumps(list(cell.finished))}),
    )


def kept_prompts(kept: Path, model: str, n_positions: int, text: str) -> Prompts:
    """The kept profiles of one cell; nothing where none are."""
    path = _kept_file(kept, model, n_positions, text)
    if not path.is_file():
        return {}
    with safe_open(path, framework="numpy") as file:
        names = json.loads(file.metadata()["prompts"])
    arrays = {name: rows.astype(np.float64) for name, rows in load_file(path).items()}
    return {prompt: {name: rows[index] for name, rows in arrays.items()} for index, prompt in enumerate(names)}


def _folder(parts: Path, model: str, n_positions: int, text: str) -> Path:
    return parts / model / str(n_positions) / text


def _kept_file(kept: Path, model: str, n_positions: int, text: str) -> Path:
    return kept / f"{model}_{n_positions}_{text}.safetensors"


def _names(parts: Path) -> set[Name]:
    return {(path.parts[-3], int(path.parts[-2]), path.parts[-1]) for path in parts.glob("*/*/*") if path.is_dir()}


def _kept_names(kept: Path) -> Iterator[Name]:
    for path in kept.glob("*_*_*.safetensors"):
        model, n_positions, text = path.stem.rsplit("_", 2)
        yield model, int(n_positions), text


def _part_prompts(folder: Path) -> Prompts:
    """Measured prompts and, where it was computed, the form with a shared direction."""
    return {file.stem: _part(file) for file in sorted(folder.glob("*.safetensors"))}


def _part(file: Path) -> dict[str, np.ndarray]:
    arrays, beside = load_file(file), file.parent / "shared_form" / f"{file.name[:3]}.safetensors"
    if beside.is_file():
        form = load_file(beside)
        arrays |= {f"theory/{SHARED}/{kind}": form[kind] for kind in KINDS}
        arrays |= {f"shares/{share}": form[share] for share in SHARES}
    return arrays
