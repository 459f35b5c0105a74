"""An attention run in tables and figures, from its record alone."""

import numpy as np

from posbias.records import Record
from posbias.report.attention_figures import attention_figures
from posbias.report.attention_view import VERB, AttentionView
from posbias.report.page import REPORTS, Report
from posbias.report.tables import Table, number_text, share_text
from posbias.report.wording import ATTENTION_GLOSSARY, ATTENTION_ROLLOUTS, label
from posbias.statistics import Interval


@REPORTS.register(VERB)
def attention_report(record: Record) -> Report:
    """What attention looks like: the whole model, every layer, and the rollouts."""
    view = AttentionView(record)
    return Report(
        kicker="posbias · what attention looks like",
        title=f"{view.title}: {_prompts(view)}",
        summary=[_whole_table(view)],
        figures=attention_figures(view),
        tables=[_layer_table(view), _rollout_table(view)],
        left_out=record.scalars["left_out"],
        caveats=record.scalars["caveats"],
        glossary=ATTENTION_GLOSSARY,
    )


def _prompts(view: AttentionView) -> str:
    prompts = "1 prompt" if view.count == 1 else f"{view.count} prompts"
    return f"{prompts} of {view.n_positions} tokens"


def _whole_table(view: AttentionView) -> Table:
    rows = [
        ("attention distance, positions", "distance", 1, f"{view.array('distance/even').mean():.1f} (even attention)"),
        ("entropy / largest", "entropy", 3, "1 (even attention)"),
        ("content logit, diagonal", "content/diagonal", 3, ""),
        ("content logit, off-diagonal", "content/off_diagonal", 3, ""),
        ("content logit, difference", "content/difference", 3, "0 (no content)"),
        ("the same without the model's scale, as published", "content/published", 2, "0 (no content)"),
        ("similarity, diagonal", "similarity/diagonal", 3, "1 (all equal)"),
        ("similarity, off-diagonal", "similarity/off_diagonal", 3, "1 (all equal)"),
        ("diagonal entries outside the bins", "similarity/diagonal_outside", 3, ""),
        ("off-diagonal entries outside the bins", "similarity/off_diagonal_outside", 3, ""),
        ("mixing, token mean", "mixing/tokens", 3, ""),
        ("mixing, Frobenius", "mixing/frobenius", 3, ""),
        ("prefixes whose mass rises", "monotonicity/violated", 3, "0 (monotone)"),
        ("mean rise of those", "monotonicity/gap", 4, "0 (monotone)"),
    ]
    if "learned_sink/per_prompt" in view.record.arrays:
        rows.append(("share of the learned sinks", "learned_sink", 3, ""))
    cells = [[text, view.overall(name).text(f".{digits}f"), flat] for text, name, digits, flat in rows]
    for name in ("diagonal", "off_diagonal"):
        key = f"similarity/of_mean/{name}"
        if key in view.record.arrays:
            text = f"similarity of the mean over prompts, as published, {name.replace('_', '-')}"
            cells.append([text, number_text(float(view.array(key).mean())), "1 (all equal)"])
    for index, threshold in enumerate(view.thresholds):
        line = view.sinks(index)
        low, high = (np.inf if end is None else float(end[0]) for end in (line.low, line.high))
        text = f"queries that give position 0 more than {threshold:g}"
        cells.append([text, Interval(float(line.value[0]), low, high).text(), ""])
    return Table(f"Attention of {view.title}, {_prompts(view)}", ("what", "mean [95 %]", "flat line"), cells)


def _layer_table(view: AttentionView) -> Table:
    header = ["layer", "distance", "entropy", "content diff", "sim diag", "sim off", "mixing", "monotone rise"]
    header += [f"sink 0 > {threshold:g}" for threshold in view.thresholds]
    columns = [
        (view.by_layer(name).value, digits)
        for name, digits in (
            ("distance", 1),
            ("entropy", 3),
            ("content/difference", 2),
            ("similarity/diagonal", 3),
            ("similarity/off_diagonal", 3),
            ("mixing/tokens", 3),
            ("monotonicity/violated", 3),
        )
    ]
    columns += [(sinks[:, 0], 3) for sinks in view.array("sinks/by_layer")]
    cells = [
        [str(layer), *(number_text(float(values[layer]), digits) for values, digits in columns)]
        for layer in range(view.depth)
    ]
    return Table("Layer by layer, means over prompts and heads", header, cells)


def _rollout_table(view: AttentionView) -> Table:
    header = ("rollout", "first tenth", "middle tenth", "last tenth", "first position", "W1 to the flat line")
    shares = ("first_tenth", "middle_tenth", "last_tenth", "first_token")
    cells = []
    for name, summary in view.record.scalars["rollouts"].items():
        texts = [share_text(summary[share]) for share in shares]
        cells.append([label(ATTENTION_ROLLOUTS, name), *texts, Interval.of_record(summary["flat"]).text()])
    return Table("Rollouts of its own attention (flat line: 10 % in every tenth)", header, cells)
