"""Influence before and after a method: does what a method makes weigh more get used more? The tie, by intervention.

On some of the test samples, with the answer at every position, the right answer's log-probability is differentiated by
the input (kind `logprob`, scored at the answer's first token) in the unchanged model and under every method inside it.
The share of the item that holds the answer is compared, paired over samples, and its change is correlated with the
change of the scores, over positions within methods and over methods.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import RunError, UsageError
from posbias.evaluation.correlation import Pair, correct_for_number, correlate_pairs
from posbias.evaluation.cost import SHORTER
from posbias.evaluation.curve import Scores, position_means
from posbias.evaluation.samples import EvaluateOptions
from posbias.evaluation.spans import SampleSpans, encoded_prompt, spans_of
from posbias.measurement.cost import estimate_cost, report_cost, without_passes
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions, Target
from posbias.measurement.prompt import measure_prompt
from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import Mitigation, PromptMitigation
from posbias.mitigation.trial.arms import UNCHANGED, Arm
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.runs.parts import PartStore
from posbias.statistics import Interval, mean_of
from posbias.tasks.language import Example, LanguageTask
from posbias.tasks.language.base import locate

KINDS = resolve_kinds("logprob")
OVER_POSITIONS, OVER_METHODS = "over positions, within methods", "over methods"
FLAT = "uniform"
"""The baseline: an item's share of the prompt's tokens."""

Shares = dict[str, Scores]
"""share[sample, position] by arm, of the item that holds the answer at that position, and FLAT."""


def preflight_influence(task: LanguageTask, options: EvaluateOptions, model: Model, n_arms: int) -> dict[str, Any]:
    """The expected cost of the influence in so many arms, before any work; refused where it does not fit into memory.

    Arguments as of `shares_of`.
    """
    fitting = [sample for sample in spans_of(task, model.tokenizer, options) if _fits(sample, model)]
    lengths = [sample.examples[gold].n_tokens or 0 for sample in fitting for gold in sample.positions]
    if not lengths:
        return {}
    estimate = estimate_cost(model, max(lengths), kinds=KINDS, passes=PassOptions(precision_prompts=0))
    estimate = replace(estimate or without_passes(model, max(lengths)), shorter=SHORTER)
    return report_cost(model, estimate, n_arms * len(lengths), max_memory=options.max_memory)


def shares_of(
    task: LanguageTask, options: EvaluateOptions, arms: Sequence[Arm], store: PartStore
) -> tuple[Shares, list[str]]:
    """Influence on the item with the answer in every arm inside the model, and what was left out, with the reason.

    Args:
        task: The run's.
        options: The test's, with as many samples as influence is measured on.
        arms: The unchanged model first.
        store: Where measured prompts are kept.

    Raises:
        UsageError: the places of items are not known.
    """
    model = arms[0].model
    if model is None:
        return {}, ["influence was not measured: it needs the model itself, not one behind a server"]
    samples = list(spans_of(task, model.tokenizer, options))
    found: Shares = {FLAT: np.stack([_flat(sample) for sample in samples])}
    left_out = []
    for arm in track(arms, "influence before and after"):
        if isinstance(arm.method, PromptMitigation):
            left_out.append(f"influence under {arm.name} was not measured: it changes requests, not the model")
            continue
        blank = np.full(len(found[FLAT][0]), np.nan)
        try:
            found[arm.name] = np.stack(
                [_shares(arm, sample, store) if _fits(sample, model) else blank for sample in samples]
            )
        except (UsageError, RunError) as error:
            if arm.method is None:
                raise
            left_out.append(f"influence under {arm.name} was not measured: {error}")
    return found, left_out


def _fits(sample: SampleSpans, model: Model) -> bool:
    """Whether the model takes it with the answer at every position."""
    lengths = [sample.examples[gold].n_tokens or 0 for gold in sample.positions]
    return model.max_positions is None or max(lengths) <= model.max_positions


def _flat(sample: SampleSpans) -> Float64[np.ndarray, "n_positions"]:
    """What uniform influence gives to the item with the answer: its share of the tokens."""
    spans = [sample.spans(gold)[column] for column, gold in enumerate(sample.positions)]
    lengths = [sample.examples[gold].n_tokens or 0 for gold in sample.positions]
    return np.array([(end - begin) / length for (begin, end), length in zip(spans, lengths, strict=True)])


def _shares(arm: Arm, sample: SampleSpans, store: PartStore) -> Float64[np.ndarray, "n_positions"]:
    """Share of influence of the answer's item, with the answer at every position."""
    found = []
    for column, gold in enumerate(sample.positions):
        example = sample.examples[gold]
        token_ids, answer = encoded_prompt(example, arm.responder.tokenizer)
        digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]
        compute = partial(_profile, arm, example, token_ids, answer)
        begin, end = sample.spans(gold)[column]
        found.append(store.get(f"influence-{arm.slug}-{digest}", compute)["influence"][begin:end].sum())
    return np.array(found)


def _profile(arm: Arm, example: Example, token_ids: Int64[np.ndarray, "_"], answer: int) -> dict[str, np.ndarray]:
    """The influence of every token of one prompt, in one arm; sums to 1."""
    passes = PassOptions(output=str(Target(tokens=[answer])), precision_prompts=0)
    changed: AbstractContextManager[Any] = nullcontext(arm.model)
    if isinstance(arm.method, Mitigation):
        tokenizer, own = arm.responder.tokenizer, example.own_control
        spans, _ = locate(example.prompt, example.passages, tokenizer, own_control=own)
        changed = mitigated(arm.model, arm.method, passages=spans or ())
    with changed as model:
        norms = measure_prompt(model, token_ids, kinds=KINDS, key=(0, 0), options=passes).norms
    return {"influence": Profile.normalised(norms[str(KINDS[0])]).influence}


def influence_scalars(
    task: LanguageTask, options: EvaluateOptions, shares: Shares, scores: Mapping[str, Mapping[str, Scores]]
) -> dict[str, Any]:
    """What the record says of influence before and after, in plain values.

    Args:
        task, options: As of `shares_of`.
        shares: What it found.
        scores: Of the same arms and samples, by measure.
    """
    before, rows = shares[UNCHANGED], len(shares[FLAT])
    changed = [name for name in scores if name in shares and name != UNCHANGED]
    ties = []
    for measure in ("accuracy", "logprob"):
        if all(measure in scores[name] for name in (UNCHANGED, *changed)):
            old = scores[UNCHANGED][measure]
            moved = {name: (shares[name] - before, scores[name][measure] - old) for name in changed}
            pairs = {
                name: Pair(*both, options.positions_of(task), task.n_items, tuple(map(str, range(rows))))
                for name, both in moved.items()
            }
            ties += _ties(measure, pairs, seed=options.seed)
    correct_for_number(ties)
    return {
        "kind": str(KINDS[0]),
        "samples": int((~np.isnan(before).any(axis=1)).sum()),
        FLAT: _means(shares[FLAT]),
        "before": _means(before),
        "changes": {name: [_change(column) for column in (shares[name] - before).T] for name in changed},
        "average": {
            name: _average(shares[name] - (before if name != UNCHANGED else 0)) for name in (UNCHANGED, *changed)
        },
        "correlations": ties,
    }


def _means(table: Scores) -> list[dict[str, float | None]]:
    """By position, with pointwise intervals."""
    return [mean.as_record() for mean in position_means(table)]


def _average(table: Scores) -> dict[str, float | None]:
    """Over positions, with an interval over the samples that have all of them."""
    return _change(table[~np.isnan(table).any(axis=1)].mean(axis=1))


def _change(units: Float64[np.ndarray, "_"]) -> dict[str, float | None]:
    """The mean of one number per sample, NaN where there is none; of no change at all it is 0, without an interval."""
    known = units[~np.isnan(units)]
    found = Interval(np.nan, -np.inf, np.inf)
    if len(known):
        found = mean_of(known).interval() if known.any() else Interval(0.0, 0.0, 0.0)
    return found.as_record()


def _ties(measure: str, pairs: Mapping[str, Pair], *, seed: int) -> list[dict[str, Any]]:
    """Correlations of both changes: of every method and of all over positions, and of their means over methods."""
    complete = [pair.complete for pair in pairs.values()]
    if not complete or not all(map(len, complete)):
        return []
    asked: dict[str, Any] = {OVER_POSITIONS: complete}
    sides = [[pair.first.mean(axis=1) for pair in complete], [pair.second.mean(axis=1) for pair in complete]]
    if len({pair.samples for pair in complete}) == 1:  # else the means are not of the same samples
        moved, scored = (np.column_stack(side) for side in sides)
        asked[OVER_METHODS] = Pair(moved, scored, tuple(range(len(pairs))), len(pairs), complete[0].samples)
    found = []
    for what, given in {**asked, **(pairs if len(pairs) > 1 else {})}.items():
        stored = correlate_pairs(given, seed=seed).as_record()
        stored["correlations"] = [one for one in stored["correlations"] if one["controlled"] == "nothing"]
        found.append({"what": what, "measure": measure, "correlations": {measure: stored}})
    return found
