"""The answers of all arms as work for an engine: one sample under one method is a unit, in whatever process.

A worker loads the model once and answers under every method. What it makes is what the arm's own evaluation would, to
the rounding of prompts that share other beginnings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posbias.evaluation import EvaluateOptions
from posbias.evaluation.responders import LocalOptions, LocalResponder, Responder
from posbias.evaluation.run import answer_samples
from posbias.evaluation.samples import Pieces, Sample
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Method
from posbias.mitigation.trial.arms import Arm
from posbias.models.loading import load_same
from posbias.models.model import ModelRequest
from posbias.models.weights import network_sha256
from posbias.runs.engines import Engine, collect
from posbias.runs.parts import PartStore
from posbias.tasks.language import LanguageTask


@dataclass(frozen=True)
class AnswerWork:
    """The samples of every arm, arm by arm."""

    request: ModelRequest | None
    network_sha256: str
    local: LocalOptions
    methods: tuple[Method | None, ...]
    """Of every arm; None: the unchanged model."""
    task: LanguageTask
    samples: tuple[Sample, ...]
    options: EvaluateOptions
    cost: Mapping[str, Any]
    description: str = "answers under all methods"

    def prepare(self) -> list[Responder]:
        """Who answers in every arm."""
        plain = LocalResponder(load_same(self.request, self.network_sha256), self.local)
        return [plain if method is None else answering_under(method, plain) for method in self.methods]

    def compute(self, prepared: list[Responder], unit: int) -> Pieces:
        """One sample in one arm."""
        arm, sample = divmod(unit, len(self.samples))
        (piece,) = answer_samples([self.samples[sample]], self.task, self.options, prepared[arm], cost=self.cost)
        return piece


def answers_of(arms: Sequence[Arm], work: AnswerWork, *, engine: Engine, store: PartStore) -> list[dict[str, Pieces]]:
    """Of every arm, by `Sample.piece`; each kept as soon as it is there. Errors as `Engine.run`."""
    names = [f"{arm.slug}-{sample.piece}" for arm in arms for sample in work.samples]
    pieces = iter(collect(work, names, engine=engine, store=store))
    return [{sample.piece: next(pieces) for sample in work.samples} for _ in arms]


def work_of(
    arms: Sequence[Arm],
    task: LanguageTask,
    samples: Sequence[Sample],
    options: EvaluateOptions,
    *,
    cost: Mapping[str, Any],
) -> AnswerWork:
    """The work of arms with a local model, which other processes can load."""
    responder = arms[0].responder
    assert isinstance(responder, LocalResponder)  # as `mitigate` has checked
    model = responder.model
    return AnswerWork(
        request=model.reload_request,
        network_sha256=network_sha256(model.network),
        local=responder.options,
        methods=tuple(arm.method for arm in arms),
        task=task,
        samples=tuple(samples),
        options=options,
        cost=cost,
    )
