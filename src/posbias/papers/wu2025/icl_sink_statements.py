"""What Wu et al. report of attention sinks under causal, window and prefix masks, and the control before training."""

import numpy as np

from posbias.papers.findings import Finding, weighed
from posbias.papers.paired import difference
from posbias.papers.wu2025.icl_cells import Cells, Figures, slope

SINK_WINDOWS = (5, 9, 13)
SINK_PREFIXES = (2, 4, 6)


def sink_findings(cells: Cells, figures: Figures) -> list[Finding]:
    """Every statement on sinks, for one variant of the task. Arguments as `icl_statements.retrieval_findings`."""
    return [statement(cells, figures) for statement in (_causal, _window, _prefix)]


def _causal(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    if cells.has({}):
        tests["causal"] = difference(_lead(cells.values("sinks", {})[0], 1))
    reported = "under the causal mask the attention sink is the first token."
    return weighed(figures.sinks, reported, tests, found="Sink score of the first token minus the largest other:")


def _window(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    windows = [{"mask": f"sliding_window(width={width})"} for width in SINK_WINDOWS]
    if cells.has(*windows):
        rows = [_lead(values, 1) for values in cells.values("sinks", *windows)]
        tests["per token of window"] = slope(rows, SINK_WINDOWS)
    reported = "the larger the window, the more the first token is the sink."
    return weighed(figures.sinks, reported, tests, found="Change of its lead over the largest other score:")


def _prefix(cells: Cells, figures: Figures) -> Finding:
    tests = {}
    for length in SINK_PREFIXES:
        cell = {"mask": f"prefix(length={length})"}
        if cells.has(cell):
            tests[f"K = {length}"] = difference(_lead(cells.values("sinks", cell)[0], length))
    reported = "under a prefix mask all K prefix tokens are sinks, not the first alone."
    return weighed(figures.sinks, reported, tests, found="Least sink score of the prefix minus the largest other:")


def sink_control(cells: Cells, figures: Figures) -> Finding:
    """The control that the source has not: attention at initialisation, nearly uniform, passes tau early on as well."""
    tests = {}
    for name, cell in {
        "causal": {},
        **{f"prefix {length}": {"mask": f"prefix(length={length})"} for length in SINK_PREFIXES},
    }.items():
        if cells.has(cell):
            count = 1 if name == "causal" else int(name.split()[1])
            after, before = cells.values("sinks", cell)[0], cells.values("sinks/initial", cell)[0]
            tests[name] = difference(_lead(after, count) - _lead(before, count))
    reported = "sinks emerge in training: the score before the first step is lower."
    return weighed(
        f"{figures.sinks}, control", reported, tests, found="Lead of the sink tokens, trained minus initial:"
    )


def _lead(sinks: np.ndarray, count: int) -> np.ndarray:
    """Least score of the first `count` tokens minus the largest of the others."""
    return np.asarray(sinks[:, :count].min(axis=1) - sinks[:, count:].max(axis=1))
