"""Recency of a decaying state, and what distractors leave of it (arXiv 2506.15156), in one associative memory.

A linear layer writes items into a state that fades, S_t = e^-s S_(t-1) + k_t v_t', and is asked for an item by its key:
the answer is the value with the largest score S' k_j. If every item has a value of its own and keys are random with d
features, the right score is |k_j|^2 e^(-s r_j), r the positions since, and every other item's is normal with deviation
|k_j| e^(-s r) / d^1/2, so that the answer is right with probability E prod Phi(d^1/2 |k_j| e^(s (r - r_j))).
"""

import numpy as np
from jaxtyping import Float64

from posbias.statistics import mean_of
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

ITEMS, FEATURES = 12, 16
DECAY = 0.15
"""Nats that the state loses per position."""
DISTRACTORS = (0, 4, 8, 12, 16, 20)
SEQUENCES = 2000
ENDS = 3
"""Places at the end of the list that recency compares with those between the ends."""
COLLAPSED = 0.2
"""Share of the recency without distractors below which it has collapsed."""

Recalled = Float64[np.ndarray, "sequences items"]


def recalled(generator: np.random.Generator, distractors: int, decay: float) -> Recalled:
    """1 for every item of a list that is answered rightly after so many distractors, else 0."""
    keys = generator.standard_normal((SEQUENCES, ITEMS + distractors, FEATURES)) / np.sqrt(FEATURES)
    left = np.exp(-decay * np.arange(ITEMS + distractors)[::-1])
    scores = keys[:, :ITEMS] @ keys.transpose(0, 2, 1) * left
    return np.asarray((scores.argmax(-1) == np.arange(ITEMS)).astype(np.float64))


def accuracy(distractors: int, decay: float) -> Float64[np.ndarray, "items"]:
    """The probability of a right answer, averaged over the lengths of keys."""
    from scipy.special import ndtr
    from scipy.stats import chi

    lengths = chi.ppf((np.arange(200) + 0.5) / 200, FEATURES)[:, None, None]
    since = np.arange(ITEMS + distractors)[::-1]
    below = ndtr(lengths * np.exp(decay * (since - since[:ITEMS, None])))
    below[:, np.arange(ITEMS), np.arange(ITEMS)] = 1.0
    return np.asarray(below.prod(-1).mean(0))


@CLAIMS.register("mamba-2506.15156/distractors")
class RecencyCollapses(Claim):
    """A fading state recalls the last items best, until others follow them."""

    paper = "Emergence of Primacy and Recency Effect in Mamba: A Mechanistic Point of View, arXiv 2506.15156v1"
    source = "abstract (one associative memory; primacy by sparse channels and Mamba itself are not decided here)"
    statement = "A decaying recurrence recalls recent items best; the advantage collapses when distractors follow."
    assumptions = (
        "the state fades by one factor per position",
        "random keys",
        "every item has its own value, and is asked for by key",
    )
    broken_by = "a state that does not fade"
    computed = (
        "accuracy of the last three of {items:.0f} items less the middle's, {most:.0f} distractors (95 % {low:.3f} to "
        "{high:.3f}); without {none:.3f} ({none_low:.3f} to {none_high:.3f})"
    )
    sharper = (
        "accuracy depends on the positions since alone, so that distractors move the list down one falling curve: with "
        "{some:.0f} of them the advantage is {largest:.3f} ({largest_low:.3f} to {largest_high:.3f}), and only where "
        "accuracy is gone (the last item's {best:.2f} to {worst:.2f}) it goes. The last item's score stays {ratio:.1f} "
        "times the first's; the formula gives accuracy within {formula_error:.3f}"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Accuracy by place for every number of distractors."""
        decay = 0.0 if broken else DECAY
        rows = [recalled(generator, count, decay) for count in DISTRACTORS]
        recency = [mean_of(row[:, -ENDS:].mean(1) - row[:, ENDS:-ENDS].mean(1)).interval() for row in rows]
        formula = np.stack([accuracy(count, decay) for count in DISTRACTORS])
        first, last = recency[0], recency[-1]
        most = max(range(len(rows)), key=lambda index: recency[index].value)
        collapsed = first.low > 0 and last.high < COLLAPSED * first.low
        return Finding(
            value=last.value,
            as_stated=collapsed and all(after.value < first.value for after in recency[1:]),
            corrected=collapsed,
            figure=curves(
                "place in the list",
                "accuracy",
                np.arange(ITEMS),
                {f"{count} distractors": row.mean(0) for count, row in zip(DISTRACTORS, rows, strict=True)},
            ),
            numbers={
                "items": ITEMS,
                "most": DISTRACTORS[-1],
                "low": last.low,
                "high": last.high,
                "none": first.value,
                "none_low": first.low,
                "none_high": first.high,
                "ratio": float(np.exp(decay * (ITEMS - 1))),
                "some": DISTRACTORS[most],
                "largest": recency[most].value,
                "largest_low": recency[most].low,
                "largest_high": recency[most].high,
                "best": float(rows[0][:, -1].mean()),
                "worst": float(rows[-1][:, -1].mean()),
                "formula_error": float(np.abs(np.stack([row.mean(0) for row in rows]) - formula).max()),
            },
            instances=SEQUENCES * len(DISTRACTORS),
        )
