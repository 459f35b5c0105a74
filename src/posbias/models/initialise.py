"""Random networks from a configuration: what a model was before training, drawn by its class's own initialiser."""

import copy
from typing import Any

import torch
from torch import nn

from posbias.checks import check_whole
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.precision import cast_weights
from posbias.models.quiet import quiet


def random_network(config: Any, *, seed: int) -> nn.Module:
    """A network of the configuration's class with all weights drawn by its own initialiser, in float32.

    Built anew from a copy of the configuration, so that norms and biases are reset too and no attention setting is
    shared with another model. The weights are those of `torch.manual_seed(seed)` followed by
    `AutoModelForCausalLM.from_config(config)`, but the global random state is left as it was.

    Raises:
        UsageError: the seed is not a whole number in [0, 2^63).
    """
    from transformers import AutoModelForCausalLM

    check_whole("init_seed", seed, least=0, below=2**63, numpy=True)
    fresh = copy.deepcopy(config)
    if hasattr(fresh, "quantization_config"):
        del fresh.quantization_config
    # All initialisers draw on the CPU; only its generator is borrowed, and given back as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        network: nn.Module = AutoModelForCausalLM.from_config(
            fresh, dtype=torch.float32, attn_implementation=attention_of(fresh), trust_remote_code=False
        )
    return network


def parameter_counts(config: Any) -> list[int]:
    """Numbers in each weight of the configuration's class; none is made."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32, trust_remote_code=False)
    return [parameter.numel() for parameter in network.parameters()]


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
