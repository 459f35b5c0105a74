"""Every target over depth, mixing and length: what `design` leaves by default. Writes grid.json beside this.

`python studies/design/grid.py`: rollouts only, no model; about 6 minutes on one core. Prints W1 of two of them:
W1 to the target, the last position apart, at the one length asked for.
"""

import json
from itertools import product
from pathlib import Path

from posbias import design
from posbias.designing.options import STARTS, DesignOptions
from posbias.designing.result import TOLERANCE, Design
from posbias.results.records import describe_environment

TARGETS = ("flat", "power(exponent=2.0)", "recency(rate=5.0)", "u_shape")
DEPTHS, MIXINGS, LENGTHS = (4, 8, 12, 24, 32), (0.05, 0.1, 0.3, 0.6, 0.9), (64, 256, 1024)
SEED = 0


def row_of(found: Design, depth: int, mixing: float) -> dict[str, object]:
    """One cell as plain numbers."""
    (n_positions,) = found.lengths
    after, before = found.distances[n_positions]
    return {
        "target": str(found.target),
        "depth": depth,
        "mixing": mixing,
        "n_positions": n_positions,
        "before": before,
        "after": after,
        "met": found.met,
        "exact": found.exact,
        "at_ends": found.at_ends,
    }


def table(rows: list[dict[str, object]]) -> str:
    """W1 of the targets that are searched for, by depth and mixing; in bold what is met."""
    searched = TARGETS[2:]
    cells = {(row["target"], row["depth"], row["mixing"], row["n_positions"]): row for row in rows}
    heads = [f"{target.partition('(')[0]} {n}" for target in searched for n in LENGTHS]
    lines = ["| layers | mixing | " + " | ".join(heads) + " |", "|---:|---:|" + "---:|" * len(heads)]
    for depth, mixing in product(DEPTHS, MIXINGS):
        at = [cells[target, depth, mixing, n] for target in searched for n in LENGTHS]
        shown = [f"**{row['after']:.4f}**" if row["met"] else f"{row['after']:.4f}" for row in at]
        lines.append(f"| {depth} | {mixing} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> None:
    """All cells, one after the other."""
    rows = []
    for target, depth, mixing, n_positions in product(TARGETS, DEPTHS, MIXINGS, LENGTHS):
        found = design(
            target,
            over="gamma_key",
            options=DesignOptions(depth=depth, mixing=mixing, n_positions=n_positions, seed=SEED),
        )
        rows.append(row_of(found, depth, mixing))
        print(rows[-1], flush=True)
    settings = {"over": "gamma_key", "starts": STARTS["rollout"], "seed": SEED, "tolerance": TOLERANCE}
    record = {"settings": settings, "environment": describe_environment(), "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
