"""Settings of `decompose`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from posbias.checks import Flag, Later, Natural, checked

if TYPE_CHECKING:
    from posbias.interventions import Intervention
    from posbias.measurement.kinds import Kind
else:
    Intervention = Annotated[Any, Later("posbias.interventions:Intervention")]
    Kind = Annotated[Any, Later("posbias.measurement.kinds:Kind")]

DEFAULT_INTERVENTIONS = (
    "bidirectional",
    "attention_scaled(factor=0.5)",
    "no_residual",
    "no_rope",
    "no_content",
    "sink_masked",
)
"""One or two per ingredient: causal mask, residual strength, encoding, content, sinks."""
DEFAULT_KINDS = ("jacobian(probes=2)", "probability")


@checked
@dataclass(frozen=True, kw_only=True)
class DecomposeOptions:
    """Settings of a decomposition, and where its finished pieces are kept."""

    interventions: Sequence[str | Intervention] | str | Intervention = DEFAULT_INTERVENTIONS
    """Changes, as objects or literals, each made on its own and at most once."""
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS
    """Kinds of influence, such as jacobian, probability, logprob; the verdict speaks of the first."""
    seed: Natural = 0
    """Seed of probes and resamples."""
    directory: Annotated[Path | None, Flag(None)] = None
    """Run directory of the record, and of every finished piece until then; None keeps nothing."""
    resume: bool = False
    """Take over what the directory holds of the same decomposition: its record, or finished pieces."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""
