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

from gguf_inputs import save_gguf
from posbias import RunError, UsageError, load_model
from posbias.models.gguf_config import gguf_configuration
from posbias.models.gguf_format import GgufFile
from posbias.models.networks import random_network
from tiny_families import CONFIGS

POSITIONS = 60
LLAMA = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
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


def factors_of(network: Any, base: float) -> np.ndarray:
    """What llama.cpp's converter writes for a scaled rotary embedding: the unscaled frequencies over the scaled."""
    frequencies = network.model.rotary_emb.inv_freq.double().numpy()
    return base ** (-np.arange(len(frequencies)) / len(frequencies)) / frequencies


PLAIN = (
    "bloom",
    "bloom-6-heads",
    "nemotron",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "phi3",
    "phi3-window",
    "qwen2",
    "qwen3",
    "stablelm",
    "stablelm-parallel",
    "starcoder2",
    "starcoder2-window",
    "llama",
)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    if name.startswith("gemma"):
        config.query_pre_attn_scalar = config.head_dim  # as in all published ones but 27B
    network = sharp_network(config)
    expected = logits(network)
    model = load_model(save_gguf(tmp_path / "w.gguf", network))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.05


@pytest.mark.parametrize(
    ("heads", "high", "length"),
    [(2, 4.0, 64), (2, 4.0, 8192), (1, 8.0, 64), (1, 4.0, 8192)],
    ids=["none in the blend", "one", "several, another width", "several"],
)
def test_factors_of_llama_3(tmp_path: Path, heads: int, high: float, length: int) -> None:
    rope = {**LLAMA3, "high_freq_factor": high, "original_max_position_embeddings": length}
    network = llama(num_attention_heads=heads, rope_parameters=rope)
    factors = factors_of(network, 5e5)
    plain = llama(num_attention_heads=heads, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    path = save_gguf(tmp_path / "w.gguf", network, tensors={"rope_freqs.weight": factors})
    model = load_model(path)
    torch.testing.assert_close(logits(model), logits(network), rtol=1e-4, atol=1e-4)
    read = model.network.model.rotary_emb.inv_freq
    torch.testing.assert_close(read, network.model.rotary_emb.inv_freq, rtol=2e-6, atol=0)
    assert not torch.equal(read, plain.model.rotary_emb.inv_freq)
    assert torch.equal(load_model(f"config:{path}").network.model.rotary_emb.inv_freq, read)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_as_published(tmp_path: Path, head_dim: int, factor: float) -> None:
    """Llama 3.1 and 3.2: all that the file leaves out is found again, from factors that were stored in 32 bits."""
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    network = llama(hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope)
    factors = {"rope_freqs.weight": factors_of(network, 5e5)}
    config = load_model(save_gguf(tmp_path / "w.gguf", network, tensors=factors)).config
    assert config.rope_parameters == rope


@pytest.mark.parametrize("value", [1.0, 4.0])
def test_factors_that_are_all_the_same(tmp_path: Path, value: float) -> None:
    sort = {"rope_type": "default"} if value == 1 else {"rope_type": "linear", "factor": value}
    network = llama(rope_parameters={"rope_theta": 1e4, **sort})
    factors = {"rope_freqs.weight": np.full(8, value)}
    assert torch.equal(logits(load_model(save_gguf(tmp_path / "w.gguf", network, tensors=factors))), logits(network))


@pytest.mark.parametrize("factors", [[1, 2, 1, 2, 1, 2, 1, 2], [8] * 4 + [1] * 4, [1] * 7, [0] * 8, [float("nan")] * 8])
def test_other_factors_are_refused(tmp_path: Path, factors: list[float]) -> None:
    path = save_gguf(tmp_path / "w.gguf", llama(), tensors={"rope_freqs.weight": factors})
    with pytest.raises(UsageError, match=r"tensor rope_freqs\.weight (holds factors that are not|has \d values; 8)"):
        load_model(path)


SCALINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "yarn": (YARN, YARN_KEYS),
    "yarn with bounds": (
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN_KEYS, "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
    ),
    "yarn of the whole context": (
        {**YARN, "original_max_position_embeddings": 512},
        {**YARN_KEYS, "rope.scaling.original_context_length": None, "rope.scaling.finetuned": True},
    ),
    "linear": ({"rope_type": "linear", "factor": 2.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "a factor alone": ({"rope_type": "linear", "factor": 2.0}, {"rope.scaling.factor": 2.0}),
    "the older name": ({"rope_type": "linear", "factor": 2.0}, {"rope.scale_linear": 2.0}),
    "none": ({"rope_type": "default"}, {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *(("Llama", case) for case in SCALINGS),
        ("Qwen2", "yarn"),
        ("Qwen3", "yarn"),
        ("StableLm", "linear"),
        ("Nemotron", "linear"),
    ],
)
def test_scalings_in_the_metadata(tmp_path: Path, family: str, case: str) -> None:
    rope, keys = SCALINGS[case]
    config = getattr(transformers, f"{family}Config")(**LLAMA, rope_parameters={"rope_theta": 1e4, **rope})
    network = sharp_network(config)
    model = load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys))
    torch.testing.assert_close(logits(model), logits(network), rtol=1e-5, atol=1e-5)
    plain = load_model(save_gguf(tmp_path / "plain.gguf", network))
    assert torch.allclose(logits(plain), logits(network), atol=1e-3) == (case == "none")


def test_gemma_3_scales_its_global_layers_alone(tmp_path: Path) -> None:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    sizes = {**LLAMA, "num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    network = sharp_network(transformers.Gemma3TextConfig(**sizes, rope_parameters=rope))
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 2e4}
    keys = {**scaling, "mm.tokens_per_image": 256}
    model = load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys))
    torch.testing.assert_close(logits(model), logits(network), rtol=1e-5, atol=1e-5)
    assert [str(mask) for mask in model.architecture_traits()["mask"]] == [*["sliding_window(width=8)"] * 5, "causal"]


def test_phi_3_has_other_factors_beyond_its_first_length(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8), np.linspace(3, 9, 8)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short.tolist(), "long_factor": long.tolist()}
    sizes = {**LLAMA, "original_max_position_embeddings": 40, "pad_token_id": 0}
    rope |= {"original_max_position_embeddings": 40, "attention_factor": 1.25}
    network = sharp_network(transformers.Phi3Config(**sizes, rope_parameters=rope))
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    model = load_model(
        save_gguf(tmp_path / "w.gguf", network, keys={"rope.scaling.attn_factor": 1.25}, tensors=tensors)
    )
    torch.testing.assert_close(logits(model), logits(network), rtol=1e-5, atol=1e-5)
    token_ids = torch.arange(30)[None]
    with torch.no_grad():
        expected, found = network(input_ids=token_ids).logits[0], model.last(model.embed(token_ids)).logits
    torch.testing.assert_close(found.reshape(-1), expected[-1], rtol=1e-5, atol=1e-5)


PHI: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "LongRoPE without factors": (
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
        {},
        "only none, linear",
    ),
    "half of LongRoPE": ({}, {"rope_factors_long.weight": np.ones(8)}, "are read together"),
    "a rescaling of nothing": (
        {"rope.scaling.attn_factor": 1.19},
        {},
        r"attn_factor 1\.19.* belongs to rope_factors_long",
    ),
    "YaRN": (YARN_KEYS, {}, "rope"),
}


@pytest.mark.parametrize("case", PHI)
def test_scalings_that_phi_3_does_not_have(tmp_path: Path, case: str) -> None:
    keys, tensors, words = PHI[case]
    network = sharp_network(transformers.Phi3Config(**LLAMA, pad_token_id=0))
    with pytest.raises(UsageError, match=f"configuration refused: .*{words}"):
        load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys, tensors=tensors))


@pytest.mark.parametrize(
    ("pattern", "windowed"), [(2, [1, 0, 1]), ([True, True, False], [1, 1, 0]), (None, [1, 1, 1, 1, 1, 0, 1])]
)
def test_windows_of_gemma_3_by_layer(tmp_path: Path, pattern: Any, windowed: list[int]) -> None:
    types = ["sliding_attention" if window else "full_attention" for window in windowed]
    sizes = {**LLAMA, "num_hidden_layers": len(types), "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
    network = sharp_network(transformers.Gemma3TextConfig(**sizes, layer_types=types))
    path = save_gguf(tmp_path / "w.gguf", network, keys={"attention.sliding_window_pattern": pattern})
    torch.testing.assert_close(logits(load_model(path)), logits(network), rtol=1e-5, atol=1e-5)


def test_heads_narrower_than_their_share(tmp_path: Path) -> None:
    """As Mistral Nemo's."""
    network = llama(head_dim=8)
    keys = {"attention.key_length": 8, "attention.value_length": 8}
    torch.testing.assert_close(logits(load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys))), logits(network))


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}])
def test_biases_of_a_llama(tmp_path: Path, biases: dict[str, bool]) -> None:
    network = llama(**biases)
    torch.testing.assert_close(logits(load_model(save_gguf(tmp_path / "w.gguf", network))), logits(network))


def test_a_llama_called_mistral_has_no_window(tmp_path: Path) -> None:
    """The format has none for it, and transformers would supply that of Mistral's first version."""
    network = llama(max_position_embeddings=8192)
    model = load_model(save_gguf(tmp_path / "w.gguf", network, others={"general.name": "mistral"}))
    assert str(model.architecture_traits()["mask"]) == "causal"
    torch.testing.assert_close(logits(model), logits(network))


@pytest.mark.parametrize(
    ("architecture", "layers", "width", "scalar"),
    [("gemma2", 46, 4608, 144), ("gemma2", 42, 3584, 128), ("gemma3", 62, 5376, 168), ("gemma3", 48, 3840, 128)],
)
def test_the_logit_scale_of_the_largest_gemma(architecture: str, layers: int, width: int, scalar: int) -> None:
    sizes = {"block_count": layers, "embedding_length": width, "attention.head_count": 32, "context_length": 8192}
    sizes |= {"feed_forward_length": 10, "attention.key_length": 128, "attention.sliding_window": 1024}
    keys = {**sizes, "attention.layer_norm_rms_epsilon": 1e-6, "vocab_size": 50}
    if architecture == "gemma2":
        keys |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    entries = {f"{architecture}.{key}": value for key, value in keys.items()}
    file = GgufFile(Path("w.gguf"), {"general.architecture": architecture, **entries}, {})
    assert gguf_configuration(file, "w.gguf").query_pre_attn_scalar == scalar


BLOCK = "blk.1.attn_q.weight"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": ({"keys": {"residual_scale": 0.2}}, r"1 keys .* not read, first llama\.residual_scale 0\.2"),
    "a window": ({"keys": {"attention.sliding_window": 8}}, r"first llama\.attention\.sliding_window 8"),
    "no causal mask": ({"keys": {"attention.causal": False}}, r"llama\.attention\.causal False; only True is read"),
    "a logit scale": ({"keys": {"attention.scale": 0.5}}, r"attention\.scale is 0\.5; only 0\.25 is read"),
    "a soft cap": ({"keys": {"attn_logit_softcapping": 30.0}}, r"llama\.attn_logit_softcapping 30\.0"),
    "clamped queries": ({"keys": {"attention.clamp_kqv": 8.0}}, r"llama\.attention\.clamp_kqv 8\.0"),
    "ALiBi": ({"keys": {"attention.max_alibi_bias": 8.0}}, r"llama\.attention\.max_alibi_bias 8\.0"),
    "experts": ({"keys": {"expert_count": 8, "expert_used_count": 2}}, r"llama\.expert_count 8; only 0 is read"),
    "other values": ({"keys": {"attention.value_length": 8}}, r"attention\.value_length 8; only 16 is read"),
    "half of a head": ({"keys": {"rope.dimension_count": 8}}, r"rope\.dimension_count is 8; heads have 16 features"),
    "sections": (
        {"keys": {"rope.dimension_sections": [2, 3, 3]}},
        r"first llama\.rope\.dimension_sections \[2, 3, 3\]",
    ),
    "layers of their own": ({"keys": {"feed_forward_length": [48, 48]}}, r"feed_forward_length \[48, 48\]; a whole"),
    "a type of scaling": ({"keys": {"rope.scaling.type": "ntk", "rope.scaling.factor": 2.0}}, r"type is 'ntk'; only"),
    "yarn without a factor": ({"keys": {"rope.scaling.type": "yarn"}}, r"'yarn' needs a rope\.scaling\.factor"),
    "two factors": (
        {"keys": {"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}},
        r"scale_linear 2\.0 and rope\.sc",
    ),
    "a scaled yarn": ({"keys": {**YARN_KEYS, "rope.scaling.attn_factor": 2.0}}, r"attn_factor 2\.0; only 1\.0 is read"),
    "DeepSeek's yarn": ({"keys": {**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 0.1}}, r"yarn_log_multiplier 0\.1"),
    "no epsilon": ({"keys": {"attention.layer_norm_rms_epsilon": None}}, r"lacks llama\.attention\.layer_norm_rms_eps"),
    "no layers": ({"keys": {"block_count": None}}, r"lacks llama\.block_count"),
    "a negative epsilon": (
        {"keys": {"attention.layer_norm_rms_epsilon": -1.0}},
        r"finite and positive ones are allowed",
    ),
    "an infinite epsilon": (
        {"keys": {"attention.layer_norm_rms_epsilon": float("inf")}},
        r"layer_norm_rms_epsilon inf",
    ),
    "a base of 0": ({"keys": {"rope.freq_base": 0.0}}, r"freq_base 0\.0; finite and positive"),
    "a base that is none": ({"keys": {"rope.freq_base": float("nan")}}, r"freq_base nan; finite and positive"),
    "no heads": ({"keys": {"attention.head_count": 0}}, r"attention\.head_count 0; a whole number of at least 1"),
    "keys of another architecture": ({"others": {"qwen2.rope.freq_base": 9.0}}, r"qwen2\.rope\.freq_base 9\.0, which"),
    "keys of none": ({"others": {"xyz.scale": 2.0}}, r"metadata has xyz\.scale 2\.0, which is not read"),
    "an unknown pattern": (
        {"keys": {"attention.sliding_window_pattern": 6}},
        r"not read, first llama\.attention\.sliding",
    ),
    "a key that is none": ({"keys": {"a\x00\n\u2028b": 6}}, r"not read, first llama\.a"),
    "an adapter": (
        {"others": {"general.type": "adapter", "adapter.type": "lora"}},
        r"general\.type is 'adapter'; only",
    ),
    "one part of two": ({"others": {"split.count": 2}}, r"one of 2 files \(split\.count\); merge them"),
    "fewer layers": (
        {"keys": {"block_count": 1}},
        r"9 tensors of its file have no place in its network, first 'blk\.1\.",
    ),
    "a tensor too many": (
        {"tensors": {"blk.0.attn_q.lora_a": [[1.0]]}},
        r"no place in its network, first 'blk\.0\.attn_q\.",
    ),
    "a norm too many": ({"tensors": {"blk.0.attn_q_norm.weight": [1.0] * 16}}, r"first 'blk\.0\.attn_q_norm\.weight'"),
    "factors of Phi": (
        {"tensors": {"rope_factors_long.weight": [1.0] * 8}},
        r"rope_factors_long\.weight is not read in a",
    ),
    "a weight too few": (
        {"tensors": {BLOCK: None}},
        r"1 weights are not in its files, first 'model\.layers\.1\.self_attn",
    ),
    "another shape": (
        {"tensors": {BLOCK: np.ones((32, 16))}},
        r"'blk\.1\.attn_q\.weight' has shape \[32, 16\], \[32, 32\]",
    ),
    "a bias too few": (
        {"tensors": {"blk.0.attn_q.bias": [1.0] * 32}},
        r"7 weights are not in its files, first .*bias'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, words = REFUSED[case]
    with pytest.raises((UsageError, RunError), match=words) as refusal:
        load_model(save_gguf(tmp_path / "w.gguf", llama(), **changes))
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) <= 500


def test_architectures_that_are_not_read_in_full(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "w.gguf", "falcon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UsageError, match=r"architecture 'falcon', of which not every key is read; allowed: llama, "):
        load_model(tmp_path / "w.gguf")


def test_keys_that_change_no_network(tmp_path: Path) -> None:
    network = llama()
    others = {"quantize.imatrix.file": "x.dat", "mradermacher.quantize_version": "2", "split.count": 0, "split.no": 0}
    others |= {"general.basename": "x", "general.sampling.temp": 0.6, "tokenizer.ggml.eot_token_id": 3}
    keys = {"expert_count": 0, "tensor_data_layout": "Meta AI original pth", "attention.causal": True}
    keys |= {"attention.key_length": 16, "attention.value_length": 16, "attention.scale": 0.25, "vocab_size": None}
    model = load_model(save_gguf(tmp_path / "w.gguf", network, keys=keys, others=others))
    torch.testing.assert_close(logits(model), logits(network))
