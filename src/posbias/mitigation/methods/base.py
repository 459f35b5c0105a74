"""What a mitigation is: a change of a finished model, or of the requests put to it, made against its position bias.

No weight is touched. Every method has a strength from 0 (the model as it is) to 1 (the method as described).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from posbias.checks import check_whole
from posbias.errors import UsageError
from posbias.evaluation.responders import Responder
from posbias.interventions.base import Intervention
from posbias.mitigation.methods.question import Question
from posbias.models.hugging_face import HuggingFaceModel
from posbias.registry import Registry

MITIGATIONS: Registry["Method"] = Registry("mitigation")

Spans = Sequence[tuple[int, int]]
"""First token and one past the last of every passage of a prompt, in order."""
Places = Spans | Question
"""The same, or where the question begins."""


@dataclass(frozen=True)
class Mitigation(Intervention):
    """A change inside a model, without training."""

    ingredient: ClassVar[str] = "attention"
    needs_passages: ClassVar[bool] = False
    """Whether it has to know where the passages of a prompt begin and end; one list serves all prompts of a batch."""
    needs_question: ClassVar[bool] = False
    """Whether all that it has to know of them is where the question begins; then it takes a `Question`, too."""
    grid: ClassVar[Mapping[str, Sequence[float]]] = {}
    """Candidates for its parameters, from which `fit` chooses on calibration samples."""

    shares_cache: ClassVar[bool] = True
    """Whether the keys and values of a prompt's beginning serve every prompt that begins so, one row for each; where it
    has to know the passages, up to the end of the last one."""

    looks_ahead: ClassVar[bool] = False
    """Whether passages see what stands behind them, so that they are read in one call."""

    strength: float = field(default=1.0, kw_only=True)
    """0 (the model as it is) ... 1 (the method as described)."""

    def __post_init__(self) -> None:
        check_strength(self.name, self.strength)

    @abstractmethod
    def apply(self, model: HuggingFaceModel, passages: Spans) -> AbstractContextManager[None]:
        """Within the context the network computes with the method, whose strength is above 0.

        Raises:
            UsageError: on entry, the model or the passages do not allow it; the message says why.
        """

    def passes(self, n_passages: int) -> int:
        """How often a prompt of so many passages is run, about."""
        return 1

    def on_prompt(self, passages: Spans, length: int) -> tuple["Mitigation", Spans]:
        """What answers one prompt of so many tokens, and the passages that it is to know."""
        return self, passages

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """As `apply`, for methods that need no passages."""
        return self.on(model, ())

    @contextmanager
    def on(self, model: HuggingFaceModel, passages: Places) -> Iterator[None]:
        """As `apply` at any strength: at 0 nothing is changed."""
        if self.needs_passages and not passages:
            raise UsageError(f"{self.name} needs the passages of the prompt: passages=[(first token, one past last)]")
        if self.strength == 0:
            yield
            return
        places = passages if isinstance(passages, Question) else check_spans(self.name, passages)
        with self.apply(model, places):  # type: ignore[arg-type] # methods that take a question say so
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Marked as a misfit, unless a method says how theories should read it."""
        if self.strength == 0:
            return model
        return model.described_by(model.family, misfit=f"no theory describes {self.name}")

    def __str__(self) -> str:
        return MITIGATIONS.spell(self)


@dataclass(frozen=True)
class PromptMitigation(ABC):
    """A change of the requests that are put to a model, or of how often it is asked; servers take it, too."""

    name: ClassVar[str]
    needs_attention: ClassVar[bool] = False
    """Whether it reads the model's attention, which a server does not show."""

    strength: float = field(default=1.0, kw_only=True)
    """Share of the requests that it is applied to, chosen by their group: 0 none ... 1 all."""

    def __post_init__(self) -> None:
        check_strength(self.name, self.strength)

    @property
    def copies(self) -> int:
        """How often a prompt stands in what is asked in its place."""
        return 1

    def passes(self, n_passages: int) -> int:
        """How often a prompt of so many passages is run, about."""
        return 1

    @abstractmethod
    def around(self, responder: Responder) -> Responder:
        """A responder that asks the given one with changed requests."""

    def __str__(self) -> str:
        return MITIGATIONS.spell(self)


Method = Mitigation | PromptMitigation


def check_strength(name: str, strength: object) -> None:
    """Refuse what is no share."""
    known = isinstance(strength, int | float) and not isinstance(strength, bool)
    if not known or not 0 <= strength <= 1:  # type: ignore[operator]
        raise UsageError(f"{name}: strength must lie in [0, 1], got {strength!r}")


def check_spans(name: str, passages: Spans) -> tuple[tuple[int, int], ...]:
    """Passages in order, none empty; a token that two of them share is the first one's."""
    spans: list[tuple[int, int]] = []
    for span in passages:
        try:
            begin, end = span
        except (TypeError, ValueError):
            raise UsageError(f"{name}: a passage must be (first token, one past its last), got {span!r}") from None
        last = spans[-1][1] if spans else 0
        check_whole(f"{name}: the begin of a passage", begin, least=0, numpy=True)
        check_whole(f"{name}: the end of a passage", end, least=begin + 1, numpy=True)
        if end <= last or (spans and begin < spans[-1][0]):
            raise UsageError(f"{name}: passages must be in order, got {(begin, end)} behind {spans[-1]}")
        spans.append((max(int(begin), last), int(end)))
    return tuple(spans)


def inside_methods() -> list[str]:
    """Names of the methods that act inside a model."""
    return [name for name in MITIGATIONS if issubclass(MITIGATIONS[name], Mitigation)]
