"""Writes scrambling.csv: influence on the demo model, natural and scrambled: `python studies/claims/scrambling.py`.

Default prompts and the same tokens in random order, by the gradient of the most likely next token's log-probability;
intervals over prompts (half a minute). Not by layer conductance: on the straight path from the mean embedding, where 16
steps do for small networks, its sum misses the score's change on this model by more with 24 steps than with 8.
"""

import csv
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from posbias import load_model, load_prompts
from posbias.comparison.metrics import wasserstein
from posbias.prompts.prompts import PromptSource
from posbias.statistics import mean_of
from posbias_papers.later2026.scrambling import LAST, conductance

HERE = Path(__file__).parent
N_POSITIONS, COUNT = 48, 8

Shares = Float64[np.ndarray, "prompts n_positions"]


def main() -> None:
    """Measure every prompt as it is and scrambled, and write the table beside this file."""
    model = load_model("demo", dtype="float32")
    shares: list[Shares] = []
    for shuffle in (False, True):
        source = PromptSource("default", shuffle=shuffle)
        prompts = load_prompts(source, model, n_positions=N_POSITIONS, count=COUNT)
        norms = np.stack([conductance(model, ids, steps=1).gradient for ids in prompts.token_ids])
        shares.append(norms / norms.sum(1, keepdims=True))
    with (HERE / "scrambling.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["quantity", "value", "low", "high"])
        for quantity, units in quantities(*shares).items():
            writer.writerow([quantity, *(f"{end:.3f}" for end in vars(mean_of(units).interval()).values())])


def quantities(natural: Shares, scrambled: Shares) -> dict[str, Float64[np.ndarray, "prompts"]]:
    """Numbers of every prompt."""
    before, after = (shares[:, -(N_POSITIONS // LAST) :].sum(1) for shares in (natural, scrambled))
    return {
        "last eighth, natural": before,
        "last eighth, scrambled": after,
        "last eighth, change": after - before,
        "W1, natural to scrambled": wasserstein(natural, scrambled),
        "W1, natural to flat": wasserstein(natural, np.full_like(natural, 1 / N_POSITIONS)),
    }


if __name__ == "__main__":
    main()
