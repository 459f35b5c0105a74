"""Settings of `train`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from posbias.checks import AUTO, Count, Flag, NonNegative, checked
from posbias.measurement.options import EngineOption, local_engine


@checked
@dataclass(frozen=True)
class TrainOptions:
    """Settings of `train`: where members are trained and kept; none but the device changes results."""

    engine: EngineOption = field(default_factory=local_engine)
    """Where the work is done (`posbias list engines`)."""
    device: str = AUTO
    """Device that trains members, such as cpu or cuda:1; auto: the first accelerator, or the CPU if there is none."""
    directory: Annotated[Path | None, Flag(None)] = None
    """Run directory: the record, models under `models/`, and checkpoints and finished stacks in `parts/` until all is
    trained. None: nothing is kept."""
    resume: bool = False
    """Read back a study that the directory holds finished, whatever commit trained it, and continue an unfinished one
    from its checkpoints."""
    overwrite: bool = False
    """Train everything anew and replace what the directory holds, which is refused otherwise."""
    checkpoint_seconds: Annotated[NonNegative, Flag(None)] = 60.0
    """Seconds between checkpoints of a stack, >= 0; 0: after every window."""
    stack_size: Count = 64
    """Most members trained as one program."""
