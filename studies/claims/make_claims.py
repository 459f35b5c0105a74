"""Writes README.md and claims.csv from a run of every claim: `python studies/claims/make_claims.py` (minutes)."""

import csv
import re
from pathlib import Path

from posbias_papers import Verdict, verify

HERE = Path(__file__).parent
HOLDS, FAILS = "holds", "fails as stated"
COLUMNS = ("claim", "source", "statement", "verdict", "value", "computed", "sharper", "assumes", "broken by")

Lines = dict[str, dict[str, str]]

HEADER = """# Study: claims, put to the test

**Question:** which statements on position bias, published and our own, hold in a numerical experiment?
**Answer:** {tally}. Below are those that do not hold as printed. [`claims.csv`](claims.csv)
has all, with what was computed, assumed and violated ([verify](../../docs/verify.md) says what that means).

`posbias verify` tests those of three papers again, `python studies/claims/make_claims.py` (seed 0) writes this page.
Claims of other papers (read from abstracts and some code; networks are ours), our own and `scrambling.csv` ran at
commit 32267854. Positions count from 0, t from 0 (t + 1 layers); d is the distance query - key, eps the smallest
admissible attention weight.
"""

FOOTER = """
## Holds, with a limit

- *2603.11487.* Trained softmax networks have the sink, but with two heads it is not necessary: a layer written by hand
  does the task without (`sinks-2603.11487/heads`).
- *2504.20966.* Softpick needs no sink, and is not kept from one: asked for the first token, it attends to it.
- *2601.04098.* Small networks keep their profile of conductance. On the demo model ([`scrambling.csv`](scrambling.csv),
  8 prompts) the last eighth has 0.295 of the gradient, and scrambling changes that by -0.102 [-0.167, -0.020].
- *2510.10276, primacy.* Not decided ([study](../experiments/README.md)).
- *2508.07479 (lengths beside the context window), primacy in 2506.15156.* Not decided: they need larger models.

## Where the papers are read differently from their letter

- *RoPE, theorems 4.7 and I.2.* For a fixed N any positive function is Theta of any other. The test asks whether one
  set of constants serves all N, as it does for theorem 4.5. It does not.
- *2603.10123, claim 4.* Leaves out the last token ([study](../birth/README.md)).
"""


def main() -> None:
    """Run every claim and write the page and the file beside this one; claims that left it keep their lines."""
    with (HERE / "claims.csv").open(newline="") as file:
        lines = {row["claim"]: row for row in csv.DictReader(file)}
    lines = dict(sorted((lines | {verdict.name: line(verdict) for verdict in verify()}).items()))
    (HERE / "README.md").write_text(f"{HEADER.format(tally=tally(lines))}\n{corrected(lines)}{FOOTER}")
    with (HERE / "claims.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines.values())


def tally(lines: Lines) -> str:
    """How many claims have each verdict."""
    names = [row["verdict"] for row in lines.values()]
    held, corrected, failed = (names.count(name) for name in (HOLDS, "holds with a correction", FAILS))
    return f"of {len(names)} claims {held} hold, {corrected} hold with a correction and {failed} in neither form"


def corrected(lines: Lines) -> str:
    """A row per claim that does not hold as printed: what is stated, and the first that holds instead."""
    rows = ["| claim | statement | value | what holds instead |", "|---|---|---|---|"]
    first: dict[str, str] = {}
    for claim, row in lines.items():
        if row["verdict"] != HOLDS:
            name = f"**{claim}**, fails" if row["verdict"] == FAILS else claim
            like = first.setdefault(re.sub(r"[\d.e+]+", "", row["sharper"]), claim)
            sharper = cell(row["sharper"].split("; ")[0]) if like == claim else f"as {like}, with other numbers"
            rows.append(f"| {name} | {cell(row['statement'])} | {row['value']} | {sharper} |")
    return "\n".join(rows) + "\n"


def line(verdict: Verdict) -> dict[str, str]:
    """One claim in full."""
    claim, finding = verdict.claim, verdict.finding
    instances = "1 instance" if finding.instances == 1 else f"{finding.instances} instances"
    entries = [
        *(claim.name, claim.source, claim.statement, str(verdict.verdict), number(finding.value)),
        *(f"{verdict.computed}; {instances}", verdict.sharper, "; ".join(claim.assumptions), claim.broken_by),
    ]
    return dict(zip(COLUMNS, entries, strict=True))


def number(value: float) -> str:
    """Four digits; what is only rounding is written as 0."""
    return "0 (to rounding)" if 0 < abs(value) < 1e-14 else f"{value:.4g}"


def cell(text: str) -> str:
    """Text that keeps a Markdown table whole."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()
