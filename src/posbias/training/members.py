"""Members of a study: `Member` before training (a model, a task, an optimiser, a seed), `TrainedMember` after it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from posbias.checks import CELLS, Natural, checked
from posbias.errors import UsageError, check_most
from posbias.models.reference.config import ReferenceConfig, constants_of, shape_of
from posbias.tasks.synthetic import SyntheticTask
from posbias.training.optimisers import Adam, AdamW

Arrays = dict[str, np.ndarray]

MemberStatus = Literal["training", "done", "stopped_early", "diverged", "failed"]
STATUSES: tuple[str, ...] = get_args(MemberStatus)[1:]
"""Statuses in which a member may end."""

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
    seed: Natural = 0
    """Seed of the initial parameters and of the data, >= 0."""
    optimiser: Adam = field(default_factory=AdamW)
    coordinates: Mapping[str, Any] = field(default_factory=dict)
    """Its point in the study's grid: plain values by axis."""

    @property
    def stack_key(self) -> tuple[Any, ...]:
        """Members with equal keys are trained as one program; a model must fit its task to have one."""
        shape = shape_of(self.config, self.task.n_positions)
        return shape, self.task.stack_key, self.task.rows, self.optimiser.name

    def check(self) -> None:
        """Refuse, before anything is trained, a model whose sizes, mask or parts do not fit its task or each other."""
        config, task = self.config, self.task
        for size, of_model, of_task in (
            ("vocabulary_size", config.vocabulary_size, task.vocabulary_size),
            ("width", config.width, config.width if task.width is None else task.width),
            ("outputs", config.n_outputs, task.n_outputs),
        ):
            if of_model != of_task:
                raise UsageError(
                    f"member {self.name!r}: the model's {size} is {of_model}, its task {task} needs {of_task}"
                )
        heads = config.architecture.heads
        check_most(f"member {self.name!r}: heads x positions x positions", heads * task.n_positions**2, CELLS)
        constants_of(config, task.n_positions)

    def generator(self) -> torch.Generator:
        """The generator of its initial parameters; on the CPU, so that they are the same on every device."""
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


@dataclass(eq=False)
class TrainedMember:
    """One member after training or failure; in a trainer and its checkpoints, the state so far."""

    member: Member
    status: MemberStatus = "training"
    reason: str = ""
    """The reason why it ended before all steps; empty when done."""
    steps: int = 0
    """Updates made."""
    losses: Float32[np.ndarray, "window"] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Mean training loss (nats) over successive windows of steps; NaN or huge if it diverged."""
    parameters: dict[str, Tensor] | None = None
    """Final parameters, on the CPU; None in training, and for a member that diverged or failed."""
    evaluation_steps: Int64[np.ndarray, "evaluation"] = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Number of updates before each evaluation."""
    evaluations: Arrays = field(default_factory=dict)
    """Values by the task's name of the quantity, with a leading axis of evaluations; empty if there were none."""

    def evaluated(self, scores: Mapping[str, np.ndarray]) -> None:
        """Add an evaluation of the task after the steps made."""
        self.evaluation_steps = np.append(self.evaluation_steps, self.steps)
        rows = {name: [self.evaluations[name]] if name in self.evaluations else [] for name in scores}
        self.evaluations = {name: np.concatenate([*rows[name], values[None]]) for name, values in scores.items()}

    def kept(self) -> dict[str, Any]:
        """The state as a piece holds it, parameters as arrays; all but the member itself."""
        values = {name: value for name, value in vars(self).items() if name != "member"}
        if self.parameters is not None:
            values["parameters"] = {name: tensor.numpy() for name, tensor in self.parameters.items()}
        return values

    @classmethod
    def of_piece(cls, member: Member, kept: Mapping[str, Any]) -> "TrainedMember":
        """The member in the state that was kept."""
        parameters = kept["parameters"]
        if parameters is not None:
            parameters = {name: torch.from_numpy(values) for name, values in parameters.items()}
        return cls(member, **{**kept, "parameters": parameters})
