"""Writes docs/claims.md from a run of every claim: `python docs/make_claims.py` (about 10 s)."""

from pathlib import Path

from posbias.papers import verify
from posbias.papers.claims import Verdict

HEADER = """# Published claims, put to the test

Made by `python docs/make_claims.py`, which runs what `posbias verify` runs (seed 0, {count} claims).

Each statement is a numerical experiment on random instances that satisfy its assumptions: attention networks with
random bounded content for Wu et al. (ICML 2025), stochastically monotone kernels and random residual networks for
arXiv 2602.16837, uniform causal attention and simulated Jacobians for arXiv 2603.10123. Bounds are evaluated with the
instance's own epsilon (its smallest admissible attention weight), for every layer, query and key. The verdict follows
from two comparisons: whether the statement held as printed, and if not whether its corrected form did. Every claim also
runs with an assumption violated on purpose, and its verdict must then change: `tests/papers` checks it.

- **holds**: every instance satisfied the statement as printed;
- **holds with a correction**: it did not, or the printed constants did not, and the corrected statement did;
- **fails as stated**: neither did, the corrected statement is about something else.

A numerical check of a theorem with a limit or with "there exist constants" can refute it or show its constants at
work; it is no proof. What exactly was computed stands in the second table. Positions are 0-based, t counts from
0 (t + 1 layers), d is the distance query - key, eps the smallest admissible attention weight.
"""

FOOTER = """
## Where we read the papers differently from their letter

- *RoPE, theorems 4.7 and I.2.* For a fixed N any positive function is Theta of any other, so the statement cannot fail
  literally; we ask whether one set of constants serves all N, as it does for the decay mask (theorem 4.5). It does not.
  The exponent in the proof's upper bound is wrong too: t+1 squared steps can add up to as little as d^2/(t+1).
- *RoPE, lemma 4.6.* Its own condition (delta + N - 1) theta <= pi keeps the exponential above exp(-c pi^2): within the
  condition a layer's "decay" is a constant factor.
- *Theorem 5.5.* Both branches are checked up to finite depth. Under harmonic mixing the collapse is real and slow.
- *"At birth", item 6.* The published Jacobian agreement of 0.02 is not contradicted for a fitted mixing: one mixing
  fitted to the outcome brings linear addition within W1 {fitted:.3f} of the simulated profile. With the mixing that the
  network really has it is {linear:.2f} away, and addition in squares, with nothing fitted, {squares:.4f}.
- *Rates.* A product of lower-triangular kernels decays at position j at the rate of its slowest diagonal among the
  positions j ... i, not of position j alone; for kernels whose diagonal falls with j, uniform ones above all, that is
  prod_l (1 - m_l + m_l A_l[j,j]).

A figure for every claim: `posbias verify --report --out runs/claims`. The centre nodes of your own mask:
`posbias verify --mask mask.npy`. On the attention of a model: `posbias verify --model demo --length 48`
([training.md](training.md#a-trained-member-is-a-model-like-any-other)).
"""


def main() -> None:
    """Run every claim and write the page beside this file."""
    verdicts = verify()
    by_name = {verdict.claim.name: verdict for verdict in verdicts}
    addition = by_name["birth-2603.10123/claim-6-linear-addition"].finding.numbers
    footer = FOOTER.format(
        fitted=addition["w1_linear_fitted_mixing"], linear=addition["w1_linear"], squares=addition["w1_squares"]
    )
    header = HEADER.format(count=len(verdicts))
    Path(__file__).with_name("claims.md").write_text(
        f"{header}\n{verdict_table(verdicts)}\n{details(verdicts)}{footer}"
    )


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
