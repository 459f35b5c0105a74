"""Contract of every registered model family: its description, read as numbers, reproduces transformers' own forward.

`replay` runs one decoder block in plain torch from nothing but the description; if a projection were split in the wrong
order, a scale, slope, window or norm read wrongly, it would not equal the module.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import posbias as pb
from posbias import UsageError
from posbias.architecture import SlidingWindow
from posbias.interventions.base import is_wired
from posbias.measurement.outputs import checkpointed
from posbias.models.attention import attention_modules, beyond_attention
from posbias.models.families import FAMILIES, replaceable
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.layout import AttentionParts, Block, Linear, MlpParts, Norm
from posbias.models.model import Outputs
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from posbias.theory.power_rollout import attention_rollout_prompt
from tiny_families import (
    BLOOM,
    CLAMPED,
    COMMON,
    DESCRIBED,
    HYBRIDS,
    MIXTURES,
    READS_TOKENS,
    UNLISTED,
    VOCABULARY,
    shaken_model,
)

# Norms, rotary angles and softmax run in float32 inside transformers, whatever the dtype of the weights.
FLOAT32_INSIDE = 2e-5
POSITIONS = 12
TOKEN_IDS = torch.randint(3, VOCABULARY, (2, POSITIONS), generator=torch.Generator().manual_seed(2))
WINDOWED = [
    *("gemma2", "gemma3_text", "mistral", "olmo3", "phi3-window", "qwen2-window", "qwen3-window"),
    *("smollm3-window", "starcoder2-window"),
]


@pytest.fixture(params=sorted(DESCRIBED))
def model(request: pytest.FixtureRequest) -> HuggingFaceModel:
    return made_once(request.param)


@cache
def made_once(name: str) -> HuggingFaceModel:
    """The tiny model of all tests here, which leave it as it is."""
    return shaken_model(name)


@pytest.fixture
def token_ids() -> Tensor:
    return TOKEN_IDS


def apply_norm(norm: Norm, values: Tensor) -> Tensor:
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    values = norm.gain * values / torch.sqrt(values.square().mean(-1, keepdim=True) + norm.epsilon)
    return values if norm.bias is None else values + norm.bias


def linear(of: Linear, values: Tensor) -> Tensor:
    return values @ of.weight.T if of.bias is None else values @ of.weight.T + of.bias


def turn(values: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary positions on the leading features of each head, as many as the angles cover."""
    if rotary is None:
        return values
    cosine, sine = (part.double() for part in rotary)
    covered, rest = values.split([cosine.shape[-1], values.shape[-1] - cosine.shape[-1]], dim=-1)
    first, second = covered.chunk(2, dim=-1)
    return torch.cat([covered * cosine + torch.cat([-second, first], dim=-1) * sine, rest], dim=-1)


def attend(
    parts: AttentionParts, values: Tensor, position_logits: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The attention branch before any post-norm, from the parts alone."""
    query = linear(parts.query, values)
    key = linear(parts.key, values)
    value = linear(parts.value, values)

    def split(features: Tensor, heads: int, norm: Norm | None) -> Tensor:
        if norm is not None and norm.gain.shape[-1] != parts.head_dim:
            features, norm = apply_norm(norm, features), None
        by_head = features.unflatten(-1, (heads, parts.head_dim))
        return (by_head if norm is None else apply_norm(norm, by_head)).transpose(1, 2)

    query = turn(split(query, parts.heads, parts.query_norm), rotary)
    key = turn(split(key, parts.key_heads, parts.key_norm), rotary)
    shared = parts.heads // parts.key_heads
    key = key.repeat_interleave(shared, dim=1)
    value = split(value, parts.key_heads, None).repeat_interleave(shared, dim=1)
    logits = parts.scale * query @ key.transpose(-1, -2)
    if parts.softcap is not None:
        logits = parts.softcap * torch.tanh(logits / parts.softcap)
    logits = logits + position_logits
    attention = torch.softmax(logits, dim=-1)
    return linear(parts.output, (attention @ value).transpose(1, 2).flatten(2))


def feed_forward(parts: MlpParts, values: Tensor) -> Tensor:
    inner = linear(parts.up, values)
    gated = inner if parts.gate is None else linear(parts.gate, values)
    return linear(parts.down, parts.activation(gated) * (1 if parts.gate is None else inner))


def position_logits(model: HuggingFaceModel, layer: int, n_positions: int) -> Tensor:
    """Mask and encoding of a layer as the description has them."""
    family, config = model.family, model.config
    index = torch.arange(n_positions)
    distance = index[:, None] - index[None, :]
    bias = torch.as_tensor(
        family.encoding(config, layer).logits(distance.flatten().numpy(), config.num_attention_heads)
    )
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
    added = stream + branch
    mlp_input = stream if family.parallel(config) else added
    update = feed_forward(family.mlp_parts(block, config), through(block.mlp_norm, mlp_input))
    return branch, added + through(block.mlp_post_norm, update)


@dataclass(frozen=True)
class Pass:
    """One forward pass of transformers itself on `TOKEN_IDS`."""

    blocks: list[dict[str, Any]]
    """Input, rotary angles and output of every block."""
    last: Outputs
    """The last position's, from embeddings."""


@cache
def watched_once(model: HuggingFaceModel) -> Pass:
    return watch(model, TOKEN_IDS)


def rotates(model: HuggingFaceModel, module: Any) -> bool:
    return module in attention_modules(model.network).values() and model.family.rotates(module, model.config)


def watch(model: HuggingFaceModel, token_ids: Tensor) -> Pass:
    seen: list[dict[str, Any]] = []
    handles = []
    for block in model.family.blocks(model.network):

        def before_attention(module: Any, _positional: Any, named: dict[str, Any]) -> None:
            turned = rotates(model, module)
            seen[-1]["rotary"] = tuple(part[0] for part in named["position_embeddings"]) if turned else None

        def before(_module: Any, positional: Any, named: dict[str, Any]) -> None:
            seen.append({"input": positional[0] if positional else named["hidden_states"]})

        def after(_module: Any, _inputs: Any, output: Any) -> None:
            seen[-1]["output"] = output[0] if isinstance(output, tuple) else output

        handles.append(block.module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(block.attention.register_forward_pre_hook(before_attention, with_kwargs=True))
        handles.append(block.module.register_forward_hook(after))
    with torch.no_grad():
        last = model.last(model.embed(token_ids))
    for handle in handles:
        handle.remove()
    return Pass(seen, last)


def test_every_family_is_in_the_table() -> None:
    assert {name.split("-")[0] for name in DESCRIBED} == set(FAMILIES)
    assert all(FAMILIES[name].name == name for name in FAMILIES)


def test_description_reproduces_every_block(model: HuggingFaceModel, token_ids: Tensor) -> None:
    norms = model.branch_norms(token_ids)
    seen = watched_once(model).blocks
    blocks = model.family.blocks(model.network)
    assert len(blocks) == len(seen) == model.sizes["layers"] == 3
    for layer, block in enumerate(blocks):
        branch, output = replay(model, block, layer, seen[layer])
        scale = seen[layer]["output"].abs().max().item()
        torch.testing.assert_close(output, seen[layer]["output"], rtol=0, atol=FLOAT32_INSIDE * scale)
        torch.testing.assert_close(norms.stream[layer], seen[layer]["input"].norm(dim=-1))
        torch.testing.assert_close(norms.branch[layer], branch.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_rotary_frequencies_are_those_of_the_angles(model: HuggingFaceModel) -> None:
    family, config = model.family, model.config
    for layer, (block, seen) in enumerate(zip(family.blocks(model.network), watched_once(model).blocks, strict=True)):
        frequencies = family.rotary_frequencies(model.network, block, config=config, layer=layer)
        assert (frequencies is None) == (seen["rotary"] is None)
        if frequencies is not None:
            angles = np.outer(np.arange(POSITIONS), np.concatenate([frequencies, frequencies]))
            for part, expected in zip(seen["rotary"], (np.cos(angles), np.sin(angles)), strict=True):
                np.testing.assert_allclose(part.numpy(), expected, atol=FLOAT32_INSIDE)


def test_embed_then_last_is_the_plain_forward_which_sees_no_future(model: HuggingFaceModel, token_ids: Tensor) -> None:
    changed = token_ids.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCABULARY
    with torch.no_grad():
        plain, after = (model.network(input_ids=ids).logits.double() for ids in (token_ids, changed))
    torch.testing.assert_close(plain[:, :8], after[:, :8], rtol=0, atol=1e-9)
    assert not torch.allclose(plain[:, 8], after[:, 8])
    ours = watched_once(model).last
    torch.testing.assert_close(ours.logits.double(), plain[:, -1], rtol=1e-6, atol=1e-6)
    head = model.network.get_output_embeddings()
    if getattr(model.config, "final_logit_softcapping", None) is None:
        scale = 1 / model.config.logits_scaling if model.model_type.startswith("granite") else 1
        scale = model.config.lm_head_multiplier if model.model_type == "falcon_h1" else scale
        torch.testing.assert_close((scale * head(ours.hidden)).to(ours.logits), ours.logits, rtol=1e-6, atol=1e-6)
    assert model.embed(token_ids).shape[-1] == model.width


def test_final_norm_is_what_the_unembedding_reads(model: HuggingFaceModel) -> None:
    last_block = watched_once(model).blocks[-1]["output"][:, -1]
    norm = model.network.get_submodule(model.family.final_norm)
    hidden = apply_norm(model.family.norm(norm), last_block)
    torch.testing.assert_close(hidden, watched_once(model).last.hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [*WINDOWED, "llama", "bloom", "mpt"])
def test_one_layer_sees_exactly_its_mask(name: str, token_ids: Tensor) -> None:
    full = shaken_model(name)
    family = full.family
    masks = [family.mask(full.config, layer) for layer in range(3)]
    windowed = next((layer for layer, mask in enumerate(masks) if isinstance(mask, SlidingWindow)), 0)
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
    if name in WINDOWED:
        assert mask.reach(POSITIONS) == 5 == int(visible.sum())


def test_only_the_embeddings_have_gradients_and_checkpointing_changes_none(
    model: HuggingFaceModel, token_ids: Tensor
) -> None:
    def gradient() -> Tensor:
        embeddings = model.embed(token_ids).requires_grad_()
        model.last(embeddings).logits.logsumexp(-1).sum().backward()
        assert embeddings.grad is not None
        return embeddings.grad

    plain = gradient()
    assert torch.all(plain.norm(dim=-1)[:, -1] > 0)
    assert all(parameter.grad is None for parameter in model.network.parameters())
    runs: list[int] = []
    first = model.family.blocks(model.network)[0]
    handle = first.attention_output.register_forward_pre_hook(lambda _module, _inputs: runs.append(1))
    with checkpointed(model.network):
        recomputed = gradient()
    assert len(runs) == 2  # once forward, once more on the way back
    handle.remove()
    torch.testing.assert_close(recomputed, plain, rtol=1e-6, atol=1e-9)


def test_traits_build_an_architecture(model: HuggingFaceModel) -> None:
    from posbias import Architecture

    architecture = Architecture.from_model(model)
    assert architecture.depth == 3
    assert architecture.heads == model.sizes["heads"]
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
    # Nothing of the shaken weights remains: every norm is back at the identity (Nemotron's: at 1 + 1, in transformers).
    gain = 2 if model.family.name == "nemotron" else 1
    for block in model.family.blocks(one):
        for norm in (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm):
            if norm is not None:
                read = model.family.norm(norm)
                assert torch.all(read.gain == gain)
                assert read.bias is None or torch.all(read.bias == 0)
    assert one.config is not model.config
    assert one.config is not same.config


def test_unknown_families_run_but_are_not_described(token_ids: Tensor) -> None:
    config = transformers.BioGptConfig(**COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    model = HuggingFaceModel(random_network(config, seed=0))
    assert not model.described
    assert model.last(model.embed(token_ids)).hidden.shape == (2, 32)
    with pytest.raises(UsageError, match=r"not in the table.*allowed: dense arcee, bloom"):
        _ = model.family
    assert bool((model.branch_norms(token_ids).branch > 0).all()), "branches are seen without a layout"
    with pytest.raises(UsageError, match="biogpt"):
        model.architecture_traits()


def test_configurations_outside_their_family_are_refused(token_ids: Tensor) -> None:
    config = transformers.BloomConfig(**BLOOM, apply_residual_connection_post_layernorm=True)
    model = HuggingFaceModel(random_network(config, seed=0))
    assert not model.described
    with pytest.raises(UsageError, match="apply_residual_connection_post_layernorm"):
        _ = model.family
    with pytest.raises(UsageError, match="those of layers 0, 1, 2 do not"):
        model.branch_norms(token_ids)
    after = UNLISTED["opt-350m"]()
    with pytest.raises(UsageError, match="do_layer_norm_before = False is set"):
        _ = HuggingFaceModel(random_network(after, seed=0)).family
    model = HuggingFaceModel(random_network(UNLISTED["falcon_h1"](), seed=0))
    model.compare_inputs()
    assert model.reads_tokens is None, "embeddings are scaled all the same"


@pytest.mark.parametrize("name", sorted(CLAMPED))
def test_clamped_maps_are_not_read_and_mixing_is(name: str, token_ids: Tensor) -> None:
    model = shaken_model(name)
    assert bool((model.branch_norms(token_ids).branch > 0).all())
    with pytest.raises(UsageError, match=r"are clamped \(clip_qkv = 0\.[45]\)"):
        pb.predict(model, theory="power_rollout", prompts=Prompts(token_ids.numpy()))


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("theory", ["rollout", "power_rollout", "mean_field"])
def test_theories_name_what_they_do_not_read(name: str, theory: str, token_ids: Tensor) -> None:
    model = HuggingFaceModel(random_network(MIXTURES[name](), seed=0), origin=Origin("tiny", init_seed=0))
    with pytest.raises(UsageError, match=r"layout of \w+ models is not in the table, .*allowed: dense arcee"):
        pb.predict(model, theory=theory, prompts=Prompts(token_ids.numpy()))


PARALLEL = ("gptj", "codegen")


@pytest.mark.parametrize("name", ["apertus", "deepseek_v3", "llama4_text", "granite_swa", "recurrent_gemma", *PARALLEL])
def test_branches_of_families_without_a_layout_are_what_attention_returns_and_is_added(name: str) -> None:
    model = shaken_model(name)
    returned: dict[int, Tensor] = {}
    for layer, module in attention_modules(model.network).items():
        module.register_forward_hook(lambda _m, _i, output, layer=layer: returned.update({layer: output[0]}))
    norms = model.branch_norms(TOKEN_IDS)
    scale = getattr(model.config, "residual_multiplier", 1.0)
    for layer, branch in returned.items():
        torch.testing.assert_close(norms.branch[layer], scale * branch.norm(dim=-1))


@pytest.mark.parametrize("name", sorted(HYBRIDS))
def test_linear_layers_are_branches_without_an_attention_matrix(name: str, token_ids: Tensor) -> None:
    model = made_once(name)
    assert beyond_attention(model.network) == [0, 2]
    assert bool((model.branch_norms(token_ids).branch > 0).all())
    with pytest.raises(UsageError, match="layers 0, 2 mix positions by linear layers, which have no attention"):
        attention_rollout_prompt(model, token_ids[0].numpy(), 0.5)
    with pytest.raises(UsageError, match="not in the table"):
        model.architecture_traits()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_table_says_which_families_let_attention_be_replaced(name: str) -> None:
    assert is_wired(made_once(name)) == replaceable(name)


@pytest.mark.parametrize("name", sorted(READS_TOKENS))
def test_models_that_read_tokens_are_not_measured(name: str) -> None:
    model = shaken_model(name, dtype=torch.float32)
    model.compare_inputs()
    assert not model.described
    with pytest.raises(UsageError, match="reads more of its tokens"):
        pb.measure(model, Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (1, 9))), kinds="probability")


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_the_list_says_runs_and_nothing_else(name: str) -> None:
    """Tried on a random model of the family's own initialisation."""
    model = HuggingFaceModel(random_network(DESCRIBED[name](), seed=0), origin=Origin("tiny", init_seed=0))
    prompts = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (1, 9)))

    def runs(call: Callable[[], Any]) -> bool:
        try:
            call()
        except UsageError:
            return False
        return True

    def replaced() -> None:
        with pb.mitigated(model, "temperature(scale=0.5)"):
            model.last(model.embed(model.token_tensor(prompts.token_ids.tolist())))

    assert runs(lambda: pb.measure(model, prompts, kinds="probability"))
    assert runs(lambda: pb.attention(model, prompts))
    assert runs(lambda: pb.predict(model, theory="rollout", prompts=prompts))
    for theory in ("power_rollout", "mean_field"):
        assert runs(lambda theory=theory: pb.predict(model, theory=theory, prompts=prompts))
    assert runs(replaced) == replaceable(name)
