"""Settings of `audit`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Lt

from posbias.checks import CountOrZero, Flag, Later, Natural, checked
from posbias.measurement.options import EngineOption, Loading, PassOptions, local_engine
from posbias.registry import split_literals

if TYPE_CHECKING:
    from posbias.prompts.prompts import PromptSource
else:
    PromptSource = Annotated[Any, Later("posbias.prompts.prompts:PromptSource")]

UNRECORDED = {"resume", "overwrite", "engine"}
"""Options that change no result, the engine's threads apart."""


@checked
@dataclass(frozen=True)
class AuditOptions(Loading):
    """Settings of an audit; the defaults are what `posbias audit` runs.

    With `init_seed`, the re-initialised model alone is audited, initialisation k with seed init_seed + k.
    """

    source: Annotated[str | PromptSource, Flag(None)] = "default"
    """Source of prompts, as `load_prompts` takes it; unused if prompts are passed in."""
    kinds: Annotated[Sequence[str], split_literals] = ("jacobian", "probability")
    """Kinds of influence (`posbias list kinds`), such as jacobian(probes=8),probability."""
    seed: Annotated[Natural, Lt(2**62)] = 0
    """Seed of prompts, probes and bootstrap; initialisation k is drawn with seed + k."""
    initialisations: CountOrZero | None = None
    """Re-initialised models, each measured on a prompt of its own; by default as many as prompts, at most 8."""
    resume: bool = False
    """Continue an unfinished audit in the same directory: finished prompts are not measured again."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""
    passes: Annotated[PassOptions, Flag(None)] = field(default_factory=PassOptions)
    """Settings of the passes of every prompt."""
    engine: EngineOption = field(default_factory=local_engine)
    """Where the work is done (`posbias list engines`)."""

    def describe(self) -> dict[str, Any]:
        """Plain values for a record, of what changes a result."""
        return {name: value for name, value in asdict(self).items() if name not in UNRECORDED}
