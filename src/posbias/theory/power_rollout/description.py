"""A described model taken apart for the power rollout: per layer its linear maps, norms, mask and rotation.

Everything comes from `posbias.models`: a model is supported when its family is described and its attention can be
recomputed (docs/theory, section 5).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.models.attention import AttentionLayer, describe_attention
from posbias.models.families import Block, MixtureParts, MlpParts, Norm, weight_of
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model


@dataclass(frozen=True)
class LayerDescription:
    """One block's maps and facts."""

    index: int
    block: Block
    attention: AttentionLayer
    mlp: MlpParts | MixtureParts
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    attention_stream_norm: Norm | None
    """Of the stream after the attention branch was added (OPT-350M)."""
    mlp_stream_norm: Norm | None
    """Of the stream after the MLP branch was added (OPT-350M)."""
    parallel: bool
    """Both branches read the block's input."""

    def inputs(self) -> dict[str, nn.Module]:
        """Modules whose inputs a trace keeps, by the name they are kept under."""
        block = self.block
        modules: dict[str, nn.Module | None] = {
            "stream": block.module,
            "attention_branch": block.attention_post_norm,
            "mlp_branch": block.mlp_post_norm,
            "attention_sum": block.attention_stream_norm,
            "mlp_sum": block.mlp_stream_norm,
        }
        if not self.parallel and block.attention_stream_norm is None:
            modules["middle"] = block.mlp_norm or block.mlp
        return {name: module for name, module in modules.items() if module is not None}

    def hidden_maps(self) -> dict[str, nn.Module]:
        """Modules that are the MLP's maps into its hidden layer, whole; none where one module holds several maps."""
        if isinstance(self.mlp, MixtureParts):
            return {}
        weights = {"up": self.mlp.up, "gate": self.mlp.gate}
        found = {}
        for module in self.block.module.modules():
            held = getattr(module, "weight", None)
            for name, weight in weights.items():
                if isinstance(held, Tensor) and weight is not None and _same_storage(held, weight):
                    found[name] = module
        return found


@dataclass(frozen=True)
class Description:
    """A whole model, taken apart."""

    layers: list[LayerDescription]
    final_module: nn.Module | None
    final_norm: Norm | None
    embedding_norm: Norm | None
    """Between the vectors entering the network and the first block (BLOOM)."""
    input_projection: Float[Tensor, "stream width"] | None
    """From the vectors entering the network to the stream (OPT-350M)."""
    output_projection: Float[Tensor, "state stream"] | None
    """From the final stream to what the unembedding reads (OPT-350M)."""
    input_scale: float
    """What the network multiplies the vectors entering it by (Granite)."""
    unembedding: nn.Module
    dtype: torch.dtype
    """What the theory computes in: float64 for float64 models, float32 otherwise."""


def describe_model(model: Model, *, n_positions: int) -> Description:
    """Take a model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: the family is not described, attention cannot be recomputed, a layer is not causal, the model
            does not take so many tokens, or its weights lie on several devices.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(
            f"the power rollout has no local maps for {type(model).__name__}; "
            "give a Hugging Face model or a reference model"
        )
    family, network = model.family, model.network
    if n_positions < 1 or (model.max_positions is not None and n_positions > model.max_positions):
        raise UsageError(f"prompts must have 1 to {model.max_positions} tokens for this model, got {n_positions}")
    places = sorted({str(parameter.device) for parameter in network.parameters()})
    if len(places) > 1:
        raise UsageError(f"the power rollout needs all weights on one device, got {', '.join(places)}")
    final_module = family.final_norm_module(network)
    embedding = None if family.embedding_norm is None else family.norm(network.get_submodule(family.embedding_norm))
    entry, leave = family.projections(network)
    blocks, attention = family.blocks(network), describe_attention(model, n_positions=n_positions)
    return Description(
        layers=[_describe_layer(model, block, layer) for block, layer in zip(blocks, attention, strict=True)],
        final_module=final_module,
        final_norm=None if final_module is None else family.norm(final_module),
        embedding_norm=embedding,
        input_projection=None if entry is None else weight_of(entry),
        output_projection=None if leave is None else weight_of(leave),
        input_scale=family.input_scale(model.config),
        unembedding=network.get_output_embeddings(),  # type: ignore[operator]
        dtype=torch.float64 if model.dtype == torch.float64 else torch.float32,
    )


def _same_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place, transposed or not."""
    return one.numel() == other.numel() and one.data_ptr() == other.data_ptr() != 0


def _describe_layer(model: HuggingFaceModel, block: Block, attention: AttentionLayer) -> LayerDescription:
    family, config = model.family, model.config

    def norm(module: nn.Module | None) -> Norm | None:
        return None if module is None else family.norm(module)

    return LayerDescription(
        index=attention.index,
        block=block,
        attention=attention,
        mlp=family.mixture_parts(block, config) or block.mlp_added(family.mlp_parts(block, config)),
        attention_norm=norm(block.attention_norm),
        attention_post_norm=norm(block.attention_post_norm),
        mlp_norm=norm(block.mlp_norm),
        mlp_post_norm=norm(block.mlp_post_norm),
        attention_stream_norm=norm(block.attention_stream_norm),
        mlp_stream_norm=norm(block.mlp_stream_norm),
        parallel=family.is_parallel(config),
    )
