"""Writes README.md from a run of every claim: `python studies/claims/make_claims.py` (about 10 s)."""

from pathlib import Path

from posbias.papers import verify
from posbias.papers.claims import Verdict

HEADER = """# Study: claims, put to the test

**Question:** which statements on position bias, published ones and our own on design, hold in a numerical experiment?
**Answer:** {tally}. Each
has its number, what was computed, what holds more sharply, and the assumption whose violation changes the verdict.
What a verdict means: [docs/verify.md](../../docs/verify.md). Made by `python studies/claims/make_claims.py` (seed 0).

Positions are 0-based, t counts from 0 (t + 1 layers), d is the distance query - key, eps the smallest admissible
attention weight.
"""

FOOTER = """
## Where the papers are read differently from their letter

- *RoPE, theorems 4.7 and I.2.* For a fixed N any positive function is Theta of any other, so the statement cannot
  fail literally; the test asks whether one set of constants serves all N, as it does for the decay mask (theorem
  4.5). It does not. The exponent in the proof's upper bound is wrong too: t+1 squared steps can add up to as little
  as d^2/(t+1).
- *RoPE, lemma 4.6.* Its own condition (delta + N - 1) theta <= pi keeps the exponential above exp(-c pi^2): within
  the condition a layer's "decay" is a constant factor.
- *Theorem 5.5.* Both branches are checked up to finite depth. Under harmonic mixing the collapse is real and slow.
- *arXiv 2603.10123, item 6.* The published Jacobian agreement of 0.02 is not contradicted for a fitted mixing: one
  mixing fitted to the outcome brings linear addition within W1 {fitted:.3f} of the simulated profile. With the mixing
  that the network really has it is {linear:.2f} away, and addition in squares, with nothing fitted, {squares:.4f}.
- *Rates.* A product of lower-triangular kernels decays at position j at the rate of its slowest diagonal among the
  positions j ... i, not of position j alone; for kernels whose diagonal falls with j, uniform ones above all, that is
  prod_l (1 - m_l + m_l A_l[j,j]).
"""


def main() -> None:
    """Run every claim and write the page beside this file."""
    verdicts = verify()
    by_name = {verdict.claim.name: verdict for verdict in verdicts}
    addition = by_name["birth-2603.10123/claim-6-linear-addition"].finding.numbers
    footer = FOOTER.format(
        fitted=addition["w1_linear_fitted_mixing"], linear=addition["w1_linear"], squares=addition["w1_squares"]
    )
    header = HEADER.format(tally=tally(verdicts))
    Path(__file__).with_name("README.md").write_text(
        f"{header}\n{verdict_table(verdicts)}\n{details(verdicts)}{footer}"
    )


def tally(verdicts: list[Verdict]) -> str:
    """How many claims have each verdict."""
    names = [str(verdict.verdict) for verdict in verdicts]
    held, corrected, failed = (names.count(name) for name in ("holds", "holds with a correction", "fails as stated"))
    return f"of {len(names)} claims {held} hold, {corrected} hold with a correction and {failed} in neither form"


def verdict_table(verdicts: list[Verdict]) -> str:
    """One row per claim: what is stated, the verdict, the number, the command."""
    rows = ["| claim | statement | verdict | value | command |", "|---|---|---|---|---|"]
    for verdict in verdicts:
        name = verdict.claim.name
        rows.append(
            f"| {name} | {cell(verdict.claim.statement)} | **{verdict.verdict}** | {number(verdict.finding.value)} | "
            f"`posbias verify {name}` |"
        )
    return "\n".join(rows) + "\n"


def details(verdicts: list[Verdict]) -> str:
    """One row per claim: what the value is, the sharper fact, assumptions, and how they are broken in the tests."""
    rows = [
        "## What was computed, and what holds more sharply\n",
        "| claim | the value | sharper, or corrected | assumes; broken on purpose by |",
        "|---|---|---|---|",
    ]
    for verdict in verdicts:
        claim, finding = verdict.claim, verdict.finding
        instances = "1 instance" if finding.instances == 1 else f"{finding.instances} instances"
        rows.append(
            f"| {claim.name} ({cell(claim.source)}) | {cell(finding.computed)}; {instances} | "
            f"{cell(finding.sharper) or '-'} | {cell('; '.join(claim.assumptions))}. *{cell(claim.broken_by)}* |"
        )
    return "\n".join(rows) + "\n"


def number(value: float) -> str:
    """Four digits; what is only rounding is written as 0."""
    return "0 (to rounding)" if 0 < abs(value) < 1e-14 else f"{value:.4g}"


def cell(text: str) -> str:
    """Text that keeps a Markdown table whole."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


if __name__ == "__main__":
    main()
