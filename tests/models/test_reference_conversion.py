"""The reference transformer computes what Hugging Face's GPT-2 and Llama compute, from the same weights."""

from typing import Any

import pytest
import torch

from posbias import Architecture
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.reference.config import NORM_EPSILON, ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from tiny_families import shaken_model

ROUNDING = 1e-5
"""Relative to the largest logit: transformers takes norms, softmax and rotary angles in float32."""
COMMON = {"attention": "content", "values": "gaussian", "residual": "added", "norm": "pre", "mlp": True}
LAYER_NORMS = {"normalisation": "layer", "activation": "gelu_tanh", "biases": True}
GATED = {"activation": "silu", "gated_mlp": True, "mlp_width": 48}
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt2": {**LAYER_NORMS, "learned_positions": 64},
    "llama": GATED,
}
ENCODINGS = {"gpt2": "none", "llama": "rope(head_dim=8)"}


def weights_of(model: HuggingFaceModel) -> dict[str, torch.Tensor]:
    """Maps [out, in] as [head, in, feature], by the reference's names."""
    family, network = model.family, model.network
    found: dict[str, torch.Tensor | None] = {
        "embedding": network.get_input_embeddings().weight,
        "unembedding": network.get_output_embeddings().weight,
    }
    if family.position_table is not None:
        found["positions"] = network.get_submodule(family.position_table).get_parameter("weight")
    norms = {"final": network.get_submodule(family.final_norm)}
    for layer, block in enumerate(family.blocks(network)):
        name = f"blocks.{layer}"
        norms[f"{name}.attention"], norms[f"{name}.mlp"] = block.attention_norm, block.mlp_norm
        parts, mlp = family.attention_parts(block, model.config), family.mlp_parts(block, model.config)
        for of in ("query", "key", "value"):
            weight, bias = getattr(parts, of), getattr(parts, f"{of}_bias")
            times = 1 if of == "query" else parts.heads // parts.key_heads  # each head with keys of its own
            by_head = weight.unflatten(0, (-1, parts.head_dim)).transpose(1, 2)
            found[f"{name}.{of}"] = by_head.repeat_interleave(times, 0)
            if bias is not None:
                found[f"{name}.{of}_bias"] = bias.unflatten(0, (-1, parts.head_dim)).repeat_interleave(times, 0)
        found[f"{name}.output"] = parts.output.T.unflatten(0, (-1, parts.head_dim))
        found[f"{name}.output_bias"] = parts.output_bias
        for of in ("up", "gate", "down"):
            weight = getattr(mlp, of)
            found[f"{name}.{of}"] = None if weight is None else weight.T
            found[f"{name}.{of}_bias"] = getattr(mlp, f"{of}_bias")
    for name, module in norms.items():
        norm = family.norm(module)
        found[f"{name}_gain"], found[f"{name}_shift"] = norm.gain, norm.bias
    return {name: weight for name, weight in found.items() if weight is not None}


@pytest.mark.parametrize("name", SETTINGS)
@torch.no_grad()
def test_logits_agree(name: str) -> None:
    model = shaken_model(name)
    for module in model.network.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = NORM_EPSILON
    config = ReferenceConfig(
        Architecture(3, 4, encoding=ENCODINGS[name]),
        width=model.width,
        vocabulary_size=model.vocabulary_size,
        **COMMON,
        **SETTINGS[name],
    )
    reference = ReferenceTransformer(config, weights_of(model))
    token_ids = torch.randint(0, model.vocabulary_size, (2, 13), generator=torch.Generator().manual_seed(3))
    theirs = model.outputs(model.embed(token_ids), list(range(13))).logits
    ours = reference.outputs(reference.embed(token_ids), list(range(13))).logits
    torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=ROUNDING * float(theirs.abs().max()))
