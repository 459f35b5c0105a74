"""`Model`: what measurement and theory ask of any causal language model, pretrained, random or our own reference.

`embed` gives the vectors x_j that enter the network; `outputs` runs it from those vectors to the output of some
positions, `last` to that of the last. Everything differentiable goes through these.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from posbias.errors import RunError, UsageError, printable
from posbias.models.devices import in_float64


@dataclass(frozen=True)
class ModelRequest:
    """The arguments of one `load_model`: enough to load the same model again in another process.

    Picklable; local paths are absolute, so it belongs in no record.
    """

    source: str
    init_seed: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    template_options: Mapping[str, Any] | None = None
    """Options of the tokenizer's chat template, beside the messages."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of some positions for a batch; the last position's alone have no axis of positions."""

    hidden: Float[Tensor, "batch *output feature"]
    """After the final norm: what the unembedding reads."""
    logits: Float[Tensor, "batch *output vocabulary"]
    """Next-token logits, with everything the model does to them (soft caps, scales)."""


@dataclass(frozen=True)
class BranchNorms:
    """How large each attention branch is beside the stream it is added to, per layer and position."""

    stream: Float[Tensor, "layer batch position"]
    """|x|, the block input."""
    branch: Float[Tensor, "layer batch position"]
    """|a|, what the attention branch adds, after any post-norm."""

    def share(self, where: str = "") -> Float64[np.ndarray, "layers position"]:
        """|a| / (|x| + |a|) of every position of a single prompt, in [0, 1].

        Raises:
            RunError: a sum is zero or not finite; the message names the layer, and the prompt by `where`.
        """
        stream, branch = (in_float64(norms[:, 0]).numpy(force=True) for norms in (self.stream, self.branch))
        total = stream + branch
        wrong = np.flatnonzero(~(np.isfinite(total) & (total > 0)).all(axis=1))
        if len(wrong):
            raise RunError(
                f"mixing: |x| + |a| is zero or not finite{where} in layer {int(wrong[0])}; it must be finite and > 0"
            )
        return np.asarray(branch / total)


class Model(ABC):
    """A causal language model, weights frozen, in evaluation mode."""

    model_type: str = "model"
    """Family of the network: transformers' name of it, or "reference"."""
    network: nn.Module
    tokenizer: Any
    """A Hugging Face tokenizer, or None for models that only take token ids."""
    no_tokenizer: str = "the model has no tokenizer"
    """Why there is no tokenizer, if there is none."""
    width: int
    """Features d of the vectors that enter the network."""
    vocabulary_size: int
    max_positions: int | None
    """Longest input; None if unbounded."""
    dtype: torch.dtype
    device: torch.device
    request: ModelRequest | None = None
    """Arguments that load the same model again in another process; None for networks made by hand."""

    @property
    def identity(self) -> dict[str, Any]:
        """Source, seed of the initialisation and intervention, as in `describe`; no weight is read."""
        return {"source": "a model", "init_seed": None}

    @property
    def intervention(self) -> str | None:
        """The spelling of the intervention that lasts in the network at the moment, or None."""
        return None

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts of `layers`, `heads` and `key heads`, as far as they are known."""
        return {}

    def __repr__(self) -> str:
        """Name, family, size, precision, device and context of the model, and what is changed in it."""
        sizes = [f"{count} {name}" for name, count in self.sizes.items() if name != "key heads"]
        context = "any length" if self.max_positions is None else f"up to {self.max_positions:,} positions"
        parts = [", ".join([self.model_type, *sizes, f"width {self.width}"]), self.precision, context]
        if self.identity["init_seed"] is not None:
            parts.append(f"drawn from seed {self.identity['init_seed']}")
        if self.intervention is not None:
            parts.append(f"under {self.intervention}")
        return printable(f"{type(self).__name__}({self.identity['source']}: {'; '.join(parts)})")

    @property
    def places(self) -> tuple[str, ...]:
        """Devices that hold weights, and "disk" if it does; several if they are spread."""
        return (str(self.device),)

    @property
    def precision(self) -> str:
        """The dtype in which it computes, and where its weights are."""
        return f"{str(self.dtype).removeprefix('torch.')} on {', '.join(self.places)}"

    @property
    def reload_request(self) -> ModelRequest | None:
        """`request`, with the device and precision that it came to; None while an intervention lasts.

        No other process has the intervention.
        """
        if self.intervention is not None or self.request is None:
            return None
        device = "spread" if len(self.places) > 1 else str(self.device)
        return replace(self.request, dtype=str(self.dtype).removeprefix("torch."), device=device)

    @abstractmethod
    def embed(self, token_ids: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position feature"]:
        """The vectors entering the network: token embeddings before anything is added to them."""

    @abstractmethod
    def outputs(self, embeddings: Float[Tensor, "batch position feature"], positions: Sequence[int]) -> Outputs:
        """Run the network from embeddings (no padding, no cache) to the outputs of some positions, differentiably.

        Positions are strictly ascending, within 0 ... N - 1; if the model allows it, only their logits are formed.
        """

    def last(self, embeddings: Float[Tensor, "batch position feature"]) -> Outputs:
        """`outputs` of the last position alone."""
        output = self.outputs(embeddings, [embeddings.shape[1] - 1])
        return Outputs(hidden=output.hidden[:, 0], logits=output.logits[:, 0])

    @abstractmethod
    def branch_norms(self, token_ids: Int[Tensor, "batch position"]) -> BranchNorms:
        """Norms of block inputs and attention branches of a described family, in one forward pass without gradients."""

    @abstractmethod
    def architecture_traits(self) -> dict[str, Any]:
        """`depth`, `heads`, `mask`, `encoding` for `Architecture`, from the configuration of a described family."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain values for a record: source, family, revision or content hash, sizes, dtype, init_seed."""

    @property
    def described(self) -> bool:
        """Tell whether the family is known, so that mixing, power rollout and architecture can be read off."""
        return True

    def token_tensor(self, token_ids: Sequence[Sequence[int]]) -> Int[Tensor, "batch position"]:
        """Token ids on the model's device.

        Raises:
            UsageError: one without an embedding, such as a token that was added to the tokenizer alone.
        """
        tensor = torch.as_tensor(token_ids, dtype=torch.long)
        outside = tensor[(tensor < 0) | (tensor >= self.vocabulary_size)]
        if self.vocabulary_size and len(outside):  # a model that takes vectors has no vocabulary, which `embed` says
            raise UsageError(
                f"token id {outside[0]} is outside the model's vocabulary 0 ... {self.vocabulary_size - 1}"
            )
        return tensor.to(self.device)
