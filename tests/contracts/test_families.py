"""Contract of every registered model family: its description, read as numbers, reproduces transformers' own forward.

`replay` runs one decoder block in plain torch from nothing but the description; if a projection were split in the wrong
order, a scale, slope, window or norm read wrongly, it would not equal the module.
"""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from posbias.errors import UsageError
from posbias.measurement.checkpointing import checkpointed
from posbias.models import HuggingFaceModel
from posbias.models.families import FAMILIES, AttentionParts, Block, MlpParts, Norm
from posbias.models.initialise import random_network

# Norms, rotary angles and softmax run in float32 inside transformers, whatever the dtype of the weights.
FLOAT32_INSIDE = 2e-5
VOCABULARY = 50
POSITIONS = 12

_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_WINDOW = {"use_sliding_window": True, "sliding_window": 5}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GPT2 = {**_COMMON, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
_NEOX = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_OPT = {**_COMMON, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_OPT = {**_OPT, "word_embed_proj_dim": 32, "max_position_embeddings": 64}
_BLOOM = {**_COMMON, "hidden_size": 32, "n_layer": 3, "n_head": 4}
_MPT = {**_COMMON, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}

CONFIGS: dict[str, Any] = {
    "bloom": lambda: transformers.BloomConfig(**_BLOOM),
    "bloom-6-heads": lambda: transformers.BloomConfig(**{**_BLOOM, "hidden_size": 48, "n_head": 6}),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(
        **_LLAMA, head_dim=16, query_pre_attn_scalar=7, sliding_window=5, layer_types=_ALTERNATING
    ),
    "gpt2": lambda: transformers.GPT2Config(**_GPT2),
    "gpt2-layer-scale": lambda: transformers.GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**_NEOX),
    "gpt_neox-sequential": lambda: transformers.GPTNeoXConfig(**_NEOX, use_parallel_residual=False),
    "llama": lambda: transformers.LlamaConfig(**_LLAMA),
    "llama-biases": lambda: transformers.LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=5),
    "mistral-full": lambda: transformers.MistralConfig(**_LLAMA, sliding_window=None),
    "mpt": lambda: transformers.MptConfig(**_MPT),
    "mpt-6-heads": lambda: transformers.MptConfig(**{**_MPT, "d_model": 48, "n_heads": 6}),
    "mpt-clip": lambda: transformers.MptConfig(**_MPT, attn_config={"clip_qkv": 0.5, "alibi": False}),
    "olmo2": lambda: transformers.Olmo2Config(**_LLAMA),
    "opt": lambda: transformers.OPTConfig(**_OPT),
    "opt-350m": lambda: transformers.OPTConfig(
        **{**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "tie_word_embeddings": True}
    ),
    "phi": lambda: transformers.PhiConfig(**_LLAMA),
    "phi-norms": lambda: transformers.PhiConfig(**_LLAMA, qk_layernorm=True),
    "qwen2": lambda: transformers.Qwen2Config(**_LLAMA),
    "qwen2-window": lambda: transformers.Qwen2Config(**_LLAMA, **_WINDOW, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16),
    "qwen3-window": lambda: transformers.Qwen3Config(**_LLAMA, head_dim=16, **_WINDOW, layer_types=_ALTERNATING),
    "smollm3": lambda: transformers.SmolLM3Config(**_LLAMA, no_rope_layers=[1, 0, 1]),
    "smollm3-window": lambda: transformers.SmolLM3Config(**_LLAMA, **_WINDOW, no_rope_layers=[1, 0, 1]),
}


def shaken_model(name: str) -> HuggingFaceModel:
    """A random model whose every weight, norms and biases included, has been moved away from its initial value."""
    network = random_network(CONFIGS[name](), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return HuggingFaceModel(network)


@pytest.fixture(params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest) -> HuggingFaceModel:
    return shaken_model(request.param)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(2))


def apply_norm(norm: Norm, values: Tensor) -> Tensor:
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    values = norm.gain * values / torch.sqrt(values.square().mean(-1, keepdim=True) + norm.epsilon)
    return values if norm.bias is None else values + norm.bias


def linear(weight: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
    return values @ weight.T if bias is None else values @ weight.T + bias


def turn(values: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary positions on the leading features of each head, as many as the angles cover."""
    if rotary is None:
        return values
    cosine, sine = (part[:, None].double() for part in rotary)
    covered, rest = values.split([cosine.shape[-1], values.shape[-1] - cosine.shape[-1]], dim=-1)
    first, second = covered.chunk(2, dim=-1)
    return torch.cat([covered * cosine + torch.cat([-second, first], dim=-1) * sine, rest], dim=-1)


def attend(
    parts: AttentionParts, values: Tensor, position_logits: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The attention branch before any post-norm, from the parts alone."""
    query = linear(parts.query, parts.query_bias, values)
    key = linear(parts.key, parts.key_bias, values)
    value = linear(parts.value, parts.value_bias, values)
    if parts.clip is not None:
        query, key, value = (item.clamp(-parts.clip, parts.clip) for item in (query, key, value))

    def split(features: Tensor, heads: int, norm: Norm | None) -> Tensor:
        if norm is not None and norm.gain.numel() != parts.head_dim:
            features, norm = apply_norm(norm, features), None
        by_head = features.unflatten(-1, (heads, parts.head_dim)).transpose(1, 2)
        return by_head if norm is None else apply_norm(norm, by_head)

    query = turn(split(query, parts.heads, parts.query_norm), rotary)
    key = turn(split(key, parts.key_heads, parts.key_norm), rotary)
    shared = parts.heads // parts.key_heads
    key = key.repeat_interleave(shared, dim=1)
    value = split(value, parts.key_heads, None).repeat_interleave(shared, dim=1)
    attention = torch.softmax(parts.scale * query @ key.transpose(-1, -2) + position_logits, dim=-1)
    return linear(parts.output, parts.output_bias, (attention @ value).transpose(1, 2).flatten(2))


def feed_forward(parts: MlpParts, values: Tensor) -> Tensor:
    inner = linear(parts.up, parts.up_bias, values)
    if parts.gate is None:
        inner = parts.activation(inner)
    else:
        inner = parts.activation(linear(parts.gate, parts.gate_bias, values)) * inner
    return linear(parts.down, parts.down_bias, inner)


def position_logits(model: HuggingFaceModel, layer: int, n_positions: int) -> Tensor:
    """Mask and encoding of a layer as the description has them."""
    family, config = model.family, model.config
    index = torch.arange(n_positions)
    distance = index[:, None] - index[None, :]
    bias = torch.as_tensor(family.encoding(config, layer).logits(distance.flatten().numpy(), family.heads(config)))
    bias = bias.reshape(-1, n_positions, n_positions).clone()
    bias[:, ~torch.as_tensor(family.mask(config, layer).visible(n_positions))] = -torch.inf
    return bias


def replay(model: HuggingFaceModel, block: Block, layer: int, seen: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The attention branch as added, and the block's output, from the description and the block's input alone."""
    family, config = model.family, model.config

    def through(module: torch.nn.Module | None, values: Tensor) -> Tensor:
        return values if module is None else apply_norm(family.norm(module), values)

    stream = seen["input"]
    logits = position_logits(model, layer, stream.shape[1])
    branch = attend(
        family.attention_parts(block, config), through(block.attention_norm, stream), logits, seen["rotary"]
    )
    branch = through(block.attention_post_norm, branch)
    added = through(block.attention_stream_norm, stream + branch)
    mlp_input = stream if family.is_parallel(config) else added
    update = feed_forward(family.mlp_parts(block, config), through(block.mlp_norm, mlp_input))
    return branch, through(block.mlp_stream_norm, added + through(block.mlp_post_norm, update))


def watch(model: HuggingFaceModel, token_ids: Tensor) -> list[dict[str, Any]]:
    """Input, rotary angles and output of every block in transformers' own forward pass."""
    seen: list[dict[str, Any]] = []
    handles = []
    for block in model.family.blocks(model.network):

        def before_attention(module: Any, _positional: Any, named: dict[str, Any]) -> None:
            seen[-1]["rotary"] = named.get("position_embeddings") if getattr(module, "use_rope", True) else None

        def before(_module: Any, positional: Any, named: dict[str, Any]) -> None:
            seen.append({"input": positional[0] if positional else named["hidden_states"]})

        def after(_module: Any, _inputs: Any, output: Any) -> None:
            seen[-1]["output"] = output[0] if isinstance(output, tuple) else output

        handles.append(block.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.attention.register_forward_pre_hook(before_attention, with_kwargs=True))
        handles.append(block.module.register_forward_hook(after))
    with torch.no_grad():
        model.last(model.embed(token_ids))
    for handle in handles:
        handle.remove()
    return seen


def test_every_family_is_in_the_table() -> None:
    assert {name.split("-")[0] for name in CONFIGS} == set(FAMILIES)
    assert all(FAMILIES[name].name == name for name in FAMILIES)


def test_description_reproduces_every_block(model: HuggingFaceModel, token_ids: Tensor) -> None:
    norms = model.branch_norms(token_ids)
    seen = watch(model, token_ids)
    blocks = model.family.blocks(model.network)
    assert len(blocks) == len(seen) == model.family.depth(model.config) == 3
    for layer, block in enumerate(blocks):
        branch, output = replay(model, block, layer, seen[layer])
        scale = seen[layer]["output"].abs().max().item()
        torch.testing.assert_close(output, seen[layer]["output"], rtol=0, atol=FLOAT32_INSIDE * scale)
        torch.testing.assert_close(norms.stream[layer], seen[layer]["input"].norm(dim=-1))
        torch.testing.assert_close(norms.branch[layer], branch.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_embed_then_last_is_the_plain_forward(model: HuggingFaceModel, token_ids: Tensor) -> None:
    with torch.no_grad():
        plain = model.network(input_ids=token_ids).logits
        ours = model.last(model.embed(token_ids))
    torch.testing.assert_close(ours.logits, plain[:, -1], rtol=1e-6, atol=1e-6)
    head = model.network.get_output_embeddings()
    if getattr(model.config, "final_logit_softcapping", None) is None:
        torch.testing.assert_close(head(ours.hidden), ours.logits, rtol=1e-6, atol=1e-6)
    assert model.embed(token_ids).shape[-1] == model.width


def test_only_the_embeddings_have_gradients(model: HuggingFaceModel, token_ids: Tensor) -> None:
    embeddings = model.embed(token_ids).requires_grad_()
    model.last(embeddings).logits.square().sum().backward()
    assert embeddings.grad is not None
    assert torch.all(embeddings.grad.norm(dim=-1)[:, -1] > 0)
    assert all(parameter.grad is None for parameter in model.network.parameters())


def test_final_norm_is_what_the_unembedding_reads(model: HuggingFaceModel, token_ids: Tensor) -> None:
    last_block = watch(model, token_ids)[-1]["output"][:, -1]
    norm = model.family.final_norm_module(model.network)
    hidden = last_block if norm is None else apply_norm(model.family.norm(norm), last_block)
    if model.width == hidden.shape[-1]:
        torch.testing.assert_close(hidden, model.last(model.embed(token_ids)).hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["mistral", "qwen2-window", "qwen3-window", "gemma3_text", "smollm3-window", "llama", "bloom", "mpt"]
)
def test_one_layer_sees_exactly_its_mask(name: str, token_ids: Tensor) -> None:
    config = CONFIGS[name]()
    windowed = next(
        (layer for layer, kind in enumerate(getattr(config, "layer_types", None) or []) if "slid" in kind), 0
    )
    full = shaken_model(name)
    family = full.family
    mask = family.mask(full.config, windowed)
    visible = torch.as_tensor(mask.visible(POSITIONS))[-1]
    # Only this layer is left to move information between positions: all others lose their attention branch.
    for layer, block in enumerate(family.blocks(full.network)):
        if layer != windowed:
            for parameter in block.attention_output.parameters():
                parameter.zero_()
    embeddings = full.embed(token_ids).requires_grad_()
    full.last(embeddings).hidden.square().sum().backward()
    assert embeddings.grad is not None
    reached = embeddings.grad.norm(dim=-1)[0] > 0
    assert torch.equal(reached, visible)
    if "window" in name or name in {"mistral", "gemma3_text"}:
        assert mask.reach(POSITIONS) == 5 == int(visible.sum())


def test_the_future_is_invisible(model: HuggingFaceModel, token_ids: Tensor) -> None:
    changed = token_ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = (model.network(input_ids=ids).logits for ids in (token_ids, changed))
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-9)
    assert not torch.allclose(before[:, 8], after[:, 8])


def test_checkpointing_changes_nothing(model: HuggingFaceModel, token_ids: Tensor) -> None:
    def gradient() -> Tensor:
        embeddings = model.embed(token_ids).requires_grad_()
        model.last(embeddings).logits.logsumexp(-1).sum().backward()
        assert embeddings.grad is not None
        return embeddings.grad

    plain = gradient()
    runs: list[int] = []
    block = model.family.blocks(model.network)[1]
    handle = block.attention_output.register_forward_pre_hook(lambda _module, _inputs: runs.append(1))
    with checkpointed(model.network):
        recomputed = gradient()
    assert len(runs) == 2  # once forward, once more on the way back
    handle.remove()
    torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-9)


def test_traits_build_an_architecture(model: HuggingFaceModel) -> None:
    from posbias.architecture import Architecture

    architecture = Architecture.from_model(model)
    assert architecture.depth == 3
    assert architecture.heads == model.family.heads(model.config)
    for layer, groups in enumerate(architecture.head_groups):
        assert groups[0].mask == model.family.mask(model.config, layer)


def test_initialisation_is_reproducible_and_leaves_the_global_generator(model: HuggingFaceModel) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (random_network(model.config, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(state, torch.random.get_rng_state())
    for (name, first), second in zip(one.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(first, second), name
    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    assert all(map(torch.equal, one.parameters(), theirs.parameters()))
    assert not torch.equal(one.get_input_embeddings().weight, other.get_input_embeddings().weight)
    # Nothing of the shaken weights remains: every norm is back at the identity.
    for block in model.family.blocks(one):
        for norm in (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm):
            if norm is not None:
                read = model.family.norm(norm)
                assert torch.all(read.gain == 1)
                assert read.bias is None or torch.all(read.bias == 0)
    assert one.config is not model.config
    assert one.config is not same.config


def test_unknown_families_run_but_are_not_described(token_ids: Tensor) -> None:
    config = transformers.GPTNeoConfig(
        **_COMMON, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
    )
    model = HuggingFaceModel(random_network(config, seed=0))
    assert not model.described
    assert model.last(model.embed(token_ids)).hidden.shape == (2, 32)
    with pytest.raises(UsageError, match="known families: bloom, gemma3_text, gpt2"):
        model.branch_norms(token_ids)
    with pytest.raises(UsageError, match="gpt_neo"):
        model.architecture_traits()


def test_configurations_outside_their_family_are_refused(token_ids: Tensor) -> None:
    config = transformers.BloomConfig(**_BLOOM, apply_residual_connection_post_layernorm=True)
    model = HuggingFaceModel(random_network(config, seed=0))
    assert not model.described
    with pytest.raises(UsageError, match="apply_residual_connection_post_layernorm"):
        model.branch_norms(token_ids)
