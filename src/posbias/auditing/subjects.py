"""One subject of an audit measured prompt by prompt: the model as trained, or re-initialised once per prompt.

Every unit (a prompt, or a birth with its prompt) is one piece in the `PartStore`: influence, mixing and the theories
that read the prompt. The pieces are then averaged and compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from posbias.auditing.options import AuditOptions
from posbias.auditing.recording import measured_subject
from posbias.auditing.theories import architecture_theories, prompt_theories
from posbias.comparison import Subject, TheoryProfile
from posbias.engines import collect
from posbias.measurement import PromptMeasurement, combine, measure_prompt, resolve_kinds
from posbias.models import HuggingFaceModel, reinitialise
from posbias.models.loading import load_same
from posbias.models.model import Model, ModelRequest
from posbias.models.weights import network_sha256
from posbias.parts import PartStore
from posbias.prompts import Prompts
from posbias.theory.mean_field import scatter_caveat

TRAINED, INITIALISED = "trained", "initialised"
"""The states of a model."""
THEORY = "theory/"
NETWORKS = "networks"
LEFT_OUT = "left_out/"


@dataclass(frozen=True)
class Unit:
    """One independent unit of a subject."""

    prompt: int
    """Index of its prompt."""
    birth: int | None = None
    """Seed of the re-initialisation it is measured on; None for the model as loaded."""


@dataclass(frozen=True)
class StateWork:
    """The units of one state of a model as work for an engine."""

    request: ModelRequest | None
    network_sha256: str | None
    token_ids: Int64[np.ndarray, "count n_positions"]
    units: tuple[Unit, ...]
    options: AuditOptions
    description: str

    def prepare(self) -> Model:
        """The model, loaded."""
        return load_same(self.request, self.network_sha256)

    def compute(self, prepared: Model, unit: int) -> dict[str, np.ndarray]:
        """Everything about one unit, as flat arrays; what is left out travels as the names of empty arrays."""
        wanted = self.units[unit]
        model, token_ids = prepared, self.token_ids[wanted.prompt]
        if wanted.birth is not None and isinstance(prepared, HuggingFaceModel):
            model = reinitialise(prepared, wanted.birth)
        kinds = resolve_kinds(list(self.options.kinds))
        key = (self.options.seed, wanted.prompt)
        measured = measure_prompt(model, token_ids, kinds=kinds, key=key, options=self.options.passes)
        theories = prompt_theories(
            model, token_ids, mixing=measured.mixing, birth=None if wanted.birth is None else wanted.prompt
        )
        return {
            **measured.to_arrays(),
            **{THEORY + name: influence for name, influence in theories.profiles.items()},
            **({} if theories.networks is None else {NETWORKS: theories.networks}),
            **{LEFT_OUT + reason: np.zeros(0) for reason in theories.left_out},
        }


@dataclass(frozen=True, eq=False)
class Examined:
    """A state of the model with everything about it."""

    subject: Subject
    """Not compared yet."""
    left_out: list[str]
    """What was not measured or does not apply, one sentence each."""
    caveats: list[str]
    """What bounds the trust in a theory, one sentence each."""


@dataclass(frozen=True)
class Examiner:
    """Measures the states of one model on the same prompts under the same options."""

    model: Model
    """The model as loaded; every state shares its configuration."""
    prompts: Prompts
    options: AuditOptions
    store: PartStore

    def examine(self, name: str, units: Sequence[Unit]) -> Examined:
        """Measure all units of a state and set the theories beside them; comparing is left to `compare_subject`.

        Raises:
            RunError: a gradient is not finite, or a piece cannot be written.
        """
        names = [f"{name}-{index:05d}" for index in range(len(units))]
        work = self.work(name, units)
        pieces = collect(work, names, engine=self.options.engine, store=self.store, prepared=self.model)
        measured = [PromptMeasurement.from_arrays(piece) for piece in pieces]
        measurement = combine(measured, kinds=list(self.options.kinds), seed=self.options.seed)
        theories, left_out = architecture_theories(self.model, measurement.n_positions, measurement.mixing)
        read, unread = _prompt_theories(pieces)
        subject = measured_subject(name, measurement, {**theories, **read})
        return Examined(subject, [*measurement.left_out, *left_out, *unread], _caveats(pieces))

    def work(self, name: str, units: Sequence[Unit]) -> StateWork:
        """The units of one state, for an engine."""
        return StateWork(
            request=self.model.reload_request,
            network_sha256=None if self.options.engine.in_process else network_sha256(self.model.network),
            token_ids=self.prompts.token_ids,
            units=tuple(units),
            options=self.options,
            description=f"measuring the {name} model",
        )


def _prompt_theories(pieces: Sequence[dict[str, np.ndarray]]) -> tuple[dict[str, TheoryProfile], list[str]]:
    theories: dict[str, TheoryProfile] = {}
    for key in pieces[0]:
        if key.startswith(THEORY):
            theories[key.removeprefix(THEORY)] = TheoryProfile.of_prompts(np.stack([piece[key] for piece in pieces]))
    return theories, [key.removeprefix(LEFT_OUT) for key in pieces[0] if key.startswith(LEFT_OUT)]


def _caveats(pieces: Sequence[dict[str, np.ndarray]]) -> list[str]:
    """How far single births lie from mean field, where it draws their heads."""
    networks = [piece[NETWORKS] for piece in pieces if len(piece.get(NETWORKS, ())) > 1]
    return [scatter_caveat(np.concatenate(networks), births=len(networks))] if networks else []
