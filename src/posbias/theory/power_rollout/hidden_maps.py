"""The hidden layer of one MLP, and the transpose of the map into it, signed (power 1) or squared (power 2).

Plain, with a = act'(up): the hidden layer's map is a W_u. Gated, with a = act'(gate) up and b = act(gate): it is
a W_g + b W_u, whose square keeps the cross term: (t a^2) W_g^2 + (t b^2) W_u^2 + 2 (t a b)(W_g o W_u). Where up has an
activation of its own, its value stands in a and its derivative is a factor of b.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.models.attention import affine
from posbias.models.families import MlpParts
from posbias.theory.power_rollout.walk import Power


def hidden_layer(
    parts: MlpParts, read: Float[Tensor, "position feature"]
) -> tuple[Float[Tensor, "position hidden"], Float[Tensor, "position hidden"] | None]:
    """What the MLP's maps `up` and `gate` (None without a gate) give, before any activation."""
    gate = None if parts.gate is None else affine(read, parts.gate, parts.gate_bias)
    return affine(read, parts.up, parts.up_bias), gate


def hidden_pull(
    parts: MlpParts,
    up: Float[Tensor, "position hidden"],
    gate: Float[Tensor, "position hidden"] | None,
    hidden: Float[Tensor, "*batch position hidden"],
    power: Power,
) -> Float[Tensor, "*batch position feature"]:
    """From the hidden layer to what the MLP read.

    Args:
        parts: The MLP's maps.
        up: As `hidden_layer` gives it.
        gate: As `hidden_layer` gives it.
        hidden: At the hidden layer's output; >= 0 for power 2.
        power: 1 signed, 2 energies.
    """
    up_weight = parts.up.to(hidden.dtype)
    if parts.gate is None or gate is None:
        _, slope = _activation(parts.activation, up)
        return (hidden * slope.pow(power)) @ up_weight.pow(power)
    gate_weight = parts.gate.to(hidden.dtype)
    value, slope = _activation(parts.activation, gate)
    if parts.up_activation is not None:
        up, up_slope = _activation(parts.up_activation, up)
        value = value * up_slope
    slope = slope * up
    if power == 1:
        return (hidden * slope) @ gate_weight + (hidden * value) @ up_weight
    pulled = (hidden * slope.square()) @ gate_weight.square() + (hidden * value.square()) @ up_weight.square()
    pulled += (2 * hidden * slope * value) @ (gate_weight * up_weight)
    return pulled.clamp_min(0)  # a sum of squares; the cross term may round below 0


def hidden_output(
    parts: MlpParts, up: Float[Tensor, "position hidden"], gate: Float[Tensor, "position hidden"] | None
) -> Float[Tensor, "position hidden"]:
    """What the MLP's map `down` reads, from what `hidden_layer` gives."""
    if gate is None:
        hidden: Tensor = parts.activation(up)
        return hidden
    passed = up if parts.up_activation is None else parts.up_activation(up)
    gated: Tensor = parts.activation(gate) * passed
    return gated


def _activation(
    activation: Callable[[Tensor], Tensor], before: Float[Tensor, "position hidden"]
) -> tuple[Float[Tensor, "position hidden"], Float[Tensor, "position hidden"]]:
    """The activation and its derivative, elementwise."""
    with torch.enable_grad():
        leaf = before.detach().requires_grad_(True)
        value = activation(leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope
