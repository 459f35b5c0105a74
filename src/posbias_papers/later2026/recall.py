"""Mixed demands of recall (arXiv 2510.10276): free recall of a whole list, running span of its last items.

The abstract names the demands and where recency and primacy are to come from, not the order in which free recall is
trained: drawn anew for each list, every item is asked for equally at every step; or that of the list.

Expected, written before training: (1) recency from the span, whatever the order; (2) primacy if recall is trained in
the order of the list. In a pilot of three families, two widths and three orders only (1) came true: networks learn all
places of an order alike, so that curves before the span are flat. The claim is on recency; primacy is not decided here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.models.reference.config import ReferenceConfig
from posbias.statistics import Interval, mean_of
from posbias.tasks.synthetic import FreeRecall, RecallAndSpan
from posbias.tasks.synthetic.recall import RecallTask
from posbias.training import AdamW, Member, TrainingSchedule, TrainOptions, train_members
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

ENDS = 3
"""Places at either end of the list that primacy and recency compare with those between."""

Recalled = Float64[np.ndarray, "seeds places"]


@dataclass(frozen=True)
class Sizes:
    """Lists and networks: two layers of GPT-2's kind."""

    seeds: int = 6
    steps: int = 400
    items: int = 10
    vocabulary: int = 20
    width: int = 16
    examples: int = 400


def recalled(generator: np.random.Generator, tasks: Mapping[str, RecallTask], sizes: Sizes) -> dict[str, Recalled]:
    """By name of the task the share of lists in which networks recall each place, cues weighted as in training."""
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
        Member(f"{name} {seed}", config, task, first + seed, AdamW(3e-3))
        for (name, task), seed in product(tasks.items(), range(sizes.seeds))
    ]
    schedule = TrainingSchedule(steps=sizes.steps, batch=32, window=50, examples=sizes.examples)
    ended = train_members(members, schedule, options=TrainOptions(device="cpu")).members
    rows = np.stack([member.evaluations["recalled"][-1] for member in ended]).astype(np.float64)
    return dict(zip(tasks, rows.reshape(len(tasks), sizes.seeds, sizes.items), strict=True))


def ends(rows: Recalled) -> tuple[Interval, Interval]:
    """Primacy and recency: the share recalled of the first places and of the last, each less that of those between."""
    between = rows[:, ENDS:-ENDS].mean(1)
    first, last = (mean_of(rows[:, part].mean(1) - between).interval() for part in (slice(ENDS), slice(-ENDS, None)))
    return first, last


@CLAIMS.register("recall-2510.10276/recency")
class MixedDemands(Claim):
    """The end of the list is recalled best because training asks for it."""

    paper = "Lost in the Middle: An Emergent Property from Information Retrieval Demands in LLMs, arXiv 2510.10276v1"
    source = "abstract (lists, sizes and order of recall are ours; primacy, sinks and completion are not decided here)"
    statement = (
        "Trained on free recall and running span, networks show recency, from the short-term demand of the span."
    )
    assumptions = ("half of the lists are asked for their last three items", "trained networks, two layers")
    broken_by = "free recall alone"
    trains = True
    computed = (
        "share recalled of the last three places less that of the middle (95 % {low:+.3f} to {high:+.3f}); free recall "
        "in the list's order {listed:+.3f} ({listed_low:+.3f} to {listed_high:+.3f})"
    )
    sharper = (
        "primacy does not show at these sizes: first three less the middle {primacy:+.3f} ({primacy_low:+.3f} to "
        "{primacy_high:+.3f}), in the list's order {listed_primacy:+.3f} ({listed_primacy_low:+.3f} to "
        "{listed_primacy_high:+.3f})"
    )

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = Sizes() if sizes is None else sizes

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Primacy and recency of networks trained on both demands, for two orders of free recall."""
        lists = {"items": self.sizes.items, "vocabulary": self.sizes.vocabulary}
        tasks = {
            f"free recall in {name}": FreeRecall(**lists, order=order)
            if broken
            else RecallAndSpan(**lists, span=ENDS, order=order)
            for order, name in (("random", "random order"), ("listed", "the list's order"))
        }
        rows = recalled(generator, tasks, self.sizes)
        (primacy, recency), (listed_primacy, listed) = map(ends, rows.values())
        intervals = {
            "": recency,
            "listed_": listed,
            "primacy_": primacy,
            "listed_primacy_": listed_primacy,
        }
        return Finding(
            value=recency.value,
            as_stated=min(recency.low, listed.low) > 0,
            figure=curves(
                "place in the list",
                "share of lists in which it is recalled",
                np.arange(self.sizes.items),
                {name: row.mean(0) for name, row in rows.items()},
            ),
            numbers={
                **{f"{name}{end}": getattr(gap, end) for name, gap in intervals.items() for end in ("low", "high")},
                "listed": listed.value,
                "primacy": primacy.value,
                "listed_primacy": listed_primacy.value,
            },
            instances=2 * self.sizes.seeds,
        )
