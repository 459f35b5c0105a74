"""Contract of every registered model family: its description is that of the network which transformers runs.

That its maps, norms and scales are right: `test_signed_pull_is_back_propagation` in `tests/theory_power`, and
`test_attention.py` beside this file.
"""

import copy
from contextlib import ExitStack
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
from posbias.models.families import FAMILIES, families
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Outputs
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from posbias.theory.power_rollout import attention_rollout_prompt
from posbias.theory.power_rollout.local_maps import norm_forward
from tiny_families import (
    BLOOM,
    CLAMPED,
    DESCRIBED,
    HYBRIDS,
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


def test_streams_and_branches_are_what_blocks_read_and_attention_adds(model: HuggingFaceModel) -> None:
    blocks, added = model.family.blocks(model.network), []
    assert len(blocks) == model.sizes["layers"] == 3
    with ExitStack() as hooks:
        for block in blocks:
            last = block.attention_post_norm or block.attention_output
            hooks.enter_context(last.register_forward_hook(lambda _m, _i, output: added.append(output)))
        norms = model.branch_norms(TOKEN_IDS)
    for layer, (block, seen) in enumerate(zip(blocks, watched_once(model).blocks, strict=True)):
        torch.testing.assert_close(norms.stream[layer], seen["input"].norm(dim=-1))
        torch.testing.assert_close(norms.branch[layer], block.branch_scale * added[layer].norm(dim=-1))


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
        torch.testing.assert_close((scale * head(ours.hidden)).to(ours.logits), ours.logits, rtol=1e-6, atol=1e-6)
    assert model.embed(token_ids).shape[-1] == model.width


def test_final_norm_is_what_the_unembedding_reads(model: HuggingFaceModel) -> None:
    last_block = watched_once(model).blocks[-1]["output"][:, -1]
    norm = model.network.get_submodule(model.family.final_norm)
    hidden = norm_forward(model.family.norm(norm), last_block)
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


def test_initialisation_is_that_of_transformers_whatever_the_weights_are(model: HuggingFaceModel) -> None:
    """That the global generator is left alone: `test_a_seed_draws_all_weights_anew` in `tests/models`."""
    one = random_network(model.config, seed=5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    assert all(map(torch.equal, one.parameters(), theirs.parameters()))
    # Nothing of the shaken weights remains: every norm is back at the identity (Nemotron's: at 1 + 1, in transformers).
    gain = 2 if model.family.name == "nemotron" else 1
    for block in model.family.blocks(one):
        for norm in (block.attention_norm, block.attention_post_norm, block.mlp_norm, block.mlp_post_norm):
            if norm is not None:
                read = model.family.norm(norm)
                assert torch.all(read.gain == gain)
                assert read.bias is None or torch.all(read.bias == 0)
    assert one.config is not model.config


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
    assert is_wired(made_once(name)) == (families()[name] == "every verb")
