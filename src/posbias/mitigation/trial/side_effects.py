"""The phase *side effects*: ordinary text and influence under every method, beside its answers.

The effort of an arm is seconds, requests and tokens. Tokens are those that a model is run on, for prompts,
scored answers and generated ones; beginnings that prompts share count once if they are run once. A method's own passes
are among them: those in which it sorts passages, those of the unchanged model and of dummies beside the answer's, and
as many as there are bases if each has its own. On a server they are the tokens that it counts, of every prompt that is
asked in place of one; a kept answer counts as it did when it was given, though nothing is paid for it again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from posbias.evaluation.curve import Scores
from posbias.mitigation.trial.influence import measure_influence
from posbias.mitigation.trial.ordinary_text import Divergences, Nats, measure_conversations, measure_text
from posbias.mitigation.trial.plan import TrialPlan
from posbias.runs.records import Record


@dataclass(frozen=True)
class Effort:
    """Work that the answers of one arm took."""

    seconds: float
    requests: int
    tokens: float | None
    """Tokens that the arm took; None if nobody counted them all."""


@dataclass(frozen=True, eq=False)
class SideEffects:
    """Everything that was measured beside the answers."""

    texts: list[Nats | None]
    """Nats per token of every window, by arm; None if text is not judged."""
    text_reasons: Mapping[str, str]
    """A code for why not, by the arm's name."""
    conversations: Mapping[str, Divergences]
    """Divergence on everyday conversations, by the name of each arm in which it was measured."""
    influence: Mapping[str, Scores]
    """Share of the item that holds the answer, by arm; empty if it was not measured."""


def measure_side_effects(plan: TrialPlan) -> tuple[TrialPlan, SideEffects]:
    """The plan with what could not be measured, and what was."""
    texts, reasons = measure_text(plan)
    conversations = measure_conversations(plan)
    influence, left_out = measure_influence(plan) if plan.options.influence else ({}, [])
    return plan.with_arms(plan.arms, left_out), SideEffects(texts, reasons, conversations, influence)


def effort_of(record: Record) -> Effort:
    """The effort of one arm, from its evaluation."""
    described = record.resolved["responder"]
    tokens = described.get("tokens_processed")
    if tokens is None and "prompt_tokens" in described and not described.get("uncounted"):
        tokens = sum(described.get(name, 0) for name in ("prompt_tokens", "generated_tokens", "reused_tokens"))
    return Effort(record.scalars["seconds"], record.scalars["examples"], tokens)
