"""Verdicts and picture of README.md, and results.csv, from the record: `python studies/design_training/analyse.py`."""

import csv
import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from scipy.stats import rankdata

from posbias.comparison.distances import Sample, compare_with_prompts
from posbias.profiles import Profile
from posbias.results.records import Record, read_record
from posbias.statistics import Estimate, Interval, detectable, holm, mean_of

HERE = Path(__file__).parent
BEST_RECALL = sum(1 / k for k in range(1, 13)) / 12
"""Of the mean probability of an item under free recall of 12."""
LEVEL = 0.05
LOSS_MARGIN = 0.05
"""Nats by which a loss may be higher and still count as no worse."""
ARMS = (
    "none",
    "rope",
    "alibi",
    "flat_gamma",
    "flat_mean_field",
    "recency",
    "middle",
    "permuted",
    "learned_zero",
    "learned_design",
)
ORDERED = ("none", "rope", "alibi", "recency", "middle", "permuted")
"""Arms whose profile at initialisation has an order to predict."""
ENDPOINTS = ("worst", "mean", "loss", "steps", "half", "double")
NAMES = {
    "worst": "worst position",
    "mean": "mean",
    "loss": "loss (nats)",
    "steps": "steps to threshold",
    "text_loss": "text loss (nats)",
    "order": "order",
    "half": "worst at N/2",
    "double": "worst at 2N",
}
TITLES = {
    "cued_copy": "Cued copy, 4 layers, 12 positions",
    "key_value": "Key-value retrieval, 2 layers, 16 positions",
    "free_recall": "Free recall, 4 layers, 12 positions",
    "cued_copy_8": "Cued copy, 8 layers, 8 positions",
    "key_value_4": "Key-value retrieval, 4 layers, 16 positions",
    "language": "Pairs in text, 2 layers, 8 slots",
}
DRAWN = ("cued_copy", "key_value", "free_recall")
PerSeed = Float64[np.ndarray, "seed"]


@dataclass(frozen=True, eq=False)
class StudyResult:
    """One study of the record."""

    name: str
    record: Record

    @cached_property
    def arms(self) -> list[str]:
        """Those that were trained."""
        return [arm for arm in ARMS if f"{self.name}/{arm}/whole" in self.record.arrays]

    def array(self, arm: str, quantity: str) -> Float64[np.ndarray, "seed ..."] | None:
        """What the record has of an arm."""
        found = self.record.arrays.get(f"{self.name}/{arm}/{quantity}")
        return None if found is None else np.asarray(found, dtype=np.float64)

    @property
    def threshold(self) -> float:
        """Score from which on a position counts as learnt."""
        return BEST_RECALL / 2 if self.name == "free_recall" else 0.5

    def values(self, arm: str, endpoint: str) -> PerSeed | None:
        """The endpoint of every network; None where the arm is not defined."""
        n_targets = int(self.record.scalars[self.name]["targets"])
        if endpoint in {"loss", "text_loss"}:
            return self.array(arm, endpoint)
        if endpoint == "steps":
            return self.steps(arm).mean(axis=1)
        if endpoint == "order":
            return self.order(arm)
        score = self.array(arm, endpoint if endpoint in {"half", "double"} else "whole")
        if score is None:
            return None
        score = score[:, :n_targets]
        return np.asarray(score.mean(axis=1) if endpoint == "mean" else score.min(axis=1))

    def steps(self, arm: str) -> Float64[np.ndarray, "seed position"]:
        """First evaluation at which a position reaches the threshold; one interval after the end where none does."""
        at = np.array(self.record.scalars[self.name]["steps"], dtype=np.float64)
        curve = self.array(arm, "curve")
        assert curve is not None
        reached = curve >= self.threshold
        first = np.where(reached.any(axis=1), reached.argmax(axis=1), len(at))
        return np.asarray(np.append(at, 2 * at[-1] - at[-2])[first])

    def order(self, arm: str) -> PerSeed:
        """Spearman's correlation over positions of the profile at initialisation with the mean score in training."""
        birth, curve = self.array(arm, "birth"), self.array(arm, "curve")
        assert birth is not None
        assert curve is not None
        learnt = curve.mean(axis=1)
        places = self.record.scalars[self.name].get("places", range(learnt.shape[1]))
        profile = rankdata(birth.mean(axis=0)[list(places)])
        return np.array([np.corrcoef(profile, rankdata(each))[0, 1] for each in learnt])

    def difference(self, arm: str, endpoint: str, other: str = "none") -> Estimate | None:
        """Arm minus another, paired over seeds."""
        one, base = self.values(arm, endpoint), self.values(other, endpoint)
        return None if one is None or base is None else mean_of(one - base)

    def corrected(self, endpoint: str) -> dict[str, float]:
        """Holm's p-value of every arm's difference from `none`; of `order` those of being 0."""
        if endpoint == "order":
            found = {arm: mean_of(self.order(arm)) for arm in self.arms if arm in ORDERED}
        else:
            each = {arm: self.difference(arm, endpoint) for arm in self.arms if arm != "none"}
            found = {arm: estimate for arm, estimate in each.items() if estimate is not None}
        adjusted = holm(np.array([float(estimate.p()) for estimate in found.values()]))
        return dict(zip(found, adjusted.tolist(), strict=True))

    def distance_at_birth(self, arm: str) -> Interval:
        """W1 of the networks' mean profile at initialisation to flat, the last position apart."""
        birth = self.array(arm, "birth")
        assert birth is not None
        inner = birth[:, :-1]
        flat = Profile.normalised(np.ones(inner.shape[1]))
        sample = Sample.of(inner, scales=inner.sum(axis=1))
        return compare_with_prompts(flat, sample, generator=np.random.default_rng(0)).distance

    def detectable(self, arm: str) -> float:
        """Difference at the worst position that would have been found, with as many comparisons as there are arms."""
        one, base = self.values(arm, "worst"), self.values("none", "worst")
        assert one is not None
        assert base is not None
        return detectable(float(np.std(one - base, ddof=1)), len(one), alpha=LEVEL / (len(self.arms) - 1))

    def verdict(self) -> str:
        """Support, harm or null, as registered."""
        above, p = self.difference("flat_mean_field", "worst"), self.corrected("worst")["flat_mean_field"]
        loss = self.difference("flat_mean_field", "loss")
        assert above is not None
        assert loss is not None
        if p < LEVEL and above.value < 0:
            return "harm"
        beyond = [self.difference("flat_mean_field", "worst", other) for other in ("permuted", "recency")]
        better = all(each is not None and each.value > 0 and float(each.p()) < LEVEL for each in beyond)
        if p < LEVEL and above.value > 0 and better and loss.interval().high < LOSS_MARGIN:
            return "support"
        return "null"

    def predicts(self) -> bool:
        """Whether influence at initialisation predicts what is learnt first, as registered."""
        p = self.corrected("order")
        chosen = ("none", "recency", "middle")
        return sum(float(self.order(arm).mean()) > 0 and p[arm] < LEVEL for arm in chosen) >= 2


def results(record: Record) -> list[StudyResult]:
    """The studies that the record has."""
    return [StudyResult(name, record) for name in TITLES if name in record.scalars]


def shown(estimate: Interval, spec: str, *, bold: bool = False) -> str:
    """A number with its ends, bold where a test says so."""
    text = estimate.text(spec)
    return f"**{text}**" if bold else text


def sheet(studies: list[StudyResult]) -> str:
    """CSV, a line per study, arm and endpoint: `none` and order as they are, other arms' differences from `none`."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["study", "arm", "endpoint", "value", "low", "high", "p below .05, corrected"])
    for study in studies:
        text = [] if study.array("none", "text_loss") is None else ["text_loss"]
        for arm in study.arms:
            writer.writerow([study.name, arm, "W1 to flat at birth", *ends(study.distance_at_birth(arm), ".3f"), ""])
            for endpoint in [*ENDPOINTS[:4], *text, "order", *ENDPOINTS[4:]]:
                values = study.values(arm, endpoint)
                if values is None or (endpoint == "order" and arm not in ORDERED):
                    continue
                own = endpoint == "order" or arm == "none"
                found = mean_of(values) if own else study.difference(arm, endpoint)
                assert found is not None
                spec = ".0f" if endpoint == "steps" else ".2f" if endpoint == "order" else ".3f"
                significant = "yes" if study.corrected(endpoint).get(arm, 1.0) < LEVEL else "no"
                line = [study.name, arm, NAMES[endpoint], *ends(found.interval(), spec)]
                writer.writerow([*line, "" if own and endpoint != "order" else significant])
    return written.getvalue()


def ends(interval: Interval, spec: str) -> list[str]:
    return [format(each, spec) for each in (interval.value, interval.low, interval.high)]


def verdicts(studies: list[StudyResult]) -> str:
    """What was registered to be decided."""
    lines = [
        "| study | verdict on `flat_mean_field` | `flat_mean_field` minus `none` | found if at least "
        "| minus `permuted` | minus `recency` | `learned_design` minus `learned_zero` | predicts the order |",
        "|" + "---|" * 8,
    ]
    for study in studies:
        pairs = [("flat_mean_field", "none"), ("flat_mean_field", "permuted"), ("flat_mean_field", "recency")]
        pairs.append(("learned_design", "learned_zero"))
        found = []
        for arm, other in pairs:
            estimate = study.difference(arm, "worst", other)
            assert estimate is not None
            p = study.corrected("worst")[arm] if other == "none" else float(estimate.p())
            found.append(shown(estimate.interval(), "+.3f", bold=p < LEVEL))
        found.insert(1, f"{study.detectable('flat_mean_field'):.3f}")
        order = "yes" if study.predicts() else "no"
        lines.append(f"| {TITLES[study.name]} | **{study.verdict()}** | {' | '.join(found)} | {order} |")
    return "\n".join(lines)


def with_verdicts(page: str, record: Record) -> str:
    """The page with the table between its two markers replaced."""
    before, rest = page.split("<!-- table verdicts -->\n")
    _, after = rest.split("<!-- end of table -->", 1)
    return f"{before}<!-- table verdicts -->\n{verdicts(results(record))}\n<!-- end of table -->{after}"


def draw(record: Record, path: Path) -> None:
    """Influence at initialisation above, score by position after training below; a column for each of three tasks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    studies = [study for study in results(record) if study.name in DRAWN]
    colours = dict(zip(ARMS, plt.get_cmap("tab10").colors, strict=True))
    figure, axes = plt.subplots(2, len(studies), figsize=(4 * len(studies), 6.4), squeeze=False)
    for column, study in enumerate(studies):
        for arm in study.arms:
            birth, whole = study.array(arm, "birth"), study.array(arm, "whole")
            assert birth is not None
            assert whole is not None
            targets = np.arange(whole.shape[1])
            inner = birth.mean(axis=0)[:-1]
            style = {
                "color": colours[arm],
                "linewidth": 2.2 if arm in {"none", "flat_mean_field"} else 1.2,
                "label": arm,
            }
            if not arm.startswith("learned"):
                axes[0, column].plot(targets, inner[: len(targets)] / inner.mean(), **style)
            axes[1, column].plot(targets, whole.mean(axis=0), **style)
        axes[0, column].set_title(TITLES[study.name], fontsize=10)
        axes[0, column].axhline(1, color="grey", linewidth=0.7, linestyle=":")
        axes[1, column].set_xlabel("target position")
    axes[0, 0].set_ylabel("influence at initialisation (flat = 1)")
    axes[1, 0].set_ylabel("score after training")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="lower center", ncol=5, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path, dpi=60, metadata={"Software": None})


if __name__ == "__main__":
    loaded = read_record(HERE / "record")
    page = HERE / "README.md"
    page.write_text(with_verdicts(page.read_text(), loaded))
    (HERE / "results.csv").write_text(sheet(results(loaded)))
    draw(loaded, HERE / "by_position.png")
