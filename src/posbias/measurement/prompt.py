"""Everything measured on one prompt, as arrays: the unit that is stored, resumed from and resampled.

It depends on the model, the prompt's tokens, the kinds, the options and (seed, index) alone, so prompts may be
measured in any order, on any day, and combined afterwards.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float64, Int64

from posbias.errors import UsageError
from posbias.measurement.checkpointing import checkpointed
from posbias.measurement.depth import DepthInfluence, influence_by_depth
from posbias.measurement.influence import influence_of_positions
from posbias.measurement.kinds import Jacobian, Kind
from posbias.measurement.mixing import mixing_of_first_pass
from posbias.measurement.passes import PassOptions
from posbias.measurement.precision import norms_in_full_precision
from posbias.models.model import Model
from posbias.parts import below
from posbias.prompts.prompts import Prompts

LEFT_OUT = "left_out/"


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
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    """What else a kind found, by kind name."""
    depth: DepthInfluence | None = None
    """Influence on the stream after the chosen layers."""
    full_precision: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """The norms again, by a float32 copy of the model; only for models below float32, on the first prompts."""
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays by slash-separated name, for storage."""
        arrays = {f"norms/{kind}": values for kind, values in self.norms.items()}
        arrays |= {f"standard_errors/{kind}": values for kind, values in self.standard_errors.items()}
        if self.mixing is not None and self.mixing_frobenius is not None:
            arrays |= {"mixing": self.mixing, "mixing_frobenius": self.mixing_frobenius}
        for kind, found in self.details.items():
            arrays |= {f"details/{kind}/{name}": np.array([value]) for name, value in found.items()}
        arrays |= {f"full_precision/{kind}": values for kind, values in self.full_precision.items()}
        arrays |= {LEFT_OUT + reason: np.zeros(0) for reason in self.left_out}
        if self.depth is not None:
            arrays |= {"depth/layers": np.array(self.depth.layers), "depth/norms": self.depth.norms}
            if self.depth.standard_errors is not None:
                arrays["depth/standard_errors"] = self.depth.standard_errors
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "PromptMeasurement":
        """The inverse of `to_arrays`."""
        details: dict[str, dict[str, float]] = {}
        for path, value in below(arrays, "details/").items():
            kind, name = path.split("/")
            details.setdefault(kind, {})[name] = float(value[0])
        depth = None
        if "depth/layers" in arrays:
            layers = tuple(int(layer) for layer in arrays["depth/layers"])
            depth = DepthInfluence(layers, arrays["depth/norms"], arrays.get("depth/standard_errors"))
        return cls(
            norms=below(arrays, "norms/"),
            standard_errors=below(arrays, "standard_errors/"),
            mixing=arrays.get("mixing"),
            mixing_frobenius=arrays.get("mixing_frobenius"),
            details=details,
            depth=depth,
            full_precision=below(arrays, "full_precision/"),
            left_out=tuple(below(arrays, LEFT_OUT)),
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
        options: The output that is read, layers, precision check, and how the passes are run.

    Raises:
        RunError: a value is not finite.
        UsageError: checkpointing or layers asked of a network without blocks, or a kind that cannot be measured on
            the output.
    """
    options = options or PassOptions()
    depth = None
    with (
        mixing_of_first_pass(model, token_ids, prompt=key[1]) as first_mixing,
        checkpointed(model.network, enabled=options.checkpointing),
    ):
        influence = influence_of_positions(model, token_ids, kinds=kinds, key=key, options=options)
        if options.layers is not None:
            probes = next((kind for kind in kinds if isinstance(kind, Jacobian)), Jacobian())
            depth = influence_by_depth(model, token_ids, kind=probes, key=key, options=options)
    mixing = first_mixing()
    full, reason = norms_in_full_precision(model, token_ids, kinds=kinds, key=key, options=options)
    reasons = [text for result in influence.values() for text in result.left_out]
    if reason is not None:
        reasons.append(reason)
    return PromptMeasurement(
        norms={kind: result.norms for kind, result in influence.items()},
        standard_errors={
            kind: result.standard_errors for kind, result in influence.items() if result.standard_errors is not None
        },
        mixing=None if mixing is None else mixing.tokens,
        mixing_frobenius=None if mixing is None else mixing.frobenius,
        details={kind: result.details for kind, result in influence.items() if result.details},
        depth=depth,
        full_precision=full,
        left_out=tuple(reasons),
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
