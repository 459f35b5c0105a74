"""What is trained: `Member` (a model, a task, an optimiser, a seed); what became of it: `TrainedMember`.

`MemberState` is what is known of a member in between; `packed` states are the checkpoint of a stack, and its result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.limits import CELLS
from posbias.models.reference import ReferenceConfig, constants_of, shape_of
from posbias.parts import below
from posbias.tasks.synthetic import SyntheticTask
from posbias.training.optimisers import AdamW, Optimiser

Arrays = dict[str, np.ndarray]

MemberStatus = Literal["done", "stopped_early", "diverged", "failed"]
STATUSES: tuple[str, ...] = get_args(MemberStatus)

INITIALISATION = 0
"""Distinguishes the draw of the initial parameters from other draws of the same seed."""


@checked
@dataclass(frozen=True, eq=False)
class Member:
    """One model to train."""

    name: str
    """Unique in a study."""
    config: ReferenceConfig
    task: SyntheticTask
    seed: int = 0
    """Of the initial parameters and of the data, >= 0."""
    optimiser: Optimiser = field(default_factory=AdamW)
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    """Where it stands in its study's grid: plain values by the grid's axes."""

    def __post_init__(self) -> None:
        check_whole(f"member {self.name!r}: seed", self.seed, least=0)

    @property
    def stack_key(self) -> tuple[Any, ...]:
        """Members with equal keys are trained as one program.

        Raises:
            UsageError: the model does not fit the task, or its parts do not fit each other.
        """
        shape = shape_of(self.config, self.task.n_positions)
        return shape, self.task.stack_key, self.task.rows, self.optimiser.name

    def check(self) -> None:
        """Refuse a model that cannot do its task, before anything is trained.

        Raises:
            UsageError: vocabulary, width or outputs differ, the mask shows the task's answers, or the architecture's
                parts do not fit each other.
        """
        for field_name, ours, theirs in (
            ("vocabulary_size", self.config.vocabulary_size, self.task.vocabulary_size),
            ("width", self.config.width, self.task.width if self.task.width is not None else self.config.width),
            ("outputs", self.config.n_outputs, self.task.n_outputs),
        ):
            if ours != theirs:
                raise UsageError(
                    f"member {self.name!r}: the model's {field_name} is {ours}, its task {self.task} needs {theirs}"
                )
        positions, heads = self.task.n_positions, self.config.architecture.heads
        CELLS.check(f"member {self.name!r}: heads x positions x positions", heads * positions**2)
        for groups in self.config.architecture.head_groups:
            for group in groups:
                self.task.check_mask(group.mask)
        constants_of(self.config, self.task.n_positions)

    def generator(self) -> torch.Generator:
        """What its initial parameters are drawn from; on the CPU, so that they are the same on every device."""
        state = np.random.SeedSequence([INITIALISATION, self.seed]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(state >> np.uint64(1)))

    def describe(self) -> dict[str, Any]:
        """Everything its result depends on, as plain values."""
        return {
            "name": self.name,
            "model": self.config.to_dict(),
            "task": str(self.task),
            "optimiser": str(self.optimiser),
            "seed": self.seed,
            "coordinates": dict(self.coordinates),
        }


@dataclass(frozen=True, eq=False)
class TrainedMember:
    """One member after training, or after it failed."""

    member: Member
    status: MemberStatus
    reason: str
    """Why it ended before all steps; empty when done."""
    steps: int
    """Updates made."""
    losses: Float32[np.ndarray, "window"]
    """Mean training loss (nats) over successive windows of steps; NaN or huge where it diverged."""
    parameters: dict[str, Tensor] | None
    """On the CPU; None where it diverged or failed."""
    evaluation_steps: Int64[np.ndarray, "evaluation"]
    """After how many updates it was evaluated."""
    evaluations: dict[str, np.ndarray]
    """By the task's name of the quantity: values with a leading axis of evaluations; empty where there were none."""


@dataclass
class MemberState:
    """What is known of a member in training."""

    status: MemberStatus | None = None
    """None while it is in training."""
    reason: str = ""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    evaluation_steps: list[int] = field(default_factory=list)
    evaluations: list[Arrays] = field(default_factory=list)
    parameters: dict[str, Tensor] | None = None

    @property
    def curve(self) -> Float32[np.ndarray, "window"]:
        """The losses, as rules and results have them."""
        return np.array(self.losses, dtype=np.float32)

    def evaluated(self) -> Arrays:
        """All evaluations by quantity, with a leading axis."""
        names = list(self.evaluations[0]) if self.evaluations else []
        return {name: np.stack([found[name] for found in self.evaluations]) for name in names}

    def result(self, member: Member) -> TrainedMember:
        """What became of the member this is the state of, once it has ended."""
        assert self.status is not None
        at = np.array(self.evaluation_steps, dtype=np.int64)
        return TrainedMember(
            member, self.status, self.reason, self.steps, self.curve, self.parameters, at, self.evaluated()
        )


def packed(states: Sequence[MemberState]) -> Arrays:
    """States as arrays, which any engine can hand over and any file can hold."""
    arrays: Arrays = {}
    for index, state in enumerate(states):
        arrays[f"{index}/losses"] = state.curve
        arrays[f"{index}/evaluation_steps"] = np.array(state.evaluation_steps, dtype=np.int64)
        arrays |= {f"{index}/evaluations/{name}": values for name, values in state.evaluated().items()}
        arrays |= {f"{index}/parameters/{name}": values.numpy() for name, values in (state.parameters or {}).items()}
    text = json.dumps([[state.status, state.reason, state.steps] for state in states])
    arrays["members"] = np.frombuffer(text.encode(), dtype=np.uint8)
    return arrays


def unpacked(arrays: Arrays) -> list[MemberState]:
    """The inverse of `packed`."""
    states = []
    for index, (status, reason, steps) in enumerate(json.loads(arrays["members"].tobytes())):
        evaluation_steps = arrays[f"{index}/evaluation_steps"].tolist()
        evaluated = below(arrays, f"{index}/evaluations/")
        evaluations = [
            {name: np.asarray(values[number]) for name, values in evaluated.items()}
            for number in range(len(evaluation_steps))
        ]
        kept = below(arrays, f"{index}/parameters/")
        parameters = {name: torch.from_numpy(values) for name, values in kept.items()} or None
        losses = arrays[f"{index}/losses"].tolist()
        states.append(MemberState(status, reason, steps, losses, evaluation_steps, evaluations, parameters))
    return states
