"""Writes scrambling.csv: influence on the demo model, natural and scrambled: `python studies/claims/scrambling.py`.

Default prompts and the same tokens in random order: layer conductance as the claim of arXiv 2601.04098 computes it, and
two kinds of `measure`; the last eighth's share, and Wasserstein distances, with intervals over prompts (5 minutes).
"""

import csv
from pathlib import Path

import numpy as np

import posbias as pb
from posbias.comparison.metrics import wasserstein
from posbias.papers.later2026.scrambling import LAST, mean_influence
from posbias.prompts.prompts import PromptSource
from posbias.statistics import mean_of

HERE = Path(__file__).parent
N_POSITIONS, COUNT = 128, 16
KINDS = ("probability", "jacobian")


def main() -> None:
    """Measure every prompt as it is and scrambled, and write the table beside this file."""
    model = pb.load_model("demo", dtype="float32")
    profiles = []
    for shuffle in (False, True):
        source = PromptSource("default", shuffle=shuffle)
        prompts = pb.load_prompts(source, model, n_positions=N_POSITIONS, count=COUNT)
        layers = [mean_influence(model, ids[None]).conductance for ids in prompts.token_ids]
        measured = pb.measure(model, prompts, kinds=list(KINDS))
        by_kind = {kind: (norms / norms.sum(1, keepdims=True))[:, None] for kind, norms in measured.per_prompt.items()}
        profiles.append({"conductance": np.stack(layers), **by_kind})
    with (HERE / "scrambling.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["influence", "quantity", "value", "low", "high"])
        for name, natural in profiles[0].items():
            for quantity, units in quantities(natural, profiles[1][name]).items():
                found = mean_of(units).interval()
                writer.writerow([name, quantity, *(f"{number:.3f}" for number in vars(found).values())])


def quantities(natural: np.ndarray, scrambled: np.ndarray) -> dict[str, np.ndarray]:
    """Numbers of every prompt, means over layers, from shares [prompt, layer, position]."""
    shares = [rows[..., -N_POSITIONS // LAST :].sum(-1).mean(1) for rows in (natural, scrambled)]
    return {
        "last eighth, natural": shares[0],
        "last eighth, scrambled": shares[1],
        "last eighth, change": shares[1] - shares[0],
        "last eighth, natural, first block": natural[:, 0, -N_POSITIONS // LAST :].sum(-1),
        "last eighth, natural, middle block": natural[:, natural.shape[1] // 2, -N_POSITIONS // LAST :].sum(-1),
        "W1, natural to scrambled": wasserstein(natural, scrambled).mean(1),
        "W1, natural to flat": wasserstein(natural, np.full_like(natural, 1 / N_POSITIONS)).mean(1),
    }


if __name__ == "__main__":
    main()
