"""Mean-field theory against measured Jacobians of freshly initialised models, one line per family and level.

    python benchmarks/mean_field/run.py --cache DIRECTORY [--cases llama,gpt2] [--seeds 16] [--markdown FILE]

Measurements are kept seed by seed in the cache, so that a run can be stopped and continued. Columns: normalised
Wasserstein distance (W1) to the measured profile (root mean square over seeds), median relative error of the profile,
predicted over measured scale, W1 of the flat line and of the residual rollout with measured mixing, largest logit
variance (s2). The noise beside W1 is the distance between two halves of the seeds, beside the error and the scale what
resampling the seeds changes.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from families import CASES, Case

from measurement import Measured, fresh_model, measure
from posbias.architecture import Architecture
from posbias.comparison.metrics import wasserstein
from posbias.theory.mean_field import mean_field
from posbias.theory.rollout import rollout_profile

COLUMNS = (
    ("case", 11),
    ("N", 4),
    ("seeds", 5),
    ("level", 8),
    ("W1", 7),
    ("noise", 7),
    ("error", 6),
    ("noise", 6),
    ("scale", 6),
    ("noise", 6),
    ("flat", 6),
    ("rollout", 7),
    ("s2", 6),
    ("seconds", 7),
)


def main() -> None:
    """Print the table and write it as Markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="directory for measured seeds")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated names; default all")
    parser.add_argument("--seeds", type=int, default=None, help="seeds per case; default as in the table")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("  ".join(name.rjust(width) for name, width in COLUMNS), flush=True)
    lines = []
    for name in options.cases.split(","):
        case = CASES[name] if options.seeds is None else replace(CASES[name], seeds=options.seeds)
        for cells in rows(case, measure(case, options.cache)):
            print("  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True)), flush=True)
            lines.append("| " + " | ".join(cells) + " |")
    if options.markdown is not None:
        head = ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        options.markdown.write_text("\n".join([*head, *lines]) + "\n")


def rows(case: Case, measured: Measured) -> list[list[str]]:
    """The case's lines of the table, one for each level."""
    model = fresh_model(case, 0)
    norm = measured.norm
    flat = distance(np.ones_like(norm), norm)
    architecture = Architecture.from_model(model, mixing=measured.mixing.mean(axis=0).tolist())
    rollout = distance(rollout_profile(architecture, n_positions=case.n_positions), norm)
    noise = distance(measured.half(0), measured.half(1))
    error_noise, scale_noise = resampling_noise(measured)
    lines = []
    for level in case.levels:
        begin = time.perf_counter()
        theory = mean_field(model, case.n_positions, level=level)
        seconds = time.perf_counter() - begin
        error = np.median(np.abs(theory.profile.influence * norm.sum() / norm - 1))
        lines.append(
            [
                case.name,
                str(case.n_positions),
                str(case.seeds),
                level,
                f"{distance(theory.jacobian_norm, norm):.4f}",
                f"{noise:.4f}",
                f"{error:.3f}",
                f"{error_noise:.3f}",
                f"{np.sqrt(np.mean(theory.jacobian_norm**2) / np.mean(norm**2)):.3f}",
                f"{scale_noise:.3f}",
                f"{flat:.3f}",
                f"{rollout:.3f}",
                f"{theory.logit_variance.max():.3f}",
                f"{seconds:.1f}",
            ]
        )
    return lines


def resampling_noise(measured: Measured) -> tuple[float, float]:
    """How much resampled seeds change the profile (median relative) and the scale (relative standard deviation)."""
    count = len(measured.squares)
    samples = np.random.default_rng(0).integers(0, count, size=(200, count))
    norms = np.stack([np.sqrt(measured.squares[sample].mean(axis=0)) for sample in samples])
    profiles = norms / norms.sum(axis=1, keepdims=True)
    whole = measured.norm / measured.norm.sum()
    error = np.median(np.abs(profiles / whole - 1), axis=1).mean()
    scale = np.sqrt((norms**2).mean(axis=1))
    return float(error), float(scale.std() / scale.mean())


def distance(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Normalised Wasserstein distance of two non-negative vectors, each scaled to sum 1."""
    return float(wasserstein(predicted / predicted.sum(), measured / measured.sum()))


if __name__ == "__main__":
    main()
