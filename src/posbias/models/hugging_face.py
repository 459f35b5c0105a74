"""`HuggingFaceModel`: a causal language model of the transformers library as a `Model`.

Weights are frozen and the network evaluates, so the only gradients are those of the vectors entering it. One forward
pass gives both the last hidden state (caught where it enters the unembedding) and the logits.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.architecture import NoEncoding
from posbias.errors import UsageError
from posbias.models.attention import watch_branches
from posbias.models.families import FAMILIES
from posbias.models.layout import Layout, stretched_positions
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.models.weights import buffers_sha256, config_sha256, dispatched, quantised, weights_sha256
from posbias.prompts.tokens import TEMPLATE_OPTIONS

CAUSAL_PROBE = 64
"""Positions on which it is tried whether a model looks ahead."""
COMPARED = 4
"""Tokens on which it is tried whether a model computes the same from embeddings as from token ids."""
COMPARED_TOLERANCE, PACKED_TOLERANCE = 1e-3, 0.05
"""Largest difference between the two as a share of the largest logit, or 4 roundings of the dtype: shapes are equal, so
that even the rounding is, save for kernels that add in any order. How packed weights are multiplied may depend on the
other rows."""
OFF_TABLE = 0.9
"""Factor that takes an embedding to where no token has one, as every gradient does."""
INTERVENTION_MARK = "posbias_intervention"
"""Attribute of a network that hooks change: the spelling of the change, so that records and parts tell it apart."""
LOOKS_AHEAD_MARK = "posbias_looks_ahead"
"""Attribute of a network that a method lets look ahead, so that nothing of a prompt's beginning serves another."""


@dataclass(frozen=True)
class Origin:
    """The source of a model, for the record."""

    source: str = "network"
    """Hub id, "demo", "config:..." or the base name of a local directory or file; never a machine path."""
    init_seed: int | None = None
    """Seed of the random initialisation, None for pretrained weights."""
    revision: str | None = None
    """Commit on the hub, if there is one."""


class HuggingFaceModel(Model):
    """A causal language model of transformers, pretrained or random.

    Args:
        network: The model with its language modelling head (`...ForCausalLM`), on its device and in its dtype. It is
            frozen and switched to evaluation in place.
        tokenizer: None if only token ids will be used.
        origin: For the record.
    """

    def __init__(self, network: nn.Module, tokenizer: Any = None, *, origin: Origin | None = None) -> None:
        self.network = network.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.origin = origin or Origin()
        outer: Any = network.config
        # A multimodal model's decoder has a part of its own; the model counts as another type, with modules elsewhere.
        self.config: Any = outer.get_text_config(decoder=True)
        self.model_type = str(outer.model_type)
        weight: Tensor = network.get_input_embeddings().weight  # type: ignore[operator]
        self.width = int(weight.shape[1])
        self.vocabulary_size = int(weight.shape[0])
        self.dtype = weight.dtype
        self.device = weight.device
        if dispatched(network):  # it begins on its first accelerator, if it has one
            accelerated = [place for place in self.places if place not in ("cpu", "disk")]
            self.device = torch.device(accelerated[0] if accelerated else "cpu")
        self._family: Layout | None = FAMILIES.get(self.model_type)
        self._misfit = None if self._family is None else self._family.unsupported(self.config)
        names = ("max_position_embeddings", "n_positions", "max_seq_len")
        lengths = (getattr(self.config, name, None) for name in names)
        self.max_positions = next((length for length in lengths if isinstance(length, int)), None)
        if self._family is not None and self._family.unbounded(self.config):
            self.max_positions = None
        self._stretched_from: int | None = None
        stretched = stretched_positions(self.config)
        if stretched is not None and self.max_positions is not None and stretched > self.max_positions:
            self._stretched_from, self.max_positions = self.max_positions, stretched
        self.reads_tokens: str | None = None
        """Why embeddings do not say all that the network reads of its tokens, as `compare_inputs` found; None: they do,
        or it was not asked."""
        named = inspect.signature(network.forward).parameters
        self._keeps_logits, self._takes_positions = "logits_to_keep" in named, "position_ids" in named

    @property
    def described(self) -> bool:
        """Tell whether the family is known and this configuration fits its description."""
        return self._family is not None and self._misfit is None

    @property
    def family(self) -> Layout:
        """The description of this model's family.

        Raises:
            UsageError: there is none, or this configuration does not fit it.
        """
        if self._family is None:
            raise UsageError(
                f"the layout of {self.model_type} models is not in the table, so their blocks cannot be read; they can "
                f"be measured, evaluated and mitigated (docs/families); allowed: dense {', '.join(FAMILIES)}"
            )
        if self._misfit is not None and self.intervention is not None:
            raise UsageError(f"no description fits the model under {self.intervention}: {self._misfit}")
        if self._misfit is not None:
            raise UsageError(f"this {self.model_type} model is not described: {self._misfit}; unset is allowed")
        return self._family

    def described_by(self, family: Layout, *, misfit: str | None = None) -> "HuggingFaceModel":
        """A view of the network, changed from outside, under another description, or none, for the reason `misfit`."""
        view = copy.copy(self)
        view._family, view._misfit = family, misfit
        return view

    @property
    def identity(self) -> dict[str, Any]:
        """Source and seed of the model's origin, with the intervention that lasts at the moment."""
        origin = self.origin
        return {"source": origin.source, "init_seed": origin.init_seed, "intervention": self.intervention}

    @property
    def places(self) -> tuple[str, ...]:
        """Devices that hold weights, and "disk" if it does; several if accelerate has spread them."""
        spread: Mapping[str, Any] = getattr(self.network, "hf_device_map", {})
        named = dict.fromkeys(place if place == "disk" else str(torch.device(place)) for place in spread.values())
        return tuple(named) or super().places

    @property
    def sizes(self) -> Mapping[str, int]:
        """Counts by the family's description, or by the usual names if the family is not described."""
        usual = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "key heads": "num_key_value_heads"}
        counts: dict[str, int] = {}
        for name, entry in usual.items():
            with suppress(AttributeError, ValueError, RuntimeError):  # absent, or others in every layer
                counts[name] = getattr(self.config, entry)
        return counts if self._family is None else {**counts, "key heads": self._family.key_heads(self.config)}

    @property
    def intervention(self) -> str | None:
        """The spelling that the network itself is marked with."""
        spelling: str | None = getattr(self.network, INTERVENTION_MARK, None)
        return spelling

    def embed(self, token_ids: Int[Tensor, "batch position"]) -> Float[Tensor, "batch position feature"]:
        """Token embeddings, with the scale some families apply inside the embedding layer (Gemma), or to its output."""
        embeddings: Tensor = self.network.get_input_embeddings()(token_ids)  # type: ignore[operator]
        return embeddings * self.config.embedding_multiplier if self.model_type == "falcon_h1" else embeddings

    def outputs(
        self,
        embeddings: Float[Tensor, "batch position feature"],
        positions: Sequence[int],
        *,
        cache: Any = None,
    ) -> Outputs:
        """Run the network like `Model.outputs`, or on after the positions in a cache of keys and values, which grows.

        Raises:
            UsageError: the network also reads the tokens themselves, which embeddings leave out.
        """
        if self.reads_tokens is not None:
            raise UsageError(
                f"model {self.origin.source!r} ({self.model_type}) reads more of its tokens than their embeddings "
                f"({self.reads_tokens}), which influence through embeddings would leave out; allowed: evaluating it, "
                "and models that read embeddings alone"
            )
        caught: list[Tensor] = []
        head: Any = self.network.get_output_embeddings()  # type: ignore[operator]
        handle = head.register_forward_pre_hook(lambda _module, inputs: caught.append(inputs[0]))
        try:
            logits = self._forward(positions, cache=cache, inputs_embeds=embeddings)
        finally:
            handle.remove()
        return Outputs(hidden=_rows(caught[-1], positions), logits=logits)

    def caveats(self) -> list[str]:
        """Differences between what runs and what the model's name promises."""
        family = self._family
        biased = family is not None and family.encoding(self.config, 0) != NoEncoding()
        caveats = [family.caveat] if family is not None and biased else []
        if self._stretched_from is not None:
            caveats.append(
                f"the configuration names {self._stretched_from:,} positions; YaRN stretches them to "
                f"{self.max_positions:,} (factor times original length), which are allowed"
            )
        return caveats

    @torch.no_grad()
    def logits(
        self,
        token_ids: Int[Tensor, "batch position"],
        positions: Sequence[int],
        *,
        cache: Any = None,
        padding: Int[Tensor, "batch"] | None = None,
    ) -> Float[Tensor, "batch output vocabulary"]:
        """Logits of some positions as `outputs` has them, by token ids: what a network's users get from it.

        `padding` is how many slots at the beginning of every row, cached ones among them, hold no token of its prompt.
        """
        return self._forward(positions, cache=cache, padding=padding, input_ids=token_ids)

    @torch.no_grad()
    def compare_inputs(self) -> None:
        """Find out, by two passes of a few tokens, whether the network reads more of its tokens than their embeddings.

        Per-layer embeddings (Gemma 3n, Gemma 4 E) and routers by token (DeepSeek-V4) do. One row holds the tokens'
        embeddings, which have to give what the tokens give; a second one embeddings that no token has.
        """
        spread = [step * self.vocabulary_size // (COMPARED + 1) for step in range(1, COMPARED + 1)]
        token_ids = self.token_tensor([spread, spread])
        positions = list(range(COMPARED))
        by_token = self.logits(token_ids, positions)[0].float()
        if not by_token.isfinite().all():
            return  # nothing can be compared; whoever runs the network says that its numbers are not finite
        factors = torch.tensor([1.0, OFF_TABLE], dtype=self.dtype, device=self.device)
        try:
            embeddings = self.embed(token_ids) * factors[:, None, None]
            by_embedding = self._forward(positions, cache=None, inputs_embeds=embeddings)[0].float()
        except Exception as error:  # whatever a network raises that cannot do without the tokens
            self.reads_tokens = f"it fails on embeddings that no token has, with {type(error).__name__}"
            return
        share = PACKED_TOLERANCE if quantised(self.network) else COMPARED_TOLERANCE
        largest = max(share, 4 * torch.finfo(self.dtype).eps) * float(by_token.abs().max())
        difference = float((by_embedding - by_token).abs().max())
        if not difference <= largest:
            self.reads_tokens = f"without them its logits differ by up to {difference:.2g}"

    @torch.no_grad()
    def branch_norms(self, token_ids: Int[Tensor, "batch position"]) -> BranchNorms:
        """|block input| and |attention branch as added|, every layer and position, in one forward pass."""
        with watch_branches(self.network) as watch:
            self.logits(token_ids, [token_ids.shape[1] - 1])
        return watch.norms()

    def architecture_traits(self) -> dict[str, Any]:
        """Depth, heads, masks and encodings; one variant if all layers agree, else a list per layer."""
        traits: dict[str, Any] = {"depth": self.sizes["layers"], "heads": self.sizes["heads"]}
        for name in ("mask", "encoding"):
            layers = [getattr(self.family, name)(self.config, layer) for layer in range(traits["depth"])]
            traits[name] = layers[0] if all(each == layers[0] for each in layers) else layers
        return traits

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        import transformers

        device = ", ".join(self.places)
        if self.device.type == "cuda":
            device += f" ({torch.cuda.get_device_name(self.device)})"
        description: dict[str, Any] = {
            "source": self.origin.source,
            "revision": self.origin.revision,
            "model_type": self.model_type,
            "described": self.described,
            "width": self.width,
            "vocabulary_size": self.vocabulary_size,
            "max_positions": self.max_positions,
            "parameters": sum(parameter.numel() for parameter in self.network.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": device,
            "init_seed": self.origin.init_seed,
            "attention": str(getattr(self.config, "_attn_implementation", None)),
            "weights_sha256": weights_sha256(self.network),
            "buffers_sha256": buffers_sha256(self.network),
            "config_sha256": config_sha256(self.network),
            "intervention": self.intervention,
            "transformers": transformers.__version__,
            "caveats": self.caveats(),
        }
        if options := getattr(self.tokenizer, TEMPLATE_OPTIONS, None):
            description["template_options"] = dict(options)
        if self._family is not None:
            description |= {"depth": self.sizes["layers"], "heads": self.sizes["heads"]}
        return description

    def _forward(
        self, positions: Sequence[int], *, cache: Any, padding: Int[Tensor, "batch"] | None = None, **inputs: Tensor
    ) -> Float[Tensor, "batch output vocabulary"]:
        """Logits of the positions, of token ids or embeddings by the network's own names."""
        arguments: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        (entering,) = inputs.values()
        if padding is not None:
            past = 0 if cache is None else int(cache.get_seq_length())
            places = torch.arange(past + entering.shape[1], device=padding.device) - padding[:, None]
            arguments["attention_mask"] = (places >= 0).long()
            if self._takes_positions:
                arguments["position_ids"] = places[:, past:].clamp(min=0)
        if self._keeps_logits:
            last = [entering.shape[1] - 1]
            arguments["logits_to_keep"] = 1 if list(positions) == last else torch.as_tensor(list(positions))
        logits: Tensor = self.network(**inputs, use_cache=cache is not None, **arguments).logits
        return _rows(logits, positions)


def _rows(
    values: Float[Tensor, "batch kept feature"], positions: Sequence[int]
) -> Float[Tensor, "batch output feature"]:
    """The rows of some positions; all of `values` if the model has picked them already."""
    # Positions ascend, so that as many rows as positions can only be those rows, in that order.
    return values if values.shape[1] == len(positions) else values[:, list(positions)]


def looks_ahead(model: HuggingFaceModel, embeddings: Float[Tensor, "one position feature"]) -> bool:
    """Tell whether an output in the middle of the first positions depends on later ones: its gradient by them is not 0.

    A network that a method has marked looks ahead, whatever its first positions do.
    """
    if hasattr(model.network, LOOKS_AHEAD_MARK):
        return True
    inputs = embeddings[:, :CAUSAL_PROBE].detach().requires_grad_()
    middle = (inputs.shape[1] - 1) // 2
    with torch.enable_grad():
        # Whatever else a network reads of its tokens: it is attention that looks ahead, and goes through these.
        logits = model._forward([middle], cache=None, inputs_embeds=inputs)
        (gradient,) = torch.autograd.grad(logits.float().square().sum(), inputs)
    return bool((gradient[:, middle + 1 :] != 0).any())
