"""What the library needs to know about a family of decoders: where its parts are and what they do.

A family is a small class of dotted paths and facts; `Block` is one decoder block taken apart by role. Theory and
measurement read these and nothing else, so a new family is one new file beside this one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from posbias.architecture import Causal, Encoding, Mask, NoEncoding
from posbias.registry import Registry

FAMILIES: Registry["Family"] = Registry("model family")


@dataclass(frozen=True)
class Norm:
    """A normalisation layer as numbers: y = gain * (x - mean?) / sqrt(power + epsilon) + bias."""

    kind: Literal["rms", "layer"]
    gain: Float[Tensor, "feature"]
    """Multiplier of each feature as applied (Gemma: 1 + weight)."""
    bias: Float[Tensor, "feature"] | None
    epsilon: float


@dataclass(frozen=True)
class AttentionParts:
    """Linear maps of one attention layer, all as [out, in] so that y = W x + b; fused maps are split."""

    query: Float[Tensor, "query_features width"]
    key: Float[Tensor, "key_features width"]
    value: Float[Tensor, "key_features width"]
    output: Float[Tensor, "width query_features"]
    heads: int
    key_heads: int
    """Key/value heads; heads / key_heads queries share one."""
    head_dim: int
    scale: float
    """What q.k is multiplied by before the softmax."""
    query_norm: Norm | None = None
    """Norm on queries: per head if its gain has head_dim features, over all features otherwise."""
    key_norm: Norm | None = None
    softcap: float | None = None
    query_bias: Float[Tensor, "query_features"] | None = None
    key_bias: Float[Tensor, "key_features"] | None = None
    value_bias: Float[Tensor, "key_features"] | None = None
    output_bias: Float[Tensor, "width"] | None = None
    clip: float | None = None
    """Bound that queries, keys and values are clamped to after their projection (some MPT checkpoints)."""


@dataclass(frozen=True)
class MlpParts:
    """Linear maps of one MLP, all as [out, in]."""

    up: Float[Tensor, "hidden width"]
    down: Float[Tensor, "width hidden"]
    gate: Float[Tensor, "hidden width"] | None
    """None for a plain MLP down(act(up x)); otherwise down(act(gate x) * (up x))."""
    activation: Any
    """The module or function the family applies elementwise."""
    up_bias: Float[Tensor, "hidden"] | None = None
    down_bias: Float[Tensor, "width"] | None = None
    gate_bias: Float[Tensor, "hidden"] | None = None


@dataclass(frozen=True)
class Block:
    """One decoder block by role; None where the family has no such part."""

    module: nn.Module
    attention: nn.Module
    attention_norm: nn.Module | None
    """Norm of the attention branch's input (None: it reads the stream as it is, as in OLMo-2)."""
    attention_output: nn.Module
    """The output projection; what it returns is the attention branch, up to `attention_post_norm`."""
    attention_post_norm: nn.Module | None
    """Norm applied to the branch before it is added to the stream (Gemma-3, OLMo-2)."""
    mlp: nn.Module
    mlp_norm: nn.Module | None
    mlp_post_norm: nn.Module | None
    attention_stream_norm: nn.Module | None = None
    """Norm applied to the stream after the attention branch was added to it (OPT-350M only)."""
    mlp_stream_norm: nn.Module | None = None
    """Norm applied to the stream after the MLP branch was added to it (OPT-350M only)."""


class Family(ABC):
    """One family of Hugging Face decoders, keyed by its `config.model_type`."""

    name: ClassVar[str]
    layers: ClassVar[str] = "model.layers"
    """Dotted path of the list of blocks, from the causal language model."""
    final_norm: ClassVar[str] = "model.norm"
    embedding_norm: ClassVar[str | None] = None
    """Norm applied to the embeddings before the first block (BLOOM)."""
    position_table: ClassVar[str | None] = None
    """Embedding of absolute positions that is added to the input (GPT-2, OPT)."""
    position_offset: ClassVar[int] = 0
    """Row of the position table that belongs to position 0 (OPT: 2)."""
    parallel: ClassVar[bool] = False
    """Attention and MLP read the same block input and are added together (GPT-NeoX, Phi); ask `is_parallel`."""

    # Paths inside a block.
    attention: ClassVar[str] = "self_attn"
    attention_output: ClassVar[str] = "self_attn.o_proj"
    attention_norm: ClassVar[str | None] = "input_layernorm"
    attention_post_norm: ClassVar[str | None] = None
    mlp: ClassVar[str] = "mlp"
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    mlp_post_norm: ClassVar[str | None] = None

    def heads(self, config: Any) -> int:
        """Query heads per layer."""
        return int(config.num_attention_heads)

    def depth(self, config: Any) -> int:
        """Decoder blocks."""
        return int(config.num_hidden_layers)

    def max_positions(self, config: Any) -> int | None:
        """Longest input the model takes, or was configured for; None where it is unbounded (ALiBi)."""
        return int(config.max_position_embeddings)

    def mask(self, config: Any, layer: int) -> Mask:
        """The attention mask of a layer: causal unless a family says otherwise."""
        return Causal()

    def encoding(self, config: Any, layer: int) -> Encoding:
        """The positional encoding of a layer as a logit bias with constant content.

        "none" unless a family says otherwise: learned positions are added to the input, rotary ones turn queries and
        keys, so with content left out neither adds a logit.
        """
        return NoEncoding()

    @abstractmethod
    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """The attention layer's linear maps and norms."""

    @abstractmethod
    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The MLP's linear maps and activation."""

    def is_parallel(self, config: Any) -> bool:
        """Whether this configuration's attention and MLP read the same block input."""
        return self.parallel

    def unsupported(self, config: Any) -> str | None:
        """Why this configuration does not fit the description of its family, or None where it does."""
        return None

    def final_norm_module(self, network: nn.Module) -> nn.Module | None:
        """The norm between the last block and the unembedding, or None where there is none."""
        return network.get_submodule(self.final_norm)

    def blocks(self, network: nn.Module) -> list[Block]:
        """All decoder blocks, taken apart."""
        layers = network.get_submodule(self.layers)
        return [self.block(module) for module in layers.children()]

    def block(self, module: nn.Module) -> Block:
        """One decoder block, taken apart."""

        def part(path: str | None) -> nn.Module | None:
            return None if path is None else module.get_submodule(path)

        return Block(
            module=module,
            attention=module.get_submodule(self.attention),
            attention_norm=part(self.attention_norm),
            attention_output=module.get_submodule(self.attention_output),
            attention_post_norm=part(self.attention_post_norm),
            mlp=module.get_submodule(self.mlp),
            mlp_norm=part(self.mlp_norm),
            mlp_post_norm=part(self.mlp_post_norm),
        )

    def norm(self, module: nn.Module) -> Norm:
        """A norm module as numbers; families with an offset gain (Gemma) override this."""
        from posbias.models.families.norms import read_norm

        return read_norm(module)
