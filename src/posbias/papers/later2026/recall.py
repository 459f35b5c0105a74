"""A U from mixed demands of recall (arXiv 2510.10276): free recall of a whole list, running span of its last items.

The abstract names the demands and where primacy and recency are to come from, not the order in which free recall is
trained. With an order drawn anew for each list every item is asked for equally at every step; in the order of the list
recall begins at its front, and what is left is asked for after more of it.

Expected, written before the runs that count: (1) recency whatever the order, from the span; (2) primacy with the order
of the list, none with a random one (as in studies/experiments), and less than none with the reversed one.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.models.reference.config import ReferenceConfig
from posbias.papers.claims import Claim, curves
from posbias.report.verify import CLAIMS, Finding
from posbias.statistics import Interval, mean_of
from posbias.tasks.synthetic import RecallAndSpan
from posbias.training import AdamW, Member, TrainingSchedule, TrainOptions, train_members

ENDS = 3
"""Places at either end of the list that primacy and recency compare with those between."""

Recalled = Float64[np.ndarray, "seeds places"]


@dataclass(frozen=True)
class Sizes:
    """Lists and networks: two layers of GPT-2's kind."""

    seeds: int = 6
    steps: int = 600
    items: int = 10
    vocabulary: int = 20
    width: int = 8
    examples: int = 400


def recalled(generator: np.random.Generator, orders: tuple[str, ...], sizes: Sizes) -> dict[str, Recalled]:
    """By order of free recall the share of lists in which networks trained on both demands recall each place."""
    config = ReferenceConfig(
        Architecture(2, heads=2),
        width=sizes.width,
        vocabulary_size=sizes.vocabulary + 3,
        attention="content",
        values="gaussian",
        residual="added",
        norm="pre",
        mlp=True,
        normalisation="layer",
        biases=True,
        learned_positions=2 * sizes.items,
        dtype="float32",
    )
    first = int(generator.integers(2**31))
    members = [
        Member(
            f"{order} {seed}",
            config,
            RecallAndSpan(sizes.items, sizes.vocabulary, ENDS, order=order),
            first + seed,
            AdamW(3e-3),
        )
        for order, seed in product(orders, range(sizes.seeds))
    ]
    schedule = TrainingSchedule(steps=sizes.steps, batch=32, window=50, examples=sizes.examples)
    ended = train_members(members, schedule, options=TrainOptions(device="cpu")).members
    rows = np.stack([member.evaluations["recalled"][-1] for member in ended]).astype(np.float64)
    return dict(zip(orders, rows.reshape(len(orders), sizes.seeds, sizes.items), strict=True))


def ends(rows: Recalled) -> tuple[Interval, Interval]:
    """Primacy and recency: the share recalled of the first places and of the last, each less that of those between."""
    between = rows[:, ENDS:-ENDS].mean(1)
    first, last = (mean_of(rows[:, part].mean(1) - between).interval() for part in (slice(ENDS), slice(-ENDS, None)))
    return first, last


@CLAIMS.register("recall-2510.10276/u-shape")
class MixedDemands(Claim):
    """Lost in the middle as an answer to what is asked for in training."""

    paper = "Lost in the Middle: An Emergent Property from Information Retrieval Demands in LLMs, arXiv 2510.10276v1"
    source = "abstract (lists, sizes, scoring and the order of recall are ours; sinks and completion are not tested)"
    statement = "Trained on free recall and running span, networks recall in a U: primacy and recency."
    assumptions = ("half of the lists with each cue", "free recall begins at the front of the list", "trained networks")
    broken_by = "free recall begins at the end of the list"
    trains = True
    computed = (
        "share recalled of the first three places less that of the middle, recall in the list's order (95 % {low:+.3f} "
        "to {high:+.3f}); of the last three less the middle {recency:+.3f} ({recency_low:+.3f} to {recency_high:+.3f})"
    )
    sharper = (
        "with an order of recall drawn for each list, in which every item is asked for equally at every step, the last "
        "three have {random_recency:+.3f} ({random_recency_low:+.3f} to {random_recency_high:+.3f}), the first "
        "{random:+.3f} ({random_low:+.3f} to {random_high:+.3f}): a uniform demand alone makes no primacy"
    )

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = Sizes() if sizes is None else sizes

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Primacy and recency of networks trained on both demands, for two orders of recall."""
        order = "reversed" if broken else "listed"
        rows = recalled(generator, (order, "random"), self.sizes)
        primacy, recency = ends(rows[order])
        random_primacy, random_recency = ends(rows["random"])
        intervals = {
            "": primacy,
            "recency_": recency,
            "random_": random_primacy,
            "random_recency_": random_recency,
        }
        return Finding(
            value=primacy.value,
            as_stated=min(interval.low for interval in intervals.values()) > 0,
            corrected=primacy.low > 0 and recency.low > 0,
            figure=curves(
                "place in the list",
                "share of lists in which it is recalled",
                np.arange(self.sizes.items),
                {name: row.mean(0) for name, row in rows.items()},
            ),
            numbers={
                **{
                    f"{name}{end}": getattr(interval, end)
                    for name, interval in intervals.items()
                    for end in ("low", "high")
                },
                "recency": recency.value,
                "random": random_primacy.value,
                "random_recency": random_recency.value,
            },
            instances=2 * self.sizes.seeds,
        )
