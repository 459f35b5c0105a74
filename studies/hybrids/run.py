"""Sheet, table and picture of this folder from its record: `python studies/hybrids/run.py`."""

import csv
import io
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from posbias.results.records import Record, read_record
from posbias.statistics import Estimate, holm, mean_of

HERE = Path(__file__).parent
STUDIES = {"cued_copy": "Cued copy", "key_value": "Key-value retrieval"}
ARMS = {
    "attention": "attention",
    "linear": "linear",
    "first": "hybrid, attention first",
    "last": "hybrid, attention last",
}
THRESHOLD, LEVEL = 0.5, 0.05
CONTRASTS = ("primacy", "recency")
MOMENTS = ("before", "after")
COMPARED = (("attention", "linear"), ("first", "linear"), ("last", "linear"), ("first", "last"))
PerSeed = Float64[np.ndarray, "seed"]


def contrast(scores: Float64[np.ndarray, "seed position"], name: str) -> PerSeed:
    """First or last position less the mean of those between."""
    end = {"primacy": 0, "recency": -1}[name]
    return np.asarray(scores[:, end] - scores[:, 1:-1].mean(axis=1))


class Results:
    """What the record says, in the words of the registration."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def of(self, study: str, arm: str, quantity: str) -> Float64[np.ndarray, "seed ..."]:
        """An array of the record."""
        return self.record.arrays[f"{study}/{arm}/{quantity}"].astype(np.float64)

    def learnt(self, study: str, arm: str) -> Float64[np.ndarray, "seed position"]:
        """Mean accuracy over the evaluations in training: what is learnt early counts more."""
        return np.asarray(self.of(study, arm, "accuracy")[:, 1:].mean(axis=1))

    def steps(self, study: str, arm: str) -> Float64[np.ndarray, "seed position"]:
        """First evaluation at which a position reaches the threshold; one interval after the end if none does."""
        at = np.array(self.record.scalars[study]["steps"], dtype=np.float64)
        reached = self.of(study, arm, "accuracy") >= THRESHOLD
        first = np.where(reached.any(axis=1), reached.argmax(axis=1), len(at))
        return np.asarray(np.append(at, 2 * at[-1] - at[-2])[first])

    def order(self, study: str, arm: str) -> PerSeed:
        """Rank correlation over positions of the arm's mean profile before training with what was learnt."""
        from scipy.stats import spearmanr

        learnt = self.learnt(study, arm)
        before = self.of(study, arm, "before").mean(axis=0)[: learnt.shape[1]]
        return np.array([spearmanr(before, row).statistic if np.ptp(row) else 0.0 for row in learnt])

    def quarter(self, study: str, arm: str, moment: str, part: str) -> Estimate:
        """Share of the first or last quarter of positions in their influence, the cue's left out."""
        n_targets = self.of(study, arm, "accuracy").shape[2]
        inner, count = self.of(study, arm, moment)[:, :n_targets], n_targets // 4
        chosen = inner[:, :count] if part == "first" else inner[:, -count:]
        return mean_of(chosen.sum(axis=1) / inner.sum(axis=1))

    def scores(self, study: str, arm: str, quantity: str) -> Float64[np.ndarray, "seed position"]:
        """Accuracy by position: `learnt` (mean over training) or `final`."""
        return self.learnt(study, arm) if quantity == "learnt" else self.of(study, arm, "accuracy")[:, -1]

    def more_primacy(self, study: str, quantity: str) -> dict[tuple[str, str], Estimate]:
        """Differences in primacy between arms, paired over seeds."""
        of = {arm: contrast(self.scores(study, arm, quantity), "primacy") for arm in ARMS}
        return {pair: mean_of(of[pair[0]] - of[pair[1]]) for pair in COMPARED}

    def registered(self, quantity: str) -> dict[tuple[str, str, str], tuple[Estimate, float]]:
        """Both contrasts of every arm and task, each with its p-value by Holm over all of them."""
        found = {}
        for study in STUDIES:
            for arm in ARMS:
                scores = self.scores(study, arm, quantity)
                found |= {(study, arm, name): mean_of(contrast(scores, name)) for name in CONTRASTS}
        adjusted = holm(np.array([float(each.p()) for each in found.values()]))
        return {key: (each, float(p)) for (key, each), p in zip(found.items(), adjusted, strict=True)}


def sheet(results: Results) -> str:
    """CSV, a line per task, arm and quantity, with ends and corrected p-values."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(["study", "arm", "quantity", "value", "low", "high", "p, Holm"])

    def line(study: str, arm: str, name: str, found: Estimate, p: str = "") -> None:
        interval = found.interval()
        numbers = [format(each, ".3f") for each in (interval.value, interval.low, interval.high)]
        writer.writerow([study, arm, name, *numbers, p])

    for quantity in ("learnt", "final"):
        for (study, arm, name), (found, p) in results.registered(quantity).items():
            line(study, arm, f"{name}, {quantity}", found, format(p, ".2g"))
    for study in STUDIES:
        for arm in ARMS:
            line(study, arm, "order", mean_of(results.order(study, arm)))
            line(study, arm, "accuracy", mean_of(results.of(study, arm, "accuracy")[:, -1].mean(axis=1)))
            for moment in MOMENTS:
                for part in ("first", "last"):
                    name = f"influence of the {part} quarter, {moment}"
                    line(study, arm, name, results.quarter(study, arm, moment, part))
            for position, steps in enumerate(results.steps(study, arm).T):
                line(study, arm, f"steps, position {position}", mean_of(steps))
        for quantity in ("learnt", "final"):
            for (arm, other), found in results.more_primacy(study, quantity).items():
                line(study, f"{arm} minus {other}", f"primacy, {quantity}", found)
    return written.getvalue()


def table(results: Results) -> str:
    """The registered contrasts of what is learnt, bold where the corrected p-value is below .05, and final accuracy."""
    lines = ["| task | layers | primacy | recency | accuracy |", "|" + "---|" * 5]
    registered = results.registered("learnt")
    for study, task in STUDIES.items():
        for arm, label in ARMS.items():
            cells = []
            for name in CONTRASTS:
                found, p = registered[study, arm, name]
                text = found.interval().text("+.2f")
                cells.append(f"**{text}**" if p < LEVEL else text)
            cells.append(f"{results.of(study, arm, 'accuracy')[:, -1].mean():.2f}")
            lines.append(f"| {task} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(page: str, results: Results) -> str:
    """The page with the table between its two markers replaced."""
    before, rest = page.split("<!-- table -->\n")
    return f"{before}<!-- table -->\n{table(results)}\n<!-- end of table -->{rest.split('<!-- end of table -->', 1)[1]}"


def draw(results: Results, path: Path) -> None:
    """Influence before and after, what is learnt and when, a row per task."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(15, 6.6), squeeze=False)
    titles = (
        "influence before (flat = 1)",
        "influence after (flat = 1)",
        "steps to accuracy .5",
        "accuracy at the end",
    )
    for row, (study, task) in zip(axes, STUDIES.items(), strict=True):
        for arm, label in ARMS.items():
            final = results.of(study, arm, "accuracy")[:, -1]
            n = final.shape[1]
            curves = [results.of(study, arm, name)[:, :n] for name in ("before", "after")]
            curves = [each * n / each.sum(axis=1, keepdims=True) for each in curves]
            for axis, values in zip(row, (*curves, results.steps(study, arm), final), strict=True):
                found = mean_of(values)
                low, high = found.ends()
                (drawn,) = axis.plot(np.arange(n), found.value, label=label, linewidth=1.8)
                axis.fill_between(np.arange(n), low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)
        for axis, title in zip(row, titles, strict=True):
            axis.set_title(f"{task}: {title}", fontsize=9)
            axis.set_xlabel("position")
    for axis in axes[:, :2].flat:
        axis.axhline(1, color="grey", linewidth=0.7, linestyle=":")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=60, metadata={"Software": None})


if __name__ == "__main__":
    loaded = Results(read_record(HERE / "record"))
    (HERE / "results.csv").write_text(sheet(loaded))
    (HERE / "README.md").write_text(with_table((HERE / "README.md").read_text(), loaded))
    draw(loaded, HERE / "by_position.png")
