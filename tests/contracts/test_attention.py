"""Contract of every family: attention is seen as the model computes it, and watching changes nothing."""

import pytest
import torch
from torch import Tensor

from posbias import UsageError
from posbias.models.attention import KernelCall, watch_attention
from posbias.models.attention_blocks import (
    AttentionState,
    before_rotation,
    kept_attention,
    query_blocks,
    seen_layers,
    state_of,
)
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import Linear
from posbias.models.networks import random_network
from posbias.theory.power_rollout.local_maps import affine, norm_forward
from tiny_families import CLAMPED, CONFIGS, DESCRIBED, MIXTURES, UNLISTED, VOCABULARY, shaken_model

POSITIONS = 23
TOLERANCE = 1e-5
"""transformers computes softmax, norms and rotary angles in float32, whatever the dtype of the weights."""
ATTENDING = sorted((DESCRIBED | UNLISTED | CLAMPED).keys() - {"mamba2"})
KINDS = pytest.mark.parametrize("name", ATTENDING)


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (1, POSITIONS), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def own_attention(model: HuggingFaceModel, token_ids: Tensor) -> list[Tensor]:
    """What eager attention returns, [head query key] for each layer that has attention."""
    given = model.network(token_ids, output_attentions=True, use_cache=False).attentions
    return [attention[0] for attention in given if attention is not None]


@torch.no_grad()
def seen(model: HuggingFaceModel, token_ids: Tensor) -> tuple[list[AttentionState], list[AttentionState], Tensor]:
    """What every layer's kernel gets, the same before rotation, and the logits of the pass that was watched."""
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    states: list[AttentionState] = []
    bare: list[AttentionState] = []

    def receive(call: KernelCall) -> None:
        states.append(state_of(call, dtype))
        bare.append(before_rotation(call, states[-1]))

    with watch_attention(model.network, receive):
        logits = model.logits(token_ids, [token_ids.shape[1] - 1])
    assert len(states) == len(seen_layers(model, n_positions=token_ids.shape[1]))
    return states, bare, logits


def whole(state: AttentionState, *, block: int = 7) -> Tensor:
    n_positions = len(state.first)
    weights = state.query.new_full((state.heads, n_positions, n_positions), torch.nan)
    for part in query_blocks(state, block=block):
        weights[:, part.queries] = 0
        weights[:, part.queries, part.keys] = part.weights.flatten(0, 1)
    return weights


@KINDS
def test_seen_attention_is_the_models_own(name: str) -> None:
    model = shaken_model(name, implementation="eager")
    for n_positions in (POSITIONS, 1, 2, 3):
        token_ids = ids()[:, :n_positions]
        found, _, _ = seen(model, token_ids)
        for state, own in zip(found, own_attention(model, token_ids), strict=True):
            ours = whole(state)
            assert ours.dtype == torch.float64
            if name == "granite_swa":  # scales outputs by what its sinks leave, and returns weights without them
                ours = ours / ours.sum(-1, keepdim=True)
            torch.testing.assert_close(ours, own.double(), rtol=TOLERANCE, atol=TOLERANCE)
            # Far from flat, so that nothing is right by accident.
            assert n_positions < POSITIONS or own.std() > 0.01


@pytest.mark.parametrize("name", sorted(DESCRIBED))
@torch.no_grad()
def test_seen_attention_gives_what_the_output_projection_reads(name: str) -> None:
    """Under the implementation that the library runs, which need not be eager."""
    model = shaken_model(name)
    own: list[Tensor] = []
    for block in model.family.blocks(model.network):
        block.attention_output.register_forward_pre_hook(lambda _module, inputs: own.append(inputs[0]))
    for state, read in zip(seen(model, ids())[0], own, strict=True):
        mixed = (whole(state).reshape(*state.query.shape[:2], POSITIONS, -1) @ state.value[:, None]).flatten(0, 1)
        mixed = mixed.transpose(0, 1).flatten(1)
        torch.testing.assert_close(mixed, read.view_as(mixed), rtol=0, atol=TOLERANCE * float(read.abs().max()))


@pytest.mark.parametrize("name", sorted(DESCRIBED))
@torch.no_grad()
def test_before_rotation_queries_and_keys_are_what_their_maps_and_norms_make(name: str) -> None:
    model = shaken_model(name)
    with kept_attention(model.network) as kept:
        _, bare, _ = seen(model, ids())
    for block, layer, state in zip(
        model.family.blocks(model.network), kept[:: len(kept) // len(bare)], bare, strict=True
    ):
        parts = model.family.attention_parts(block, model.config)

        def made(read: Tensor, of: Linear, norm: object, *, parts=parts) -> Tensor:  # type: ignore[no-untyped-def]
            raw = affine(read, of)
            width = raw.shape[-1] if norm is None else norm.gain.shape[-1]  # type: ignore[attr-defined]
            return norm_forward(norm, raw.unflatten(-1, (-1, width))).reshape(len(raw), -1, parts.head_dim)  # type: ignore[arg-type]

        query = made(layer.read, parts.query, parts.query_norm)
        key = made(layer.read, parts.key, parts.key_norm).repeat_interleave(parts.heads // parts.key_heads, 1)
        expected = torch.einsum("ihc,jhc->hij", query, key)
        found = (state.query @ state.key[:, None].mT).flatten(0, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
        assert state.scale == pytest.approx(parts.scale)


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_rows_sum_to_one_and_no_mass_lies_outside_the_mask(name: str) -> None:
    """Where there are learned sinks: to what they leave."""
    model = shaken_model(name)
    layers = seen_layers(model, n_positions=POSITIONS)
    for layer, state in zip(layers, seen(model, ids())[0], strict=True):
        weights = whole(state)
        visible = torch.as_tensor(model.family.mask(model.config, layer).visible(POSITIONS))
        rows = weights.sum(-1)
        if state.sinks is None:
            torch.testing.assert_close(rows, torch.ones_like(rows), rtol=0, atol=1e-12)
        else:
            assert bool(((rows > 0) & (rows < 1)).all())
        assert not weights[:, ~visible].any()
        assert bool((weights[:, visible] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@KINDS
def test_watching_changes_no_logit_and_leaves_nothing_behind(name: str, dtype: torch.dtype) -> None:
    model = shaken_model(name, dtype=dtype)
    plain = model.logits(ids(), [POSITIONS - 1])
    _, _, watched = seen(model, ids())
    assert torch.equal(plain, watched)
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.network.modules())
    assert not any("posbias_site" in vars(module) for module in model.network.modules())


LONG = 400


@torch.no_grad()
def position_steps(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """How what is added to the logits of the last query grows from key to key, in a layer without content."""
    model = shaken_model(name, implementation=implementation, dtype=dtype)
    states: list[AttentionState] = []
    for parameter in model.family.blocks(model.network)[0].attention.parameters():
        parameter.zero_()
    with watch_attention(model.network, lambda call: states.append(state_of(call, torch.float64))):
        length = min(LONG, model.max_positions or LONG)  # MPT's table is of 64 positions
        model.logits(torch.full((1, length), 7), [length - 1])
    added = states[0].added if states[0].logits is None else states[0].logits
    assert added is not None
    return added[:, -1].diff(dim=-1)


def slopes(name: str, implementation: str) -> Tensor:
    model = shaken_model(name, implementation=implementation)
    encoding = model.family.encoding(model.config, 0)
    return torch.as_tensor(encoding.linear_slopes(model.sizes["heads"]))


@pytest.mark.parametrize("name", ["bloom", "bloom-6-heads", "mpt", "mpt-6-heads"])
def test_alibi_falls_off_by_the_encodings_slopes(name: str) -> None:
    steps = position_steps(name, "eager")[:, -60:]
    torch.testing.assert_close(steps, slopes(name, "eager")[:, None].expand_as(steps), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("implementation", "times"), [("eager", 2), ("sdpa", 1)])
def test_falcons_alibi_is_what_runs(implementation: str, times: int) -> None:
    """Slopes over sqrt(head_dim), added twice by eager attention, on a staircase past position 256."""
    steps = position_steps("falcon-alibi", implementation)
    published = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    applied = times * published / 8**0.5
    torch.testing.assert_close(steps[:, :255], applied[:, None].expand(-1, 255), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(steps[:, 256:], applied[:, None])
    torch.testing.assert_close(slopes("falcon-alibi", implementation), applied, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("name", "said"), [("falcon-alibi", "staircase"), ("bloom", "steps"), ("mpt", "maximum 8")])
def test_biases_that_are_not_the_published_ones_are_told(name: str, said: str) -> None:
    (caveat,) = shaken_model(name).describe()["caveats"]
    assert said in caveat
    assert shaken_model("falcon").describe()["caveats"] == []


def test_what_cannot_be_seen_is_refused() -> None:
    model = shaken_model("llama")
    model.config._attn_implementation = "somebodys"
    with pytest.raises(UsageError, match=r"llama model cannot be seen: .*'somebodys'"):
        seen_layers(model, n_positions=5)
    model.config._attn_implementation = "eager"
    assert seen_layers(model, n_positions=5) == [0, 1, 2]
    with pytest.raises(UsageError, match="mamba2 model cannot be seen: no layer has any"):
        seen_layers(shaken_model("mamba2", dtype=torch.float32), n_positions=5)
    with pytest.raises(UsageError, match=r"eager attention matrices of 4 heads at 1000000 positions take .* GB"):
        seen_layers(shaken_model("bloom"), n_positions=1_000_000)


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
    for state, own in zip(seen(model, ids())[0], own_attention(model, ids()), strict=True):
        torch.testing.assert_close(whole(state), own, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(UsageError, match=r"scale what they turn by 1\.1|not in the table"):
        model.family.rotary_frequencies(network, model.family.blocks(network)[0], config=config, layer=0)
