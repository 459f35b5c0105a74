"""The reference transformer as a `Model`: frozen weights behind the interface that measurement and theory ask for.

Its forward is the stack's, for one member. On disk a model is `reference.json` (configuration, where it came from) and
`weights.safetensors`; nothing that could run code is read. The JSON file is written last, so that a directory with it
is whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.architecture import Architecture, Encoding, KeyBias, NoEncoding
from posbias.errors import RunError, UsageError, one_line
from posbias.files import parsed_json, read_whole, write_atomically
from posbias.models.devices import check_precision
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.models.reference.config import ReferenceConfig, constants_of, draw_parameters, draws, shown
from posbias.models.reference.forward import (
    entered,
    entrance,
    layer_inputs,
    layer_output,
    of_layer,
    read_out,
    split,
)
from posbias.models.weights import weights_sha256
from posbias.results.records import plain

CONFIG_FILE = "reference.json"
WEIGHTS_FILE = "weights.safetensors"
FORMAT = 1
ITEMS = "items"
"""Name of the table of input vectors beside the weights."""
CONFIG_BYTES = 10_000_000
"""The largest configuration read; those of real models have a few thousand bytes."""

Tensors = dict[str, Tensor]


class ReferenceBlock(nn.Module):
    """One layer's weights."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, stream: Float[Tensor, "batch position feature"], weights: Tensors, fixed: Tensors
    ) -> Float[Tensor, "batch position feature"]:
        """The layer's output, from the weights and constants of this layer in a stack of one member."""
        return layer_output(self.config, weights, fixed, stream[None])[0]


class ReferenceNetwork(nn.Module):
    """Embedding, blocks, optional final norm, readout; drawn from `config.seed` unless weights are given."""

    def __init__(self, config: ReferenceConfig, parameters: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self.config = config
        if parameters is None:
            parameters = draw_parameters(config, torch.Generator().manual_seed(config.seed))
        self.blocks = nn.ModuleList([ReferenceBlock(config) for _ in range(config.architecture.depth)])
        for name, value in parameters.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, nn.Parameter(value.detach().to(config.torch_dtype, copy=True)))

    def stack(self, embeddings: Float[Tensor, "batch position feature"]) -> tuple[Tensors, Tensors]:
        """Weights and constants of a stack of this one member at the length of its inputs."""
        weights = {name: value[None] for name, value in self.named_parameters()}
        constants = constants_of(self.config, embeddings.shape[1])
        return weights, {name: value[None].to(embeddings.device) for name, value in constants.items()}

    def forward(
        self, embeddings: Float[Tensor, "batch position feature"]
    ) -> tuple[Float[Tensor, "batch position feature"], Float[Tensor, "batch position output"]]:
        """Hidden states after the final norm, and logits, at every position."""
        weights, constants = self.stack(embeddings)
        stream = entrance(weights, constants, embeddings[None])[0]
        for layer, block in enumerate(self.blocks):
            stream = block(stream, *of_layer(weights, constants, layer))
        hidden = entered(self.config, weights, "final", stream[None])
        return hidden[0], read_out(self.config, weights, hidden)[0]


class ReferenceTransformer(Model):
    """The reference network as a `Model`: frozen, in evaluation mode, without a tokenizer.

    Args:
        config: The network, or just an `Architecture` for the linear attention-only one.
        parameters: Trained weights, named as `draw_parameters` names them; None: drawn from the configuration's seed.
        items: For a network of vector inputs: the vectors that token ids name.
    """

    model_type = "reference"
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
        self.max_positions = None
        self.dtype = self.config.torch_dtype
        self.device = torch.device("cpu")
        self.origin = {"source": "reference"}

    @property
    def identity(self) -> dict[str, Any]:
        """Source and seed of the model's origin."""
        return {"init_seed": None, **self.origin}

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts of the configuration."""
        layers, heads = self.config.architecture.depth, self.config.architecture.heads
        return {"layers": layers, "heads": heads, "key heads": heads}

    def to(self, device: str | torch.device) -> "ReferenceTransformer":
        """Move the model, in place; refused in float64 if the device has none."""
        check_precision(torch.device(device), self.dtype)
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
            return self.network.get_parameter("embedding")[token_ids]
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
        vectors = self.embed(token_ids)
        parameters, constants = self.network.stack(vectors)
        stream = entrance(parameters, constants, vectors[None])
        passing, added = [], []
        for weights, fixed, below in layer_inputs(self.config, parameters, constants, stream):
            keep, branch = split(self.config, weights, fixed, below)
            added.append(branch[0].norm(dim=-1))
            passing.append(torch.zeros_like(added[-1]) if keep is None else keep[0].norm(dim=-1))
        return BranchNorms(stream=torch.stack(passing), branch=torch.stack(added))

    def architecture_traits(self) -> dict[str, Any]:
        """Those of the architecture it was built from; an encoding that enters by content adds no logit: "none"."""
        config, heads = self.config, self.config.architecture.heads
        traits = {name: getattr(config.architecture, name) for name in ("depth", "heads", "mask", "encoding")}
        if config.trained_key_bias is not None:
            return {**traits, "encoding": self._key_biases(config.trained_key_bias)}
        layers = [[(group, shown(config, group)) for group in layer] for layer in config.architecture.head_groups]
        if all(group is as_shown for layer in layers for group, as_shown in layer):
            return traits
        encoding: list[list[Encoding]] = [[NoEncoding()] * heads for _ in layers]
        for row, layer in zip(encoding, layers, strict=True):
            for _, group in layer:
                for head in group.heads:
                    row[head] = group.encoding
        distinct = {item for row in encoding for item in row}
        return {**traits, "encoding": distinct.pop() if len(distinct) == 1 else encoding}

    def _key_biases(self, n_positions: int) -> list[Encoding]:
        """The bias of every layer's keys that have a trained one: the encoding's plus the trained."""
        biases: list[Encoding] = []
        for block, groups in zip(self.network.blocks, self.config.architecture.head_groups, strict=True):
            values = block.get_parameter("trained_key_bias").detach().cpu().double().numpy().copy()
            for group in groups:
                first_row = group.encoding.pair_logits(np.zeros(1, int), np.arange(n_positions), len(values))[:, 0]
                values[group.heads] += first_row[group.heads]
            biases.append(KeyBias(values.tolist()))
        return biases

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return {
            "model_type": "reference",
            "described": True,
            **self.config.to_dict(),
            **self.origin,
            "device": str(self.device),
            "weights_sha256": weights_sha256(self.network),
        }


def save_reference(
    directory: str | Path,
    config: ReferenceConfig,
    *,
    parameters: Mapping[str, Tensor],
    provenance: Mapping[str, Any] | None = None,
    items: Float[Tensor, "item feature"] | None = None,
) -> Path:
    """Write a model so that `load_model(directory)` gives it back; files of an earlier model there are replaced.

    Weights are named as `draw_parameters` names them; `provenance` holds plain values for the record (study, member,
    task, steps, seeds). `items` are the vectors that token ids shall name, for a model of vector inputs.

    Raises:
        UsageError: weights that are not the configuration's, or items for a model with a vocabulary.
    """
    from safetensors.torch import save

    check_parameters(config, parameters)
    if items is not None and config.vocabulary_size is not None:
        raise UsageError(f"items belong to models of vector inputs, this one has {config.vocabulary_size} tokens")
    tensors = {**parameters} if items is None else {**parameters, ITEMS: items.to(config.torch_dtype)}
    document = {"format": FORMAT, "config": config.to_dict(), "provenance": plain(dict(provenance or {}))}
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).unlink(missing_ok=True)
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(path / WEIGHTS_FILE, save(stored))
    write_atomically(path / CONFIG_FILE, json.dumps(document, indent=1).encode())
    return path


def load_reference(
    directory: str | Path, *, dtype: str | None = None, init_seed: int | None = None, device: str = "cpu"
) -> ReferenceTransformer:
    """A saved model, frozen, in its own `dtype` or another; `init_seed` draws its weights anew, but not its items.

    Raises:
        UsageError: no such model, an unknown format, a configuration or dtype that is not allowed.
        RunError: weights damaged, missing, of the wrong shape, or not finite.
    """
    path = Path(directory)
    if not (path / CONFIG_FILE).is_file():
        raise UsageError(f"{path.name!r} holds no reference model ({CONFIG_FILE} is missing)")
    content = read_whole(path / CONFIG_FILE, f"model {path.name!r}:", CONFIG_BYTES)
    document = parsed_json(content, f"model {path.name!r}: {CONFIG_FILE}")
    version = document.get("format") if isinstance(document, dict) else None
    if version != FORMAT or not isinstance(document.get("config"), dict) or "provenance" not in document:
        raise UsageError(f"model {path.name!r} has format {str(version)[:80]}; this version reads {FORMAT}")
    config = config_from(document["config"])
    tensors = load_parameters(path, config)
    items = tensors.pop(ITEMS, None)
    config = config if dtype is None else replace(config, dtype=dtype)
    if init_seed is not None:
        config = replace(config, seed=init_seed)
        tensors = draw_parameters(config, torch.Generator().manual_seed(init_seed))
    model = ReferenceTransformer(config, tensors, items=items)
    model.origin = {"source": path.resolve().name, "init_seed": init_seed, "provenance": document["provenance"]}
    return model.to(device)


def config_from(values: Mapping[str, Any]) -> ReferenceConfig:
    """The configuration that `to_dict` described, refused if a field is unknown, missing or out of range."""
    try:
        return ReferenceConfig(**{**values, "architecture": Architecture(**values["architecture"])})
    except UsageError as error:
        why = one_line(error)  # it may repeat a value of any length
        raise UsageError(f"{why}; a model that another posbias has saved is trained again") from None
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"reference configuration is refused: {one_line(error)}") from None


def load_parameters(directory: Path, config: ReferenceConfig) -> dict[str, Tensor]:
    """The weights beside a configuration, and the items if there are any; read only if they are this model's.

    Raises:
        RunError: it is missing or damaged, or holds weights of another shape or not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    name, path = directory.name, directory / WEIGHTS_FILE
    try:
        tensors: dict[str, Tensor] = load_file(path)
        check_parameters(config, {key: value for key, value in tensors.items() if key != ITEMS})
        if ITEMS in tensors and not bool(tensors[ITEMS].isfinite().all()):
            raise UsageError(f"weight {ITEMS!r} holds NaN or infinite values; allowed: finite")
    except (SafetensorError, OSError) as error:
        raise RunError(f"model {name!r}: {path.name} is missing or damaged: {one_line(error)}") from None
    except UsageError as error:
        raise RunError(f"model {name!r}: {error}") from None
    return tensors


def check_parameters(config: ReferenceConfig, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not the configuration's, or not finite: the first missing, unknown, or wrong."""
    expected = {name: list(shape) for name, _, shape, _ in draws(config)}
    for name in sorted(set(expected) ^ set(parameters)):
        raise UsageError(f"weight {name[:80]!r} is {'missing' if name in expected else 'not part of this model'}")
    for name, value in parameters.items():
        if list(value.shape) != expected[name]:
            raise UsageError(f"weight {name!r} has shape {list(value.shape)}, expected {expected[name]}")
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            raise UsageError(f"weight {name[:80]!r} holds NaN or infinite values; allowed: finite")
