"""Writes README.md and claims.csv from a run of every claim: `python studies/claims/make_claims.py` (minutes)."""

import csv
import re
from pathlib import Path

from posbias.papers import Verdict, verify

HERE = Path(__file__).parent
HOLDS = "holds"
HEADER = """# Study: claims, put to the test

**Question:** which statements on position bias, published and our own, hold in a numerical experiment?
**Answer:** {tally}. Below are those that do not hold as printed. [`claims.csv`](claims.csv)
has all, with what was computed, assumed and violated, and all that holds instead ([verify](../../docs/verify.md) says
what that means).

One claim: `posbias verify wu2025/theorem-4.5`; all: `posbias verify`; this page and the file: `python
studies/claims/make_claims.py` (seed 0). Positions count from 0, t from 0 (t + 1 layers);
d is the distance query - key, eps the smallest admissible attention weight.
"""

FOOTER = """
## Holds, with a limit

- *2603.11487.* Trained softmax networks have the sink, but with two heads it is not necessary: a layer written by hand
  does the task without (`sinks-2603.11487/heads`).
- *2504.20966.* Softpick needs no sink, and is not kept from one: asked for the first token, it attends to it.
- *2601.04098.* Small networks keep their profile of conductance. On the demo model ([`scrambling.csv`](scrambling.csv),
  8 prompts) the last eighth has 0.295 of the gradient, and scrambling changes that by -0.102 [-0.167, -0.020].
- *2510.10276.* Recency follows from the demand. Primacy showed in no order of recall: not decided.
- *2508.07479 (lengths beside the context window), primacy in 2506.15156.* Not decided: they need trained models of
  several windows, and of Mamba's size.

## Where the papers are read differently from their letter

- *RoPE, theorems 4.7 and I.2.* For a fixed N any positive function is Theta of any other. The test asks whether one
  set of constants serves all N, as it does for theorem 4.5. It does not.
- *Theorem 5.5.* Checked up to finite depth. Under harmonic mixing collapse is slow.
- *Rates.* A product of lower-triangular kernels decays at position j at the rate of its slowest diagonal among the
  positions j ... i.
- *2603.10123, claim 4.* Leaves out the last token ([study](../birth/README.md)).
- *Claims named by a number other than 2602.16837 and 2603.10123.* Abstracts and some code at hand; networks are ours.
"""


def main() -> None:
    """Run every claim and write the page and the file beside this one."""
    verdicts = verify()
    (HERE / "README.md").write_text(f"{HEADER.format(tally=tally(verdicts))}\n{corrected(verdicts)}{FOOTER}")
    with (HERE / "claims.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("claim", "source", "statement", "verdict", "value", "computed", "sharper", "assumes", "broken by")
        )
        writer.writerows(map(line, verdicts))


def tally(verdicts: list[Verdict]) -> str:
    """How many claims have each verdict."""
    names = [str(verdict.verdict) for verdict in verdicts]
    held, corrected, failed = (names.count(name) for name in (HOLDS, "holds with a correction", "fails as stated"))
    return f"of {len(names)} claims {held} hold, {corrected} hold with a correction and {failed} in neither form"


def corrected(verdicts: list[Verdict]) -> str:
    """A row per claim that does not hold as printed: what is stated, and the first that holds instead."""
    rows = ["| claim | statement | value | what holds instead |", "|---|---|---|---|"]
    first: dict[str, str] = {}
    for verdict in verdicts:
        claim, finding = verdict.claim, verdict.finding
        if str(verdict.verdict) != HOLDS:
            name = f"**{claim.name}**, fails" if str(verdict.verdict) == "fails as stated" else claim.name
            like = first.setdefault(re.sub(r"[\d.e+]+", "", verdict.sharper), claim.name)
            sharper = cell(verdict.sharper.split("; ")[0]) if like == claim.name else f"as {like}, with other numbers"
            rows.append(f"| {name} | {cell(claim.statement)} | {number(finding.value)} | {sharper} |")
    return "\n".join(rows) + "\n"


def line(verdict: Verdict) -> list[str]:
    """One claim in full."""
    claim, finding = verdict.claim, verdict.finding
    instances = "1 instance" if finding.instances == 1 else f"{finding.instances} instances"
    return [
        *(claim.name, claim.source, claim.statement, str(verdict.verdict), number(finding.value)),
        *(f"{verdict.computed}; {instances}", verdict.sharper, "; ".join(claim.assumptions), claim.broken_by),
    ]


def number(value: float) -> str:
    """Four digits; what is only rounding is written as 0."""
    return "0 (to rounding)" if 0 < abs(value) < 1e-14 else f"{value:.4g}"


def cell(text: str) -> str:
    """Text that keeps a Markdown table whole."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()
