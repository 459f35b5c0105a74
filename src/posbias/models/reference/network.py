"""The reference transformer as a `Model`: frozen weights behind the interface that measurement and theory ask for.

Its forward is the stack's, for one member and without products of weights formed ahead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.architecture import Architecture, Encoding, NoEncoding
from posbias.errors import UsageError
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.models.reference.attention import content_logits
from posbias.models.reference.config import ReferenceConfig, ReferenceShape, shape_of
from posbias.models.reference.constants import constants_of, shown
from posbias.models.reference.forward import entrance, layer_output, of_constants, split
from posbias.models.reference.layers import normalise, read_out
from posbias.models.reference.parameters import draw_parameters
from posbias.models.weights import weights_sha256


class ReferenceBlock(nn.Module):
    """One layer's weights, and what it does with them. Trainable like any module."""

    query: nn.Parameter
    key: nn.Parameter
    value: nn.Parameter
    output: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    attention_gain: nn.Parameter
    mlp_gain: nn.Parameter

    def __init__(self, config: ReferenceConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.groups = config.architecture.head_groups[layer]
        self.mixing = float(config.architecture.layer_mixing[layer])

    def forward(self, stream: Float[Tensor, "batch position feature"]) -> Float[Tensor, "batch position feature"]:
        """The layer's output."""
        return layer_output(self._shape(stream), self._weights(), self._constants(stream), stream[None], rows=None)[0]

    def split(
        self, stream: Float[Tensor, "batch position feature"]
    ) -> tuple[Float[Tensor, "batch position feature"], Float[Tensor, "batch position feature"]]:
        """What the residual keeps of the stream, and what attention adds to it."""
        parts = split(self._shape(stream), self._weights(), self._constants(stream), stream[None], rows=None)
        kept, added = parts
        return (torch.zeros_like(stream) if kept is None else kept[0]), added[0]

    def content_logits(
        self, inputs: Float[Tensor, "batch position feature"]
    ) -> Float[Tensor, "batch head position position"]:
        """q.k / sqrt(head_dim), queries and keys turned in the heads whose encoding is rotary."""
        shape, weights = self._shape(inputs), self._weights()
        return content_logits(shape, weights, self._constants(inputs), inputs[None], rows=None)[0]

    def _shape(self, stream: Float[Tensor, "batch position feature"]) -> ReferenceShape:
        return replace(shape_of(self.config, stream.shape[1]), merges=False)

    def _weights(self) -> dict[str, Tensor]:
        return {name: value[None] for name, value in self.named_parameters()}

    def _constants(self, stream: Float[Tensor, "batch position feature"]) -> dict[str, Tensor]:
        constants = constants_of(self.config, stream.shape[1])
        return of_constants({name: value[None].to(stream.device) for name, value in constants.items()}, self.layer)


class ReferenceNetwork(nn.Module):
    """Embedding, blocks, optional final norm, readout; drawn from `config.seed` unless weights are given."""

    embedding: nn.Parameter
    final_gain: nn.Parameter

    def __init__(self, config: ReferenceConfig, parameters: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        if parameters is None:
            parameters = draw_parameters(config, torch.Generator().manual_seed(config.seed))
        layers = range(config.architecture.depth)
        self.blocks = nn.ModuleList([ReferenceBlock(config, layer) for layer in layers])
        for name, value in parameters.items():
            _place(self, name, nn.Parameter(value.detach().to(config.torch_dtype, copy=True)))

    def forward(
        self, embeddings: Float[Tensor, "batch position feature"]
    ) -> tuple[Float[Tensor, "batch position feature"], Float[Tensor, "batch position output"]]:
        """Hidden states after the final norm, and logits, at every position."""
        n_positions = embeddings.shape[1]
        shape = replace(shape_of(self.config, n_positions), merges=False)
        weights = {name: value[None] for name, value in self.named_parameters() if not name.startswith("blocks.")}
        constants = constants_of(self.config, n_positions) if shape.adds_positions else {}
        fixed = {name: value[None].to(embeddings.device) for name, value in constants.items()}
        stream = entrance(shape, weights, fixed, embeddings[None])[0]
        for block in self.blocks:
            stream = block(stream)
        hidden = normalise(shape, weights, "final", stream[None]) if shape.norm == "pre" else stream[None]
        return hidden[0], read_out(shape, weights, hidden)[0]


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under its dotted name."""
    *path, last = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


class ReferenceTransformer(Model):
    """The reference network as a `Model`: frozen, in evaluation mode, without a tokenizer.

    Args:
        config: The network, or just an `Architecture` for the linear attention-only one.
        parameters: Trained weights, named as `draw_parameters` names them; None: drawn from the configuration's seed.
        items: For a network of vector inputs: the vectors that token ids name.
    """

    network: ReferenceNetwork
    origin: Mapping[str, Any]
    """For the record: `source`, and of a saved model its `init_seed` and `provenance`."""

    def __init__(
        self,
        config: ReferenceConfig | Architecture,
        parameters: Mapping[str, Tensor] | None = None,
        *,
        items: Float[Tensor, "item feature"] | None = None,
    ) -> None:
        self.config = ReferenceConfig(config) if isinstance(config, Architecture) else config
        self.network = ReferenceNetwork(self.config, parameters)
        self.network.eval().requires_grad_(False)
        self.tokenizer = None
        self.width = self.config.width
        self.items = None if items is None else items.to(self.config.torch_dtype)
        if items is not None and (self.config.vocabulary_size is not None or items.shape[1] != self.width):
            raise UsageError(f"items [item, {self.width}] belong to a reference model without a vocabulary")
        self.vocabulary_size = (0 if items is None else len(items)) or self.config.vocabulary_size or 0
        self.max_positions = self.config.learned_positions
        self.dtype = self.config.torch_dtype
        self.device = torch.device("cpu")
        self.origin = {"source": "reference"}

    def to(self, device: str | torch.device) -> "ReferenceTransformer":
        """Move the model, in place."""
        self.device = torch.device(device)
        self.network.to(self.device)
        self.items = None if self.items is None else self.items.to(self.device)
        return self

    def embed(self, token_ids: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position feature"]:
        """Rows of the embedding, or of the items.

        Raises:
            UsageError: the model takes vectors and has no items.
        """
        if self.config.vocabulary_size is not None:
            return self.network.embedding[token_ids]
        if self.items is None:
            raise UsageError("this reference model takes vectors; give it items, or vectors in place of token ids")
        return self.items[token_ids]

    def outputs(self, embeddings: Float[Tensor, "batch position feature"], positions: Sequence[int]) -> Outputs:
        """Hidden states and logits of some positions, differentiably."""
        hidden, logits = self.network(embeddings)
        rows = list(positions)
        return Outputs(hidden=hidden[:, rows], logits=logits[:, rows])

    @torch.no_grad()
    def branch_norms(self, token_ids: Int[Tensor, "batch position"]) -> BranchNorms:
        """Norms of what each layer keeps of the stream and of what attention adds to it."""
        stream = self.embed(token_ids)
        kept, added = [], []
        for block in self.network.blocks:
            assert isinstance(block, ReferenceBlock)
            keep, branch = block.split(stream)
            kept.append(keep.norm(dim=-1))
            added.append(branch.norm(dim=-1))
            stream = block(stream)
        return BranchNorms(stream=torch.stack(kept), branch=torch.stack(added))

    def architecture_traits(self) -> dict[str, Any]:
        """Those of the architecture it was built from; an encoding that enters by content adds no logit: "none"."""
        architecture = self.config.architecture
        traits = {name: getattr(architecture, name) for name in ("depth", "heads", "mask", "encoding")}
        groups = [[(group, shown(self.config, group)) for group in layer] for layer in architecture.head_groups]
        if all(one.encoding == other.encoding for layer in groups for one, other in layer):
            return traits
        encoding: list[list[Encoding]] = [[NoEncoding()] * architecture.heads for _ in groups]
        for layer, row in zip(groups, encoding, strict=True):
            for _, group in layer:
                for head in group.heads:
                    row[head] = group.encoding
        distinct = {item for row in encoding for item in row}
        return {**traits, "encoding": distinct.pop() if len(distinct) == 1 else encoding}

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return {
            "model_type": "reference",
            "described": True,
            **self.config.to_dict(),
            **self.origin,
            "weights_sha256": weights_sha256(self.network),
        }
