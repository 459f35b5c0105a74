"""Layouts of decoders: where the parts of a network are and what they do, as data; their maps and rotary positions.

`Block` is one decoder block taken apart by role. Theory, measurement and interventions read these and nothing else; the
rows are in `families.py`.

`nn.Linear` stores [out, in], GPT-2's `Conv1D` [in, out]; here every map is [out, in], so that y = W x + b.

Most kinds of RoPE turn a position by the same angle in every pass. LongRoPE takes other frequencies (PhiMoE: another
factor, too) for all positions of a pass that is longer than the original context; dynamic NTK has frequencies of its
own for every length beyond the configured one. Keys that were turned in one sort of pass fit no pass of another.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor, nn

from posbias.architecture import Causal, Encoding, Mask, NoEncoding, SlidingWindow
from posbias.errors import UsageError
from posbias.models.attention import named_blocks

ORIGINAL = "original_max_position_embeddings"
"""What a configuration calls the context length before it was stretched."""


def changing_kinds(module: nn.Module) -> set[str]:
    """Kinds of RoPE among a module's own whose frequencies depend on the length of the prompt."""
    kinds = getattr(module, "rope_type", "default")
    kinds = set(kinds.values()) if isinstance(kinds, Mapping) else {kinds}
    return {str(kind) for kind in kinds if any(word in str(kind) for word in ("dynamic", "longrope"))}


@dataclass(frozen=True)
class AngleLengths:
    """Lengths of a pass (positions, cached ones included) at which a network's rotary angles become others."""

    switches: tuple[int, ...] = ()
    """A pass longer than one of these has other angles at all of its positions."""
    moving_from: int | None = None
    """Beyond it, the angles of every length are their own; None: nowhere."""

    @classmethod
    def of(cls, config: Any) -> "AngleLengths":
        """Those of a decoder's configuration."""
        switches: set[int] = set()
        moving_from = None
        for rope in _settings(config):
            if rope.get("rope_type") == "longrope":
                switches.add(int(rope.get(ORIGINAL, config.max_position_embeddings)))
            elif "dynamic" in str(rope.get("rope_type")):
                moving_from = int(config.max_position_embeddings)
        return cls(tuple(sorted(switches)), moving_from)

    def angles(self, n_positions: int) -> tuple[int, int]:
        """A name of the angles in a pass of so many positions: passes of one name can share keys."""
        moves = self.moving_from is not None and n_positions > self.moving_from
        return sum(n_positions > switch for switch in self.switches), n_positions if moves else 0


def _settings(config: Any, *, without: str | None = None) -> list[Mapping[str, Any]]:
    """The rotary parameters of a configuration: one set for every sort of layers (but one), or one for all."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return []
    by_sort = {name: rope for name, rope in parameters.items() if isinstance(rope, Mapping)} or {"": parameters}
    return [rope for name, rope in by_sort.items() if name != without]


def stretched_positions(config: Any) -> int | None:
    """The positions that YaRN stretches a context to, factor times the original; None unless all full layers have it.

    Published configurations may leave `max_position_embeddings` at the original length (Qwen 2.5) or name the stretched
    one (DeepSeek-V3).
    """
    lengths = []
    for rope in _settings(config, without="sliding_attention"):
        factor, original = rope.get("factor"), rope.get(ORIGINAL)
        if rope.get("rope_type") != "yarn" or not isinstance(factor, int | float) or not isinstance(original, int):
            return None
        lengths.append(int(factor * original))
    return min(lengths, default=None)


def turned_by(
    values: Float[Tensor, "*rows feature"],
    cosine: Float[Tensor, "*shown pair"],
    sine: Float[Tensor, "*shown pair"],
) -> Float[Tensor, "*rows feature"]:
    """Turn queries or keys by angles, half against half; features beyond the pairs stay."""
    pairs = cosine.shape[-1]
    precise = torch.promote_types(values.dtype, torch.float32)
    whole = values.to(precise)
    first, second, unturned = whole[..., :pairs], whole[..., pairs : 2 * pairs], whole[..., 2 * pairs :]
    cosine, sine = cosine.to(whole), sine.to(whole)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, unturned], -1).to(values.dtype)


ATTENTION_NORMS = ("ln_attn", "input_layernorm", "ln_1", "norm_1", "self_attn_layer_norm")
"""Norms before attention; blocks that have none of them read the stream as it is (OLMo-2)."""
GATE = "gate_proj"
"""What every family calls the gate of its MLP, if it is a map of its own."""

Fusion = Literal["stacked", "interleaved"]
"""How one map holds all queries, keys and values: one after the other (GPT-2, MPT, Phi-3); for each key head its
queries, its key, its value (GPT-NeoX, BLOOM, Falcon)."""


@dataclass(frozen=True)
class Norm:
    """A normalisation layer: y = gain * (x - mean?) / sqrt(power + epsilon) + bias.

    Power is the mean square, of the centred x in a LayerNorm.
    """

    kind: Literal["rms", "layer"]
    gain: Float[Tensor, "*heads feature"]
    """Multiplier of each feature as applied (Gemma: 1 + weight); q/k norms may have one for every head."""
    bias: Float[Tensor, "*heads feature"] | None
    epsilon: float


class Linear(NamedTuple):
    """A linear map, y = W x + b."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, "out"] | None = None

    @classmethod
    def of(cls, module: nn.Module, factor: float = 1.0) -> "Linear":
        """That of a module, times a factor; refused if it is quantised or offloaded."""
        bias = getattr(module, "bias", None)
        return cls(scaled(weight_of(module), factor), scaled(bias if isinstance(bias, Tensor) else None, factor))

    def split(self, by: Callable[[Tensor], Sequence[Tensor]]) -> list["Linear"]:
        """Maps of some of the rows each."""
        parts = by(self.weight)
        biases = [None] * len(parts) if self.bias is None else by(self.bias)
        return [Linear(weight, bias) for weight, bias in zip(parts, biases, strict=True)]


@dataclass(frozen=True)
class AttentionParts:
    """The maps of one attention layer: logits = softcap(scale q.k), beside what positions add.

    Rotary positions turn the first features of a head, half against half.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    heads: int
    key_heads: int
    """Key/value heads; heads / key_heads queries share one."""
    head_dim: int
    scale: float
    """Factor on q.k before the softmax."""
    query_norm: Norm | None = None
    """Norm on queries: per head if its gain ends in head_dim features, over all features otherwise."""
    key_norm: Norm | None = None
    softcap: float | None = None

    @property
    def value_dim(self) -> int:
        """Features of a value, `head_dim` in most families."""
        return len(self.value.weight) // self.key_heads


@dataclass(frozen=True)
class MlpParts:
    """The maps of one MLP."""

    up: Linear
    down: Linear
    gate: Linear | None
    """The gate of down(act(gate x) * (up x)); None for a plain MLP, down(act(up x))."""
    activation: Any
    """The module or function the family applies elementwise."""


def weight_of(linear: nn.Module) -> Float[Tensor, "out in"]:
    """The matrix W of y = W x + b; refused if it is quantised, offloaded, or changed by an adapter of peft."""
    if hasattr(linear, "base_layer") and not getattr(linear, "merged", False):
        raise UsageError(
            "attention and theory read weights as they act, and an adapter is beside them; load what "
            "merge_and_unload() of the PeftModel returns"
        )
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        storage = str(weight.dtype) if isinstance(weight, Tensor) else "packed bits"
        raise UsageError(
            f"attention and theory read weights as floating-point numbers, {type(linear).__name__} holds them as "
            f"{storage}; load it unquantised"
        )
    if weight.is_meta:
        raise UsageError("attention and theory read weights in memory, some are offloaded; load the model whole")
    return weight.T if type(linear).__name__ == "Conv1D" else weight


def scaled(numbers: Tensor | None, factor: float) -> Any:
    """Numbers that may be missing times a factor, or the very ones if it is 1."""
    return numbers if numbers is None or factor == 1 else numbers * factor


def split_fused(fused: Shaped[Tensor, "all *columns"], heads: tuple[int, int], fusion: Fusion) -> tuple[Tensor, ...]:
    """Query, key and value rows of one map, heads in order within each."""
    columns, key_heads = fused.shape[1:], heads[1]
    size = fused.shape[0] // (heads[0] + 2 * key_heads)
    if fusion == "stacked":
        return torch.split(fused, [heads[0] * size, key_heads * size, key_heads * size])
    by_group = fused.reshape(key_heads, -1, size, *columns)
    query, key, value = by_group[:, :-2], by_group[:, -2], by_group[:, -1]
    return query.reshape(-1, *columns), key.reshape(-1, *columns), value.reshape(-1, *columns)


def present(module: nn.Module, names: tuple[str, ...]) -> Any:
    """A module's attribute by the first of some names that it has; None if it has none of them."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


@dataclass(frozen=True)
class Block:
    """One decoder block by role; None for a part that it does not have."""

    module: nn.Module
    attention: nn.Module
    attention_output: nn.Module
    """The output projection of the attention."""
    attention_norm: nn.Module | None = None
    """Norm of the attention branch's input (None: it reads the stream as it is, as in OLMo-2)."""
    attention_post_norm: nn.Module | None = None
    """Norm applied to the branch before it is added to the stream (Gemma-3, OLMo-2)."""
    mlp: nn.Module | None = None
    mlp_norm: nn.Module | None = None
    mlp_post_norm: nn.Module | None = None
    branch_scale: float = 1.0
    """Factor on both branches when they are added to the stream (Granite)."""


@dataclass(frozen=True)
class Layout:
    """The layout of one family of Hugging Face decoders, keyed by its `config.model_type` in the table."""

    name: str = ""
    final_norm: str = "model.norm"
    """Dotted path from the causal language model."""
    embedding_norm: str | None = None
    """Norm applied to the embeddings before the first block (BLOOM)."""
    position_table: str | None = None
    """Embedding of absolute positions that is added to the input (GPT-2, OPT)."""
    parallel: Callable[[Any], bool] = lambda config: False
    """Attention and MLP read the same block input and are added together, in a configuration."""
    refused: tuple[str, ...] = ("use_bidirectional_attention",)
    """Entries of the configuration that must not be set, or that must ("no ..."); the default is that of embedding
    models, no decoders."""
    one_window: bool = False
    """All layers see `sliding_window` keys, not those of `layer_types`."""
    rotates: Callable[[Any, Any], bool] = lambda attention, config: (
        "position_embeddings" in signature(attention.forward).parameters
    )
    """Tells whether a layer turns queries and keys by position, of its attention module and the configuration."""
    encoding: Callable[[Any, int], Encoding] = lambda config, layer: NoEncoding()
    """A layer's logit bias by position with content left out: ALiBi alone has one. Learned positions are added to the
    input, rotary ones turn queries and keys."""
    caveat: str = ""
    """The difference between the biases by position that run and those that the model's name promises."""

    # Paths inside a block.
    attention: str = "self_attn"
    attention_output: str = "self_attn.o_proj"
    attention_post_norm: tuple[str, ...] = ()
    mlp: str = "mlp"
    """The MLP, or its last map if it is no module of its own (OPT)."""
    mlp_norm: tuple[str, ...] = ("post_attention_layernorm",)
    mlp_post_norm: tuple[str, ...] = ()

    # Names inside its attention and its MLP.
    query_key_value: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Three projections, or one that holds all three."""
    fusion: Fusion = "stacked"
    up_and_down: tuple[str, str] = ("up_proj", "down_proj")
    """The maps of the MLP, beside its gate if it has one."""
    gate_in_up: bool = False
    """The first half of the up projection is the gate."""
    key_heads: Callable[[Any], int] = lambda config: int(config.num_key_value_heads)
    """Key/value heads per layer, of a configuration."""
    unbounded: Callable[[Any], bool] = lambda config: False
    """Tells whether the model takes an input of any length (ALiBi), whatever its configuration names."""

    def mask(self, config: Any, layer: int) -> Mask:
        """The attention mask of a layer; transformers counts the query's own position in a window, as we do."""
        types = getattr(config, "layer_types", None)
        windowed = self.one_window or (types is not None and types[layer] == "sliding_attention")
        width = getattr(config, "sliding_window", None) if windowed else None
        return Causal() if width is None else SlidingWindow(width=int(width))

    def unsupported(self, config: Any) -> str | None:
        """The entry of a configuration that does not fit the layout; None if there is none."""
        for entry in self.refused:
            name = entry.removeprefix("no ")
            if bool(getattr(config, name, None)) == (name == entry):
                return f"{name} is set" if name == entry else f"{name} = False is set"
        return None

    def blocks(self, network: nn.Module) -> list[Block]:
        """All decoder blocks, taken apart."""
        return [
            Block(
                module=module,
                attention=module.get_submodule(self.attention),
                attention_output=module.get_submodule(self.attention_output),
                attention_norm=present(module, ATTENTION_NORMS),
                attention_post_norm=present(module, self.attention_post_norm),
                mlp=module.get_submodule(self.mlp),
                mlp_norm=present(module, self.mlp_norm),
                mlp_post_norm=present(module, self.mlp_post_norm),
                branch_scale=float(getattr(module, "residual_multiplier", 1.0)),
            )
            for module in named_blocks(network).values()
        ]

    def norm(self, module: nn.Module) -> Norm:
        """A LayerNorm or RMS norm as numbers; others are refused.

        Gemma and Nemotron store their gain less one; everyone else stores the gain itself, OLMo 1 has none.
        """
        kind = type(module).__name__
        if isinstance(module, nn.LayerNorm):
            stored: Tensor | None = module.weight
            gain = torch.ones(module.normalized_shape) if stored is None else stored
            gain = 1 + gain if kind == "NemotronLayerNorm1P" else gain
            return Norm(kind="layer", gain=gain, bias=module.bias, epsilon=module.eps)
        if kind == "OlmoLayerNorm":
            shape: Any = module.normalized_shape
            return Norm(kind="layer", gain=torch.ones(shape), bias=None, epsilon=1e-5)  # a literal of its code
        if not kind.endswith("RMSNorm"):
            raise UsageError(f"{kind} is not a norm posbias can read; known: LayerNorm and RMS norms")
        weight = module.get_parameter("weight")
        epsilon: Any = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        gain = 1 + weight if kind.startswith(("GemmaRMS", "Gemma2", "Gemma3RMS")) else weight
        return Norm(kind="rms", gain=gain, bias=None, epsilon=float(epsilon))

    def head_norms(self, attention: nn.Module) -> list[Norm | None]:
        """The norms of queries and of keys, of each head or over all features, None where a model has none."""
        names = ("q_layernorm", "k_layernorm") if hasattr(attention, "q_layernorm") else ("q_norm", "k_norm")
        modules = [getattr(attention, name, None) for name in names]
        return [None if module is None else self.norm(module) for module in modules]

    def attention_parts(self, block: Block, config: Any) -> AttentionParts:
        """The attention layer's linear maps and norms, the factor on its branch in the output map."""
        clip = getattr(config, "clip_qkv", None) or getattr(getattr(config, "attn_config", None), "clip_qkv", None)
        if clip:
            raise UsageError(
                f"{self.name}: queries, keys and values are clamped (clip_qkv = {clip}), which what reads the maps of "
                "attention does not follow; allowed: measuring and evaluating the model, or one without a clamp"
            )
        heads = config.num_attention_heads, self.key_heads(config)
        maps = [Linear.of(block.attention.get_submodule(name)) for name in self.query_key_value]
        if len(maps) == 1:
            maps = maps[0].split(lambda rows: split_fused(rows, heads, self.fusion))
        query_norm, key_norm = self.head_norms(block.attention)
        return AttentionParts(
            query=maps[0],
            key=maps[1],
            value=maps[2],
            output=Linear.of(block.attention_output, block.branch_scale),
            heads=heads[0],
            key_heads=heads[1],
            head_dim=len(maps[0].weight) // heads[0],
            scale=float(present(block.attention, ("scaling", "inv_norm_factor", "softmax_scale"))),
            query_norm=query_norm,
            key_norm=key_norm,
            softcap=getattr(block.attention, "attn_logit_softcapping", None),
        )

    def mlp_parts(self, block: Block, config: Any) -> MlpParts:
        """The linear maps and activation of an MLP that is no mixture, the factor on its branch in the down map."""
        module = block.module if self.mlp == self.up_and_down[1] else block.mlp
        assert module is not None, "every block of a layout has an MLP"
        up, down = (module.get_submodule(name) for name in self.up_and_down)
        gates = [Linear.of(module.get_submodule(GATE))] if hasattr(module, GATE) else []
        maps = Linear.of(up).split(lambda rows: rows.chunk(2)) if self.gate_in_up else [*gates, Linear.of(up)]
        return MlpParts(
            up=maps[-1],
            down=Linear.of(down, block.branch_scale),
            gate=maps[0] if len(maps) > 1 else None,
            activation=present(module, ("act_fn", "act", "activation_fn", "gelu_impl")),
        )

    def input_scale(self, network: Any) -> float:
        """Factor that the network puts on the vectors that enter it, before the first block (Granite)."""
        return float(getattr(network.base_model, "embedding_multiplier", 1.0))

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


ROLES = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class Projection:
    """One module, y = W x + b, and the rows of W by role."""

    path: str
    """Dotted path within the network."""
    layer: int
    module: nn.Module
    rows: Mapping[str, Int[Tensor, "row"]]

    @property
    def shape(self) -> tuple[int, int]:
        """Features made, and features read."""
        made, read = weight_of(self.module).shape
        return made, read


def projections_of(network: nn.Module, family: Layout | None, config: Any) -> list[Projection]:
    """The linear projections of attention and of MLPs, layer by layer, experts of a mixture left out.

    They are known by the names that the layout has for them, or most families without one.
    """
    roles: dict[str, tuple[str, ...]] = {f".{role}_proj": (role,) for role in ROLES}
    if family is not None:
        queries = [f".{family.attention}.{name}" for name in family.query_key_value]
        within = "" if family.mlp == family.up_and_down[1] else f".{family.mlp}"
        up, down, gate = (f"{within}.{name}" for name in (*family.up_and_down, GATE))
        roles = dict(zip(queries, (("q",), ("k",), ("v",)) if len(queries) > 1 else (("q", "k", "v"),), strict=True))
        roles |= {f".{family.attention_output}": ("o",), gate: ("gate",), down: ("down",)}
        roles[up] = ("gate", "up") if family.gate_in_up else ("up",)
    found = []
    for path, module in network.named_modules():
        numbers = [int(step) for step in path.split(".") if step.isdigit()]
        name = next((name for name in roles if path.endswith(name)), None)
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if name is None or len(numbers) != 1 or not linear:
            continue
        made = torch.arange(weight_of(module).shape[0])
        parts: Any = made.chunk(len(roles[name]))
        if roles[name] == ("q", "k", "v"):
            assert family is not None
            parts = split_fused(made, (config.num_attention_heads, family.key_heads(config)), family.fusion)
        found.append(Projection(path, numbers[0], module, dict(zip(roles[name], parts, strict=True))))
    return sorted(found, key=lambda one: (one.layer, ROLES.index(next(iter(one.rows)))))
