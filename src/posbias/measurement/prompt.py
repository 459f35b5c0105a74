"""Everything measured on one prompt, as arrays: the unit that is stored, resumed from and resampled.

It depends on the model, the prompt's tokens, the kinds and (seed, index) alone, so prompts may be measured in any
order, on any day, and combined afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError
from posbias.measurement.checkpointing import checkpointed
from posbias.measurement.influence import influence_of_positions
from posbias.measurement.kinds import Kind
from posbias.measurement.mixing import mixing_of_layers
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts


@dataclass(frozen=True)
class PassOptions:
    """How the passes are run: memory against time, never what is measured."""

    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    rows: int = 1
    """Vector-Jacobian products per backward pass (copies of the prompt in the batch), >= 1."""

    def __post_init__(self) -> None:
        if not isinstance(self.checkpointing, bool):
            raise UsageError(f"checkpointing must be True or False, got {self.checkpointing!r}")
        if isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1:
            raise UsageError(f"rows must be a whole number >= 1, got {self.rows!r}")


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """What one prompt says."""

    norms: dict[str, Float64[np.ndarray, "n_positions"]]
    """Influence of every position by kind name, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "n_positions"]]
    """Of the norms, for sampled kinds only."""
    mixing: Float64[np.ndarray, "layers"] | None
    """Mean over tokens of |a| / (|x| + |a|); None for a model without a family description."""
    mixing_frobenius: Float64[np.ndarray, "layers"] | None

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays by slash-separated name, for storage."""
        arrays = {f"norms/{kind}": values for kind, values in self.norms.items()}
        arrays |= {f"standard_errors/{kind}": values for kind, values in self.standard_errors.items()}
        if self.mixing is not None and self.mixing_frobenius is not None:
            arrays |= {"mixing": self.mixing, "mixing_frobenius": self.mixing_frobenius}
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "PromptMeasurement":
        """The inverse of `to_arrays`."""
        return cls(
            norms=_below("norms/", arrays),
            standard_errors=_below("standard_errors/", arrays),
            mixing=arrays.get("mixing"),
            mixing_frobenius=arrays.get("mixing_frobenius"),
        )


def measure_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    *,
    kinds: Sequence[Kind],
    key: tuple[int, int],
    options: PassOptions | None = None,
) -> PromptMeasurement:
    """Measure one prompt: every kind of influence, and the mixing where the model's family is described.

    Args:
        model: Any causal language model.
        token_ids: One prompt.
        kinds: Distinct kinds, as `resolve_kinds` returns them.
        key: (seed, index of the prompt), both >= 0; all that random probes depend on.
        options: How the passes are run.

    Raises:
        RunError: a value is not finite.
        UsageError: checkpointing asked of a network without blocks.
    """
    options = options or PassOptions()
    with checkpointed(model.network, enabled=options.checkpointing):
        influence = influence_of_positions(model, token_ids, kinds=kinds, key=key, rows=options.rows)
    mixing = mixing_of_layers(model, token_ids, prompt=key[1]) if model.described else None
    return PromptMeasurement(
        norms={kind: result.norms for kind, result in influence.items()},
        standard_errors={
            kind: result.standard_errors for kind, result in influence.items() if result.standard_errors is not None
        },
        mixing=None if mixing is None else mixing.tokens,
        mixing_frobenius=None if mixing is None else mixing.frobenius,
    )


def check_prompts(model: Model, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot take.

    Raises:
        UsageError: longer than the model's positions, or a token id outside its vocabulary.
    """
    if model.max_positions is not None and prompts.n_positions > model.max_positions:
        raise UsageError(f"prompts have {prompts.n_positions} positions; the model takes at most {model.max_positions}")
    largest = int(prompts.token_ids.max())
    if largest >= model.vocabulary_size:
        raise UsageError(
            f"token id {largest} in the prompts; the model's vocabulary is 0 to {model.vocabulary_size - 1}"
        )


def _below(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
