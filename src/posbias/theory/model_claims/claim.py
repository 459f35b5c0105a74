"""What a claim on one model is: premises that are checked on it, and the statement's number and verdict.

The statement is examined whether the premises are met or not: where they are not, the verdict says so, and what became
of the statement all the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from posbias.errors import UsageError
from posbias.models.model import Model
from posbias.prompts import Prompts
from posbias.registry import Registry
from posbias.theory.claims import CLAIMS, Claim, Finding
from posbias.theory.claims.claim import selected
from posbias.theory.claims.order import ROUNDING
from posbias.theory.model_claims.run import ModelRun, run_model

MODEL_CLAIMS: Registry["ModelClaim"] = Registry("claim on a model")


@dataclass(frozen=True)
class Premise:
    """An assumption as it is found on a model."""

    text: str
    met: bool
    found: str = ""
    """What was found, with its number."""


@dataclass(frozen=True, eq=False)
class ModelVerdict:
    """A claim, its premises on the model, and what its experiment found there."""

    claim: Claim
    """As published."""
    premises: tuple[Premise, ...]
    finding: Finding

    @property
    def met(self) -> bool:
        """Whether every premise is."""
        return all(premise.met for premise in self.premises)

    @property
    def verdict(self) -> str:
        """holds or fails; where premises are not met, what the statement did all the same."""
        outcome = "holds" if self.finding.as_stated else "fails"
        return outcome if self.met else f"premises not met ({outcome} all the same)"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and for a record; the evidence arrays are kept apart."""
        return {
            "claim": self.claim.name,
            "paper": self.claim.paper,
            "source": self.claim.source,
            "statement": self.claim.statement,
            "assumptions": [premise.text for premise in self.premises],
            "premises": [{"premise": each.text, "met": each.met, "found": each.found} for each in self.premises],
            "broken": "",
            "computed": self.finding.computed,
            "value": float(self.finding.value),
            "verdict": self.verdict,
            "sharper": self.finding.sharper,
            "numbers": {name: float(number) for name, number in self.finding.numbers.items()},
            "instances": int(self.finding.instances),
        }


class ModelClaim(ABC):
    """A published claim in the form in which one model's attention can meet it or not; named as the claim is."""

    name: ClassVar[str]

    @abstractmethod
    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """The assumptions that attention, mask and mixing tell of."""

    @abstractmethod
    def examine(self, run: ModelRun) -> Finding:
        """The statement's number on this model, worst over prompts."""

    def check(self, run: ModelRun) -> ModelVerdict:
        """Premises and number together."""
        return ModelVerdict(CLAIMS[self.name](), self.premises(run), self.examine(run))


def verify_model(model: Model, prompts: Prompts, selection: str | None = None) -> list[ModelVerdict]:
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
