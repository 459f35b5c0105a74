"""Writes scrambling.csv: influence on the demo model, natural and scrambled: `python studies/claims/scrambling.py`.

Default prompts and the same tokens in random order: layer conductance and the gradient of the most likely next token's
log-probability, as the claim of arXiv 2601.04098 computes them; intervals over prompts (a minute).
"""

import csv
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from posbias import load_model, load_prompts
from posbias.comparison.metrics import wasserstein
from posbias.papers.later2026.scrambling import LAST, conductance
from posbias.prompts.prompts import PromptSource
from posbias.statistics import mean_of

HERE = Path(__file__).parent
N_POSITIONS, COUNT, STEPS = 48, 8, 8

Shares = Float64[np.ndarray, "prompts layers n_positions"]


def main() -> None:
    """Measure every prompt as it is and scrambled, and write the table beside this file."""
    model = load_model("demo", dtype="float32")
    rows: list[dict[str, Shares]] = []
    for shuffle in (False, True):
        prompts = load_prompts(PromptSource("default", shuffle=shuffle), model, n_positions=N_POSITIONS, count=COUNT)
        influences = [conductance(model, ids, steps=STEPS) for ids in prompts.token_ids]
        print("missed", max(influence.missed for influence in influences))
        sizes = {
            "conductance": np.stack([np.abs(influence.conductance) for influence in influences]),
            "gradient": np.stack([influence.gradient[None] for influence in influences]),
        }
        rows.append({name: size / size.sum(-1, keepdims=True) for name, size in sizes.items()})
    with (HERE / "scrambling.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["influence", "quantity", "value", "low", "high"])
        for name, natural in rows[0].items():
            for quantity, units in quantities(natural, rows[1][name]).items():
                writer.writerow([name, quantity, *(f"{end:.3f}" for end in vars(mean_of(units).interval()).values())])


def quantities(natural: Shares, scrambled: Shares) -> dict[str, Float64[np.ndarray, "prompts"]]:
    """Numbers of every prompt, means over layers unless one is named."""
    last = slice(N_POSITIONS - N_POSITIONS // LAST, None)
    before, after = natural[..., last].sum(-1), scrambled[..., last].sum(-1)
    return {
        "last eighth, natural": before.mean(1),
        "last eighth, scrambled": after.mean(1),
        "last eighth, change": (after - before).mean(1),
        "last eighth, natural, input": before[:, 0],
        "last eighth, change, input": (after - before)[:, 0],
        "last eighth, natural, middle block": before[:, before.shape[1] // 2],
        "W1, natural to scrambled": wasserstein(natural, scrambled).mean(1),
        "W1, natural to flat": wasserstein(natural, np.full_like(natural, 1 / N_POSITIONS)).mean(1),
    }


if __name__ == "__main__":
    main()
