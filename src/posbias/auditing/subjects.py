"""One subject of an audit measured prompt by prompt: the model as trained, or re-initialised once per prompt.

Every unit (a prompt, or a birth with its prompt) is one piece in the `PartStore`: influence, mixing and the theories
that read the prompt. The pieces are then averaged and compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from posbias.auditing.options import AuditOptions
from posbias.auditing.recording import measured_subject
from posbias.auditing.storage import PartStore
from posbias.auditing.theories import architecture_theories, prompt_theories
from posbias.comparison import Subject, TheoryProfile
from posbias.measurement import PromptMeasurement, combine, measure_prompt, resolve_kinds
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts import Prompts

TRAINED, INITIALISED = "trained", "initialised"
"""The states of a model."""
THEORY = "theory/"
LEFT_OUT = "left_out/"


@dataclass(frozen=True)
class Unit:
    """One independent unit of a subject."""

    prompt: int
    """Index of its prompt."""
    model: Callable[[], Model]
    """The model it is measured on; called only if the unit is not finished yet."""


@dataclass(frozen=True)
class Examiner:
    """Measures the states of one model on the same prompts under the same options."""

    model: Model
    """The model as loaded; every state shares its configuration."""
    prompts: Prompts
    options: AuditOptions
    store: PartStore

    def examine(self, name: str, units: Sequence[Unit]) -> tuple[Subject, list[str]]:
        """Measure all units of a state and set the theories beside them; comparing is left to `compare_subject`.

        Returns:
            The subject, and what was left out, one sentence each.

        Raises:
            RunError: a gradient is not finite, or a piece cannot be written.
        """
        pieces = [
            self.store.get(f"{name}-{index:05d}", partial(self._piece, unit, initialised=name == INITIALISED))
            for index, unit in enumerate(track(units, f"measuring the {name} model"))
        ]
        measured = [PromptMeasurement.from_arrays(piece) for piece in pieces]
        measurement = combine(measured, kinds=list(self.options.kinds), seed=self.options.seed)
        theories, left_out = architecture_theories(self.model, measurement.n_positions, measurement.mixing)
        read, unread = _prompt_theories(pieces)
        subject = measured_subject(name, measurement, {**theories, **read})
        return subject, [*measurement.left_out, *left_out, *unread]

    def _piece(self, unit: Unit, *, initialised: bool) -> dict[str, np.ndarray]:
        """Everything about one unit, as flat arrays; what is left out travels as the names of empty arrays."""
        model, token_ids = unit.model(), self.prompts.token_ids[unit.prompt]
        kinds = resolve_kinds(list(self.options.kinds))
        measured = measure_prompt(model, token_ids, kinds=kinds, key=(self.options.seed, unit.prompt))
        theories, left_out = prompt_theories(
            model, token_ids, mixing=measured.mixing, birth=unit.prompt if initialised else None
        )
        return {
            **measured.to_arrays(),
            **{THEORY + name: influence for name, influence in theories.items()},
            **{LEFT_OUT + reason: np.zeros(0) for reason in left_out},
        }


def _prompt_theories(pieces: Sequence[dict[str, np.ndarray]]) -> tuple[dict[str, TheoryProfile], list[str]]:
    theories: dict[str, TheoryProfile] = {}
    for key in pieces[0]:
        if key.startswith(THEORY):
            theories[key.removeprefix(THEORY)] = TheoryProfile.of_prompts(np.stack([piece[key] for piece in pieces]))
    return theories, [key.removeprefix(LEFT_OUT) for key in pieces[0] if key.startswith(LEFT_OUT)]
