"""Contract of every family: attention recomputed in blocks is the model's own, and watching changes nothing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from posbias import UsageError
from posbias.models.attention import (
    affine,
    describe_attention,
    project_attention,
    query_blocks,
    rotated,
    watch_attention,
)
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import random_network
from tiny_families import CONFIGS, DESCRIBED, MIXTURES, VOCABULARY, shaken_model

POSITIONS = 23
TOLERANCE = 1e-5
"""transformers computes softmax, norms and rotary angles in float32, whatever the dtype of the weights."""
ATTENDING = sorted(DESCRIBED)
KINDS = pytest.mark.parametrize("name", ATTENDING)


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def own_attention(model: HuggingFaceModel, token_ids: Tensor) -> list[Tensor]:
    """What eager attention returns, [head query key] for each layer."""
    given = model.network(token_ids, output_attentions=True, use_cache=False).attentions
    assert len(given) == len(model.family.attention_blocks(model.network))
    return [attention[0] for attention in given]


@torch.no_grad()
def recomputed(model: HuggingFaceModel, token_ids: Tensor, *, block: int = 7) -> tuple[list[Tensor], Tensor]:
    """The recomputed attention of each layer, and the logits of the pass that was watched."""
    layers = describe_attention(model, n_positions=token_ids.shape[1])
    dense: list[Tensor] = []

    def receive(layer, given) -> None:  # type: ignore[no-untyped-def]
        assert layer is layers[len(dense)]
        state = rotated(project_attention(layer.parts, given.read), given.cosine, given.sine)
        weights = given.read.new_full((layer.parts.heads, *2 * [token_ids.shape[1]]), torch.nan)
        for part in query_blocks(layer.parts, state, mask=layer.mask, block=block):
            weights[:, part.queries] = 0
            weights[:, part.queries, part.keys] = part.weights.flatten(0, 1)
        dense.append(weights)

    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    with watch_attention(layers, receive, dtype=dtype):
        logits = model.last(model.embed(token_ids)).logits
    return dense, logits


@KINDS
def test_recomputed_attention_is_the_models_own(name: str) -> None:
    model = shaken_model(name, implementation="eager")
    found, _ = recomputed(model, ids())
    for ours, own in zip(found, own_attention(model, ids()), strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, own.double(), rtol=TOLERANCE, atol=TOLERANCE)
        assert own.std() > 0.01  # far from flat, so that nothing is right by accident


@KINDS
@torch.no_grad()
def test_recomputed_attention_gives_the_branch_that_the_model_adds(name: str) -> None:
    """Under the implementation that the library runs, which need not be eager."""
    model = shaken_model(name)
    if model.family.gated_queries:
        pytest.skip("gates of heads' outputs are not read")
    layers = describe_attention(model, n_positions=POSITIONS)
    ours: list[Tensor] = []
    own: list[Tensor] = []

    def receive(layer, given) -> None:  # type: ignore[no-untyped-def]
        state = rotated(project_attention(layer.parts, given.read), given.cosine, given.sine)
        mixed = state.query.new_empty(*state.query.shape[:3], layer.parts.value_dim)
        for part in query_blocks(layer.parts, state, mask=layer.mask, block=7):
            mixed[:, :, part.queries] = part.weights @ state.value[:, None, part.keys]
        ours.append(affine(mixed.flatten(0, 1).transpose(0, 1).flatten(1), layer.parts.output, layer.parts.output_bias))

    for _, block in model.family.attention_blocks(model.network):
        block.attention_output.register_forward_hook(
            lambda _module, _inputs, output, scale=block.branch_scale: own.append(
                scale * output.reshape(-1, output.shape[-1])
            )
        )
    with watch_attention(layers, receive, dtype=torch.float64):
        model.last(model.embed(ids()))
    for branch, added in zip(ours, own, strict=True):
        torch.testing.assert_close(branch, added.view_as(branch), rtol=0, atol=TOLERANCE * float(added.abs().max()))


@KINDS
def test_rows_sum_to_one_and_no_mass_lies_outside_the_mask(name: str) -> None:
    """Where there are learned sinks: to what they leave."""
    model = shaken_model(name)
    found, _ = recomputed(model, ids())
    for layer, weights in zip(describe_attention(model, n_positions=POSITIONS), found, strict=True):
        visible = torch.as_tensor(model.family.mask(model.config, layer.index).visible(POSITIONS))
        rows = weights.sum(-1)
        if layer.parts.sinks is None:
            torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-12)
        else:
            assert bool(((rows > 0) & (rows < 1)).all())
        assert not weights[:, ~visible].any()
        assert bool((weights[:, visible] > 0).all())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in ATTENDING for dtype in (torch.float64, torch.bfloat16)),
        ("llama", torch.float32),
    ],
    ids=str,
)
def test_watching_changes_no_logit(name: str, dtype: torch.dtype) -> None:
    model = shaken_model(name, dtype=dtype)
    with torch.no_grad():
        plain = model.last(model.embed(ids())).logits
    found, watched = recomputed(model, ids())
    assert torch.equal(plain, watched)
    assert all(weights.dtype == (dtype if dtype == torch.float64 else torch.float32) for weights in found)
    assert not any(module._forward_pre_hooks for module in model.network.modules())


@pytest.mark.parametrize("name", ["bloom", "falcon-alibi", "gemma2", "llama", "mistral"])
def test_the_size_of_blocks_changes_nothing(name: str) -> None:
    model = shaken_model(name)
    one, other = (recomputed(model, ids(), block=block)[0] for block in (1, 64))
    for first, second in zip(one, other, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)


@KINDS
def test_short_prompts(name: str) -> None:
    model = shaken_model(name, implementation="eager")
    for n_positions in (1, 2, 3):
        token_ids = ids()[:, :n_positions]
        found, _ = recomputed(model, token_ids)
        for ours, own in zip(found, own_attention(model, token_ids), strict=True):
            torch.testing.assert_close(ours, own.double(), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["bloom", "bloom-6-heads", "mpt", "mpt-6-heads"])
def test_alibi_falls_off_by_the_encodings_slopes(name: str) -> None:
    model = shaken_model(name)
    family, config = model.family, model.config
    parts = family.attention_parts(family.blocks(model.network)[0], config)
    slopes = family.encoding(config, 0).linear_slopes(parts.heads)
    logits = parts.position_logits(40).double()
    np.testing.assert_allclose(logits.diff(dim=-1).numpy(), np.repeat(slopes[:, None], 39, 1), rtol=1e-4)


LONG = 400


def long_falcon(implementation: str, dtype: torch.dtype = torch.float64) -> HuggingFaceModel:
    return shaken_model("falcon-alibi", implementation=implementation, dtype=dtype)


@pytest.mark.parametrize(("implementation", "times"), [("eager", 2), ("sdpa", 1)])
def test_falcons_alibi_is_what_runs(implementation: str, times: int) -> None:
    """Slopes over sqrt(head_dim), added twice by eager attention, on a staircase past position 256."""
    model = long_falcon(implementation)
    family, config = model.family, model.config
    parts = family.attention_parts(family.blocks(model.network)[0], config)
    steps = parts.position_logits(LONG).diff(dim=-1)
    published = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    applied = times * published / 8**0.5
    torch.testing.assert_close(steps[:, :255], applied[:, None].expand(-1, 255), rtol=1e-9, atol=0)
    assert not torch.allclose(steps[:, 256:], applied[:, None])
    assert bool((steps[:, 256:] == 0).any())
    np.testing.assert_allclose(family.encoding(config, 0).linear_slopes(4), applied.numpy(), rtol=1e-9)


def test_falcons_staircase_is_in_its_own_attention() -> None:
    model = long_falcon("eager")
    model.family.blocks(model.network)[0].attention.query_key_value.weight.zero_()
    token_ids = torch.full((1, LONG), 7)
    found, _ = recomputed(model, token_ids, block=64)
    own = own_attention(model, token_ids)[0].double()
    torch.testing.assert_close(found[0], own, rtol=TOLERANCE, atol=TOLERANCE)
    slopes = torch.as_tensor(model.family.encoding(model.config, 0).linear_slopes(4))
    smooth = (slopes[:, None] * torch.arange(LONG)).softmax(-1)
    assert (own[:, -1] - smooth).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_falcons_alibi_is_reported(implementation: str, dtype: torch.dtype) -> None:
    said = long_falcon(implementation, dtype).describe()["caveats"]
    twice = [sentence for sentence in said if "twice" in sentence]
    assert len(twice) == (implementation == "eager")
    assert any("sqrt(head_dim)" in sentence for sentence in said)
    assert any("staircase" in sentence for sentence in said)
    assert shaken_model("falcon", implementation=implementation).describe()["caveats"] == []


@pytest.mark.parametrize(("dtype", "position"), [(torch.bfloat16, 256), (torch.float16, 2048)], ids=str)
def test_rounded_alibi_is_reported(dtype: torch.dtype, position: int) -> None:
    assert shaken_model("bloom").describe()["caveats"] == []
    model = shaken_model("bloom", dtype=dtype)
    (said,) = model.describe()["caveats"]
    assert f"past position {position}" in said
    parts = model.family.attention_parts(model.family.blocks(model.network)[0], model.config)
    steps = parts.position_logits(2 * position).double().diff(dim=-1)
    assert bool((steps[0, :position] == 0.25).all())
    assert not bool((steps[0, position:] == 0.25).all())


def test_settings_that_mpt_ignores_are_reported() -> None:
    assert shaken_model("mpt").describe()["caveats"] == []
    (said,) = shaken_model("mpt-clip").describe()["caveats"]
    assert "alibi=False" in said


def test_bloom_in_half_precision_is_followed_where_biases_round() -> None:
    model = shaken_model("bloom", dtype=torch.bfloat16)
    model.family.blocks(model.network)[0].attention.query_key_value.weight.zero_()
    model.family.blocks(model.network)[0].attention.query_key_value.bias.zero_()
    token_ids = torch.full((1, LONG), 7)
    found, _ = recomputed(model, token_ids, block=64)
    torch.testing.assert_close(found[0], own_attention(model, token_ids)[0].float(), rtol=1e-2, atol=1e-3)


def test_what_cannot_be_recomputed_is_refused() -> None:
    model = shaken_model("llama")
    model.config._attn_implementation = "somebodys"
    with pytest.raises(UsageError, match=r"llama model cannot be recomputed: .*'somebodys'"):
        describe_attention(model, n_positions=5)
    model.config._attn_implementation = "eager"
    assert len(describe_attention(model, n_positions=5)) == 3


def test_weights_that_cannot_be_read_are_refused() -> None:
    model = shaken_model("llama")
    attention = model.family.blocks(model.network)[1].attention
    attention.q_proj.to("meta")
    with pytest.raises(UsageError, match="some are offloaded"):
        describe_attention(model, n_positions=5)
    attention.q_proj.weight = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(UsageError, match=r"Linear holds them as torch\.int8"):
        describe_attention(model, n_positions=5)
    attention.q_proj = torch.nn.Identity()
    with pytest.raises(UsageError, match="Identity holds them as packed bits"):
        describe_attention(model, n_positions=5)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@torch.no_grad()
def test_scaled_rotary_positions_are_followed(name: str) -> None:
    """YaRN multiplies sines and cosines; attention follows, mean field has no theory for it."""
    config = (CONFIGS | MIXTURES)[name]()
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    network = random_network(config, seed=0)
    network.set_attn_implementation("eager")
    for parameter in network.parameters():
        parameter.mul_(10)
    model = HuggingFaceModel(network)
    found, _ = recomputed(model, ids())
    for ours, own in zip(found, own_attention(model, ids()), strict=True):
        torch.testing.assert_close(ours, own, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(UsageError, match=r"scale what they turn by 1\.1"):
        model.family.rotary_frequencies(network, model.family.blocks(network)[0], config=config, layer=0)


@torch.no_grad()
def test_attention_upcast_by_gpt2_is_followed() -> None:
    config = CONFIGS["gpt2-layer-scale"]()
    config.reorder_and_upcast_attn = True
    network = random_network(config, seed=0)
    network.set_attn_implementation("eager")
    for parameter in network.parameters():
        parameter.mul_(10)
    model = HuggingFaceModel(network)
    found, _ = recomputed(model, ids())
    for ours, own in zip(found, own_attention(model, ids()), strict=True):
        torch.testing.assert_close(ours, own, rtol=TOLERANCE, atol=TOLERANCE)
