"""Record, sheet and picture of this folder.

`python studies/hybrids/run.py collect RUNS` puts into the record what `posbias train` left in RUNS/cued_copy and
RUNS/key_value, and the influence of every position before and after; `python studies/hybrids/run.py analyse` decides
what was registered and draws.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.reference.network import ReferenceTransformer, load_parameters
from posbias.models.reference.parameters import draw_parameters
from posbias.runs.records import Record, read_record
from posbias.statistics import Estimate, holm, mean_of
from posbias.tasks.synthetic import stack_tasks
from posbias.training import Member, load_study

HERE = Path(__file__).parent
STUDIES = {"cued_copy": "Cued copy", "key_value": "Key-value retrieval"}
ARMS = {
    "attention": "attention",
    "linear": "linear",
    "first": "hybrid, attention first",
    "last": "hybrid, attention last",
}
FRESH, PROMPTS = 10_000, 4
"""Added to a network's seed for prompts that it never saw; prompts per network."""
THRESHOLD, LEVEL = 0.5, 0.05
CONTRASTS = ("primacy", "recency")
PerSeed = Float64[np.ndarray, "seed"]


def profile(model: ReferenceTransformer, member: Member) -> Float64[np.ndarray, "position"]:
    """Share of every position in the Jacobian of the last, mean over prompts."""
    (kind,) = resolve_kinds("jacobian(exact=True)")
    ids = stack_tasks([member.task], [FRESH + member.seed]).batch(0, PROMPTS).inputs[0].numpy()
    norms = [
        measure_prompt(model, row, kinds=[kind], key=(member.seed, index), options=PassOptions()).norms[kind.name]
        for index, row in enumerate(ids)
    ]
    return np.asarray(np.mean([row / row.sum() for row in norms], axis=0))


def collected(study: str, runs: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Settings of a study, and its arrays by arm with an axis of seeds."""
    members, run, arrays = load_study(HERE / f"{study}.yaml").members(), read_record(runs / study), {}
    for arm in ARMS:
        chosen = [index for index, member in enumerate(members) if member.coordinates["arm"] == arm]
        place = f"{study}/{arm}"
        arrays[f"{place}/accuracy"] = run.arrays["evaluations/accuracy_by_position"][chosen].astype(np.float16)
        arrays[f"{place}/loss"] = run.arrays["losses"][chosen].astype(np.float16)
        before, after = [], []
        for index in chosen:
            member = members[index]
            drawn = draw_parameters(member.config, member.generator())
            trained = load_parameters(runs / study / "models" / f"{index:04d}", member.config)
            before.append(profile(ReferenceTransformer(member.config, drawn), member))
            after.append(profile(ReferenceTransformer(member.config, trained), member))
        arrays |= {f"{place}/before": np.float32(before), f"{place}/after": np.float32(after)}
        print(place, flush=True)
    steps = run.arrays["evaluation_steps"][0].tolist()
    return {"steps": steps, "counts": run.scalars["counts"], "trained_with": run.environment.get("commit")}, arrays


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

    def registered(self, quantity: str) -> dict[tuple[str, str, str], tuple[Estimate, float]]:
        """Both contrasts of every arm and task, each with its p-value by Holm over all of them."""
        found = {}
        for study in STUDIES:
            for arm in ARMS:
                scores = self.learnt(study, arm) if quantity == "learnt" else self.of(study, arm, "accuracy")[:, -1]
                found |= {(study, arm, name): mean_of(contrast(scores, name)) for name in CONTRASTS}
        adjusted = holm(np.array([float(each.p()) for each in found.values()]))
        return {key: (each, float(p)) for (key, each), p in zip(found.items(), adjusted, strict=True)}


def write_sheet(results: Results, path: Path) -> None:
    """A line per task, arm and quantity, with ends and corrected p-values."""
    with path.open("w", newline="") as file:
        sheet = csv.writer(file, lineterminator="\n")
        sheet.writerow(["study", "arm", "quantity", "value", "low", "high", "p, Holm"])

        def line(study: str, arm: str, name: str, found: Estimate, p: str = "") -> None:
            interval = found.interval()
            numbers = [format(each, ".3f") for each in (interval.value, interval.low, interval.high)]
            sheet.writerow([study, arm, name, *numbers, p])

        for quantity in ("learnt", "final"):
            for (study, arm, name), (found, p) in results.registered(quantity).items():
                line(study, arm, f"{name}, {quantity}", found, format(p, ".2g"))
        for study in STUDIES:
            for arm in ARMS:
                line(study, arm, "order", mean_of(results.order(study, arm)))
                final, steps = results.of(study, arm, "accuracy")[:, -1], results.steps(study, arm)
                line(study, arm, "accuracy", mean_of(final.mean(axis=1)))
                n = final.shape[1]
                for name in ("before", "after"):
                    shares = results.of(study, arm, name)[:, :n] / results.of(study, arm, name)[:, :n].sum(1)[:, None]
                    for part, chosen in (("first", slice(0, n // 4)), ("last", slice(n - n // 4, n))):
                        line(study, arm, f"influence of the {part} quarter, {name}", mean_of(shares[:, chosen].sum(1)))
                for position in range(n):
                    line(study, arm, f"steps, position {position}", mean_of(steps[:, position]))


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["collect", "analyse"])
    parser.add_argument("runs", type=Path, nargs="?")
    given = parser.parse_args()
    if given.action == "collect":
        record = Record(verb="study", arguments={})
        for each in STUDIES:
            record.scalars[each], added = collected(each, given.runs)
            record.arrays |= added
        record.save(HERE / "record", overwrite=True)
    else:
        loaded = Results(read_record(HERE / "record"))
        write_sheet(loaded, HERE / "results.csv")
        draw(loaded, HERE / "by_position.png")
