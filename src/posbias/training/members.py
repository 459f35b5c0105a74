"""What is trained and how: `TrainingSchedule` and `TrainOptions`, optimisers, and `Member` before and after training.

The schedule and the member decide the result; options say where the work is done and kept. Optimisers are those of
PyTorch for many models at once, with settings of each member's own, since a grid may vary the learning rate within one
stack: all operations are elementwise, so a member's update does not depend on who else is in the stack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Interval
from jaxtyping import Float, Float32, Int64
from pydantic import AllowInfNan
from torch import Tensor

from posbias.checks import CELLS, Count, CountOrZero, Natural, NonNegative, Positive, Steps, StepsOrZero, checked
from posbias.errors import UsageError, check_most
from posbias.models.reference.config import ReferenceConfig, constants_of, shape_of
from posbias.registry import Registry, Spelled
from posbias.runs.engines import Arrays
from posbias.tasks.synthetic import SyntheticTask

STOPPING: Registry["Below"] = Registry("stopping rule", left={"plateau": "below"})


@STOPPING.register("below")
@dataclass(frozen=True)
class Below(Spelled):
    """A member ends once the mean loss of each of the last `windows` windows is below `loss`."""

    loss: Positive
    """Nats, > 0."""
    windows: Steps = 3
    """Number of windows in a row, >= 1."""

    def stops(self, curve: Float32[np.ndarray, "window"]) -> bool:
        """True if the end of the curve of mean losses by window, oldest first, is low enough."""
        return len(curve) >= self.windows and bool(np.all(curve[-self.windows :] < self.loss))


def stopping_rule(text: str) -> Below | None:
    """The rule that a study or a record spells; None for "never"."""
    return None if text == "never" else STOPPING.parse(text)


@checked
@dataclass(frozen=True)
class TrainingSchedule:
    """The `train` section of a study: what decides the result of a training, beside the member itself."""

    steps: Steps
    """Updates, >= 1."""
    batch: Count = 128
    """Sequences per update and member, >= 1."""
    window: Steps = 10
    """Steps per entry of the loss curve, >= 1; rules, divergence and evaluations look at the end of a window."""
    evaluate_every: StepsOrZero = 0
    """Evaluate when this many steps are done, and every as many again: a multiple of `window`. 0: only at the end."""
    examples: CountOrZero = 1000
    """Sequences per evaluation set, >= 1; 0 evaluates nothing."""
    stopping: Below | None = None
    """Ends a member that has learnt enough; None: all steps are trained."""
    diverged_above: Annotated[Positive, AllowInfNan(True)] = 100.0
    """A mean loss (nats) over a window that is not finite or above this ends the member as diverged."""

    def __post_init__(self) -> None:
        if self.evaluate_every % self.window:
            raise UsageError(
                f"training: evaluate_every must be a multiple of window ({self.window}), got {self.evaluate_every}"
            )

    def describe(self) -> dict[str, object]:
        """Plain values for a record and for the fingerprint of checkpoints."""
        return {**vars(self), "stopping": str(self.stopping or "never")}


OPTIMISERS: Registry["Adam"] = Registry("optimiser", left={"sgd": "adam or adamw"})

Flat = Float[Tensor, "member value"]

Remainder = Annotated[float, Interval(ge=0, lt=1)]
"""What is kept from step to step."""


@OPTIMISERS.register("adam")
@dataclass(frozen=True)
class Adam(Spelled):
    """Adam without weight decay; members of one stack share the kind of optimiser, not the settings."""

    kind: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    learning_rate: Positive = 1e-3
    """Size of a step, > 0."""
    beta1: Remainder = 0.9
    """Decay of the running mean of gradients, in [0, 1)."""
    beta2: Remainder = 0.999
    """Decay of the running mean of squared gradients, in [0, 1)."""
    epsilon: Positive = 1e-8
    """Added to the root of the squares, > 0."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by PyTorch's names."""
        return {"lr": self.learning_rate, "betas": (self.beta1, self.beta2), "eps": self.epsilon}


@OPTIMISERS.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay that does not pass through the moments."""

    kind: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    weight_decay: NonNegative = 1e-2
    """Share of a parameter lost per step is learning rate times this, >= 0."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by PyTorch's names."""
        return {**super().settings, "weight_decay": self.weight_decay}


def optimiser_of(
    members: Sequence[Adam], values: Flat, gradients: Flat, state: Mapping[str, Tensor]
) -> torch.optim.Optimizer:
    """PyTorch's optimiser of the rows of `values`: it reads `gradients` and changes `values` and `state` in place."""
    groups: dict[Adam, list[Tensor]] = {}
    moments = {}
    for index, (member, row) in enumerate(zip(members, values.unbind(), strict=True)):
        row.grad = gradients[index]
        moments[row] = {name: of_members[index] for name, of_members in state.items()}
        groups.setdefault(member, []).append(row)
    alike = [{"params": rows, **member.settings} for member, rows in groups.items()]
    optimiser = members[0].kind(alike, fused=True)  # type: ignore[call-arg]
    optimiser.state.update(moments)
    return optimiser


MemberStatus = Literal["training", "done", "stopped_early", "diverged", "failed"]


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
        state = np.random.SeedSequence([0, self.seed]).generate_state(1, np.uint64)[0]  # apart from its other draws
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
