"""Whether the published code's flags explain a difference: standard deviation 1/d, `--not_res` inverted, decay lost.

Each is answered by running both readings: the paper's and what the code does.
"""

from posbias.papers.findings import Finding, weighed
from posbias.papers.paired import Difference, difference
from posbias.papers.wu2025.icl_cells import ENCODINGS, FIRST_LAST, Cells, slope
from posbias.papers.wu2025.icl_statements import RELATIVE

WHERE = "Their code"


def flag_findings(paper: Cells, code: Cells) -> list[Finding]:
    """What each flag would change.

    Args:
        paper: Members with components of variance 1/d, as the paper says.
        code: The same with standard deviation 1/d, as the published code draws them.
    """
    return [
        _scale_of_accuracy(paper, code),
        _scale_of_depth(paper, code),
        _inverted_residual(paper),
        _lost_decay(paper),
    ]


def _scale_of_accuracy(paper: Cells, code: Cells) -> Finding:
    """Whether the code's smaller vectors are learnt less well, which would call for its many steps."""
    tests: dict[str, Difference] = {}
    for encoding in RELATIVE:
        for depth in code.depths(encoding=encoding):
            cell = {"encoding": encoding, "depth": depth}
            seeds = paper.outcomes.common_seeds(paper.factors(**cell), code.factors(**cell))
            if seeds:
                rows = [which.outcomes.values("novel", which.factors(**cell), seeds) for which in (paper, code)]
                lost = rows[0] - rows[1]
                tests[f"{ENCODINGS[encoding]}, {depth} layers"] = difference(lost)
    reported = "items and labels of norm 1/8 (std 1/d, the code) are learnt less well than of norm 1 (variance 1/d)."
    return weighed(WHERE, reported, tests, found="Accuracy on novel classes with variance 1/d minus with std 1/d:")


def _scale_of_depth(paper: Cells, code: Cells) -> Finding:
    """The depth effect with the code's smaller vectors."""
    tests = {}
    for encoding in RELATIVE:
        depths = code.depths(encoding=encoding)
        if len(depths) > 1:
            rows = code.gaps(*({"encoding": encoding, "depth": depth} for depth in depths))
            tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    reported = "with std 1/d, as the code draws vectors, more layers mean more bias to the first place."
    return weighed(WHERE, reported, tests, found="Change of the gap first vs last per layer, std 1/d:")


def _inverted_residual(paper: Cells) -> Finding:
    """The statement about no residual, on members with residual connections."""
    tests = {}
    for encoding in RELATIVE:
        depths = paper.depths(encoding=encoding, residual=True)
        if len(depths) > 1:
            rows = paper.gaps(*({"encoding": encoding, "depth": depth, "residual": True} for depth in depths))
            tests[ENCODINGS[encoding]] = slope([row[:, FIRST_LAST] for row in rows], depths)
    reported = (
        "`--not_res` is inverted; were the figures' labels exchanged, depth would amplify the bias with residual "
        "connections."
    )
    return weighed(WHERE, reported, tests, found="Change of the gap first vs last per layer, with residual:")


def _lost_decay(paper: Cells) -> Finding:
    """`--pe decay` is silently no encoding; then the two would not differ."""
    tests = {}
    for depth in paper.depths(encoding="decay"):
        cells = ({"encoding": "none", "depth": depth}, {"encoding": "decay", "depth": depth})
        if paper.has(*cells):
            first, second = paper.gaps(*cells)
            tests[f"{depth} layers"] = difference(first[:, FIRST_LAST] - second[:, FIRST_LAST])
    reported = (
        "`--pe decay` is silently no encoding; the published decay bars differ from those without, so it was not used."
    )
    return weighed(WHERE, reported, tests, found="Gap first vs last without encoding minus with decay:")
