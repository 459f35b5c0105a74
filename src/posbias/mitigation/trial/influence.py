"""Influence before and after a method: is what a method gives more weight also used more? The tie, by intervention.

On some of the test samples, with the answer at every position, the right answer's log-probability is differentiated by
the input (kind `logprob`, scored at the answer's first token) in the unchanged model and under every method inside it.
The share of the item that holds the answer is compared, paired over samples, and its change is correlated with the
change of the scores, over positions within methods and over methods.
"""

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import RunError, UsageError
from posbias.evaluation.correlation import Pair, correct_for_number, correlate_pairs
from posbias.evaluation.curve import Scores, position_means
from posbias.evaluation.spans import SampleSpans, encoded_prompt
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions, Target
from posbias.measurement.prompt import measure_prompt
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import Mitigation, PromptMitigation
from posbias.mitigation.trial.arms import UNCHANGED, Arm
from posbias.mitigation.trial.plan import TrialPlan
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.runs.parts import PartStore
from posbias.statistics import Interval, mean_of
from posbias.tasks.language import Example
from posbias.tasks.language.locating import locate

KINDS = resolve_kinds("logprob")
OVER_POSITIONS, OVER_METHODS = "over positions, within methods", "over methods"
FLAT = "uniform"
"""The baseline: an item's share of the prompt's tokens."""

Shares = dict[str, Scores]
"""share[sample, position] by arm, of the item that holds the answer at that position, and FLAT."""


def measure_influence(plan: TrialPlan) -> tuple[Shares, list[str]]:
    """Influence on the item with the answer in every arm inside the model, and what was left out, with the reason.

    Measured prompts are kept in the plan's lasting pieces.
    """
    model = plan.model
    if model is None:
        return {}, ["influence was not measured: it needs the model itself, not one behind a server"]
    shares: Shares = {FLAT: np.stack([_flat(sample) for sample in plan.spans])}
    left_out = []
    for arm in track(plan.arms, "influence before and after"):
        if isinstance(arm.method, PromptMitigation):
            left_out.append(f"influence under {arm.name} was not measured: it changes requests, not the model")
            continue
        blank = np.full(len(shares[FLAT][0]), np.nan)
        try:
            shares[arm.name] = np.stack(
                [_shares(arm, sample, plan.lasting) if _fits(sample, model) else blank for sample in plan.spans]
            )
        except (UsageError, RunError) as error:
            if arm.method is None:
                raise
            left_out.append(f"influence under {arm.name} was not measured: {error}")
    return shares, left_out


def _fits(sample: SampleSpans, model: Model) -> bool:
    """True if the model takes the sample with the answer at every position."""
    lengths = [sample.examples[gold].n_tokens or 0 for gold in sample.positions]
    return model.max_positions is None or max(lengths) <= model.max_positions


def _flat(sample: SampleSpans) -> Float64[np.ndarray, "n_positions"]:
    """The share of uniform influence that the item with the answer has: its share of the tokens."""
    spans = [sample.spans(gold)[column] for column, gold in enumerate(sample.positions)]
    lengths = [sample.examples[gold].n_tokens or 0 for gold in sample.positions]
    return np.array([(end - begin) / length for (begin, end), length in zip(spans, lengths, strict=True)])


def _shares(arm: Arm, sample: SampleSpans, store: PartStore) -> Float64[np.ndarray, "n_positions"]:
    """Share of influence of the answer's item, with the answer at every position."""
    shares = []
    for column, gold in enumerate(sample.positions):
        example = sample.examples[gold]
        token_ids, answer = encoded_prompt(example, arm.plain.tokenizer)
        digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]
        compute = partial(_profile, arm, example, token_ids, answer)
        begin, end = sample.spans(gold)[column]
        shares.append(store.get(f"influence-{arm.slug}-{digest}", compute)["influence"][begin:end].sum())
    return np.array(shares)


def _profile(arm: Arm, example: Example, token_ids: Int64[np.ndarray, "_"], answer: int) -> dict[str, np.ndarray]:
    """The influence of every token of one prompt, in one arm; sums to 1."""
    passes = PassOptions(output=str(Target(tokens=[answer])), precision_prompts=0)
    changed: AbstractContextManager[Any] = nullcontext(arm.model)
    if isinstance(arm.method, Mitigation):
        spans, _ = locate(example.prompt, example.passages, arm.plain.tokenizer, own_control=example.own_control)
        changed = mitigated(arm.model, arm.method, passages=spans or ())
    with changed as model:
        norms = measure_prompt(model, token_ids, kinds=KINDS, key=(0, 0), options=passes).norms
    return {"influence": Profile.normalised(norms[str(KINDS[0])]).influence}


def influence_scalars(
    shares: Mapping[str, Scores],
    scores: Mapping[str, Mapping[str, Scores]],
    *,
    positions: tuple[int, ...],
    n_items: int,
    seed: int,
) -> dict[str, Any]:
    """Influence before and after as a record holds it, in plain values.

    Args:
        shares: From `measure_influence`.
        scores: Scores of the same arms and samples, by measure.
        positions, n_items: Positions of the columns, and the number of items of the task.
        seed: Seed of the correlations' intervals.
    """
    before, rows = shares[UNCHANGED], len(shares[FLAT])
    changed = [name for name in scores if name in shares and name != UNCHANGED]
    ties = []
    for measure in ("accuracy", "logprob"):
        if all(measure in scores[name] for name in (UNCHANGED, *changed)):
            old = scores[UNCHANGED][measure]
            moved = {name: (shares[name] - before, scores[name][measure] - old) for name in changed}
            pairs = {
                name: Pair(*changes, positions, n_items, tuple(map(str, range(rows))))
                for name, changes in moved.items()
            }
            ties += _ties(measure, pairs, seed=seed)
    correct_for_number(ties)
    return {
        "kind": str(KINDS[0]),
        "samples": int((~np.isnan(before).any(axis=1)).sum()),
        FLAT: _means(shares[FLAT]),
        "before": _means(before),
        "changes": {name: [_change(column) for column in (shares[name] - before).T] for name in changed},
        "average": {
            name: _change(table[~np.isnan(table).any(axis=1)].mean(axis=1))  # of the samples that have all positions
            for name in (UNCHANGED, *changed)
            for table in [shares[name] - (before if name != UNCHANGED else 0)]
        },
        "correlations": ties,
    }


def _means(table: Scores) -> list[dict[str, float | None]]:
    """Means by position, with pointwise intervals."""
    return [mean.as_record() for mean in position_means(table)]


def _change(units: Float64[np.ndarray, "_"]) -> dict[str, float | None]:
    """The mean of one number per sample, NaN if there is none; of no change at all it is 0, without an interval."""
    measured = units[~np.isnan(units)]
    mean = Interval(np.nan, -np.inf, np.inf)
    if len(measured):
        mean = mean_of(measured).interval() if measured.any() else Interval(0.0, 0.0, 0.0)
    return mean.as_record()


def _ties(measure: str, pairs: Mapping[str, Pair], *, seed: int) -> list[dict[str, Any]]:
    """Correlations of both changes: of every method and of all over positions, and of their means over methods."""
    complete = [pair.complete for pair in pairs.values()]
    if not complete or not all(map(len, complete)):
        return []
    over: dict[str, Any] = {OVER_POSITIONS: complete}
    sides = [[pair.first.mean(axis=1) for pair in complete], [pair.second.mean(axis=1) for pair in complete]]
    if len({pair.samples for pair in complete}) == 1:  # else the means are not of the same samples
        moved, scored = (np.column_stack(side) for side in sides)
        over[OVER_METHODS] = Pair(moved, scored, tuple(range(len(pairs))), len(pairs), complete[0].samples)
    ties = []
    for scope, compared in {**over, **(pairs if len(pairs) > 1 else {})}.items():
        stored = correlate_pairs(compared, seed=seed).as_record()
        stored["correlations"] = [entry for entry in stored["correlations"] if entry["controlled"] == "nothing"]
        ties.append({"what": scope, "measure": measure, "correlations": {measure: stored}})
    return ties
