"""What a claim on one model is: premises that are checked on it, and the statement's number and verdict.

The statement is examined whether the premises are met or not: where they are not, the verdict says so, and what became
of the statement all the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from posbias.errors import UsageError
from posbias.models.model import Model
from posbias.papers.claims import CLAIMS, Finding, Premise, Verdict, selected
from posbias.papers.model_kernels import ModelRun, run_model
from posbias.papers.order import ROUNDING
from posbias.prompts import Prompts
from posbias.registry import Registry

MODEL_CLAIMS: Registry["ModelClaim"] = Registry("claim on a model")


class ModelClaim(ABC):
    """A published claim in the form in which one model's attention can meet it or not; named as the claim is."""

    name: ClassVar[str]

    @abstractmethod
    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """The assumptions that attention, mask and mixing tell of."""

    @abstractmethod
    def examine(self, run: ModelRun) -> Finding:
        """The statement's number on this model, worst over prompts."""

    def check(self, run: ModelRun) -> Verdict:
        """Premises and number together."""
        return Verdict(CLAIMS[self.name](), self.examine(run), premises=self.premises(run))


def verify_model(model: Model, prompts: Prompts, selection: str | None = None) -> list[Verdict]:
    """Put the claims whose premises attention and mixing can tell of to the test on a model.

    Args:
        model: A reference model, or a Hugging Face model of a described family.
        prompts: Equally long, 2 to 256 positions; every number is the worst over prompts unless it says otherwise.
        selection: A claim, a paper, or None for every claim with a form for models.

    Returns:
        One verdict per claim.

    Raises:
        UsageError: an unknown claim, or none with a form for models; prompts or a model that cannot be used.
        RunError: attention or norms are not finite.
    """
    names = [name for name in selected(selection) if name in MODEL_CLAIMS]
    if not names:
        raise UsageError(f"claim {selection!r} has no form for models; claims with one: {', '.join(MODEL_CLAIMS)}")
    run = run_model(model, prompts)
    return [MODEL_CLAIMS[name]().check(run) for name in names]


def attention_only(run: ModelRun) -> Premise:
    """No residual connection."""
    least = float(run.mixing.min())
    return Premise("attention only: no residual connections", 1 - least <= ROUNDING, f"least mixing {least:.3f}")


def bounded_below(run: ModelRun) -> Premise:
    """Every admissible weight above one positive number: what bounded weights and values give at any finite depth."""
    epsilon = float(run.epsilons.min())
    return Premise("every admissible attention weight is positive", epsilon > 0, f"smallest {epsilon:.2e}")


def masked_as(run: ModelRun, kinds: Sequence[str]) -> Premise:
    """One of some masks in every layer."""
    mask = run.mask
    found = "layers or heads differ, or no mask of the library" if mask is None else str(mask)
    text = f"mask {' or '.join(kinds)} in every layer"
    return Premise(text, mask is not None and type(mask).name in kinds, found)
