"""A Hugging Face decoder as a reference model: the same logits, from weights copied out of its described parts.

Any family whose blocks are what a reference layer is: GPT-2, BLOOM, Llama, Mistral, Qwen2 and others.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias import Architecture, UsageError
from posbias.architecture import Encoding, NoEncoding, Rope
from posbias.models.families.layout import Block
from posbias.models.families.parts import AttentionParts, MlpParts, Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.forward import ACTIVATIONS
from posbias.models.reference.network import ReferenceTransformer

AGREEMENT = 1e-3
"""Largest difference of logits, relative to their spread: far above rounding, far below any other mathematics."""
FREQUENCY_AGREEMENT = 1e-5
"""Rotary frequencies are kept in single precision."""
ACTIVATION_AGREEMENT = 1e-6
"""BLOOM writes the constant of its tanh with eight digits."""
PROBE_POSITIONS = 7


def reference_from_hugging_face(model: HuggingFaceModel) -> ReferenceTransformer:
    """The reference model that computes what a Hugging Face decoder computes.

    Args:
        model: On the CPU, in float32 or float64, of a described family.

    Returns:
        Its own copies of the weights; equal logits up to rounding (about 1e-5 in float32), checked on one prompt.

    Raises:
        UsageError: the model has a part that no reference layer has, or its type is not allowed.
    """
    family = model.family
    network: Any = model.network
    blocks = family.blocks(network)
    _check_family(model, blocks)
    attention = [family.attention_parts(block, model.config) for block in blocks]
    mlps = [family.mlp_parts(block, model.config) for block in blocks]
    norms = _norms(model, blocks)
    config = _config(model, attention[0], mlp=mlps[0], norm=norms["final"])
    unembedding = network.get_output_embeddings()
    if getattr(unembedding, "bias", None) is not None:
        _refuse(model, ["a bias in its unembedding"])
    parameters: dict[str, Tensor] = {
        "embedding": network.get_input_embeddings().weight,
        "unembedding": unembedding.weight,
    }
    for name, norm in norms.items():
        parameters[f"{name}_gain"] = norm.gain
        if norm.kind != "rms":
            parameters[f"{name}_shift"] = torch.zeros_like(norm.gain) if norm.bias is None else norm.bias
    if config.learned_positions is not None:
        parameters["positions"] = _position_table(model)
    for layer, (parts, mlp) in enumerate(zip(attention, mlps, strict=True)):
        weights = {**_attention_weights(config, parts), **_mlp_weights(config, mlp)}
        parameters |= {f"blocks.{layer}.{name}": value for name, value in weights.items()}
    reference = ReferenceTransformer(config, parameters)
    _check_agreement(model, reference)
    return reference


def _config(model: HuggingFaceModel, parts: AttentionParts, *, mlp: MlpParts, norm: Norm) -> ReferenceConfig:
    """The configuration, read off the first layer; weights of another layer that differ in shape are refused later."""
    family = model.family
    traits = model.architecture_traits()
    rotary = [_rotary(model, layer) for layer in range(traits["depth"])]
    encoding = [found or NoEncoding() for found in rotary] if any(rotary) else traits["encoding"]
    biases = (parts.query_bias, parts.output_bias, mlp.up_bias, mlp.down_bias)
    return ReferenceConfig(
        Architecture(traits["depth"], traits["heads"], mask=traits["mask"], encoding=encoding),
        width=model.width,
        vocabulary_size=model.vocabulary_size,
        attention="content",
        values="gaussian",
        residual="added",
        norm="pre",
        mlp=True,
        dtype=str(model.dtype).removeprefix("torch."),
        head_width=parts.head_dim,
        key_value_heads=parts.key_heads,
        biases=any(bias is not None for bias in biases),
        normalisation=norm.kind,
        norm_epsilon=norm.epsilon,
        embedding_norm=family.embedding_norm is not None,
        mlp_width=mlp.up.shape[0],
        activation=_activation(mlp.activation, model.dtype),
        gated_mlp=mlp.gate is not None,
        learned_positions=None if family.position_table is None else len(_position_table(model)),
    )


def _check_family(model: HuggingFaceModel, blocks: list[Block]) -> None:
    family, config = model.family, model.config
    odd = {
        "attention and MLP in parallel": family.is_parallel(config),
        "an input scale": family.input_scale(config) != 1,
        "norms after its branches": any(
            norm is not None for block in blocks for norm in (block.attention_post_norm, block.mlp_post_norm)
        ),
        "branches without a norm before them": any(
            block.attention_norm is None or block.mlp_norm is None for block in blocks
        ),
        "scaled branches": any(block.branch_scale != 1 for block in blocks),
    }
    for parts in (family.attention_parts(block, config) for block in blocks):
        odd["norms on queries and keys"] = parts.query_norm is not None or parts.key_norm is not None
        odd["capped attention"] = parts.softcap is not None
    _refuse(model, [what for what, found in odd.items() if found])


def _refuse(model: HuggingFaceModel, odd: list[str]) -> None:
    if odd:
        raise UsageError(f"{model.model_type} has {odd[0]}, which no reference layer has; GPT-2, Llama and BLOOM fit")


def _norms(model: HuggingFaceModel, blocks: list[Block]) -> dict[str, Norm]:
    """All norms by the reference's names; of one sort and epsilon."""
    family, network = model.family, model.network
    modules: dict[str, nn.Module | None] = {"final": network.get_submodule(family.final_norm)}
    if family.embedding_norm is not None:
        modules["embedding"] = network.get_submodule(family.embedding_norm)
    for layer, block in enumerate(blocks):
        modules[f"blocks.{layer}.attention"] = block.attention_norm
        modules[f"blocks.{layer}.mlp"] = block.mlp_norm
    norms = {name: family.norm(module) for name, module in modules.items() if module is not None}
    if len({(norm.kind, norm.epsilon) for norm in norms.values()}) > 1:
        _refuse(model, ["norms of different sorts"])
    return norms


def _attention_weights(config: ReferenceConfig, parts: AttentionParts) -> dict[str, Tensor]:
    """[out, in] maps as [head, in, feature]; a scale other than 1 / sqrt(head_dim) goes into the query."""
    rescale = parts.scale * parts.head_dim**0.5

    def by_head(weight: Float[Tensor, "out width"], heads: int) -> Float[Tensor, "head width feature"]:
        return weight.view(heads, parts.head_dim, -1).transpose(1, 2)

    weights = {
        "query": by_head(parts.query * rescale, parts.heads),
        "key": by_head(parts.key, parts.key_heads),
        "value": by_head(parts.value, parts.key_heads),
        "output": parts.output.T.reshape(parts.heads, parts.head_dim, -1),
    }
    if config.biases:
        query = _or_zeros(parts.query_bias, parts.query) * rescale
        weights["query_bias"] = query.view(parts.heads, -1)
        weights["key_bias"] = _or_zeros(parts.key_bias, parts.key).view(parts.key_heads, -1)
        weights["value_bias"] = _or_zeros(parts.value_bias, parts.value).view(parts.key_heads, -1)
        weights["output_bias"] = _or_zeros(parts.output_bias, parts.output)
    return weights


def _mlp_weights(config: ReferenceConfig, parts: MlpParts) -> dict[str, Tensor]:
    weights = {"up": parts.up.T, "down": parts.down.T}
    if parts.gate is not None:
        weights["gate"] = parts.gate.T
    if config.biases:
        weights["up_bias"] = _or_zeros(parts.up_bias, parts.up)
        weights["down_bias"] = _or_zeros(parts.down_bias, parts.down)
        if parts.gate is not None:
            weights["gate_bias"] = _or_zeros(parts.gate_bias, parts.gate)
    return weights


def _or_zeros(bias: Float[Tensor, "out"] | None, weight: Float[Tensor, "out in"]) -> Float[Tensor, "out"]:
    return torch.zeros_like(weight[:, 0]) if bias is None else bias


def _position_table(model: HuggingFaceModel) -> Float[Tensor, "position feature"]:
    assert model.family.position_table is not None
    table = model.network.get_submodule(model.family.position_table).get_parameter("weight")
    return table[model.family.position_offset :]


def _rotary(model: HuggingFaceModel, layer: int) -> Encoding | None:
    """The rotary encoding of a layer, or None where nothing turns."""
    family, block = model.family, model.family.blocks(model.network)[layer]
    found = family.rotary_frequencies(model.network, block, config=model.config, layer=layer)
    if found is None:
        return None
    head_dim = family.attention_parts(block, model.config).head_dim
    half = len(found)
    base = float(found[1] ** -half) if half > 1 else 10000.0  # a single pair turns by 1 whatever the base
    theta = (getattr(model.config, "rope_parameters", None) or {}).get("rope_theta")
    base = float(theta) if theta is not None else base
    if 2 * half != head_dim or not np.allclose(found, base ** (-np.arange(half) / half), rtol=FREQUENCY_AGREEMENT):
        _refuse(model, ["rotary positions of part of a head, or rescaled ones"])
    return Rope(base=base, head_dim=head_dim)


def _activation(activation: Any, dtype: torch.dtype) -> str:
    inputs = torch.linspace(-5, 5, 101, dtype=dtype)
    with torch.no_grad():
        found: Tensor = activation(inputs)
    for name, known in ACTIVATIONS.items():
        if torch.allclose(found, known(inputs), atol=ACTIVATION_AGREEMENT, rtol=0):
            return name
    raise UsageError(f"an MLP's activation is none that reference layers have: {', '.join(ACTIVATIONS)}")


@torch.no_grad()
def _check_agreement(model: HuggingFaceModel, reference: ReferenceTransformer) -> None:
    """Whatever is not described (scaled or capped logits) shows in the logits of one prompt."""
    token_ids = torch.linspace(0, model.vocabulary_size - 1, PROBE_POSITIONS).long()[None]
    theirs = model.last(model.embed(token_ids)).logits
    ours = reference.last(reference.embed(token_ids)).logits
    if not bool((ours - theirs).abs().max() <= AGREEMENT * theirs.std()):
        _refuse(model, ["logits that its described parts do not explain"])
