"""`MeanFieldSpec` read off a model: mean squares of its weights, its norms' epsilons, its masks and encodings.

Meant for a model at initialisation. Whatever its initialiser did (depth-scaled output projections, a custom scheme) is
in the weights, so nothing about the initialiser has to be known.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from posbias.architecture import HeadGroup, Rope
from posbias.errors import UsageError
from posbias.models.families import AttentionParts, Block, Family, MlpParts, Norm
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.reference import ReferenceBlock, ReferenceNetwork, ReferenceTransformer
from posbias.models.reference.forward import ACTIVATIONS
from posbias.models.reference.parameters import shown
from posbias.theory.mean_field.activations import Activation, recognise
from posbias.theory.mean_field.spec import (
    AttentionSpec,
    HeadNormSpec,
    LayerSpec,
    LinearSpec,
    MeanFieldSpec,
    MlpSpec,
    NormSpec,
    ResidualSpec,
)

EMBEDDING_ROWS = 4096
"""Rows of the embedding whose mean square is taken: its relative error is then below 0.2 % at width 256."""
CLIP_DEVIATIONS = 5.0
"""A clamp this many standard deviations out never acts."""


def spec_of(model: Model) -> MeanFieldSpec:
    """The mean-field description of a model.

    Raises:
        UsageError: the model's family is not described, or something in it has no mean-field theory.
    """
    if isinstance(model, ReferenceTransformer):
        return _reference_spec(model)
    if isinstance(model, HuggingFaceModel):
        return _family_spec(model)
    raise UsageError(f"mean field needs a described model, got {type(model).__name__}")


def _family_spec(model: HuggingFaceModel) -> MeanFieldSpec:
    family, config, network = model.family, model.config, model.network
    blocks = family.blocks(network)
    final = family.final_norm_module(network)
    layers = tuple(
        LayerSpec(
            attention=_attention_spec(model, block, layer),
            mlp=_mlp_spec(family, block, config),
            parallel=family.is_parallel(config),
        )
        for layer, block in enumerate(blocks)
    )
    first = family.attention_parts(blocks[0], config)
    if first.query.shape[1] != model.width:
        raise UsageError(f"mean field needs embeddings as wide as the blocks, got {model.width}")
    input_scale = family.input_scale(config)
    return MeanFieldSpec(
        width=model.width,
        layers=layers,
        embedding=_embedding_power(model) * input_scale**2,
        input_scale=input_scale,
        positions=_position_power(family, network),
        embedding_norm=None
        if family.embedding_norm is None
        else _norm(family, network.get_submodule(family.embedding_norm)),
        final_norm=_norm(family, final),
    )


def _attention_spec(model: HuggingFaceModel, block: Block, layer: int) -> AttentionSpec:
    family, config = model.family, model.config
    parts = block.attention_added(family.attention_parts(block, config))
    _check_clip(parts, model.width)
    group = HeadGroup(
        mask=family.mask(config, layer),
        encoding=family.encoding(config, layer),
        heads=np.arange(parts.heads),
        n_heads=parts.heads,
        content=np.zeros(parts.heads),
        sinks=np.full(parts.heads, -np.inf),
    )
    return AttentionSpec(
        heads=parts.heads,
        head_dim=parts.head_dim,
        scale=parts.scale,
        query=_linear(parts.query, parts.query_bias),
        key=_linear(parts.key, parts.key_bias),
        value=_linear(parts.value, parts.value_bias),
        output=_linear(parts.output, parts.output_bias),
        groups=(group,),
        rotation=_rotation(model, block, layer),
        query_norm=_head_norm(parts.query_norm, parts.head_dim),
        key_norm=_head_norm(parts.key_norm, parts.head_dim),
        softcap=parts.softcap,
        pre_norm=_norm(family, block.attention_norm),
        post_norm=_norm(family, block.attention_post_norm),
        residual=ResidualSpec(norm=_norm(family, block.attention_stream_norm)),
    )


def _mlp_spec(family: Family, block: Block, config: Any) -> MlpSpec:
    parts = block.mlp_added(family.mlp_parts(block, config))
    return MlpSpec(
        hidden=int(parts.up.shape[0]),
        activation=_activation(parts),
        up=_linear(parts.up, parts.up_bias),
        down=_linear(parts.down, parts.down_bias),
        gate=None if parts.gate is None else _linear(parts.gate, parts.gate_bias),
        pre_norm=_norm(family, block.mlp_norm),
        post_norm=_norm(family, block.mlp_post_norm),
        residual=ResidualSpec(norm=_norm(family, block.mlp_stream_norm)),
    )


def _activation(parts: MlpParts) -> Activation:
    def evaluate(x: Float64[np.ndarray, "..."]) -> Float64[np.ndarray, "..."]:
        with torch.no_grad():
            values: Tensor = parts.activation(torch.from_numpy(x).float())
        return values.double().numpy()

    return recognise(evaluate)


def _linear(weight: Tensor, bias: Tensor | None) -> LinearSpec:
    return LinearSpec(variance=_power(weight), bias=0.0 if bias is None else _power(bias))


def _power(values: Tensor) -> float:
    """Mean square."""
    return float(values.detach().double().square().mean())


def _norm(family: Family, module: nn.Module | None) -> NormSpec | None:
    return None if module is None else _norm_spec(family.norm(module))


def _norm_spec(norm: Norm) -> NormSpec:
    bias = 0.0 if norm.bias is None else _power(norm.bias)
    return NormSpec(epsilon=norm.epsilon, gain=_power(norm.gain), bias=bias)


def _head_norm(norm: Norm | None, head_dim: int) -> HeadNormSpec | None:
    return None if norm is None else HeadNormSpec(_norm_spec(norm), per_head=norm.gain.shape[-1] == head_dim)


def _check_clip(parts: AttentionParts, width: int) -> None:
    """A clamp on queries, keys and values must be too far out to act."""
    largest = max(_power(weight) for weight in (parts.query, parts.key, parts.value))
    if parts.clip is not None and parts.clip < CLIP_DEVIATIONS * (largest * width) ** 0.5:
        raise UsageError(f"mean field has no theory for queries, keys and values clamped to {parts.clip}")


@torch.no_grad()
def _embedding_power(model: Model) -> float:
    rows = np.unique(np.linspace(0, model.vocabulary_size - 1, EMBEDDING_ROWS).astype(np.int64))
    power = model.embed(model.token_tensor([rows.tolist()])).double().square().mean(dim=-1)
    return float(power[power > 0].mean())  # a padding token's row is zero


def _position_power(family: Family, network: nn.Module) -> float:
    if family.position_table is None:
        return 0.0
    table = network.get_submodule(family.position_table).get_parameter("weight")
    return _power(table[family.position_offset :])


def _rotation(model: HuggingFaceModel, block: Block, layer: int) -> Float64[np.ndarray, "heads pairs"] | None:
    """Rotary frequencies, the same for every head; None where a layer turns nothing."""
    family, config = model.family, model.config
    frequencies = family.rotary_frequencies(model.network, block, config=config, layer=layer)
    return None if frequencies is None else np.tile(frequencies, (family.heads(config), 1))


def _reference_spec(model: ReferenceTransformer) -> MeanFieldSpec:
    config, network = model.config, model.network
    if config.values != "gaussian":
        raise UsageError(f"mean field needs values drawn for every head (gaussian), got {config.values!r}")
    if config.vocabulary_size is None and model.items is None:
        raise UsageError("mean field needs to know this model's input vectors; give it items")
    if config.embedding_norm and (config.learned_positions is not None or config.input_encoding is not None):
        raise UsageError("mean field has no embedding norm before positions are added; allowed: either of the two")
    blocks = [block for block in network.blocks if isinstance(block, ReferenceBlock)]
    return MeanFieldSpec(
        width=model.width,
        layers=tuple(LayerSpec(_reference_attention(block), _reference_mlp(block)) for block in blocks),
        embedding=_embedding_power(model),
        positions=0.0 if config.learned_positions is None else _power(network.get_parameter("positions")),
        added=config.input_encoding,
        embedding_norm=_reference_norm(network, "embedding") if config.embedding_norm else None,
        final_norm=_reference_norm(network, "final") if config.norm == "pre" else None,
    )


def _reference_norm(module: ReferenceBlock | ReferenceNetwork, name: str) -> NormSpec:
    shift = 0.0 if module.config.normalisation == "rms" else _power(module.get_parameter(f"{name}_shift"))
    return NormSpec(module.config.norm_epsilon, gain=_power(module.get_parameter(f"{name}_gain")), bias=shift)


def _reference_linear(block: ReferenceBlock, name: str) -> LinearSpec:
    bias = _power(block.get_parameter(f"{name}_bias")) if block.config.biases else 0.0
    return LinearSpec(_power(block.get_parameter(name)), bias=bias)


def _reference_attention(block: ReferenceBlock) -> AttentionSpec:
    config = block.config
    content = config.attention == "content"
    kept, added = (config.residual_scale, 1.0) if config.residual == "added" else (0.0, 1.0)
    if config.residual == "mixed":
        kept, added = 1 - block.mixing, block.mixing
    norm = None if config.norm == "none" else _reference_norm(block, "attention")
    return AttentionSpec(
        heads=config.architecture.heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        query=_reference_linear(block, "query") if content else LinearSpec(0.0),
        key=_reference_linear(block, "key") if content else LinearSpec(0.0),
        value=_reference_linear(block, "value"),
        # Heads side by side: the identity, which takes as much from every feature as a random map of this variance.
        output=_reference_linear(block, "output") if config.output_map else LinearSpec(1 / config.width),
        groups=tuple(shown(config, group) for group in block.groups),
        rotation=_reference_rotation(block) if content else None,
        pre_norm=norm if config.norm == "pre" else None,
        residual=ResidualSpec(kept, added, norm if config.norm == "post" else None),
    )


def _reference_mlp(block: ReferenceBlock) -> MlpSpec | None:
    config = block.config
    if not config.mlp:
        return None
    norm = None if config.norm == "none" else _reference_norm(block, "mlp")
    kept = {"none": 0.0, "mixed": 1.0, "added": config.residual_scale}[config.residual]
    return MlpSpec(
        hidden=config.hidden_width,
        activation=recognise(lambda x: ACTIVATIONS[config.activation](torch.from_numpy(x)).numpy()),
        up=_reference_linear(block, "up"),
        down=_reference_linear(block, "down"),
        gate=_reference_linear(block, "gate") if config.gated_mlp else None,
        pre_norm=norm if config.norm == "pre" else None,
        residual=ResidualSpec(kept, 1.0, norm if config.norm == "post" else None),
    )


def _reference_rotation(block: ReferenceBlock) -> Float64[np.ndarray, "heads pairs"] | None:
    """Frequencies of every head; zero where a head is not rotary."""
    half = block.config.head_dim // 2
    rotation = np.zeros((block.config.architecture.heads, half))
    for group in block.groups:
        if isinstance(group.encoding, Rope):
            rotation[group.heads] = group.encoding.base ** (-np.arange(half) / half)
    return rotation if np.any(rotation) else None
