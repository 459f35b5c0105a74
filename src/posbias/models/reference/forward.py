"""The reference transformer as a pure function of stacked weights: logits of the wanted rows, and attention maps.

Written with a member axis throughout: `stream` is [member, batch, position, feature] and each weight [member, ...], so
that one matrix product per map serves all members; a single model is a stack of one. The last layer computes only the
rows that are asked for.

Where nothing stands between two maps their product may be formed first: q.k = x (W_Q W_K^T) x'^T when heads are not
rotary, and sum_j a_j (x_j W_V) = (sum_j a_j x_j) W_V. For one row of the last layer this leaves almost no work; without
it a step of the networks in benchmarks/train takes 1.6 to 2.2 times as long. A key's bias shifts all logits of a row
alike and drops out of the softmax; a value's bias passes through, as rows sum to 1.

A gated linear layer in attention's place is outer products that fade at one rate per head:

    S_t = exp(-s_t) S_(t-1) + w_t k_t v_t',   y_t = S_t' q_t / sqrt(head_dim),
    w_t = softplus(u_t),   u_t = x_t W_step + b_step,   s_t = slope exp(rate) w_t / log 2,

then an RMS norm of each head and the output map: Mamba 2 without its convolution, skip and output gate. The slope is
the architecture's (`recurrent(slopes=...)`): what the state loses in a position where u = 0, before training.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from jaxtyping import Complex, Float, Inexact, Int
from torch import Tensor
from torch.nn import functional

from posbias.errors import UsageError
from posbias.models.reference.config import ReferenceShape

Weights = Mapping[str, Tensor]
Stream = Float[Tensor, "member batch position feature"]
Rows = Float[Tensor, "member batch row feature"]
Maps = Float[Tensor, "member #batch head row position"]


def linear(
    inputs: Stream,
    weight: Float[Tensor, "member feature output"],
    bias: Float[Tensor, "member output"] | None = None,
) -> Float[Tensor, "member batch position output"]:
    """x W + b with each member's own W and b."""
    flat = inputs.flatten(1, 2)
    product = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias[:, None], flat, weight)
    return product.reshape(*inputs.shape[:3], weight.shape[2])


def rows_of(values: Inexact[Tensor, "..."], rows: tuple[int, ...], *, dim: int) -> Inexact[Tensor, "..."]:
    """Some positions of one axis: a view if they follow each other, as the last one alone does."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values.narrow(dim, rows[0], len(rows))
    return values.index_select(dim, torch.tensor(rows, device=values.device))


def branch(shape: ReferenceShape, weights: Weights, inputs: Stream, maps: Maps) -> Rows:
    """Attention's addition to the stream: mean_h A_h x, mean_h A_h x W, sum_h A_h x V_h O_h, or A_h x V_h joined."""
    if shape.values != "gaussian":
        mean = maps.mean(dim=2) @ inputs
        return linear(mean, weights["value"]) if shape.values == "orthogonal" else mean
    carried = _carried(shape, weights, inputs, maps)
    if not shape.output_map:
        return carried.flatten(3)
    return linear(carried.flatten(3), weights["output"].flatten(1, 2), weights.get("output_bias"))


def _carried(
    shape: ReferenceShape, weights: Weights, inputs: Stream, maps: Maps
) -> Float[Tensor, "member batch row head head_feature"]:
    """The values that each head brings to each row."""
    bias = weights.get("value_bias")
    if not _merges_values(shape, n_rows=maps.shape[3]):
        values = shared(shape, heads_of(inputs, weights["value"], bias))
        return (maps @ values).transpose(2, 3)
    # [member, head, batch * row, feature], so that each head's map is one product.
    members, batch, heads, rows = len(inputs), inputs.shape[1], *maps.shape[2:4]
    whole = (maps.flatten(2, 3) @ inputs).view(members, batch, heads, rows, -1).transpose(1, 2)
    carried = (whole.flatten(2, 3) @ weights["value"]).view(members, heads, batch, rows, -1)
    if bias is not None:
        carried = carried + bias[:, :, None, None]
    return carried.permute(0, 2, 3, 1, 4)


def attention(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None = None
) -> Maps:
    """Row-stochastic matrices A_h of a layer, from what the branch reads; one for the whole batch without content.

    `rows` are the query positions wanted; None: all.
    """
    bias = logit_bias(shape, weights, constants["bias"], rows=rows)[:, None]
    if shape.attention != "content":
        return torch.softmax(bias, dim=-1)
    query, key = queries_and_keys(shape, weights, constants, inputs, rows=rows)
    return torch.softmax(query @ key.transpose(-1, -2) + bias, dim=-1)


def logit_bias(
    shape: ReferenceShape,
    weights: Weights,
    fixed: Float[Tensor, "member head position position"],
    *,
    rows: tuple[int, ...] | None = None,
) -> Float[Tensor, "member head row position"]:
    """Bias on the logits of a layer's chosen rows: the architecture's `fixed` one plus the trained one."""
    bias = fixed if rows is None else rows_of(fixed, rows, dim=2)
    if shape.trained_key_bias is None:
        return bias
    trained, n_positions = weights["trained_key_bias"], shape.n_positions
    beyond = n_positions - shape.trained_key_bias
    if beyond > 0:
        trained = torch.cat((trained, trained[..., -1:].expand(-1, -1, beyond)), dim=2)
    return bias + trained[:, :, None, :n_positions]


def queries_and_keys(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None
) -> tuple[
    Float[Tensor, "member batch head row head_feature"], Float[Tensor, "member batch #head position head_feature"]
]:
    """Queries / sqrt(head_dim) of the chosen rows, and keys: two factors of the logits."""
    stream_rows = inputs if rows is None else rows_of(inputs, rows, dim=2)
    if _merges_queries(shape, n_rows=stream_rows.shape[2]):
        return merged_queries(shape, weights, stream_rows), inputs[:, :, None]
    scale = 1 / math.sqrt(shape.head_dim)
    weight, bias = map_of(shape, weights, "query")
    key = shared(shape, heads_of(inputs, *map_of(shape, weights, "key")))
    if shape.rotary:
        turn = torch.complex(constants["cosine"], constants["sine"])[:, None]
        aside = scale * (turn if rows is None else rows_of(turn, rows, dim=3))
        return turned(heads_of(stream_rows, weight, bias), aside), turned(key, turn)
    return heads_of(stream_rows, weight * scale, None if bias is None else bias * scale), key


def map_of(
    shape: ReferenceShape, weights: Weights, name: str
) -> tuple[Float[Tensor, "member head feature head_feature"], Float[Tensor, "member head head_feature"] | None]:
    """Weight and bias of queries or keys; if they are turned, the two features of each pair side by side."""
    weight, bias = weights[name], weights.get(f"{name}_bias")
    if not shape.rotary:
        return weight, bias
    return _paired(weight), None if bias is None else _paired(bias)


def _paired(features: Float[Tensor, "*any feature"]) -> Float[Tensor, "*any feature"]:
    """Features k and k + half next to each other: no product of a query with a key changes."""
    halves = features.reshape(*features.shape[:-1], 2, -1)
    return halves.transpose(-1, -2).flatten(-2)


def merged_queries(
    shape: ReferenceShape, weights: Weights, stream_rows: Rows
) -> Float[Tensor, "member batch head row feature"]:
    """(x W_Q + b) W_K^T / sqrt(head_dim), as wide as the stream."""
    back = weights["key"].transpose(2, 3) / math.sqrt(shape.head_dim)
    query_key = weights["query"] @ back
    bias = weights.get("query_bias")
    return heads_of(stream_rows, query_key, None if bias is None else (bias[:, :, None] @ back)[:, :, 0])


def heads_of(
    inputs: Stream,
    weight: Float[Tensor, "member head feature head_feature"],
    bias: Float[Tensor, "member head head_feature"] | None,
) -> Float[Tensor, "member batch head position head_feature"]:
    """x W + b for each head, all heads in one product."""
    heads = weight.shape[1]
    joined = linear(inputs, weight.transpose(1, 2).flatten(2), None if bias is None else bias.flatten(1))
    return joined.view(*inputs.shape[:3], heads, -1).transpose(2, 3)


def shared(
    shape: ReferenceShape, vectors: Float[Tensor, "member batch shared position head_feature"]
) -> Float[Tensor, "member batch head position head_feature"]:
    """Keys or values spread over the heads that share them."""
    if shape.key_value_heads == shape.heads:
        return vectors
    return vectors.repeat_interleave(shape.heads // shape.key_value_heads, dim=2)


def turned(
    vectors: Float[Tensor, "member batch head position feature"],
    turn: Complex[Tensor, "member one head position pair"],
) -> Float[Tensor, "member batch head position feature"]:
    """Rotary positions: neighbouring features as one complex number, turned by its angle."""
    pairs = torch.view_as_complex(vectors.reshape(*vectors.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


def _merges_queries(shape: ReferenceShape, *, n_rows: int) -> bool:
    """Tell whether x (W_Q W_K^T) x'^T takes fewer products than (x W_Q) (x' W_K)^T."""
    n, d, e = shape.n_positions, shape.width, shape.head_dim
    if shape.rotary or shape.key_value_heads != shape.heads:
        return False
    return n_rows * d * d + n_rows * n * d < (n_rows + n) * d * e + n_rows * n * e


def _merges_values(shape: ReferenceShape, *, n_rows: int) -> bool:
    """Tell whether (A x) W_V takes fewer products than A (x W_V)."""
    n, d, e = shape.n_positions, shape.width, shape.head_dim
    if shape.key_value_heads != shape.heads:
        return False
    return n_rows * (n * d + d * e) < n * d * e + n_rows * n * e


CHUNK = 64
"""Positions that read each other in one product; what lies further back is read from the state."""
BARE_STEP = math.log(2)
"""softplus(0)."""
LANES = 64
"""A multiple of the values that vector instructions take at once: what is left over is rounded otherwise."""


def linear_branch(
    shape: ReferenceShape, weights: Weights, constants: Weights, inputs: Stream, *, rows: tuple[int, ...] | None = None
) -> Rows:
    """A linear layer's addition to the stream, of the wanted rows (None: all)."""
    query, key, value = (
        heads_of(inputs, weights[name], weights.get(f"{name}_bias")) for name in ("query", "key", "value")
    )
    step = elementwise(functional.softplus, linear(inputs, weights["step"], weights["step_bias"])).transpose(2, 3)
    fall = decay_rates(weights, constants)[:, None, :, None] * step
    written = shared(shape, key) * step[..., None]
    read = recurrence(query / math.sqrt(shape.head_dim), written, shared(shape, value), fall).transpose(2, 3)
    read = read if rows is None else rows_of(read, rows, dim=2)
    read = (read * torch.rsqrt(read.square().mean(dim=-1, keepdim=True) + shape.norm_epsilon)).flatten(3)
    return linear(read, weights["output"].flatten(1, 2), weights.get("output_bias")) if shape.output_map else read


def recurrence(
    query: Float[Tensor, "member *stack position feature"],
    key: Float[Tensor, "member *stack position feature"],
    value: Float[Tensor, "member *stack position carried"],
    fall: Float[Tensor, "member *stack position"],
    *,
    chunk: int = CHUNK,
) -> Float[Tensor, "member *stack position carried"]:
    """y_t = S_t' q_t with S_t = exp(-fall_t) S_(t-1) + k_t v_t', S = 0 at first, in O(N chunk) and no step per token.

    Args:
        query: q_t.
        key: k_t.
        value: v_t.
        fall: Nats that the state loses at each position, >= 0.
        chunk: Positions in one product, >= 1; changes no number beyond rounding.
    """
    n_positions, state, rows = query.shape[-2], None, []
    for start in range(0, n_positions, chunk):
        within = slice(start, start + chunk)
        q, k, v = query[..., within, :], key[..., within, :], value[..., within, :]
        lost = fall[..., within].cumsum(-1)
        since = lost[..., :, None] - lost[..., None, :]
        ahead = torch.ones(since.shape[-2:], dtype=torch.bool, device=since.device).triu(1)
        # Hidden before the exponential: what lies ahead would overflow, and its gradient be no number.
        read = (q @ k.transpose(-1, -2) * elementwise(torch.exp, -since.masked_fill(ahead, torch.inf))) @ v
        if state is not None:
            read = read + elementwise(torch.exp, -lost)[..., None] * (q @ state)
        rows.append(read)
        if start + chunk < n_positions:
            left = elementwise(torch.exp, lost - lost[..., -1:])[..., None]
            added = (k * left).transpose(-1, -2) @ v
            if state is not None:
                added = added + elementwise(torch.exp, -lost[..., -1:])[..., None] * state
            state = added
    return torch.cat(rows, dim=-2)


def elementwise(function: Callable[[Tensor], Tensor], values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """A function of every value, to the same bits whatever members (axis 0) stand beside each other."""
    flat = values.flatten(1)
    beyond = -flat.shape[1] % LANES
    padded = functional.pad(flat, (0, beyond)) if beyond else flat
    return function(padded)[:, : flat.shape[1]].view(values.shape)


def decay_rates(weights: Weights, constants: Weights) -> Float[Tensor, "member head"]:
    """Nats that each head's state loses per unit of w."""
    return constants["slopes"] * elementwise(torch.exp, weights["rate"]) / BARE_STEP


def bare_decays(weights: Weights, constants: Weights) -> Float[Tensor, "member head"]:
    """Nats that each head's state loses per position at bare gates, u = b_step; the slopes at initialisation."""
    return decay_rates(weights, constants) * elementwise(functional.softplus, weights["step_bias"])


Inputs = Int[Tensor, "member batch position"] | Float[Tensor, "member batch position feature"]
Chosen = tuple[int, ...] | None
"""Rows that are wanted; None: all."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
}


def forward(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Float[Tensor, "member batch row output"]:
    """Logits of the positions `rows`, each in 0 ... N - 1, for every member of a stack of one shape.

    Parameters and constants are those of `draw_parameters` and `constants_of`, each with a leading member axis; inputs
    are token ids, or vectors if the shape has no vocabulary, of N positions.

    Raises:
        UsageError: inputs of another length or sort, or a row outside them.
    """
    return read_out(shape, parameters, hidden_states(shape, parameters, constants, inputs, rows=rows))


def hidden_states(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Rows:
    """The stream of some positions after the last layer and norm: what the readout reads. Arguments as `forward`."""
    _check(shape, inputs, rows)
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    for layer in range(shape.depth):
        weights, fixed = of_layer(parameters, layer), of_constants(constants, layer)
        stream = layer_output(shape, weights, fixed, stream, rows=rows if layer == shape.depth - 1 else None)
    return normalise(shape, parameters, "final", stream) if shape.norm == "pre" else stream


def attention_maps(
    shape: ReferenceShape, parameters: Weights, constants: Weights, inputs: Inputs
) -> Float[Tensor, "layer member batch head query key"]:
    """Attention of every layer and head, for small models: all of them are kept. Arguments as `forward`.

    Returns:
        Rows sum to 1 and are 0 if the mask hides the key.

    Raises:
        UsageError: a layer is linear and has no attention.
    """
    refuse_linear_layers(shape.linear_layers)
    _check(shape, inputs, (0,))
    stream = entrance(shape, parameters, constants, embedded(shape, parameters, inputs))
    maps = []
    for weights, fixed, below in layer_inputs(shape, parameters, constants, stream):
        layer_maps = attention(shape, weights, fixed, entered(shape, weights, "attention", below))
        maps.append(layer_maps.expand(-1, inputs.shape[1], -1, -1, -1))
    return torch.stack(maps)


def refuse_linear_layers(linear: Sequence[bool]) -> None:
    """Refuse to take them for attention."""
    layers = ", ".join(str(layer) for layer, is_linear in enumerate(linear) if is_linear)
    if layers:
        raise UsageError(
            f"attention of this reference model: its layers {layers} are linear ones (recurrent), which have no "
            "attention matrix; allowed are models with attention in every layer"
        )


def layer_inputs(
    shape: ReferenceShape, parameters: Weights, constants: Weights, stream: Stream
) -> Iterator[tuple[Weights, Weights, Stream]]:
    """Weights, constants and input of every layer, from below; `stream` is what enters the first."""
    for layer in range(shape.depth):
        weights, fixed = of_layer(parameters, layer), of_constants(constants, layer)
        yield weights, fixed, stream
        stream = layer_output(shape, weights, fixed, stream)


def embedded(shape: ReferenceShape, parameters: Weights, inputs: Inputs) -> Stream:
    """The vectors of the inputs, before anything is added to them."""
    if shape.vocabulary_size is None:
        return inputs
    members = torch.arange(len(inputs), device=inputs.device)[:, None, None]
    return parameters["embedding"][members, inputs]


def entrance(shape: ReferenceShape, parameters: Weights, constants: Weights, vectors: Stream) -> Stream:
    """The input of the first layer: embeddings, normalised if configured, plus vectors of position."""
    if shape.embedding_norm:
        vectors = normalise(shape, parameters, "embedding", vectors)
    if shape.adds_positions:
        vectors = vectors + constants["positions"][:, None]
    if shape.learned_positions is not None:
        vectors = vectors + parameters["positions"][:, None, : shape.n_positions]
    return vectors


def layer_output(
    shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> Rows:
    """One layer, of its wanted rows only (None: all)."""
    passing, added = split(shape, weights, constants, stream, rows=rows)
    stream = added if passing is None else passing + added
    if shape.norm == "post":
        stream = normalise(shape, weights, "attention", stream)
    if shape.mlp_width:
        stream = with_mlp(shape, weights, constants, stream)
    return stream @ weights["rotation"][:, None] if shape.rotate_stream else stream


def split(
    shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> tuple[Rows | None, Rows]:
    """The part of the stream that the residual keeps (None: nothing), and the part that attention, or the linear layer
    in its place, adds to it."""
    entering = entered(shape, weights, "attention", stream)
    if "step" in weights:
        added = linear_branch(shape, weights, constants, entering, rows=rows)
    else:
        added = branch(shape, weights, entering, attention(shape, weights, constants, entering, rows=rows))
    if shape.residual == "none":
        return None, added
    passing = stream if rows is None else rows_of(stream, rows, dim=2)
    if shape.residual == "scaled":
        return scaled(constants["kept"], passing), scaled(constants["added"], added)
    return passing, added


def of_constants(constants: Weights, layer: int) -> dict[str, Tensor]:
    """The constants of one layer."""
    return {name: value[:, layer] for name, value in constants.items() if name != "positions"}


def of_layer(tensors: Weights, layer: int) -> dict[str, Tensor]:
    """The weights of one layer under their short names."""
    prefix = f"blocks.{layer}."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def normalise(shape: ReferenceShape, weights: Weights, name: str, stream: Stream) -> Stream:
    """The norm called `name`."""
    gain = weights[f"{name}_gain"][:, None, None]
    if shape.normalisation == "rms":
        power = stream.square().mean(dim=-1, keepdim=True)
        return gain * stream * torch.rsqrt(power + shape.norm_epsilon)
    shift = weights[f"{name}_shift"][:, None, None]
    return functional.layer_norm(stream, (shape.width,), eps=shape.norm_epsilon) * gain + shift


def entered(shape: ReferenceShape, weights: Weights, name: str, stream: Stream) -> Stream:
    """The input of a branch: the stream, normalised if norms come first."""
    return normalise(shape, weights, name, stream) if shape.norm == "pre" else stream


def with_mlp(shape: ReferenceShape, weights: Weights, constants: Weights, stream: Stream) -> Stream:
    """The stream after the layer's MLP and its residual."""
    inner = entered(shape, weights, "mlp", stream)
    activation = ACTIVATIONS[shape.activation]
    up = linear(inner, weights["up"], weights.get("up_bias"))
    gate = linear(inner, weights["gate"], weights.get("gate_bias")) if shape.gated_mlp else None
    hidden = activation(up) if gate is None else activation(gate) * up
    update = linear(hidden, weights["down"], weights.get("down_bias"))
    if shape.residual == "scaled":
        stream = scaled(constants["mlp_kept"], stream) + update
    else:
        stream = update if shape.residual == "none" else stream + update
    return normalise(shape, weights, "mlp", stream) if shape.norm == "post" else stream


def scaled(factor: Float[Tensor, "member"], stream: Stream) -> Stream:
    """Each member's stream times its own number."""
    return factor[:, None, None, None] * stream


def read_out(shape: ReferenceShape, parameters: Weights, hidden: Rows) -> Float[Tensor, "member batch row output"]:
    """Logits of the outputs."""
    if shape.readout == "linear":
        return linear(hidden, parameters["unembedding"].transpose(1, 2))
    for layer in range(shape.readout_layers + 1):
        hidden = functional.relu(hidden) if layer else hidden
        hidden = linear(hidden, parameters[f"readout.{layer}.weight"], parameters[f"readout.{layer}.bias"])
    return hidden


def _check(shape: ReferenceShape, inputs: Inputs, rows: tuple[int, ...]) -> None:
    vectors = shape.vocabulary_size is None
    expected = "[member, batch, position, feature] of numbers" if vectors else "[member, batch, position] of token ids"
    if inputs.ndim != 3 + vectors or inputs.is_floating_point() != vectors:
        raise UsageError(f"inputs must be {expected}, got {list(inputs.shape)} of {inputs.dtype}")
    if inputs.shape[2] != shape.n_positions:
        raise UsageError(f"inputs have {inputs.shape[2]} positions, the shape {shape.n_positions}")
    if not rows or not all(0 <= row < shape.n_positions for row in rows):
        raise UsageError(f"rows must be positions within 0 ... {shape.n_positions - 1}, at least one, got {list(rows)}")
