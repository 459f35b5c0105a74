"""Networks written to GGUF files come back with the same logits, or the file is refused by what is not read."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFWriter
from jaxtyping import Float
from torch import Tensor

import tiny_families
from gguf_inputs import save_gguf
from posbias import RunError, UsageError, load_model
from posbias.models.networks import random_network

POSITIONS = 60
LLAMA = {**tiny_families.LLAMA, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


def sharp_network(config: Any) -> Any:
    """A random network whose attention tells positions apart, so that wrong ones change its logits."""
    network = random_network(config, seed=0).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.mul_(12 if "q_proj" in name or "k_proj" in name or "qkv" in name or "c_attn" in name else 5)
            else:
                weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    return network


def logits(model: Any) -> Float[Tensor, "position token"]:
    token_ids = torch.arange(POSITIONS)[None] * 7 % 50
    with torch.no_grad():
        if isinstance(model, transformers.PreTrainedModel):
            return model(input_ids=token_ids).logits[0]
        return model.outputs(model.embed(token_ids), range(POSITIONS)).logits[0]


def llama(**entries: Any) -> Any:
    return sharp_network(transformers.LlamaConfig(**{**LLAMA, **entries}))


PUBLISHED = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama, another base": transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    ),
    "llama, narrow heads": transformers.LlamaConfig(**LLAMA, head_dim=8),
    "qwen2": transformers.Qwen2Config(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=128),
    "gpt2": transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2),
    "gemma2": transformers.Gemma2Config(**LLAMA, head_dim=256, sliding_window=8),
    "gemma3": transformers.Gemma3TextConfig(**{**LLAMA, "num_hidden_layers": 7}, head_dim=256, sliding_window=8),
}
"""Small networks with the constants that published models of each architecture have."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    network = sharp_network(PUBLISHED[name])
    expected = logits(network)
    model = load_model(save_gguf(tmp_path / "w.gguf", network))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.05
    assert not hasattr(model.network.config, "quantization_config")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "factors of RoPE": ({"tensors": {"rope_freqs.weight": [1.0] * 8}}, r"1 tensors of it, first 'rope_freqs\.weight'"),
    "a scaling": ({"keys": YARN_KEYS}, r"does not read llama\.rope\.scaling\.\w+ = "),
    "a scaling without a factor": ({"keys": {"rope.scaling.type": "linear"}}, r"rope\.scaling\.type = 'linear'"),
    "an unknown key": ({"keys": {"residual_scale": 0.2}}, r"does not read llama\.residual_scale = 0\.2"),
    "a window": ({"keys": {"attention.sliding_window": 8}}, r"llama\.attention\.sliding_window = 8"),
    "no causal mask": ({"keys": {"attention.causal": False}}, r"llama\.attention\.causal = False"),
    "a logit scale": ({"keys": {"attention.scale": 0.5}}, r"llama\.attention\.scale = 0\.5"),
    "a soft cap": ({"keys": {"attn_logit_softcapping": 30.0}}, r"llama\.attn_logit_softcapping = 30\.0"),
    "ALiBi": ({"keys": {"attention.max_alibi_bias": 8.0}}, r"llama\.attention\.max_alibi_bias = 8\.0"),
    "experts": ({"keys": {"expert_count": 8, "expert_used_count": 2}}, r"llama\.expert_count = 8"),
    "other values": ({"keys": {"attention.value_length": 8}}, r"attention\.value_length = 8"),
    "keys of another architecture": ({"others": {"qwen2.rope.freq_base": 9.0}}, r"qwen2\.rope\.freq_base = 9\.0"),
    "an adapter": ({"others": {"general.type": "adapter"}}, "is no whole model"),
    "one part of two": ({"others": {"split.count": 2}}, "is no whole model"),
    "a Mistral": ({"others": {"general.name": "mistral"}}, "a sliding window that the file lacks"),
    "fewer layers": ({"keys": {"block_count": 1}}, r"9 tensors of it, first 'blk\.1\."),
    "a norm too many": ({"tensors": {"blk.0.attn_q_norm.weight": [1.0] * 16}}, r"first 'blk\.0\.attn_q_norm\.weight'"),
    "a bias": ({"tensors": {"blk.0.attn_q.bias": [1.0] * 32}}, r"first 'blk\.0\.attn_q\.bias'"),
    "a weight too few": ({"tensors": {"blk.1.attn_q.weight": None}}, r"1 weights are not in its files, first"),
    "another shape": ({"tensors": {"blk.1.attn_q.weight": np.ones((32, 16))}}, "tiny|w.gguf"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_transformers_would_leave_out_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises((UsageError, RunError), match=words) as refusal:
        load_model(save_gguf(tmp_path / "w.gguf", llama(), **changes))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 500


@pytest.mark.parametrize("layers", [{"gemma2": 46}, {"gemma3": 62}])
def test_the_logit_scale_of_27b_is_in_no_file(tmp_path: Path, layers: dict[str, int]) -> None:
    ((name, depth),) = layers.items()
    kind = transformers.Gemma2Config if name == "gemma2" else transformers.Gemma3TextConfig
    config = kind(**{**LLAMA, "num_hidden_layers": depth, "hidden_size": 8}, head_dim=256, sliding_window=8)
    with pytest.raises(UsageError, match=r"logit scale is 1 / sqrt\(4\)"):
        load_model(save_gguf(tmp_path / "w.gguf", random_network(config, seed=0)))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "w.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UsageError, match=r"architecture 'falcon'; allowed: llama, .* load the safetensors"):
        load_model(tmp_path / "w.gguf")


def test_keys_that_change_no_network(tmp_path: Path) -> None:
    network = llama()
    others = {"quantize.imatrix.file": "x.dat", "mradermacher.quantize_version": "2", "split.count": 0, "split.no": 0}
    others |= {"general.basename": "x", "general.sampling.temp": 0.6, "tokenizer.ggml.eot_token_id": 3}
    keys = {"expert_count": 0, "tensor_data_layout": "Meta AI original pth", "attention.causal": True}
    keys |= {"attention.key_length": 16, "attention.value_length": 16, "rope.scaling.type": "none"}
    model = load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys, others=others))
    torch.testing.assert_close(logits(model), logits(network))
