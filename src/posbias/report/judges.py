"""A judge's verdicts in words and a table: is it right, does it follow the slot, does asking all orders help?"""

from posbias.evaluation.judges import Verdicts
from posbias.report.tables import Table
from posbias.statistics import Interval

VERDICTS = {
    "accuracy": "right verdicts",
    "flip_rate": "preferred response changes with the order",
    "first_pick": "first response picked (1/{} without position bias)",
    "tie_rate": "tie called",
    "agreed_share": "decided, if only verdicts count that agree in all {} orders",
    "agreed_accuracy": "right verdicts of these",
    "agreement_gain": "these less a single verdict",
    "majority_accuracy": "most of the {} orders prefer the best response",
    "majority_gain": "these less a single verdict",
}
"""Rates of a judge's verdicts; {} is the number of responses, and of orders."""


def judge_findings(verdicts: Verdicts) -> list[str]:
    """Findings that the intervals of a judge's verdicts support."""
    first = verdicts.first_pick
    if not first.known:
        return ["no question has a response named in all orders, so nothing can be said about the slot"]
    leaning, unbiased = "no preference for a slot is established", 1 / verdicts.n_slots
    if first.excludes(unbiased):
        later = "the second slot" if verdicts.n_slots == 2 else "a later slot"
        leaning = f"{'the first slot' if first.value > unbiased else later} is preferred"
    return [
        f"right in {verdicts.accuracy} of the verdicts",
        f"the preferred response changes with the order in {verdicts.flip_rate} of {verdicts.n_both} questions",
        f"the first response is picked in {first}: {leaning}",
        *([f"a tie is called in {verdicts.tie_rate} of the verdicts"] if verdicts.ties else []),
        *debiasing_findings(verdicts),
    ]


def debiasing_findings(verdicts: Verdicts) -> list[str]:
    """Whether it helps to ask all orders: to keep what agrees in them or, of several responses, to follow most of them;
    and at which price in requests."""
    orders, share = verdicts.n_slots, verdicts.agreed_share
    findings = []
    if verdicts.majority_accuracy is not None and verdicts.majority_gain is not None:
        gain = _gain_text(verdicts.majority_gain)
        findings.append(
            f"most of {orders} orders are right in {verdicts.majority_accuracy}, {gain}, for {orders} requests"
        )
    if verdicts.agreed_accuracy is not None and verdicts.agreement_gain is not None and share is not None:
        gain, price = _gain_text(verdicts.agreement_gain), orders / share.value
        findings.append(f"verdicts that agree in {orders} orders are right in {verdicts.agreed_accuracy}, {gain}")
        findings.append(f"verdicts that agree decide {share.value:.0%} of the questions, {price:.1f} requests each")
    return findings


def _gain_text(gain: Interval) -> str:
    """A gain over a single verdict, and whether it is established."""
    decided = "helps" if gain.low > 0 else "harms" if gain.high < 0 else "no gain established"
    return f"{gain.text('+.3f')} against one verdict ({decided})"


def verdict_table(verdicts: Verdicts) -> Table:
    """The rates of a judge's verdicts in all orders."""
    cells = [
        [name.format(verdicts.n_slots), value.text()]
        for rate, name in VERDICTS.items()
        if (value := getattr(verdicts, rate)) is not None
    ]
    title = (
        f"{verdicts.n_pairs} questions in {verdicts.n_slots} orders, {verdicts.n_both} with a response named in each"
    )
    return Table(title, ["rate", "value"], cells)
