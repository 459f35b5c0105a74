"""Families of decoders, described: where the parts of a network are and what they do.

A family is a small class of dotted paths and facts, whose defaults are Llama's; `Block` is one decoder block taken
apart by role. Theory and measurement read these and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from posbias.architecture import Causal, Encoding, Mask, NoEncoding, Recurrent, SlidingWindow
from posbias.errors import UsageError
from posbias.models.families.parts import (
    AttentionParts,
    Fusion,
    MixtureParts,
    MlpParts,
    Norm,
    bias_of,
    neighbours_as_halves,
    read_attention,
    read_norm,
    readable,
    weight_of,
)
from posbias.models.rotary import changing_kinds
from posbias.registry import Registry

FAMILIES: Registry["Family"] = Registry("model family")

Angles = tuple[Float[Tensor, "position rotary"], Float[Tensor, "position rotary"]]
"""Cosines and sines of a layer for a single prompt."""
Windows = Literal["none", "all layers", "layer_types"]
KNOWN_ATTENTION = ("eager", "flash_attention_2", "flash_attention_3", "flex_attention", "sdpa")
"""transformers' own attention implementations; one registered by someone else may compute anything."""


@dataclass(frozen=True)
class Mixer:
    """A layer that mixes positions, by the parts at its two ends."""

    module: nn.Module
    output: nn.Module
    """The output projection."""
    scale: float = 1.0
    """Factor on the layer's output when it is added to the stream (Granite, Falcon-H1)."""


@dataclass(frozen=True)
class Block:
    """One decoder block by role; None for a part that it does not have.

    What attention and linear layer add to the stream is one branch, the attention branch by name, whichever is there.
    """

    module: nn.Module
    softmax: Mixer | None = None
    """The attention."""
    linear: Mixer | None = None
    """A state-space, gated linear or convolutional layer, which has no attention matrix: in attention's place, or
    beside it (Falcon-H1)."""
    attention_norm: nn.Module | None = None
    """Norm of the attention branch's input (None: it reads the stream as it is, as in OLMo-2)."""
    attention_post_norm: nn.Module | None = None
    """Norm applied to the branch before it is added to the stream (Gemma-3, OLMo-2)."""
    mlp: nn.Module | None = None
    mlp_norm: nn.Module | None = None
    mlp_post_norm: nn.Module | None = None
    attention_stream_norm: nn.Module | None = None
    """Norm applied to the stream after the attention branch was added to it (OPT-350M only)."""
    mlp_stream_norm: nn.Module | None = None
    """Norm applied to the stream after the MLP branch was added to it (OPT-350M only)."""
    mlp_scale: float = 1.0
    """Factor on the MLP's output when it is added to the stream (Granite, Falcon-H1)."""
    output_scale: float | Float[Tensor, "1"] = 1.0
    """Factor on the stream that the block returns (Gemma 4)."""

    @property
    def attention(self) -> nn.Module:
        """The attention of a block that has it."""
        assert self.softmax is not None, "blocks that have attention are those of `Family.attention_blocks`"
        return self.softmax.module

    @property
    def attention_output(self) -> nn.Module:
        """The output projection of the attention of a block that has it."""
        assert self.softmax is not None, "blocks that have attention are those of `Family.attention_blocks`"
        return self.softmax.output

    @property
    def mixers(self) -> list[Mixer]:
        """The layers that mix positions, which read the same; none if every position stays by itself."""
        return [mixer for mixer in (self.softmax, self.linear) if mixer is not None]

    @property
    def adds(self) -> list[tuple[nn.Module, float]]:
        """Modules whose outputs, times these factors, are the attention branch as it is added to the stream.

        They are not the attention modules themselves: BLOOM's returns residual + branch.
        """
        if self.attention_post_norm is None:
            return [(mixer.output, mixer.scale) for mixer in self.mixers]
        (mixer,) = self.mixers
        return [(self.attention_post_norm, mixer.scale)]

    def attention_added(self, parts: AttentionParts) -> AttentionParts:
        """The attention's parts with its factor in the output map: the branch as it is added."""
        assert self.softmax is not None, "only attention has these parts"
        scale = self.softmax.scale
        if scale == 1:
            return parts
        bias = None if parts.output_bias is None else parts.output_bias * scale
        return replace(parts, output=parts.output * scale, output_bias=bias)

    def mlp_added(self, parts: MlpParts) -> MlpParts:
        """The MLP's parts with `mlp_scale` in the down map."""
        if self.mlp_scale == 1:
            return parts
        bias = None if parts.down_bias is None else parts.down_bias * self.mlp_scale
        return replace(parts, down=parts.down * self.mlp_scale, down_bias=bias)


def stream_read(positional: tuple[Any, ...], named: Mapping[str, Any]) -> Float[Tensor, "batch position feature"]:
    """The stream that a block, or its attention, is about to read, among the arguments of its call."""
    stream: Tensor = positional[0] if positional else named["hidden_states"]
    return stream


class Family:
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
    parallel_switch: ClassVar[str | None] = None
    """Entry of the configuration that says whether they do, in families that differ in it."""
    refused: ClassVar[tuple[str, ...]] = ()
    """Entries of the configuration that must not be set, because the description would not fit."""
    windows: ClassVar[Windows] = "none"
    """The layers that see `config.sliding_window` keys: all, or those that `config.layer_types` names."""
    rotary: ClassVar[bool] = True
    """Queries and keys are turned by position; ask `rotates` about one layer."""
    turns_neighbours: ClassVar[bool] = False
    """Neighbouring features turn, not half against half."""

    # Paths inside a block.
    attention: ClassVar[str] = "self_attn"
    attention_output: ClassVar[str] = "self_attn.o_proj"
    attention_norm: ClassVar[str | None] = "input_layernorm"
    attention_post_norm: ClassVar[str | None] = None
    mlp: ClassVar[str | None] = "mlp"
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    mlp_post_norm: ClassVar[str | None] = None

    linear: ClassVar[str | None] = None
    """The layer that mixes positions where a block has no attention, or beside it; ask `is_linear`."""
    side_by_side: ClassVar[bool] = False
    """Blocks with a linear layer have attention, too."""
    linear_output: ClassVar[str] = "out_proj"
    """Its output projection, within it."""

    # Names inside its attention and its MLP.
    query_key_value: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """Three projections, or one that holds all three."""
    packs_projections: ClassVar[bool] = False
    """A projection holds more than queries, keys and values, or they are made of latents: no method may change it."""
    fusion: ClassVar[Fusion] = "stacked"
    query_key_norms: ClassVar[tuple[str, str] | None] = None
    """Norms of queries and keys before they turn, of each head or over all features."""
    query_key_norm_switch: ClassVar[str | None] = None
    """Entry of the configuration that says whether these norms are there; None: they always are."""
    up_and_down: ClassVar[tuple[str, str]] = ("up_proj", "down_proj")
    """The maps of the MLP, beside its `gate` if it has one."""
    gate: ClassVar[str] = "gate_proj"
    gate_in_up: ClassVar[bool] = False
    """The first half of the up projection is the gate."""
    activation: ClassVar[str] = "act_fn"
    no_mean_field: ClassVar[str | None] = None
    """Parts that mean field has no theory for, in every model of the family."""
    some_models: ClassVar[str | None] = None
    """What does not run on some models of the family."""
    attends: ClassVar[bool] = True
    """Some layer has attention."""
    replaceable: ClassVar[bool] = True
    """Attention goes through transformers' attention interface, and no cap is on its logits as published."""
    groups_heads: ClassVar[bool] = False
    """Heads are grouped by `num_key_value_heads`; another family's configuration may hold that without a meaning."""
    scale: ClassVar[str] = "scaling"
    """Attribute of the attention that q.k is multiplied by; ask `logit_scale`."""

    def heads(self, config: Any) -> int:
        """Query heads per layer."""
        return int(config.num_attention_heads)

    def key_heads(self, config: Any) -> int:
        """Key/value heads per layer."""
        return int(config.num_key_value_heads) if self.groups_heads else self.heads(config)

    def depth(self, config: Any) -> int:
        """Decoder blocks."""
        return int(config.num_hidden_layers)

    def max_positions(self, config: Any) -> int | None:
        """Longest input the model takes, or was configured for; None if it is unbounded (ALiBi, state spaces)."""
        longest = getattr(config, "max_position_embeddings", None)
        return None if longest is None else int(longest)

    def mask(self, config: Any, layer: int) -> Mask:
        """The attention mask of a layer; transformers counts the query's own position in a window, as we do."""
        types = getattr(config, "layer_types", None) if self.windows == "layer_types" else None
        windowed = self.windows == "all layers" or (types is not None and types[layer] == "sliding_attention")
        width = getattr(config, "sliding_window", None) if windowed else None
        return Causal() if width is None else SlidingWindow(width=int(width))

    def encoding(self, config: Any, layer: int) -> Encoding:
        """The positional encoding of a layer as a logit bias with constant content.

        "none" unless a family says otherwise: learned positions are added to the input, rotary ones turn queries and
        keys, so with content left out neither adds a logit.
        """
        return NoEncoding()

    def encodings(self, network: nn.Module, config: Any) -> list[Encoding]:
        """The encoding of every layer; of a linear one its own decays, as many quantiles of them as there are heads.

        Attention beside a linear layer counts as many decays of 0, which is what it is without content.
        """
        heads, encodings = self.heads(config), list[Encoding]()
        for layer, block in enumerate(self.blocks(network)):
            if block.linear is None:
                encodings.append(self.encoding(config, layer))
                continue
            slopes = Recurrent(self.decays(block.linear.module).tolist()).linear_slopes(heads).tolist()
            encodings.append(Recurrent(slopes if block.softmax is None else [0.0] * heads + slopes))
        return encodings

    def logit_scale(self, attention: nn.Module) -> float:
        """Factor that the attention multiplies q.k by."""
        return float(getattr(attention, self.scale))

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """The attention layer's linear maps and norms."""
        parts = read_attention(
            [block.attention.get_submodule(name) for name in self.query_key_value],
            block.attention_output,
            heads=(self.heads(config), self.key_heads(config)),
            fusion=self.fusion,
            scale=self.logit_scale(block.attention),
        )
        sinks = getattr(block.attention, "sinks", None)
        if sinks is not None:
            parts = replace(parts, sinks=readable(block.attention, "sinks").detach())
        switch = self.query_key_norm_switch
        if self.query_key_norms is not None and (switch is None or getattr(config, switch)):
            norms = (self.norm(block.attention.get_submodule(name)) for name in self.query_key_norms)
            parts = replace(parts, query_norm=next(norms), key_norm=next(norms))
        return neighbours_as_halves(parts, self.turned(config, parts.head_dim)) if self.turns_neighbours else parts

    def turned(self, config: Any, head_dim: int) -> int:
        """Features of each head that turn; asked if neighbours turn."""
        return int(head_dim * float(config.rope_parameters.get("partial_rotary_factor", 1.0)))

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The MLP's linear maps and activation; refused for a mixture of experts, which `mixture_parts` reads."""
        if self.is_mixture(block):
            raise UsageError(f"MLPs of {self.name} are mixtures of experts; a single MLP is needed")
        return self.mlp_within(self.mlp_module(block))

    def is_mixture(self, block: Block) -> bool:
        """Tell whether a block has a mixture of experts for its MLP."""
        return any(hasattr(module, "experts") for module in self.mlp_modules(block))

    def mlp_modules(self, block: Block) -> tuple[nn.Module, ...]:
        """The modules whose outputs, added up, are the MLP branch before any norm or factor; none without an MLP."""
        return () if block.mlp is None else (block.mlp,)

    def mlp_module(self, block: Block) -> nn.Module:
        """The module in which the maps of the MLP lie."""
        assert block.mlp is not None, "a family without MLPs says why they cannot be read"
        return block.mlp

    def mlp_within(self, module: nn.Module) -> MlpParts:
        """The MLP whose maps lie in a module."""
        up, down = (module.get_submodule(name) for name in self.up_and_down)
        gate: Any = getattr(module, self.gate, None)
        up_map, up_bias = weight_of(up), bias_of(up)
        gate_map, gate_bias = (None, None) if gate is None else (weight_of(gate), bias_of(gate))
        if self.gate_in_up:
            gate_map, up_map = up_map.chunk(2)
            gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2)
        return MlpParts(
            up=up_map,
            down=weight_of(down),
            gate=gate_map,
            activation=getattr(module, self.activation),
            up_bias=up_bias,
            down_bias=bias_of(down),
            gate_bias=gate_bias,
        )

    def mixture_parts(self, block: Block, config: Any) -> MixtureParts | None:
        """The experts and the router, if the block has a mixture of experts for its MLP."""
        return None

    def embedding_scale(self, config: Any) -> float:
        """Factor that the network puts on token embeddings outside the embedding layer, and on no vectors given."""
        return 1.0

    def input_scale(self, config: Any) -> float:
        """Factor that the network puts on the vectors that enter it, before the first block."""
        return 1.0

    def rotates(self, attention: nn.Module, config: Any) -> bool:
        """Tell whether this layer's attention module turns queries and keys by position."""
        return self.rotary

    def angles(self, attention: nn.Module, arguments: Mapping[str, Any]) -> Angles:
        """Cosines and sines of a layer that rotates, from its attention module and the named arguments of its call."""
        cosine, sine = arguments["position_embeddings"]
        return cosine[0], sine[0]

    def rotary_frequencies(
        self, network: nn.Module, block: Block, *, config: Any, layer: int
    ) -> Float64[np.ndarray, "pairs"] | None:
        """Radians per position of the feature pairs that turn; None if a layer turns nothing.

        Read off the network's own buffer. If kinds of layers differ (Gemma 3, OLMo 3), each has a buffer named after
        it; without any (a rotary module replaced by one that leaves everything in place) nothing turns. Refused are
        models that also scale what they turn (YaRN, LongRoPE), or whose buffer holds what the last pass needed.
        """
        if not self.rotates(block.attention, config):
            return None
        for module in network.modules():
            for name, factor in vars(module).items():
                if name.endswith("attention_scaling") and factor != 1:
                    raise UsageError(f"rotary positions scale what they turn by {float(factor):g}; only 1 is allowed")
            if "longrope" in changing_kinds(module):
                raise UsageError("rotary frequencies of longrope depend on the prompt's length; others are allowed")
        types = getattr(config, "layer_types", None)
        names = ["inv_freq"] if types is None else [f"{types[layer]}_inv_freq", "inv_freq"]
        buffers = {path.rpartition(".")[2]: buffer for path, buffer in network.named_buffers()}
        buffer = next((buffers[name] for name in names if name in buffers), None)
        return None if buffer is None else np.asarray(buffer.detach().cpu().double().numpy())

    def not_recomputable(self, config: Any) -> str | None:
        """Why attention cannot be recomputed from the input of the attention module; None if it can."""
        implementation = getattr(config, "_attn_implementation", None)
        if implementation in KNOWN_ATTENTION:
            return None
        return f"it runs the attention implementation {implementation!r}; known are {', '.join(KNOWN_ATTENTION)}"

    def caveats(self, config: Any, dtype: torch.dtype) -> tuple[str, ...]:
        """Differences between what runs and what the model's name promises."""
        return ()

    def is_parallel(self, config: Any) -> bool:
        """Tell whether this configuration's attention and MLP read the same block input."""
        return self.parallel if self.parallel_switch is None else bool(getattr(config, self.parallel_switch))

    def unsupported(self, config: Any) -> str | None:
        """Why this configuration does not fit the description of its family; None if it does."""
        values = ((name, getattr(config, name, None)) for name in self.refused)
        return next((f"{name} is set" for name, value in values if value), None)

    def final_norm_module(self, network: nn.Module) -> nn.Module | None:
        """The norm between the last block and the unembedding; None if there is none."""
        return network.get_submodule(self.final_norm)

    def projections(self, network: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
        """Linear maps from the vectors entering the network to the stream, and from the final stream to the input of
        the unembedding; None, as in nearly every family, if there is none."""
        return None, None

    def blocks(self, network: nn.Module) -> list[Block]:
        """All decoder blocks, taken apart."""
        return [self.block(module) for module in network.get_submodule(self.layers).children()]

    def block(self, module: nn.Module) -> Block:
        """One decoder block, taken apart."""

        def part(path: str | None) -> nn.Module | None:
            return None if path is None else module.get_submodule(path)

        def mixer(layer: str, output: str) -> Mixer:
            return Mixer(module.get_submodule(layer), module.get_submodule(output))

        linear = None
        if self.linear is not None and self.is_linear(module):
            linear = mixer(self.linear, f"{self.linear}.{self.linear_output}")
        return Block(
            module=module,
            softmax=mixer(self.attention, self.attention_output) if linear is None or self.side_by_side else None,
            linear=linear,
            attention_norm=part(self.attention_norm),
            attention_post_norm=part(self.attention_post_norm),
            mlp=part(self.mlp),
            mlp_norm=part(self.mlp_norm),
            mlp_post_norm=part(self.mlp_post_norm),
        )

    def is_linear(self, module: nn.Module) -> bool:
        """Tell whether a block, of a family that has linear layers, mixes positions by one."""
        return getattr(module, str(self.linear), None) is not None

    def attention_blocks(self, network: nn.Module) -> list[tuple[int, Block]]:
        """The blocks that have attention, with their layers."""
        return [(layer, block) for layer, block in enumerate(self.blocks(network)) if block.softmax is not None]

    def beyond_attention(self, network: nn.Module) -> list[int]:
        """The layers in which attention is not all that mixes positions: it has a linear layer beside it, or is not."""
        blocks = enumerate(self.blocks(network))
        return [layer for layer, block in blocks if block.softmax is None or block.linear is not None]

    def decays(self, layer: nn.Module) -> Float64[np.ndarray, "decays"]:
        """Nats that the states of a linear layer lose per position, one for each of its decays, at bare biases."""
        raise UsageError(f"{self.name} models have no linear layers")

    def linear_call(self, n_positions: int, device: torch.device) -> dict[str, Any]:
        """Named arguments beside its input that a linear layer needs to read a whole prompt."""
        return {}

    def norm(self, module: nn.Module) -> Norm:
        """A norm module as numbers."""
        return read_norm(module)
