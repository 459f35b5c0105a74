"""How often `evaluate --sequential` claims too much, and what it saves: `python studies/intervals/sequential.py` (a
minute) prints what docs/intervals.md sums up.

Five positions with one chance of a right answer, 100 samples at most, `worst>=0.8`. At a chance below .8 the bound must
not be claimed; .799 is hardest. The fixed design asks all 100.
"""

import numpy as np
from scipy.special import betaln

from posbias.evaluation.requirements import ALPHA, Requirement, levels_of
from posbias.evaluation.sequential import looks_of

GOAL = Requirement.parse("worst>=0.8")
CHANCES, COUNT, N_POSITIONS, RUNS, SEED = (0.4, 0.6, 0.7, 0.799, 0.9, 0.95, 0.99), 100, 5, 2000, 0


def outcome(scores: np.ndarray, *, sequential: bool) -> tuple[int, int, int]:
    """Whether the bound is claimed, whether it is excluded, and after how many samples."""
    for look in looks_of(COUNT, sequential=sequential):
        value = levels_of(scores[: look.count], alpha=look.alpha if sequential else ALPHA).worst
        if GOAL.met(value) or GOAL.excluded(value):
            return int(GOAL.met(value)), int(GOAL.excluded(value)), look.count
    return 0, 0, COUNT


def confidence_sequence(chance: float, threshold: float) -> float:
    """Chance that an interval which holds after every sample (a mixture over Beta(1/2, 1/2)) claims the threshold."""
    state, claimed = np.ones(1), 0.0
    for count in range(1, COUNT + 1):
        state, right = np.convolve(state, [1 - chance, chance]), np.arange(count + 1)
        mixture = betaln(right + 0.5, count - right + 0.5) - betaln(0.5, 0.5)
        likelihood = right * np.log(threshold) + (count - right) * np.log(1 - threshold)
        told = mixture - likelihood >= -np.log(ALPHA)
        claimed += state[told & (right > threshold * count)].sum()
        state = np.where(told, 0.0, state)
    return float(claimed)


def main() -> None:
    """Print a row for every chance."""
    print("| true accuracy | claimed >= .8 | fixed | excluded | fixed | mean samples | saved |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    generator = np.random.default_rng(SEED)
    for chance in CHANCES:
        runs = (generator.random((RUNS, COUNT, N_POSITIONS)) < chance).astype(np.float64)
        found, fixed = (np.mean([outcome(run, sequential=way) for run in runs], axis=0) for way in (True, False))
        rates = " | ".join(f"{100 * rate:.1f} %" for pair in zip(found[:2], fixed[:2], strict=True) for rate in pair)
        print(f"| {chance:g} | {rates} | {found[2]:.0f} | {1 - found[2] / COUNT:.0%} |")
    print(f"confidence sequence, one position: .9 claimed in {confidence_sequence(0.9, 0.8):.0%} of runs")


if __name__ == "__main__":
    main()
