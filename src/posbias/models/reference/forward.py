"""The reference transformer as a pure function of stacked weights: logits of the wanted rows, and attention maps.

Written with a member axis throughout: `stream` is [member, batch, position, feature] and each weight [member, ...], so
that one matrix product per map serves all members; a single model is a stack of one. The last layer computes only the
rows that are asked for.

Where nothing stands between two maps their product may be formed first: q.k = x (W_Q W_K^T) x'^T when heads are not
rotary, and sum_j a_j (x_j W_V) = (sum_j a_j x_j) W_V. For one row of the last layer this leaves almost no work; without
it a step of the networks in benchmarks/train takes 1.6 to 2.2 times as long.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Complex, Float, Inexact, Int
from torch import Tensor
from torch.nn import functional

from posbias.models.reference.config import NORM_EPSILON, ReferenceConfig

Weights = Mapping[str, Tensor]
Stream = Float[Tensor, "member batch position feature"]
Rows = Float[Tensor, "member batch row feature"]
Chosen = tuple[int, ...] | None
"""Rows that are wanted; None: all."""
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


def rows_of(values: Inexact[Tensor, "..."], rows: Chosen, *, dim: int) -> Inexact[Tensor, "..."]:
    """The chosen positions of one axis: a view if they follow each other, as the last one alone does."""
    if rows is None:
        return values
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return values.narrow(dim, rows[0], len(rows))
    return values.index_select(dim, torch.tensor(rows, device=values.device))


def branch(config: ReferenceConfig, weights: Weights, inputs: Stream, maps: Maps) -> Rows:
    """Attention's addition to the stream: mean_h A_h x, sum_h A_h x V_h O_h, or A_h x V_h joined."""
    if config.values != "gaussian":
        return maps.mean(dim=2) @ inputs
    members, batch, heads, rows, n_positions = len(inputs), inputs.shape[1], *maps.shape[2:]
    width, head_dim = config.width, config.head_dim
    if rows * (n_positions * width + width * head_dim) < n_positions * head_dim * (width + rows):
        # (A x) W_V, [member, head, batch * row, feature], so that each head's map is one product.
        whole = (maps.flatten(2, 3) @ inputs).view(members, batch, heads, rows, -1).transpose(1, 2)
        carried = (whole.flatten(2, 3) @ weights["value"]).view(members, heads, batch, rows, -1).permute(0, 2, 3, 1, 4)
    else:
        carried = (maps @ heads_of(inputs, weights["value"])).transpose(2, 3)
    joined = carried.flatten(3)
    return linear(joined, weights["output"].flatten(1, 2)) if config.output_map else joined


def attention(
    config: ReferenceConfig,
    weights: Weights,
    constants: Weights,
    inputs: Stream,
    *,
    rows: Chosen = None,
) -> Maps:
    """Row-stochastic matrices A_h of a layer, from what the branch reads; one for the whole batch without content.

    `rows` are the query positions wanted; None: all.
    """
    bias = rows_of(constants["bias"], rows, dim=2)
    if config.trained_key_bias is not None:  # keys beyond the table have its last number
        key = torch.arange(bias.shape[-1], device=bias.device).clamp(max=config.trained_key_bias - 1)
        bias = bias + weights["trained_key_bias"][:, :, None, key]
    if config.attention != "content":
        return torch.softmax(bias[:, None], dim=-1)
    query, key = queries_and_keys(config, weights, constants, inputs, rows=rows)
    return torch.softmax(query @ key.transpose(-1, -2) + bias[:, None], dim=-1)


def queries_and_keys(
    config: ReferenceConfig, weights: Weights, constants: Weights, inputs: Stream, *, rows: Chosen
) -> tuple[
    Float[Tensor, "member batch head row head_feature"], Float[Tensor, "member batch #head position head_feature"]
]:
    """Queries / sqrt(head_dim) of the chosen rows, and keys: two factors of the logits."""
    stream_rows = rows_of(inputs, rows, dim=2)
    query, key, scale = weights["query"], weights["key"], 1 / math.sqrt(config.head_dim)
    n_rows, n_positions, width, head_dim = stream_rows.shape[2], inputs.shape[2], config.width, config.head_dim
    if "cosine" in constants:
        turn = torch.complex(constants["cosine"], constants["sine"])[:, None]
        aside = rows_of(turn, rows, dim=3) * scale
        # Features k and k + half next to each other: no product of a query with a key changes.
        query, key = (part.view(*part.shape[:-1], 2, -1).mT.flatten(-2) for part in (query, key))
        return turned(heads_of(stream_rows, query), aside), turned(heads_of(inputs, key), turn)
    if (
        n_rows * width * (width + n_positions)
        < (n_rows + n_positions) * width * head_dim + n_rows * n_positions * head_dim
    ):
        return heads_of(stream_rows, query @ (key.transpose(2, 3) / math.sqrt(head_dim))), inputs[:, :, None]
    return heads_of(stream_rows, query * scale), heads_of(inputs, key)


def heads_of(
    inputs: Stream, weight: Float[Tensor, "member head feature head_feature"]
) -> Float[Tensor, "member batch head position head_feature"]:
    """x W for each head, all heads in one product."""
    joined = linear(inputs, weight.transpose(1, 2).flatten(2))
    return joined.view(*inputs.shape[:3], weight.shape[1], -1).transpose(2, 3)


def turned(
    vectors: Float[Tensor, "member batch head position feature"],
    turn: Complex[Tensor, "member one head position pair"],
) -> Float[Tensor, "member batch head position feature"]:
    """Rotary positions: neighbouring features as one complex number, turned by its angle."""
    pairs = torch.view_as_complex(vectors.reshape(*vectors.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


Inputs = Int[Tensor, "member batch position"] | Float[Tensor, "member batch position feature"]


def forward(
    config: ReferenceConfig, parameters: Weights, constants: Weights, inputs: Inputs, *, rows: tuple[int, ...]
) -> Float[Tensor, "member batch row output"]:
    """Logits of the positions `rows`, each in 0 ... N - 1, for every member of a stack of one shape.

    Parameters and constants are those of `draw_parameters` and `constants_of`, each with a leading member axis; inputs
    are token ids, or vectors, of N positions. The configuration is that of any member.
    """
    stream = entrance(parameters, constants, inputs)
    last = config.architecture.depth - 1
    for layer in range(last + 1):
        weights, fixed = of_layer(parameters, constants, layer)
        stream = layer_output(config, weights, fixed, stream, rows=rows if layer == last else None)
    return read_out(config, parameters, entered(config, parameters, "final", stream))


def attention_maps(
    config: ReferenceConfig, parameters: Weights, constants: Weights, inputs: Inputs
) -> Float[Tensor, "layer member batch head query key"]:
    """Attention of every layer and head, for small models: all of them are kept. Arguments as `forward`.

    Returns:
        Rows sum to 1 and are 0 if the mask hides the key.
    """
    stream, maps = entrance(parameters, constants, inputs), []
    for weights, fixed, below in layer_inputs(config, parameters, constants, stream):
        layer_maps = attention(config, weights, fixed, entered(config, weights, "attention", below))
        maps.append(layer_maps.expand(-1, inputs.shape[1], -1, -1, -1))
    return torch.stack(maps)


def layer_inputs(
    config: ReferenceConfig, parameters: Weights, constants: Weights, stream: Stream
) -> Iterator[tuple[Weights, Weights, Stream]]:
    """Weights, constants and input of every layer, from below; `stream` is what enters the first."""
    for layer in range(config.architecture.depth):
        weights, fixed = of_layer(parameters, constants, layer)
        yield weights, fixed, stream
        stream = layer_output(config, weights, fixed, stream)


def entrance(parameters: Weights, constants: Weights, inputs: Inputs) -> Stream:
    """The input of the first layer: the inputs' vectors, with those of their positions if these are added."""
    vectors = inputs
    if not inputs.is_floating_point():
        vectors = parameters["embedding"][torch.arange(len(inputs), device=inputs.device)[:, None, None], inputs]
    return vectors + constants["positions"][:, None] if "positions" in constants else vectors


def layer_output(
    config: ReferenceConfig, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> Rows:
    """One layer, of its wanted rows only (None: all): attention's branch, then the MLP's."""
    passing, added = split(config, weights, constants, stream, rows=rows)
    stream = added if passing is None else passing + added
    if not config.mlp:
        return stream
    hidden = functional.gelu(linear(entered(config, weights, "mlp", stream), weights["up"]))
    update = linear(hidden, weights["down"])
    return update if config.residual == "none" else stream + update


def split(
    config: ReferenceConfig, weights: Weights, constants: Weights, stream: Stream, *, rows: Chosen = None
) -> tuple[Rows | None, Rows]:
    """The part of the stream that the residual keeps (None: nothing), and the part that attention adds to it."""
    entering = entered(config, weights, "attention", stream)
    added = branch(config, weights, entering, attention(config, weights, constants, entering, rows=rows))
    if config.residual == "none":
        return None, added
    passing = rows_of(stream, rows, dim=2)
    if config.residual == "mixed":
        kept, weight = (constants[name][:, None, None, None] for name in ("kept", "added"))
        return kept * passing, weight * added
    return passing, added


def of_layer(parameters: Weights, constants: Weights, layer: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of one layer under their short names, and its constants."""
    prefix = f"blocks.{layer}."
    weights = {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}
    return weights, {name: value[:, layer] for name, value in constants.items() if name != "positions"}


def entered(config: ReferenceConfig, weights: Weights, name: str, stream: Stream) -> Stream:
    """The input of a branch, or of the readout (`final`): the stream, normalised if the configuration has norms."""
    if config.norm == "none":
        return stream
    power = stream.square().mean(dim=-1, keepdim=True)
    return weights[f"{name}_gain"][:, None, None] * stream * torch.rsqrt(power + NORM_EPSILON)


def read_out(config: ReferenceConfig, parameters: Weights, hidden: Rows) -> Float[Tensor, "member batch row output"]:
    """Logits of the outputs."""
    if config.readout == "linear":
        return linear(hidden, parameters["unembedding"].transpose(1, 2))
    for layer in range(config.readout_layers + 1):
        hidden = functional.relu(hidden) if layer else hidden
        hidden = linear(hidden, parameters[f"readout.{layer}.weight"], parameters[f"readout.{layer}.bias"])
    return hidden
