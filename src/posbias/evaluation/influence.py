"""Influence beside an evaluation: what weighs and what is used, on the very same prompts.

The model answers a task at several positions (`evaluate`); then, on each of those prompts, influence and theories,
profiles over tokens that sum to 1, are summed over the tokens of the item that holds the answer and of every other
item. Kinds that score tokens score the first token of the right answer, at which it is decided which item is used; the
others look at the last position's output.

The items other than the answer's keep their order, so where they stand in one prompt is known from the answer's own
tokens in the others: with the answer behind it, position p begins where the answer begins when it stands at p; with the
answer before it, position p ends where the answer ends when it stands at p.

Beside an evaluation's record: arrays `influence/SOURCE[/KIND]/WHAT` [n_samples n_positions], shares of a prompt's
influence; scalars `influence`: {series: [InfluenceSeries], left_out: [sentence]}.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.evaluation.correlation import InfluenceSeries, Pair, SeriesName, corrected, correlate_pairs
from posbias.evaluation.curve import Scores, position_means
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.options import EvaluateOptions
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import WITHIN_THOUGHTS, encode_requests
from posbias.evaluation.samples import samples_of
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.outputs import PassOptions, Target
from posbias.measurement.prompt import measure_prompt
from posbias.measurement.room import check_passes
from posbias.measurement.theories import (
    ARCHITECTURE_THEORIES,
    architecture_theories,
    prompt_theories,
)
from posbias.models.model import Model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.runs.parts import PartStore, made_by, packed, unpacked
from posbias.runs.records import plain
from posbias.tasks.language import LANGUAGE_TASKS, Example, LanguageTask

GOLD, PLACE = "gold", "place"
"""Influence of the item that holds the answer; of a position where another item stands, averaged over where the answer
is instead."""
MEASURED = "measured"
DEFAULT_KINDS = ("jacobian(probes=2)", "logprob")


@dataclass(frozen=True, eq=False)
class SampleSpans:
    """The prompts of one sample, with the answer at each of the chosen positions and at their neighbours."""

    examples: dict[int, Example]
    """Prompts by position of the answer."""
    positions: tuple[int, ...]
    """The chosen positions, ascending."""

    def spans(self, gold: int) -> list[tuple[int, int]]:
        """Begin and end in tokens of every chosen position, in the prompt with the answer at `gold`."""
        spans = []
        for position in self.positions:
            begin, end = self._gold_span(position)
            if position < gold:
                end = self._gold_span(position + 1)[0]
            elif position > gold:
                begin = self._gold_span(position - 1)[1]
            spans.append((begin, end))
        return spans

    def _gold_span(self, position: int) -> tuple[int, int]:
        """Begin and end of the answer's item when it stands at a position."""
        example = self.examples[position]
        if example.gold_token is None or example.gold_end is None:
            raise UsageError(
                "the places of items in tokens are not known: they need a tokenizer with character offsets and a task "
                "with a moved item"
            )
        return example.gold_token, example.gold_end


def spans_of(task: LanguageTask, tokenizer: Any, options: EvaluateOptions) -> Iterator[SampleSpans]:
    """Every sample of a task, located."""
    positions = options.positions_of(task)
    around = {position + step for position in positions for step in (-1, 0, 1)}
    placed = sorted(position for position in around if 0 <= position < task.n_items)
    for sample in samples_of(task, tokenizer, replace(options, positions=placed)):
        if any(example.cluster for example in sample.examples):
            raise UsageError(f"{task}: influence is correlated over independent samples; leave out groups and repeats")
        if any(example.gold_position is None for example in sample.examples):
            raise UsageError(f"{task}: no item holds the answer, so there is no influence of one to measure")
        yield SampleSpans(dict(zip(placed, sample.examples, strict=True)), positions)


def encoded_prompt(example: Example, tokenizer: Any) -> tuple[Int64[np.ndarray, "_"], int]:
    """The tokens of a prompt, and the right answer's first token; UsageError if thoughts come before it."""
    request = Request(prompt=example.prompt, answer=example.target, own_control=example.own_control)
    (encoded,) = encode_requests(tokenizer, [request])
    if encoded.thinks:
        raise UsageError(f"there is no influence on the answer: {WITHIN_THOUGHTS}")
    return encoded.prompt, int(encoded.answer[0])


@dataclass(frozen=True, eq=False)
class Weighing:
    """Influence of items on the prompts of an evaluation."""

    model: Model
    plan: "BehaviourPlan"
    evaluation: Evaluation
    directory: Path | None
    """Folder in which measured prompts are kept, beside the answers, which were already taken over or begun anew."""

    @cached_property
    def store(self) -> PartStore:
        """Measured prompts by name."""
        settings = {
            "verb": "audit_behaviour",
            "model": self.model.describe(),
            **self.plan.measured,
            "positions": list(self.evaluation.positions),
            "seed": self.plan.evaluation.seed,
            "made_by": made_by(),
        }
        return PartStore(self.directory, settings)

    def series(self) -> tuple[dict[SeriesName, Scores], list[str]]:
        """Shares of influence, of the GOLD item or of a PLACE, one row per sample, and what was left out.

        A sample that was too long at any position has NaN throughout.
        """
        evaluation, positions = self.evaluation, self.evaluation.positions
        samples = list(spans_of(self.plan.asked, self.model.tokenizer, self.plan.evaluation))
        fits = evaluation.tables["too_long"].sum(axis=1) == 0
        tables: dict[SeriesName, Scores] = {}
        left_out: list[str] = []
        for row in track([row for row in range(len(samples)) if fits[row]], "influence"):
            shares, reasons = self._sample(samples[row], row)
            left_out += reasons
            for profile, matrix in shares.items():
                source, _, kind = profile.partition("/")
                about = {GOLD: np.diag(matrix), PLACE: elsewhere(matrix)}
                if source in ARCHITECTURE_THEORIES:  # these do not know what stands where
                    del about[GOLD]
                for item, values in about.items():
                    blank = np.full((len(samples), len(positions)), np.nan)
                    tables.setdefault(SeriesName(source, kind or None, item), blank)[row] = values
        return {key: table for key, table in tables.items() if not np.isnan(table).all()}, list(dict.fromkeys(left_out))

    def _sample(self, sample: SampleSpans, row: int) -> tuple[dict[str, np.ndarray], list[str]]:
        """share[gold position, position] by SOURCE[/KIND], from one measured prompt per position of the answer."""
        pieces: list[dict[str, np.ndarray]] = []
        reasons: list[str] = []
        for column, gold in enumerate(self.evaluation.positions):
            token_ids, answer = encoded_prompt(sample.examples[gold], self.model.tokenizer)
            digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:16]
            compute = partial(self._measure, token_ids, answer, row * len(self.evaluation.positions) + column)
            piece = unpacked(self.store.get(f"influence-{row:05d}-{gold:05d}-{digest}", compute))
            reasons += piece["left_out"]
            spans = sample.spans(gold)
            pieces.append(
                {
                    name: np.array([rows[begin:end].sum() for begin, end in spans])
                    for name, rows in piece["profiles"].items()
                }
            )
        shared = [name for name in pieces[0] if all(name in piece for piece in pieces)]
        return {name: np.stack([piece[name] for piece in pieces]) for name in shared}, reasons

    def _measure(self, token_ids: Int64[np.ndarray, "_"], answer: int, index: int) -> dict[str, np.ndarray]:
        """Profiles of one prompt, each summing to 1, by name, and what was left out, packed."""
        arrays: dict[str, np.ndarray] = {}
        mixing = None
        for takes_targets, output in ((True, str(Target(tokens=(answer,)))), (False, "last")):
            kinds = [kind for kind in self.plan.resolved if kind.takes_targets is takes_targets]
            if not kinds:
                continue
            key = (self.plan.evaluation.seed, index)
            passes = PassOptions(output=output, precision_prompts=0)
            measured = measure_prompt(self.model, token_ids, kinds=kinds, key=key, options=passes)
            for kind, norms in measured.norms.items():
                arrays[f"{MEASURED}/{kind}"] = Profile.normalised(norms).influence
            mixing = measured.mixing.get("token_mean")
        theories, left_out = architecture_theories(self.model, len(token_ids), mixing)
        arrays |= {name: entry.profile.influence for name, entry in theories.items()}
        if self.plan.prompt_theories:
            read, refused = prompt_theories(self.model, token_ids, mixing)
            arrays |= {name: values / values.sum() for name, values in read.items()}
            left_out = [*left_out, *refused]
        return packed({"profiles": arrays, "left_out": left_out})


def elsewhere(matrix: Float64[np.ndarray, "n n"]) -> Float64[np.ndarray, "n"]:
    """Each position's mean over the prompts whose answer stands at another one; NaN with a single position."""
    count = len(matrix)
    return np.asarray((matrix * (1 - np.eye(count))).sum(axis=0) / (count - 1 or np.nan))


@checked
@dataclass(frozen=True)
class BehaviourPlan:
    """The task that is put to a model, and the influence that is measured on its prompts."""

    task: str | LanguageTask
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=16))
    """Contents, positions, seed; influence is measured on the same prompts. Its directory is set by the run."""
    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    prompt_theories: bool = True
    """Compute theories that read every prompt, too; each takes as long as a few backward passes."""

    def __post_init__(self) -> None:
        self.evaluation.check_plain("influence on a task's prompts")

    @property
    def asked(self) -> LanguageTask:
        """The task as an object."""
        return LANGUAGE_TASKS.parse(self.task) if isinstance(self.task, str) else self.task

    @property
    def resolved(self) -> tuple[Kind, ...]:
        """The kinds as objects."""
        return resolve_kinds(list(self.kinds))

    @property
    def measured(self) -> dict[str, Any]:
        """Settings of the influence in plain values: all that it depends on, beside model and prompts."""
        return {"kinds": [str(kind) for kind in self.resolved], "prompt_theories": self.prompt_theories}


def check_behaviour(model: Model, plan: BehaviourPlan) -> None:
    """Refuse, before any work, a wrong task, a tokenizer without offsets, and passes that a CPU cannot hold."""
    samples = spans_of(plan.asked, model.tokenizer, plan.evaluation)
    lengths = [sample.examples[position].n_tokens or 0 for sample in samples for position in sample.positions]
    fitting = [length for length in lengths if model.max_positions is None or length <= model.max_positions]
    if fitting:
        check_passes(model, max(fitting))


def with_influence(model: Model, plan: BehaviourPlan, evaluation: Evaluation, directory: Path | None) -> Evaluation:
    """The evaluation with the influence of items on its prompts, and how both hang together.

    Args:
        model: The model that answered, with a tokenizer that knows character offsets.
        plan: What was asked, and what is measured.
        evaluation: Its answers; the record gets what is measured.
        directory: Folder in which measured prompts are kept until the record is saved.
    """
    series, left_out = Weighing(model, plan, evaluation, directory).series()
    evaluation.record.resolved["kinds"] = plan.measured["kinds"]
    _store_correlations(evaluation, series, left_out)
    return replace(Evaluation.from_record(evaluation.record), outputs=evaluation.outputs)


def _store_correlations(evaluation: Evaluation, series: Mapping[SeriesName, Scores], left_out: Sequence[str]) -> None:
    """Put the shares of influence, and their correlations with every measure, into the record."""
    record, seed = evaluation.record, evaluation.record.seeds["samples"]
    entries = []
    for name, table in series.items():
        record.arrays[name.array] = table
        pairs = {
            measure: Pair(table, scores, evaluation.positions, evaluation.n_items)
            for measure, scores in evaluation.measures.items()
        }
        found = {measure: correlate_pairs(pair, seed=seed) for measure, pair in pairs.items() if pair.complete.any()}
        entries.append(InfluenceSeries(*name, means=position_means(table), correlations=found))
    stored = [plain(asdict(entry)) for entry in corrected(entries)]
    record.scalars["influence"] = {"series": stored, "left_out": list(left_out)}
