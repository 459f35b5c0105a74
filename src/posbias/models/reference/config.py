"""`ReferenceConfig`: what a reference transformer consists of; its weights at initialisation, and what is fixed.

The architecture says what mixes positions; everything else in a layer is chosen here. `ReferenceShape` is the part that
decides which tensors exist and which operations run: models of one shape compute together, stacked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import Architecture, Causal, HeadGroup, KeyEncoding, NoEncoding, Recurrent, Rope
from posbias.architecture.encodings import AbsoluteEncoding
from posbias.checks import CELLS, checked_value
from posbias.errors import UsageError, check_most

CHOICES = {
    "attention": ("positional", "content"),
    "values": ("identity", "orthogonal", "gaussian"),
    "residual": ("mixed", "added", "none"),
    "norm": ("none", "pre", "post"),
    "dtype": ("float32", "float64"),
    "normalisation": ("rms", "layer"),
    "activation": ("gelu", "gelu_tanh", "relu", "silu"),
    "absolute": ("logits", "added"),
    "readout": ("linear", "mlp"),
    "initialisation": ("gaussian", "linear", "normal"),
}
COUNTS = (
    "width",
    "vocabulary_size",
    "outputs",
    "head_width",
    "key_value_heads",
    "mlp_width",
    "learned_positions",
    "trained_key_bias",
)
COUNTS_OF_READOUT = ("readout_width", "readout_layers")
NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class ReferenceConfig:
    """A reference transformer: what mixes positions, and what else is in a layer."""

    architecture: Architecture
    width: int = 16
    """Features d (>= 1); a multiple of the number of heads if heads have features of their own."""
    vocabulary_size: int | None = 64
    """Rows of the embedding (>= 1); None: no embedding, inputs are vectors of `width` features."""
    attention: str = "positional"
    """`positional`: logits from encoding and content offset alone; `content`: q.k / sqrt(head_dim) added, rotary
    encodings turn q and k, and a layer whose encoding is `recurrent` is a gated linear layer (`recurrence`)."""
    values: str = "identity"
    """Values that heads carry: x itself (`identity`), x times one `orthogonal` matrix per layer, or x through value and
    output maps of each head (`gaussian`)."""
    residual: str = "mixed"
    """`mixed`: (1 - m) x + m a with the architecture's mixing; `added`: s x + a; `none`: a alone."""
    norm: str = "none"
    """`none`; `pre`: norm of each branch's input and at the end; `post`: of the stream after each addition."""
    mlp: bool = False
    rotate_stream: bool = False
    """Multiply the stream after each layer by an orthogonal matrix, which changes no norm."""
    seed: int = 0
    dtype: str = "float64"
    """Type of weights and computation: `float32` or `float64`."""
    outputs: int | None = None
    """Classes of the readout (>= 1); None: as many as the vocabulary has tokens."""
    head_width: int | None = None
    """Features of one head (>= 1); None: width / heads."""
    key_value_heads: int | None = None
    """Heads that keys and values are shared between, a divisor of heads; None: as many as heads."""
    output_map: bool = True
    """Give heads with values of their own (`gaussian`) output maps; without, their features are joined."""
    biases: bool = False
    """Give the linear maps of attention and MLP biases."""
    normalisation: str = "rms"
    """`rms`: gain * x / sqrt(mean x^2 + epsilon); `layer`: mean taken off first, and a shift added."""
    norm_epsilon: float = NORM_EPSILON
    embedding_norm: bool = False
    """Normalise the embedded tokens, before positions are added."""
    mlp_width: int | None = None
    """Hidden features of each MLP (>= 1); None: 4 d."""
    activation: str = "gelu"
    """Activation of the MLPs: `gelu` (exact), `gelu_tanh`, `relu` or `silu`."""
    gated_mlp: bool = False
    """Multiply the MLP's hidden features: activation(x gate) * (x up)."""
    residual_scale: float = 1.0
    """The s of `added`, for attention and MLP; any finite number."""
    absolute: str = "logits"
    """Effect of an absolute encoding of the architecture: its constant-content `logits`, or its vectors are `added` to
    the input of the first layer."""
    learned_positions: int | None = None
    """Rows of a trained table of vectors added to the input (>= 1, the longest context); None: no table."""
    trained_key_bias: int | None = None
    """Keys (>= 1) whose bias is trained, for each layer and head: a number added to what the encoding gives (none,
    key_bias or gamma_key), 0 at initialisation; later keys get the last number. None: the encoding's alone."""
    readout: str = "linear"
    """From the stream to the outputs: one `linear` map without bias, or an `mlp` of ReLU layers with biases."""
    readout_width: int | None = None
    """Hidden features of the readout MLP (>= 1); None: d."""
    readout_layers: int = 3
    """Hidden layers of the readout MLP (>= 1), each followed by a ReLU; a linear map to the outputs comes after."""
    initialisation: str = "gaussian"
    """Initial linear maps: `gaussian` with variance 1 / inputs and biases 0; `linear`, uniform within 1 / sqrt(inputs)
    as PyTorch's linear layer; `normal` with deviation `initial_deviation` and biases 0."""
    initial_deviation: float = 0.02
    """Deviation of `normal`, embeddings included (> 0)."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"reference {name} {getattr(self, name)!r} is unknown; allowed: {', '.join(allowed)}")
        for name in (*COUNTS, *COUNTS_OF_READOUT):
            value = getattr(self, name)
            if value is not None:
                checked_value(f"reference {name}", value, Annotated[int, Ge(1)])
        layer = self.width * (4 * self.architecture.heads * self.head_dim + 3 * self.hidden_width * self.mlp)
        tables = sum(count or 0 for count in (self.vocabulary_size, self.outputs, self.learned_positions))
        readout = (self.readout_width or self.width) ** 2 * self.readout_layers * (self.readout == "mlp")
        layer += self.architecture.heads * (self.trained_key_bias or 0)
        weights = self.architecture.depth * layer + self.width * (self.width + tables) + readout
        check_most("reference weights", weights, CELLS)
        if self.vocabulary_size is None and self.outputs is None:
            raise UsageError("reference outputs must be given if there is no vocabulary (vocabulary_size None)")
        for name in ("norm_epsilon", "initial_deviation"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"reference {name} must be a finite number > 0, got {getattr(self, name)}")
        if not abs(self.residual_scale) < float("inf"):
            raise UsageError(f"reference residual_scale must be finite, got {self.residual_scale}")
        heads = self.architecture.heads
        sinks = self.architecture.layer_sinks
        if sinks.max() > float("-inf"):
            raise UsageError(f"reference models have no sinks, the architecture has logits up to {sinks.max():g}")
        if self.per_head and self.head_width is None and self.width % heads:
            raise UsageError(f"reference width {self.width} is not a multiple of {heads} heads")
        if heads % self.n_key_value_heads:
            raise UsageError(f"reference key_value_heads {self.key_value_heads} is not a divisor of {heads} heads")
        joined = self.values == "gaussian" and not self.output_map
        if joined and heads * self.head_dim != self.width:
            raise UsageError(
                f"reference without output maps needs heads * head_dim = width, got {heads} * {self.head_dim} for "
                f"width {self.width}"
            )
        if self.rotary and self.head_dim % 2:
            raise UsageError(f"rotary positions need an even number of features per head, got {self.head_dim}")
        self._check_trained_key_bias()
        self._check_linear_layers()
        added = self.input_encoding
        if added is not None and added.width != self.width:
            raise UsageError(f"reference width {self.width} differs from the {added.width} features of {added}")

    def to_dict(self) -> dict[str, Any]:
        """Everything the model's numbers depend on apart from its weights, as plain values."""
        return {**vars(self), "architecture": self.architecture.describe()}

    def _check_trained_key_bias(self) -> None:
        """Refuse it beside an encoding that is no bias of keys: their sum would be no encoding with a name."""
        for group in (group for layer in self.architecture.head_groups for group in layer):
            if self.trained_key_bias is not None and not isinstance(group.encoding, NoEncoding | KeyEncoding):
                raise UsageError(
                    "reference trained_key_bias is added to the encodings none, key_bias or gamma_key, got "
                    f"{group.encoding}"
                )

    def _check_linear_layers(self) -> None:
        """Refuse what would be ignored in a linear layer."""
        for layer, groups in enumerate(self.architecture.head_groups):
            if not self.linear_layers[layer]:
                continue
            reasons = {
                f"in all of its heads, got {' and '.join(str(group.encoding) for group in groups)}": not all(
                    isinstance(group.encoding, Recurrent) for group in groups
                ),
                f"with the mask causal, got {groups[0].mask}": any(
                    not isinstance(group.mask, Causal) for group in groups
                ),
                f"with values gaussian, got {self.values}": self.values != "gaussian",
                "without a content offset": bool(self.architecture.layer_content[layer].any()),
            }
            for reason, wrong in reasons.items():
                if wrong:
                    raise UsageError(f"reference layer {layer} is linear (recurrent), which is allowed {reason}")

    @property
    def linear_layers(self) -> tuple[bool, ...]:
        """For every layer whether it is linear: a state that decays in attention's place."""
        content = self.attention == "content"
        return tuple(
            content and any(isinstance(group.encoding, Recurrent) for group in groups)
            for groups in self.architecture.head_groups
        )

    @property
    def per_head(self) -> bool:
        """Tell whether heads have features of their own."""
        return self.attention == "content" or self.values == "gaussian"

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.width // self.architecture.heads if self.head_width is None else self.head_width

    @property
    def n_key_value_heads(self) -> int:
        """Heads of keys and values."""
        return self.architecture.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def n_outputs(self) -> int:
        """Classes of the readout."""
        chosen = self.vocabulary_size if self.outputs is None else self.outputs
        assert chosen is not None  # checked when the configuration was made
        return chosen

    @property
    def hidden_width(self) -> int:
        """Hidden features of each MLP."""
        return 4 * self.width if self.mlp_width is None else self.mlp_width

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as PyTorch's."""
        chosen: torch.dtype = getattr(torch, self.dtype)
        return chosen

    @property
    def input_encoding(self) -> AbsoluteEncoding | None:
        """The absolute encoding whose vectors are added to the input, or None."""
        if self.absolute != "added":
            return None
        groups = [group for layer in self.architecture.head_groups for group in layer]
        encodings = {group.encoding for group in groups if isinstance(group.encoding, AbsoluteEncoding)}
        if len(encodings) > 1:
            raise UsageError(
                f"reference: {len(encodings)} absolute encodings cannot all be added to the input; give one"
            )
        return encodings.pop() if encodings else None

    @property
    def rotary(self) -> bool:
        """Tell whether queries and keys of some head are turned."""
        groups = [group for layer in self.architecture.head_groups for group in layer]
        return self.attention == "content" and any(isinstance(group.encoding, Rope) for group in groups)


@dataclass(frozen=True)
class ReferenceShape:
    """Sizes and operations that must be equal for models to be computed together.

    Masks, encodings (given that both or neither are rotary, both or neither add vectors), content offsets and residual
    scales are not part of it: they are data.
    """

    n_positions: int
    depth: int
    heads: int
    width: int
    head_dim: int
    key_value_heads: int
    vocabulary_size: int | None
    n_outputs: int
    dtype: torch.dtype
    attention: str
    values: str
    output_map: bool
    biases: bool
    residual: str
    """`none`, `added` (scale 1) or `scaled` (by the constants)."""
    norm: str
    normalisation: str
    norm_epsilon: float
    embedding_norm: bool
    mlp_width: int
    """Hidden features; 0: no MLP."""
    activation: str
    gated_mlp: bool
    rotate_stream: bool
    rotary: bool
    linear_layers: tuple[bool, ...]
    adds_positions: bool
    learned_positions: int | None
    trained_key_bias: int | None
    readout: str
    readout_width: int
    readout_layers: int


def shape_of(config: ReferenceConfig, n_positions: int) -> ReferenceShape:
    """The shape of a configuration at a context length (>= 1, within the table of learned positions)."""
    checked_value("reference n_positions", n_positions, Annotated[int, Ge(1)])
    if config.learned_positions is not None and n_positions > config.learned_positions:
        raise UsageError(f"reference has {config.learned_positions} learned positions, {n_positions} were asked for")
    scaled = config.residual == "mixed" or (config.residual == "added" and config.residual_scale != 1)
    shared = {field.name for field in fields(ReferenceConfig)} & {field.name for field in fields(ReferenceShape)}
    different = {
        "n_positions": n_positions,
        "depth": config.architecture.depth,
        "heads": config.architecture.heads,
        "head_dim": config.head_dim,
        "key_value_heads": config.n_key_value_heads,
        "n_outputs": config.n_outputs,
        "dtype": config.torch_dtype,
        "residual": "scaled" if scaled else config.residual,
        "mlp_width": config.hidden_width if config.mlp else 0,
        "rotary": config.rotary,
        "linear_layers": config.linear_layers,
        "adds_positions": config.input_encoding is not None,
        "readout_width": config.width if config.readout_width is None else config.readout_width,
    }
    return ReferenceShape(**({name: getattr(config, name) for name in shared} | different))


Draw = tuple[str, str, tuple[int, ...], int]
"""Name, sort (`table`, `weight`, `bias`, `orthogonal`, `gain`, `shift`), shape, and inputs of the map."""


def draw_parameters(config: ReferenceConfig, generator: torch.Generator | None) -> dict[str, Float[Tensor, "..."]]:
    """Weights at initialisation, drawn from the generator alone, not from the configuration's `seed`.

    Without a generator only shapes are made, on the meta device, which takes no memory.

    Returns:
        `embedding` [vocabulary, d], `blocks.L.query` [head, d, head_dim], `blocks.L.up` [d, hidden], ...,
        `unembedding` [output, d] or `readout.K.weight` [in, out]; contiguous, on the generator's device.
    """
    device = torch.device("meta") if generator is None else generator.device
    linear, normal = config.initialisation == "linear", config.initialisation == "normal"

    def drawn(sort: str, shape: tuple[int, ...], inputs: int) -> Tensor:
        if sort == "orthogonal":
            return torch.empty(shape, device=device) if generator is None else random_orthogonal(shape[0], generator)
        if sort == "gain":
            return torch.ones(shape, dtype=torch.float64, device=device)
        if sort == "shift" or (sort == "bias" and not linear):
            return torch.zeros(shape, dtype=torch.float64, device=device)
        if linear and sort != "table":
            values = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
            return (2 * values - 1) / math.sqrt(inputs)
        values = torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
        if normal:
            return values * config.initial_deviation
        return values if sort == "table" else values / math.sqrt(inputs)

    return {name: drawn(sort, shape, inputs).to(config.torch_dtype) for name, sort, shape, inputs in _draws(config)}


def _draws(config: ReferenceConfig) -> Iterator[Draw]:
    """Everything there is to draw, in the order of the draws."""
    width, outputs = config.width, config.n_outputs
    if config.vocabulary_size is not None:
        yield "embedding", "table", (config.vocabulary_size, width), width
    if config.embedding_norm:
        yield from _norm(config, "embedding")
    for layer in range(config.architecture.depth):
        for name, sort, shape, inputs in _block(config, layer):
            yield f"blocks.{layer}.{name}", sort, shape, inputs
    if config.readout == "linear":
        yield "unembedding", "weight", (outputs, width), width
    else:
        hidden = width if config.readout_width is None else config.readout_width
        for layer, (inputs, into) in enumerate(pairwise([width, *[hidden] * config.readout_layers, outputs])):
            yield f"readout.{layer}.weight", "weight", (inputs, into), inputs
            yield f"readout.{layer}.bias", "bias", (into,), inputs
    if config.norm == "pre":
        yield from _norm(config, "final")
    if config.learned_positions is not None:
        yield "positions", "table", (config.learned_positions, width), width


def _block(config: ReferenceConfig, layer: int) -> Iterator[Draw]:
    heads, shared, biases = config.architecture.heads, config.n_key_value_heads, config.biases
    width, head_dim, hidden = config.width, config.head_dim, config.hidden_width
    if config.attention == "content":
        yield "query", "weight", (heads, width, head_dim), width
        yield "key", "weight", (shared, width, head_dim), width
        if biases:
            yield "query_bias", "bias", (heads, head_dim), width
            yield "key_bias", "bias", (shared, head_dim), width
    if config.values == "orthogonal":
        yield "value", "orthogonal", (width, width), width
    if config.values == "gaussian":
        yield "value", "weight", (shared, width, head_dim), width
        if biases:
            yield "value_bias", "bias", (shared, head_dim), width
        if config.output_map:
            yield "output", "weight", (heads, head_dim, width), heads * head_dim
            if biases:
                yield "output_bias", "bias", (width,), heads * head_dim
    if config.linear_layers[layer]:
        yield "step", "weight", (width, heads), width
        yield "step_bias", "shift", (heads,), width
        yield "rate", "shift", (heads,), 1
    if config.trained_key_bias is not None:
        yield "trained_key_bias", "shift", (heads, config.trained_key_bias), 1
    if config.norm != "none":
        yield from _norm(config, "attention")
    if config.mlp:
        if config.norm != "none":
            yield from _norm(config, "mlp")
        into = ("up", "gate") if config.gated_mlp else ("up",)
        yield from ((name, "weight", (width, hidden), width) for name in into)
        yield "down", "weight", (hidden, width), hidden
        if biases:
            yield from ((f"{name}_bias", "bias", (hidden,), width) for name in into)
            yield "down_bias", "bias", (width,), hidden
    if config.rotate_stream:
        yield "rotation", "orthogonal", (width, width), width


def _norm(config: ReferenceConfig, name: str) -> Iterator[Draw]:
    yield f"{name}_gain", "gain", (config.width,), 1
    if config.normalisation != "rms":
        yield f"{name}_shift", "shift", (config.width,), 1


def random_orthogonal(width: int, generator: torch.Generator) -> Float[Tensor, "width width"]:
    """A uniformly distributed orthogonal matrix (QR of a Gaussian one, signs fixed)."""
    gaussian = torch.randn((width, width), generator=generator, dtype=torch.float64, device=generator.device)
    orthogonal, triangular = torch.linalg.qr(gaussian)
    signed: Tensor = orthogonal * torch.sign(torch.diagonal(triangular))
    return signed


def constants_of(config: ReferenceConfig, n_positions: int) -> dict[str, Float[Tensor, "..."]]:
    """The tensors that the architecture fixes at one context length N (>= 1).

    Returns:
        `bias` [layer, head, query, key], added to the logits, -inf if the mask hides the key; `kept`, `added` and
        `mlp_kept` [layer], what multiplies the stream and the attention branch, and the stream beside the MLP;
        if heads are rotary, `cosine` and `sine` [layer, head, position, pair], 1 and 0 for heads that are not;
        if layers are linear, `slopes` [layer, head], 0 for those that are not;
        if vectors are added to the input, `positions` [position, feature]. On the CPU, in the model's precision.

    Raises:
        UsageError: n_positions below 1, or beyond what the encodings have vectors for.
    """
    shape = shape_of(config, n_positions)
    depth, dtype = shape.depth, config.torch_dtype
    mixed = config.residual == "mixed"
    mixing = torch.from_numpy(np.asarray(config.architecture.layer_mixing, dtype=np.float64))
    scale = config.residual_scale if config.residual == "added" else float(mixed)
    bias = np.empty((depth, shape.heads, n_positions, n_positions))
    for layer, groups in enumerate(config.architecture.head_groups):
        for group in groups:
            bias[layer, group.heads] = shown(config, group).masked_logits(n_positions)
    constants = {
        "bias": torch.from_numpy(bias),
        "kept": 1 - mixing if mixed else torch.full((depth,), scale, dtype=torch.float64),
        "added": mixing if mixed else torch.ones(depth, dtype=torch.float64),
        "mlp_kept": torch.full((depth,), scale, dtype=torch.float64),
    }
    if config.rotary:
        angles = torch.stack([rotary_angles(config, layer, n_positions) for layer in range(depth)])
        constants |= {"cosine": angles.cos(), "sine": angles.sin()}
    if any(config.linear_layers):
        slopes = np.zeros((depth, shape.heads))
        for layer, groups in enumerate(config.architecture.head_groups):
            for group in groups if config.linear_layers[layer] else ():
                slopes[layer, group.heads] = group.linear_slopes()
        constants["slopes"] = torch.from_numpy(slopes)
    if config.input_encoding is not None:
        constants["positions"] = torch.from_numpy(config.input_encoding.vectors_at(np.arange(n_positions)))
    return {name: value.to(dtype) for name, value in constants.items()}


def shown(config: ReferenceConfig, group: HeadGroup) -> HeadGroup:
    """The group as its logits show it.

    If there is content, rotary encodings turn q and k and recurrent ones are the decays of a state; absolute ones may
    be added to the input. They add their constant-content bias if not.
    """
    turned = config.attention == "content" and isinstance(group.encoding, Rope | Recurrent)
    entered = config.absolute == "added" and isinstance(group.encoding, AbsoluteEncoding)
    return replace(group, encoding=NoEncoding()) if turned or entered else group


def rotary_angles(config: ReferenceConfig, layer: int, n_positions: int) -> Float[Tensor, "head position pair"]:
    """Angles of the feature pairs of each head at each position, in float64; 0 for a head that is not rotary."""
    half = config.head_dim // 2
    angles = torch.zeros((config.architecture.heads, n_positions, half), dtype=torch.float64)
    for group in config.architecture.head_groups[layer]:
        if isinstance(group.encoding, Rope):
            frequency = group.encoding.base ** (-torch.arange(half, dtype=torch.float64) / half)
            turn = torch.arange(n_positions, dtype=torch.float64)[:, None] * frequency
            angles[torch.from_numpy(group.heads)] = turn
    return angles


def stacked(members: Sequence[Mapping[str, Tensor]]) -> dict[str, Float[Tensor, "member ..."]]:
    """Parameters or constants of several models of one shape with a leading member axis."""
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}
