"""`ReferenceConfig`: what a reference transformer consists of; its weights at initialisation, and what is fixed.

The architecture says what mixes positions; everything else in a layer is chosen here. `shape_of` is the part that
decides which tensors exist and which operations run: models of one shape compute together, stacked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import Architecture, Encoding, HeadGroup, KeyEncoding, NoEncoding, Rope
from posbias.architecture.encodings import Sinusoidal
from posbias.checks import CELLS, Natural, OneOf, checked, checked_value
from posbias.errors import UsageError, check_most

Counted = Annotated[int, Ge(1)]
NORM_EPSILON = 1e-6
"""Added to the power that a norm divides by."""


@checked
@dataclass(frozen=True)
class ReferenceConfig:
    """A reference transformer: what mixes positions, and what else is in a layer."""

    name: ClassVar[str] = "reference"

    architecture: Architecture
    width: Counted = 16
    """Features d (>= 1); a multiple of the number of heads if heads have features of their own."""
    vocabulary_size: Counted | None = 64
    """Rows of the embedding (>= 1); None: no embedding, inputs are vectors of `width` features."""
    attention: Annotated[str, OneOf("positional", "content")] = "positional"
    """`positional`: logits from encoding and content offset alone; `content`: q.k / sqrt(head_dim) added, and rotary
    encodings turn q and k."""
    values: Annotated[str, OneOf("identity", "gaussian")] = "identity"
    """Values that heads carry: x itself (`identity`), or x through value and output maps of each head (`gaussian`)."""
    residual: Annotated[str, OneOf("mixed", "added", "none")] = "mixed"
    """`mixed`: (1 - m) x + m a with the architecture's mixing; `added`: x + a; `none`: a alone."""
    norm: Annotated[str, OneOf("none", "pre")] = "none"
    """`none`; `pre`: gain * x / sqrt(mean x^2 + 1e-6) of each branch's input and at the end."""
    mlp: bool = False
    """Give each layer an MLP, x W_up -> GELU (exact) -> W_down."""
    seed: Natural = 0
    dtype: Annotated[str, OneOf("float32", "float64")] = "float64"
    """Type of weights and computation: `float32` or `float64`."""
    outputs: Counted | None = None
    """Classes of the readout (>= 1); None: as many as the vocabulary has tokens."""
    output_map: bool = True
    """Give heads with values of their own (`gaussian`) output maps; without, their features are joined."""
    mlp_width: Counted | None = None
    """Hidden features of each MLP (>= 1); None: 4 d."""
    absolute: Annotated[str, OneOf("logits", "added")] = "logits"
    """Effect of an absolute encoding of the architecture: its constant-content `logits`, or its vectors are `added` to
    the input of the first layer."""
    trained_key_bias: Counted | None = None
    """Keys (>= 1) whose bias is trained, for each layer and head: a number added to what the encoding gives (none,
    key_bias or gamma_key), 0 at initialisation; later keys get the last number. None: the encoding's alone."""
    readout: Annotated[str, OneOf("linear", "mlp")] = "linear"
    """From the stream to the outputs: one `linear` map without bias, or an `mlp` of ReLU layers with biases."""
    readout_width: Counted | None = None
    """Hidden features of the readout MLP (>= 1); None: d."""
    readout_layers: Counted = 3
    """Hidden layers of the readout MLP (>= 1), each followed by a ReLU; a linear map to the outputs comes after."""
    initialisation: Annotated[str, OneOf("gaussian", "linear")] = "gaussian"
    """Initial linear maps: `gaussian` with variance 1 / inputs and biases 0; `linear`, uniform within 1 / sqrt(inputs)
    as PyTorch's linear layer."""

    def __post_init__(self) -> None:
        if self.vocabulary_size is None and self.outputs is None:
            raise UsageError("reference outputs must be given if there is no vocabulary (vocabulary_size None)")
        readout = (self.readout_width or self.width) ** 2 * self.readout_layers * (self.readout == "mlp")
        check_most("reference weights", readout, CELLS)  # before every layer of a file's number is listed
        check_most("reference weights", sum(math.prod(shape) for _, _, shape, _ in draws(self)), CELLS)
        heads = self.architecture.heads
        sinks = self.architecture.layer_sinks
        if sinks.max() > float("-inf"):
            raise UsageError(f"reference models have no sinks, the architecture has logits up to {sinks.max():g}")
        if (self.attention == "content" or self.values == "gaussian") and self.width % heads:
            raise UsageError(f"reference width {self.width} is not a multiple of {heads} heads")
        if self.rotary and self.head_dim % 2:
            raise UsageError(f"rotary positions need an even number of features per head, got {self.head_dim}")
        for encoding in self._encodings:  # the sum with another encoding would be none with a name
            if self.trained_key_bias is not None and not isinstance(encoding, NoEncoding | KeyEncoding):
                raise UsageError(
                    f"reference trained_key_bias is added to the encodings none, key_bias or gamma_key, got {encoding}"
                )
        added = self.input_encoding
        if added is not None and added.width != self.width:
            raise UsageError(f"reference width {self.width} differs from the {added.width} features of {added}")

    def to_dict(self) -> dict[str, Any]:
        """Everything the model's numbers depend on apart from its weights, as plain values."""
        return {**vars(self), "architecture": self.architecture.describe()}

    @property
    def _encodings(self) -> set[Encoding]:
        return {group.encoding for layer in self.architecture.head_groups for group in layer}

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.width // self.architecture.heads

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
    def input_encoding(self) -> Sinusoidal | None:
        """The absolute encoding whose vectors are added to the input, or None."""
        if self.absolute != "added":
            return None
        encodings = {encoding for encoding in self._encodings if isinstance(encoding, Sinusoidal)}
        if len(encodings) > 1:
            raise UsageError(
                f"reference: {len(encodings)} absolute encodings cannot all be added to the input; give one"
            )
        return encodings.pop() if encodings else None

    @property
    def rotary(self) -> bool:
        """Tell whether queries and keys of some head are turned."""
        return self.attention == "content" and any(isinstance(encoding, Rope) for encoding in self._encodings)


def shape_of(config: ReferenceConfig, n_positions: int) -> tuple[Any, ...]:
    """What must be equal for models to be computed together: the tensors that exist, and the operations that run.

    Masks, encodings (given that both or neither are rotary, both or neither add vectors), content offsets and mixing
    are not part of it: they are data.

    Raises:
        UsageError: n_positions below 1.
    """
    checked_value("reference n_positions", n_positions, Counted)
    choices = tuple(value for name, value in vars(config).items() if name not in ("architecture", "absolute", "seed"))
    stack = config.architecture.depth, config.architecture.heads
    return (n_positions, *stack, config.rotary, config.input_encoding is not None, *choices)


def draw_parameters(config: ReferenceConfig, generator: torch.Generator) -> dict[str, Float[Tensor, "..."]]:
    """Weights at initialisation, drawn from the generator alone, not from the configuration's `seed`.

    Returns:
        `embedding` [vocabulary, d], `blocks.L.query` [head, d, head_dim], `blocks.L.up` [d, hidden], ...,
        `unembedding` [output, d] or `readout.K.weight` [in, out]; contiguous, on the generator's device.
    """
    given: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}
    linear = config.initialisation == "linear"

    def drawn(sort: str, shape: tuple[int, ...], inputs: int) -> Tensor:
        if sort == "gain":
            return torch.ones(shape, **given)
        if sort == "zero" or (sort == "bias" and not linear):
            return torch.zeros(shape, **given)
        if linear and sort != "table":
            return (2 * torch.rand(shape, generator=generator, **given) - 1) / math.sqrt(inputs)
        values = torch.randn(shape, generator=generator, **given)
        return values if sort == "table" else values / math.sqrt(inputs)

    return {name: drawn(sort, shape, inputs).to(config.torch_dtype) for name, sort, shape, inputs in draws(config)}


def draws(config: ReferenceConfig) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Everything there is to draw, in the order of the draws.

    Name, sort (`table`, `weight`, `bias`, `gain`, `zero`), shape, and inputs of the map.
    """
    heads, width, head_dim, outputs = config.architecture.heads, config.width, config.head_dim, config.n_outputs
    if config.vocabulary_size is not None:
        yield "embedding", "table", (config.vocabulary_size, width), width
    for layer in range(config.architecture.depth):
        block = f"blocks.{layer}"
        projections = ["query", "key"] * (config.attention == "content") + ["value"] * (config.values == "gaussian")
        for name in projections:
            yield f"{block}.{name}", "weight", (heads, width, head_dim), width
        if config.values == "gaussian" and config.output_map:
            yield f"{block}.output", "weight", (heads, head_dim, width), heads * head_dim
        if config.trained_key_bias is not None:
            yield f"{block}.trained_key_bias", "zero", (heads, config.trained_key_bias), 1
        if config.norm == "pre":
            yield f"{block}.attention_gain", "gain", (width,), 1
        if config.mlp and config.norm == "pre":
            yield f"{block}.mlp_gain", "gain", (width,), 1
        if config.mlp:
            yield f"{block}.up", "weight", (width, config.hidden_width), width
            yield f"{block}.down", "weight", (config.hidden_width, width), config.hidden_width
    if config.readout == "linear":
        yield "unembedding", "weight", (outputs, width), width
    else:
        hidden = [config.readout_width or width] * config.readout_layers
        for layer, (inputs, into) in enumerate(pairwise([width, *hidden, outputs])):
            yield f"readout.{layer}.weight", "weight", (inputs, into), inputs
            yield f"readout.{layer}.bias", "bias", (into,), inputs
    if config.norm == "pre":
        yield "final_gain", "gain", (width,), 1


def constants_of(config: ReferenceConfig, n_positions: int) -> dict[str, Float[Tensor, "..."]]:
    """The tensors that the architecture fixes at one context length N (>= 1).

    Returns:
        `bias` [layer, head, query, key], added to the logits, -inf if the mask hides the key; `kept` and `added`
        [layer], what multiplies the stream and the attention branch;
        if heads are rotary, `cosine` and `sine` [layer, head, position, pair], 1 and 0 for heads that are not;
        if vectors are added to the input, `positions` [position, feature]. On the CPU, in the model's precision.

    Raises:
        UsageError: n_positions below 1, or beyond what the encodings have vectors for.
    """
    shape_of(config, n_positions)
    depth, heads = config.architecture.depth, config.architecture.heads
    mixed = config.residual == "mixed"
    mixing = torch.from_numpy(np.asarray(config.architecture.layer_mixing, dtype=np.float64))
    half = config.head_dim // 2
    bias = torch.empty(depth, heads, n_positions, n_positions, dtype=torch.float64)
    angles = torch.zeros(depth, heads, n_positions, half if config.rotary else 0, dtype=torch.float64)
    for layer, groups in enumerate(config.architecture.head_groups):
        for group in groups:
            of = layer, torch.from_numpy(group.heads)
            bias[of] = torch.from_numpy(shown(config, group).masked_logits(n_positions))
            if config.rotary and isinstance(group.encoding, Rope):
                frequency = group.encoding.base ** (-torch.arange(half, dtype=torch.float64) / half)
                angles[of] = torch.arange(n_positions, dtype=torch.float64)[:, None] * frequency
    constants = {
        "bias": bias,
        "kept": 1 - mixing if mixed else torch.full((depth,), float(config.residual == "added"), dtype=torch.float64),
        "added": mixing if mixed else torch.ones(depth, dtype=torch.float64),
    }
    if config.rotary:
        constants |= {"cosine": angles.cos(), "sine": angles.sin()}
    if config.input_encoding is not None:
        constants["positions"] = torch.from_numpy(config.input_encoding.vectors_at(np.arange(n_positions)))
    return {name: value.to(config.torch_dtype) for name, value in constants.items()}


def shown(config: ReferenceConfig, group: HeadGroup) -> HeadGroup:
    """The group as its logits show it.

    If there is content, rotary encodings turn q and k; absolute ones may be added to the input. They add their
    constant-content bias if not.
    """
    turned = config.attention == "content" and isinstance(group.encoding, Rope)
    entered = config.absolute == "added" and isinstance(group.encoding, Sinusoidal)
    return replace(group, encoding=NoEncoding()) if turned or entered else group


def stacked(members: Sequence[Mapping[str, Tensor]]) -> dict[str, Float[Tensor, "member ..."]]:
    """Parameters or constants of several models of one shape with a leading member axis."""
    return {name: torch.stack([member[name] for member in members]) for name in members[0]}
