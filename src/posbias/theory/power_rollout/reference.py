"""Reference transformers in the power rollout: their description, and the trace of one pass.

Masks and logits by position are any matrix there, residuals have factors, and heads that carry the stream itself
(values `identity`, `orthogonal`) agree on its direction, so that the value path squares their mean attention
(docs/theory, section 5).
"""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posbias.errors import RunError
from posbias.models.layout import Block, Mixer
from posbias.models.reference.config import constants_of, shape_of
from posbias.models.reference.forward import (
    entrance,
    logit_bias,
    normalise,
    of_constants,
    of_layer,
    read_out,
    split,
    with_mlp,
)
from posbias.models.reference.network import ReferenceBlock, ReferenceTransformer
from posbias.theory.power_rollout.trace import Description, LayerDescription, LayerTrace, Trace, score_gradient
from posbias.theory.reference import attention_parts, heads_turn_alike, mlp_parts, norm_of


def describe_reference(model: ReferenceTransformer, *, n_positions: int) -> Description:
    """Take a reference model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: the model does not take so many tokens, or has linear layers.
    """
    config, network = model.config, model.network
    constants = {name: value.to(model.device) for name, value in constants_of(config, n_positions).items()}
    shape = shape_of(config, n_positions)
    layers = []
    for index, block in enumerate(network.blocks):
        assert isinstance(block, ReferenceBlock)
        parts = attention_parts(block)
        weights = {name: value.detach()[None] for name, value in block.named_parameters(recurse=False)}
        bias = logit_bias(shape, weights, constants["bias"][index][None])
        bias = bias[0].reshape(parts.key_heads, -1, n_positions, n_positions)
        layers.append(
            LayerDescription(
                index=index,
                block=Block(block, softmax=Mixer(block, block), mlp=block),
                parts=parts,
                mlp=mlp_parts(block),
                attention_norm=norm_of(block, "attention", where="pre"),
                attention_post_norm=None,
                mlp_norm=norm_of(block, "mlp", where="pre"),
                mlp_post_norm=None,
                attention_stream_norm=norm_of(block, "attention", where="post"),
                mlp_stream_norm=norm_of(block, "mlp", where="post"),
                stream_factor=constants["kept"][index],
                branch_factor=constants["added"][index],
                mlp_stream_factor=constants["mlp_kept"][index],
                rotation=block.get_parameter("rotation") if config.rotate_stream else None,
                bias=bias,
                heads_agree=config.values != "gaussian",
            )
        )
    final, embedding = norm_of(network, "final", where="pre"), norm_of(network, "embedding")
    return Description(layers, final, embedding, dtype=config.torch_dtype)


@torch.no_grad()
def trace_reference(
    model: ReferenceTransformer, description: Description, token_ids: Int[Tensor, "position"], *, target: str
) -> Trace:
    """Run one prompt forward and keep the activations that pulls need.

    Raises:
        RunError: an output is not finite.
    """
    vectors = model.embed(token_ids[None])
    shape, parameters, constants = model.network.stack(vectors)
    # The norms of sums are left out of the MLP: a pull needs their inputs.
    bare = shape if shape.norm == "pre" else replace(shape, norm="none")
    stream, layers = entrance(shape, parameters, constants, vectors[None]), []
    for index, block in enumerate(model.network.blocks):
        assert isinstance(block, ReferenceBlock)
        weights, fixed = of_layer(parameters, index), of_constants(constants, index)
        carried, added = split(shape, weights, fixed, stream, rows=None)
        total = added if carried is None else carried + added
        middle = normalise(shape, weights, "attention", total) if shape.norm == "post" else total
        mlp_sum = with_mlp(bare, weights, fixed, middle) if shape.mlp_width else middle
        cosine, sine = (_of_pairs(block, fixed[name][0]) if shape.rotary else None for name in ("cosine", "sine"))
        layers.append(
            LayerTrace(
                stream[0, 0],
                middle[0, 0],
                cosine=cosine,
                sine=sine,
                attention_sum=total[0, 0],
                mlp_sum=mlp_sum[0, 0],
            )
        )
        stream = normalise(shape, weights, "mlp", mlp_sum) if shape.norm == "post" and shape.mlp_width else mlp_sum
        stream = stream @ weights["rotation"][:, None] if shape.rotate_stream else stream
    final = stream[0, :, -1:]
    state = normalise(shape, parameters, "final", final[None])[0] if shape.norm == "pre" else final
    if not bool(state.isfinite().all()):
        raise RunError("the model's last state is not finite on a prompt; check its weights for overflow")
    gradient = None
    if target != "jacobian":
        with torch.enable_grad():
            leaf = state.detach().requires_grad_(True)
            gradient = score_gradient(read_out(shape, parameters, leaf[None])[0, 0, 0], leaf, target)
    return Trace(vectors[0], layers, final[0, 0], state[0, 0], gradient)


def _of_pairs(
    block: ReferenceBlock, values: Float[Tensor, "head position pair"]
) -> Float[Tensor, "*heads position rotary"]:
    """Cosines or sines for both features of a pair; one row per head only if heads turn differently."""
    of_features = torch.cat([values, values], -1)
    return of_features[0] if heads_turn_alike(block) else of_features
