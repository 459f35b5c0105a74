"""Influence and behaviour of one model: what weighs and what is used, on the very same prompts.

The model answers a task at several positions (`evaluate`); then, on each of those prompts, influence and theories,
profiles over tokens that sum to 1, are summed over the tokens of the item that holds the answer and of every other
place. Kinds that score tokens score the first token of the right answer, where it is decided which item is used; the
others look at the last position's output.

The items other than the answer's keep their order, so the places of one prompt are known from the answer's own place
in the others: with the answer behind it, place p begins where the answer begins when it stands at p; with the answer
before it, place p ends where the answer ends when it stands at p.

Beside an evaluation's record: arrays `influence/SOURCE[/KIND]/WHAT` [n_samples n_positions], shares of a prompt's
influence; scalars `influence`: {series: [{source, kind, what, means: [interval], correlations: {measure:
Correlations.as_record}}], left_out: [text]}.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from posbias.auditing.subjects import ARCHITECTURE_THEORIES, architecture_theories, prompt_theories, theories_of_tokens
from posbias.checks import checked
from posbias.directories import held
from posbias.errors import UsageError
from posbias.evaluation import (
    EvaluateOptions,
    Evaluation,
    Pair,
    correlate,
    evaluate,
    evaluation_record,
    finished_evaluation,
    write_outputs,
)
from posbias.evaluation.correlation import correct_for_number
from posbias.evaluation.cost import SHORTER
from posbias.evaluation.evaluation import BEHAVIOUR
from posbias.evaluation.pooling import array_name
from posbias.evaluation.responders import LocalOptions, LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.local import encode_requests
from posbias.evaluation.statistics import Scores, position_means
from posbias.measurement import Kind, PassOptions, measure_prompt, resolve_kinds
from posbias.measurement.cost import estimate_cost, report_cost, without_passes
from posbias.measurement.outputs import Target
from posbias.models.model import Model
from posbias.parts import PartStore, fingerprint, made_by
from posbias.profiles import Profile
from posbias.progress import track
from posbias.records import REPORT_FILE, Record, remove_record, run_directory
from posbias.report import conclude, write_report
from posbias.tasks.language import LANGUAGE_TASKS, Example, LanguageTask


@dataclass(frozen=True, eq=False)
class SampleSpans:
    """The prompts of one sample, with the answer at each place and its neighbours."""

    examples: dict[int, Example]
    """By place of the answer; every one located in tokens."""
    places: tuple[int, ...]
    """Places that are looked at, ascending."""
    tokenizer: Any

    def prompt(self, gold: int) -> tuple[Int64[np.ndarray, "_"], int]:
        """The tokens of the prompt with the answer at `gold`, and the right answer's first token."""
        example = self.examples[gold]
        (encoded,) = encode_requests(self.tokenizer, [Request(prompt=example.prompt, answer=example.target)])
        return encoded.prompt, int(encoded.answer[0])

    def spans(self, gold: int) -> list[tuple[int, int]]:
        """Begin and end in tokens of every place of `places`, in the prompt with the answer at `gold`."""
        return [self._span(gold, place) for place in self.places]

    def _span(self, gold: int, place: int) -> tuple[int, int]:
        begin, end = self._own(place)
        if place < gold:
            return begin, self._own(place + 1)[0]
        if place > gold:
            return self._own(place - 1)[1], end
        return begin, end

    def _own(self, place: int) -> tuple[int, int]:
        example = self.examples[place]
        if example.gold_token is None or example.gold_end is None:
            raise UsageError(
                "the places of items in tokens are not known: it takes a tokenizer with character offsets and a task "
                "with a moved item"
            )
        return example.gold_token, example.gold_end


def spans_of(
    task: LanguageTask, tokenizer: Any, *, places: Sequence[int], count: int, seed: int
) -> Iterator[SampleSpans]:
    """Every sample of a task, located."""
    around = {place + step for place in places for step in (-1, 0, 1)}
    wanted = sorted(place for place in around if 0 <= place < task.n_items)
    drawn = task.examples(tokenizer, count=count, positions=wanted, seed=seed)
    for _, group in itertools.groupby(drawn, key=lambda example: example.sample):
        examples = list(group)
        if any(example.gold_position is None for example in examples):
            raise UsageError(f"{task}: no item holds the answer, so there is no influence of one to measure")
        by_place = dict(zip(wanted, examples, strict=True))
        yield SampleSpans(by_place, tuple(places), tokenizer)


GOLD, PLACE = "gold", "place"
"""Influence of the item that holds the answer; of a place where another item stands, averaged over where the answer is
instead."""
MEASURED = "measured"
LEFT_OUT = "left_out/"
DEFAULT_KINDS = ("jacobian(probes=2)", "logprob")

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
            pieces.append(
                {name: np.array([rows[begin:end].sum() for begin, end in spans]) for name, rows in profiles.items()}
            )
        shared = [name for name in pieces[0] if all(name in piece for piece in pieces)]
        shares: dict[Name, np.ndarray] = {}
        for name in shared:
            source, _, kind = name.partition("/")
            shares[source, kind or None] = np.stack([piece[name] for piece in pieces])
        return shares, reasons

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
            read = prompt_theories(self.model, token_ids, mixing=mixing, initialisation=None)
            arrays |= {name: values / values.sum() for name, values in read.profiles.items()}
            left_out = [*left_out, *read.left_out]
        return {**arrays, **{LEFT_OUT + reason: np.zeros(0) for reason in left_out}}


def elsewhere(matrix: Float64[np.ndarray, "gold place"]) -> Float64[np.ndarray, "place"]:
    """Each place's mean over the prompts whose answer stands at another one; NaN with a single place."""
    n_places = len(matrix)
    if n_places < 2:
        return np.full(n_places, np.nan)
    mean: np.ndarray = (matrix * (1 - np.eye(n_places))).sum(axis=0) / (n_places - 1)
    return mean


@checked
@dataclass(frozen=True)
class BehaviourPlan:
    """What is asked and measured."""

    task: str | LanguageTask
    evaluation: EvaluateOptions = field(default_factory=lambda: EvaluateOptions(count=16))
    """Contents, positions, seed; influence is measured on the same prompts. Its directory is set by the run."""
    kinds: tuple[str | Kind, ...] = DEFAULT_KINDS
    prompt_theories: bool = True
    """Whether theories that read every prompt are computed too; each takes as long as a few backward passes."""
    cost: Mapping[str, Any] | None = None
    """What `preflight_behaviour` expects of the influence; None: it is still to be asked."""

    @property
    def asked(self) -> LanguageTask:
        """The task as an object."""
        return LANGUAGE_TASKS.parse(self.task) if isinstance(self.task, str) else self.task


def preflight_behaviour(model: Model, plan: BehaviourPlan) -> BehaviourPlan:
    """The plan with the expected cost of the influence on every prompt that fits into the context, before any work.

    The cost is empty where no prompt fits, or where short runs fail, which the run will report.

    Raises:
        UsageError: it does not fit into memory, a wrong task, or a tokenizer without offsets.
    """
    task, options = plan.asked, plan.evaluation
    places = options.positions_of(task)
    samples = spans_of(task, model.tokenizer, places=places, count=options.count, seed=options.seed)
    lengths = [sample.examples[place].n_tokens or 0 for sample in samples for place in places]
    fitting = [length for length in lengths if model.max_positions is None or length <= model.max_positions]
    kinds = resolve_kinds(list(plan.kinds))
    if not fitting:
        return replace(plan, cost={})
    longest = max(fitting)
    theories = theories_of_tokens(model, initialised=False) if plan.prompt_theories else None
    estimate = estimate_cost(model, longest, kinds=kinds, passes=PassOptions(precision_prompts=0), beside=theories)
    estimate = replace(estimate or without_passes(model, longest), shorter=SHORTER)
    cost = report_cost(model, estimate, len(fitting), max_memory=options.max_memory)
    return replace(plan, cost={**cost, "prompts": len(fitting)} if cost else {})


def link_behaviour(audit: Record, directory: Path) -> Path:
    """Let the page of a finished audit lead to that of the behaviour below it, and draw it anew."""
    related = {"behaviour: does what weighs also get used?": f"{BEHAVIOUR}/{REPORT_FILE}"}
    with held(directory):
        if audit.resolved.get("related") != related:
            audit.resolved["related"] = related
            audit.save(directory)
        return write_report([audit], directory)


@checked
def audit_behaviour(
    model: Model,
    plan: BehaviourPlan,
    *,
    out: str | Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    command: str = "",
) -> Record:
    """Answers by position, influence and theories of the same prompts, and how they hang together.

    Args:
        model: With a tokenizer that knows character offsets.
        plan: Task, samples, kinds.
        out: Run directory; with it an interrupted run can be resumed.
        arguments: What the user passed, for the record.
        command: What repeats the run in a shell.

    Raises:
        UsageError: wrong input, a task whose items have no places, a tokenizer without offsets, or prompts that do not
            fit into memory.
        RunError: the run failed; finished samples and prompts are kept.
    """
    given = {"task": str(plan.asked), "count": plan.evaluation.count} if arguments is None else dict(arguments)
    kinds = resolve_kinds(list(plan.kinds))
    beside = {"kinds": [str(kind) for kind in kinds], "prompt_theories": plan.prompt_theories}
    with run_directory(out, verb="evaluate", arguments=given, resume=plan.evaluation.resume) as directory:
        options, responder = replace(plan.evaluation, directory=directory), LocalResponder(model, LocalOptions())
        finished = finished_evaluation(plan.asked, responder, options, **beside)
        if finished is not None and directory is not None:
            conclude(finished, directory, found=True)
            return finished
        plan = preflight_behaviour(model, plan) if plan.cost is None else plan
        evaluation = evaluate(plan.asked, responder, options=options)
        weighing = Weighing(
            model, kinds, evaluation, _store(model, evaluation, kinds, plan, directory), plan.prompt_theories
        )
        series, left_out = weighing.series()
        record = evaluation_record(evaluation, given, command=command)
        record.resolved["kinds"] = beside["kinds"]
        record.resolved["fingerprint"] = fingerprint({"evaluation": evaluation.fingerprint, **beside})
        if directory is not None and directory.name == BEHAVIOUR:
            record.resolved["related"] = {"the audit of the model": f"../{REPORT_FILE}"}
        record.scalars["cost_of_influence"] = dict(plan.cost or {})
        _store_correlations(record, evaluation, series, left_out)
        if directory is not None:
            remove_record(directory)  # of an older run, which had other outputs
            write_outputs(evaluation, directory)
            conclude(record, directory)
    return record


def _store(
    model: Model, evaluation: Evaluation, kinds: Sequence[Kind], plan: BehaviourPlan, directory: Path | None
) -> PartStore:
    """Where measured prompts are kept, beside the answers, which were already taken over or begun anew."""
    settings = {
        "verb": "audit_behaviour",
        "model": model.describe(),
        "kinds": [str(kind) for kind in kinds],
        "prompt_theories": plan.prompt_theories,
        "positions": list(evaluation.positions),
        "seed": evaluation.options.seed,
        "made_by": made_by(),
    }
    return PartStore(directory, settings, resume=True)


def _store_correlations(
    record: Record, evaluation: Evaluation, series: Mapping[tuple[Name, str], Scores], left_out: Sequence[str]
) -> None:
    entries = []
    for ((source, kind), what), table in series.items():
        record.arrays[array_name(source, kind, what)] = table
        entries.append(
            {
                "source": source,
                "kind": kind,
                "what": what,
                "means": [mean.as_record() for mean in position_means(table)],
                "correlations": dict(_correlations(evaluation, table)),
            }
        )
    correct_for_number(entries)
    record.scalars["influence"] = {"series": entries, "left_out": list(left_out)}


def _correlations(evaluation: Evaluation, table: Scores) -> Iterator[tuple[str, dict[str, Any]]]:
    """The correlations of one series with every measure that has samples in common with it."""
    for measure, scores in evaluation.measures.items():
        pair = Pair(table, scores, evaluation.positions, evaluation.n_items)
        if len(pair.complete):
            yield measure, correlate(pair, seed=evaluation.options.seed).as_record()
