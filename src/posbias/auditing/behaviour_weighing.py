"""How much the item with the answer, and every other place, weighs in each prompt of an evaluation.

Influence and theories are profiles over tokens that sum to 1; here they are summed over the tokens of items.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float64, Int64

from posbias.auditing.behaviour_spans import SampleSpans, spans_of
from posbias.auditing.theories import ARCHITECTURE_THEORIES, architecture_theories, prompt_theories
from posbias.evaluation import Evaluation
from posbias.evaluation.statistics import Scores
from posbias.measurement import Kind, PassOptions, measure_prompt
from posbias.measurement.outputs import Target
from posbias.models.model import Model
from posbias.parts import PartStore
from posbias.profiles import Profile
from posbias.progress import track

GOLD, PLACE = "gold", "place"
"""Influence of the item that holds the answer; of a place where another item stands, averaged over where the answer is
instead."""
MEASURED = "measured"
LEFT_OUT = "left_out/"

Name = tuple[str, str | None]
"""Source (measured, or a theory) and kind of influence."""


@dataclass(frozen=True, eq=False)
class Weighing:
    """Influence of items on the prompts of an evaluation."""

    model: Model
    kinds: tuple[Kind, ...]
    evaluation: Evaluation
    store: PartStore
    prompt_theories: bool
    """Whether theories that read every prompt are computed too."""

    def series(self) -> tuple[dict[tuple[Name, str], Scores], list[str]]:
        """Shares of influence by ((source, kind), GOLD or PLACE), one row per sample, and what was left out.

        A sample that was too long at any position has NaN throughout.
        """
        evaluation, places = self.evaluation, self.evaluation.positions
        count, seed = evaluation.options.count, evaluation.options.seed
        samples = list(spans_of(evaluation.task, self.model.tokenizer, places=places, count=count, seed=seed))
        fits = evaluation.tables["too_long"].sum(axis=1) == 0
        tables: dict[tuple[Name, str], Scores] = {}
        left_out: dict[str, None] = {}
        for row in track([row for row in range(len(samples)) if fits[row]], "influence"):
            shares, reasons = self._sample(samples[row], row)
            left_out |= dict.fromkeys(reasons)
            for name, matrix in shares.items():
                about = {GOLD: np.diag(matrix), PLACE: elsewhere(matrix)}
                if name[0] in ARCHITECTURE_THEORIES:  # these do not know what stands where
                    del about[GOLD]
                for what, values in about.items():
                    blank = np.full((len(samples), len(places)), np.nan)
                    tables.setdefault((name, what), blank)[row] = values
        return {key: table for key, table in tables.items() if not np.isnan(table).all()}, list(left_out)

    def _sample(self, sample: SampleSpans, row: int) -> tuple[dict[Name, Float64[np.ndarray, "gold place"]], list[str]]:
        """share[gold place, place] by source, from one measured prompt per place of the answer."""
        pieces: list[dict[str, np.ndarray]] = []
        reasons: list[str] = []
        for column, gold in enumerate(self.evaluation.positions):
            token_ids, answer = sample.prompt(gold)
            digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]
            compute = partial(self._measure, token_ids, answer, row * len(self.evaluation.positions) + column)
            piece = self.store.get(f"influence-{row:05d}-{gold:05d}-{digest}", compute)
            reasons += [name.removeprefix(LEFT_OUT) for name in piece if name.startswith(LEFT_OUT)]
            profiles = {name: values for name, values in piece.items() if not name.startswith(LEFT_OUT)}
            spans = sample.spans(gold)
            pieces.append({name: summed(values, spans) for name, values in profiles.items()})
        shared = [name for name in pieces[0] if all(name in piece for piece in pieces)]
        return {_named(name): np.stack([piece[name] for piece in pieces]) for name in shared}, reasons

    def _measure(self, token_ids: Int64[np.ndarray, "_"], answer: int, index: int) -> dict[str, np.ndarray]:
        """Profiles of one prompt, each summing to 1, by name."""
        arrays: dict[str, np.ndarray] = {}
        mixing = None
        for takes_targets, output in ((True, str(Target(tokens=[answer]))), (False, "last")):
            kinds = [kind for kind in self.kinds if kind.takes_targets is takes_targets]
            if not kinds:
                continue
            key = (self.evaluation.options.seed, index)
            passes = PassOptions(output=output, precision_prompts=0)
            measured = measure_prompt(self.model, token_ids, kinds=kinds, key=key, options=passes)
            for kind, norms in measured.norms.items():
                arrays[f"{MEASURED}/{kind}"] = Profile.normalised(norms).influence
            mixing = measured.mixing
        theories, left_out = architecture_theories(self.model, len(token_ids), mixing)
        arrays |= {name: entry.profile.influence for name, entry in theories.items()}
        if self.prompt_theories:
            read = prompt_theories(self.model, token_ids, mixing=mixing, birth=None)
            arrays |= {name: values / values.sum() for name, values in read.profiles.items()}
            left_out = [*left_out, *read.left_out]
        return {**arrays, **{LEFT_OUT + reason: np.zeros(0) for reason in left_out}}


def summed(
    profile: Float64[np.ndarray, "n_positions"], spans: Sequence[tuple[int, int]]
) -> Float64[np.ndarray, "n_places"]:
    """Share of the influence on each span of tokens."""
    return np.array([float(profile[begin:end].sum()) for begin, end in spans])


def elsewhere(matrix: Float64[np.ndarray, "gold place"]) -> Float64[np.ndarray, "place"]:
    """Each place's mean over the prompts whose answer stands at another one; NaN with a single place."""
    n_places = len(matrix)
    if n_places < 2:
        return np.full(n_places, np.nan)
    mean: np.ndarray = (matrix * (1 - np.eye(n_places))).sum(axis=0) / (n_places - 1)
    return mean


def _named(name: str) -> Name:
    source, _, kind = name.partition("/")
    return source, kind or None
