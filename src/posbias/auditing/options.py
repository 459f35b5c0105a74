"""What an audit may be told beyond model, length and prompts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posbias.checks import check_size, check_whole, checked
from posbias.engines import Engine, Local
from posbias.errors import UsageError
from posbias.limits import REPEATS
from posbias.measurement import PassOptions
from posbias.prompts import PromptSource

MOST_BIRTHS = 8
"""Re-initialisations measured by default at most: enough independent units for an interval (six carry a claim)."""

UNRECORDED = {"resume", "command", "engine", "max_memory"}
"""Options that change no result, the engine's threads apart."""


@checked
@dataclass(frozen=True)
class AuditOptions:
    """Settings of an audit; the defaults are what `posbias audit` runs."""

    source: str | PromptSource = "default"
    """Where prompts come from, as `load_prompts` takes it; unused where prompts are given."""
    kinds: Sequence[str] = ("jacobian", "probability")
    """Influence kinds, as literal spellings ("jacobian(probes=8)")."""
    seed: int = 0
    """Of prompts, probes and bootstrap; birth k is initialised with seed + k."""
    births: int | None = None
    """Re-initialisations, each measured on a prompt of its own; None: as many as prompts, at most MOST_BIRTHS."""
    resume: bool = False
    """Continue an unfinished audit in the same directory: finished prompts are not measured again."""
    dtype: str = "float32"
    device: str = "cpu"
    init_seed: int | None = None
    """Audit the re-initialised model alone, birth k with seed init_seed + k; the trained weights are not measured."""

    passes: PassOptions = field(default_factory=PassOptions)
    """Memory against time."""
    max_memory: int | None = None
    """Bytes that weights and passes may take; None: what is free."""
    engine: Engine = field(default_factory=Local)
    """Which processes or machines measure."""
    command: str = ""
    """The shell line that repeats the audit, for its record, where there is one."""

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, least=0, below=2**62, numpy=True)
        if self.births is not None:
            check_size("births", self.births, REPEATS, least=0)

    def count_births(self, n_prompts: int) -> int:
        """How many re-initialisations go with that many prompts."""
        if self.births is not None and self.births > n_prompts:
            raise UsageError(f"births must be at most the {n_prompts} prompts, one prompt for each; got {self.births}")
        return min(n_prompts, MOST_BIRTHS) if self.births is None else self.births

    def describe(self) -> dict[str, Any]:
        """Plain values for a record, of what changes a result."""
        return {name: value for name, value in asdict(self).items() if name not in UNRECORDED}
