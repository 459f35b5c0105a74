"""What the power rollout keeps of stacked reference transformers: every layer's activations and attention, densely.

Reference models are small and computed together, so that attention is kept as matrices [member, batch, head, query,
key]. Heads that carry the stream itself (values `identity` and `orthogonal`) count as one head of their mean attention.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.errors import RunError
from posbias.models.families import Norm
from posbias.models.reference import ReferenceShape
from posbias.models.reference.attention import Weights, attention, branch, heads_of, map_of, shared, turned
from posbias.models.reference.forward import entered, entrance, normalise, of_constants, of_layer, read_out, with_mlp

Stream = Float[Tensor, "member batch position feature"]


@dataclass(frozen=True)
class StackAttention:
    """One layer's attention, and what enters it."""

    weights: Float[Tensor, "member batch head query key"]
    """Rows sum to 1."""
    value: Float[Tensor, "member batch carrier position carried"]
    """What a head carries from each position, before any output map; the stream itself as one carrier where values are
    not `gaussian`."""
    query: Float[Tensor, "member batch head position head_dim"] | None
    """As the dot product sees it; None where content plays no part."""
    key: Float[Tensor, "member batch head position head_dim"] | None


@dataclass(frozen=True)
class StackLayer:
    """One layer: its weights, its constants and its activations."""

    weights: dict[str, Tensor]
    """Under their short names, [member, ...]."""
    constants: dict[str, Tensor]
    stream: Stream
    """The layer's input."""
    attention: StackAttention
    attention_sum: Stream
    """The stream with the attention branch added, before any norm of it."""
    middle: Stream
    """What the MLP branch starts from."""
    mlp_sum: Stream
    """The stream with the MLP branch added, before any norm of it."""

    def norm(self, shape: ReferenceShape, name: str) -> Norm:
        """The norm called `name`, one gain per member."""
        return norm_of(shape, self.weights, name)


@dataclass(frozen=True)
class StackTrace:
    """Stacked members on their inputs."""

    shape: ReferenceShape
    parameters: dict[str, Tensor]
    vectors: Stream
    """What enters the networks, before anything is added to it."""
    layers: list[StackLayer]
    final_stream: Float[Tensor, "member batch feature"]
    """The last position's stream above the last layer."""
    state: Float[Tensor, "member batch feature"]
    """The last position's final state, which the readout reads."""
    score_gradient: Float[Tensor, "member batch feature"] | None
    """Gradient of the target's score by the final state; None for the target "jacobian"."""


def norm_of(shape: ReferenceShape, weights: Weights, name: str) -> Norm:
    """A norm of every member as numbers."""
    shift = weights.get(f"{name}_shift")
    return Norm(
        kind="rms" if shape.normalisation == "rms" else "layer",
        gain=weights[f"{name}_gain"][:, None, None],
        bias=None if shift is None else shift[:, None, None],
        epsilon=shape.norm_epsilon,
    )


@torch.no_grad()
def trace_stack(
    shape: ReferenceShape, parameters: Weights, constants: Weights, vectors: Stream, *, target: str = "jacobian"
) -> StackTrace:
    """Run stacked members forward and keep what the pulls need.

    Args:
        shape: Equal for all members.
        parameters: As `draw_parameters` makes them, each with a leading member axis.
        constants: As `constants_of` makes them, likewise.
        vectors: Embedded inputs.
        target: "jacobian", or "probability" or "logprob" of the likeliest output.

    Raises:
        RunError: an output is not finite.
    """
    shape = replace(shape, merges=False)
    stream, layers = entrance(shape, parameters, constants, vectors), []
    for layer in range(shape.depth):
        kept, stream = _layer(shape, of_layer(parameters, layer), of_constants(constants, layer), stream)
        layers.append(kept)
    final = stream[:, :, -1:]
    state = normalise(shape, parameters, "final", final) if shape.norm == "pre" else final
    if not bool(state.isfinite().all()):
        raise RunError("the model's last state is not finite on a prompt; check its weights for overflow")
    gradient = None if target == "jacobian" else _score_gradient(shape, parameters, state, target)
    return StackTrace(shape, dict(parameters), vectors, layers, final[:, :, 0], state[:, :, 0], gradient)


def _layer(
    shape: ReferenceShape, weights: dict[str, Tensor], constants: dict[str, Tensor], stream: Stream
) -> tuple[StackLayer, Stream]:
    seen = entered(shape, weights, "attention", stream)
    found = _attention(shape, weights, constants, seen)
    total = branch(shape, weights, seen, found.weights)
    if shape.residual == "scaled":
        total = _times(constants["kept"], stream) + _times(constants["added"], total)
    elif shape.residual == "added":
        total = stream + total
    middle = normalise(shape, weights, "attention", total) if shape.norm == "post" else total
    after = middle
    if shape.mlp_width:
        # The norm after the sum is left to the pull, which needs what it reads.
        after = with_mlp(shape if shape.norm == "pre" else replace(shape, norm="none"), weights, constants, middle)
    mlp_sum = after
    if shape.mlp_width and shape.norm == "post":
        after = normalise(shape, weights, "mlp", after)
    kept = StackLayer(weights, constants, stream, found, total, middle, mlp_sum)
    return kept, after @ weights["rotation"][:, None] if shape.rotate_stream else after


def _attention(
    shape: ReferenceShape, weights: dict[str, Tensor], constants: dict[str, Tensor], seen: Stream
) -> StackAttention:
    maps = attention(shape, weights, constants, seen, rows=None).expand(-1, seen.shape[1], -1, -1, -1)
    if shape.values == "gaussian":
        value = shared(shape, heads_of(seen, weights["value"], weights.get("value_bias")))
    else:
        value = seen[:, :, None]  # before an orthogonal map, which comes after the mean over heads
    if shape.attention != "content":
        return StackAttention(maps, value, None, None)
    query = heads_of(seen, *map_of(shape, weights, "query"))
    key = shared(shape, heads_of(seen, *map_of(shape, weights, "key")))
    if shape.rotary:
        turn = torch.complex(constants["cosine"], constants["sine"])[:, None]
        query, key = turned(query, turn), turned(key, turn)
    return StackAttention(maps, value, query, key)


def _score_gradient(
    shape: ReferenceShape, parameters: Weights, state: Float[Tensor, "member batch one feature"], target: str
) -> Float[Tensor, "member batch feature"]:
    with torch.enable_grad():
        leaf = state.detach().requires_grad_(True)
        best = read_out(shape, parameters, leaf).log_softmax(-1).amax(-1)
        (gradient,) = torch.autograd.grad((best if target == "logprob" else best.exp()).sum(), leaf)
    found: Tensor = gradient[:, :, 0]
    return found


def _times(factor: Float[Tensor, "member"], stream: Stream) -> Stream:
    return factor[:, None, None, None] * stream
