"""Random networks from a configuration: what a model was before training, drawn by its class's own initialiser."""

import copy
from typing import Any, NamedTuple

import torch
from torch import nn

from posbias.checks import check_whole, checked
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.sources import quiet
from posbias.models.weights import cast_weights


def random_network(config: Any, *, seed: int) -> nn.Module:
    """A network of the configuration's class with all weights drawn by its own initialiser, in float32.

    Built anew from a copy of the configuration, so that norms and biases are reset too and no attention setting is
    shared with another model. The weights are those of `torch.manual_seed(seed)` followed by
    `AutoModelForCausalLM.from_config(config)`, but the global random state is left as it was.

    Raises:
        UsageError: the seed is not a whole number in [0, 2^63).
    """
    check_whole("init_seed", seed, least=0, below=2**63, numpy=True)
    # All initialisers draw on the CPU; only its generator is borrowed, and given back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        return _unquantised_network(config)


class NetworkSize(NamedTuple):
    """What a configuration describes."""

    numbers: int
    """In all weights."""
    largest: int
    """Numbers in the largest of them."""
    tables: int
    """Bytes of the tables beside them."""


def network_size(config: Any) -> NetworkSize:
    """The size of a network of this configuration; none of it is allocated."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        network = _unquantised_network(config)
    tables = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    counts = [parameter.numel() for parameter in network.parameters()]
    return NetworkSize(sum(counts), max(counts, default=0), tables)


def _unquantised_network(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    fresh = copy.deepcopy(config)
    if hasattr(fresh, "quantization_config"):
        del fresh.quantization_config
    network: nn.Module = AutoModelForCausalLM.from_config(
        fresh, dtype=torch.float32, attn_implementation=attention_of(fresh), trust_remote_code=False
    )
    return network


@checked
def reinitialise(model: HuggingFaceModel, seed: int) -> HuggingFaceModel:
    """The same configuration with all weights drawn anew by the model class's own initialiser; a new model.

    Args:
        model: Any loaded model; it is left as it is.
        seed: As for `random_network`.
    """
    with quiet(local=True):
        network = cast_weights(random_network(model.network.config, seed=seed), model.dtype).to(model.device)
    origin = Origin(model.origin.source, int(seed), model.origin.revision)
    return HuggingFaceModel(network, model.tokenizer, origin=origin)


def attention_of(config: Any) -> str:
    """The attention implementation we ask for: `sdpa` where the model class has it, else `eager` (BLOOM, MPT)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    network_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if getattr(network_class, "_supports_sdpa", False) else "eager"
