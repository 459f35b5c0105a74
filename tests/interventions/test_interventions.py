"""Every intervention against the same change made by hand, and nothing left behind when its context ends."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from posbias import UsageError, intervened
from posbias.interventions import INTERVENTIONS, resolve_interventions
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field import spec_of
from posbias.theory.power_rollout import attention_rollout_prompt
from theory_calls import power_rollout
from tiny_families import CONFIGS, VOCABULARY, shaken_model

POSITIONS = 12
EXAMPLES = {
    "attention_scaled": "attention_scaled(factor=0.5)",
    "key_biased": "key_biased(biases='gamma_key(alpha=3.0)')",
    "sink_masked": "sink_masked(positions=2)",
    "window": "window(width=4)",
}
UNCHANGING = (
    "attention_scaled(factor=1)",
    "key_biased(biases='gamma_key(alpha=1.0)')",
    "window(width=64)",
)
"""Spelled so that nothing happens."""
NAMES = {*CONFIGS, "gpt_oss"}
OWN_MASKS = {"falcon-alibi", "mpt"}
OWN_KEYS = OWN_MASKS | {"falcon", "gemma2"}
"""Models whose masks, and whose keys' biases, are not replaced."""
FLOAT32_INSIDE = 2e-5
"""Norms, rotary angles and softmax run in float32 inside transformers."""


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def token_ids() -> np.ndarray:
    return np.random.default_rng(3).integers(3, VOCABULARY, POSITIONS)


def last(model, token_ids) -> Tensor:
    with torch.no_grad():
        return model.last(model.embed(model.token_tensor([token_ids.tolist()]))).logits[0]


def with_network(model, change) -> HuggingFaceModel:
    """A copy of a model whose network was changed by hand."""
    network = copy.deepcopy(model.network)
    with torch.no_grad():
        change(network)
    return HuggingFaceModel(network)


def influence(model, token_ids) -> np.ndarray:
    (kind,) = resolve_kinds("jacobian(exact=True)")
    return measure_prompt(model, token_ids, kinds=[kind], key=(0, 0)).norms["jacobian"]


@pytest.mark.parametrize("name", [name for name in sorted(NAMES) if "-" not in name or name == "falcon-alibi"])
def test_an_intervention_is_refused_or_leaves_the_model_bit_for_bit_as_it_was(name, token_ids):
    model = shaken_model(name)
    before = last(model, token_ids)
    applied = set()
    for literal in [*(EXAMPLES.get(variant, variant) for variant in INTERVENTIONS), *UNCHANGING]:
        try:
            with intervened(model, literal) as changed:
                after = last(changed, token_ids)
        except UsageError:
            continue
        finally:
            assert torch.equal(last(model, token_ids), before), literal
        applied.add(literal)
        assert bool(after.isfinite().all())
        torch.testing.assert_close(after, before, rtol=0, atol=1e-12) if literal in UNCHANGING else None
        assert literal in UNCHANGING or not torch.allclose(after, before, rtol=0, atol=1e-3), literal
    for literal in ("window(width=4)", "sink_masked(positions=2)", "bidirectional"):
        assert (literal in applied) == (name not in OWN_MASKS), literal
    assert (EXAMPLES["key_biased"] in applied) == (name not in OWN_KEYS)
    assert {"attention_scaled(factor=0.5)", "no_residual"} <= applied


def test_an_exception_inside_the_context_restores_the_model(token_ids):
    model = shaken_model("llama")
    before = last(model, token_ids)
    for literal in ("no_rope", "no_content", "no_residual", "window(width=2)"):
        with pytest.raises(ZeroDivisionError), intervened(model, literal):
            raise ZeroDivisionError
        assert torch.equal(last(model, token_ids), before)


def test_without_rope_llama_is_smollm3_without_rope_layers(token_ids):
    model = shaken_model("llama")
    config = transformers.SmolLM3Config(**{**CONFIGS["smollm3"]().to_dict(), "no_rope_layers": [0, 0, 0]})
    config.tie_word_embeddings = False
    plain = transformers.SmolLM3ForCausalLM(config).double()
    plain.load_state_dict(model.network.state_dict())
    with intervened(model, "no_rope") as changed:
        found = last(changed, token_ids)
    torch.testing.assert_close(found, last(HuggingFaceModel(plain), token_ids), rtol=0, atol=1e-12)


def test_rope_whose_frequencies_follow_the_length_is_refused(token_ids):
    config = CONFIGS["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = HuggingFaceModel(transformers.LlamaForCausalLM(config))
    with pytest.raises(UsageError, match="dynamic takes its frequencies from the prompt's length"):
        intervened(model, "no_rope").__enter__()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("literal", ["bidirectional", "sink_masked(positions=3)", "window(width=3)"])
def test_masks_are_the_dense_additive_mask_given_by_hand(literal, implementation, token_ids):
    model = shaken_model("llama", implementation=implementation)
    index = np.arange(POSITIONS)
    query, key = index[:, None], index[None, :]
    visible = {
        "bidirectional": np.ones((POSITIONS, POSITIONS), dtype=bool),
        "sink_masked(positions=3)": (key <= query) & ~((key < 3) & (query >= 3)),
        "window(width=3)": (key <= query) & (key > query - 3),
    }[literal]
    mask = torch.zeros(1, 1, POSITIONS, POSITIONS, dtype=torch.float64)
    mask[0, 0, ~torch.as_tensor(visible)] = -torch.inf
    with torch.no_grad():
        embeddings = model.embed(model.token_tensor([token_ids.tolist()]))
        expected = model.network(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits[0, -1]
    with intervened(model, literal) as changed:
        torch.testing.assert_close(last(changed, token_ids), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen2-window", "gpt2", "bloom"])
def test_what_a_mask_hides_has_no_influence(name, token_ids):
    model = shaken_model(name)
    with intervened(model, "window(width=2)") as changed:
        reached = influence(changed, token_ids)
    assert np.all(reached[:-4] == 0)  # three layers reach three positions back
    assert np.all(reached[-4:] > 0)
    with intervened(model, "sink_masked(positions=2)") as changed:
        reached = influence(changed, token_ids)
    assert np.all(reached[:2] == 0)
    assert reached[2] > 0 or name in ("gemma3_text", "qwen2-window")


def test_attention_scaled_is_the_output_projection_scaled(token_ids):
    def scale(network):
        for block in shaken_family.blocks(network):
            block.attention_output.weight.mul_(0.3)
            if block.attention_output.bias is not None:
                block.attention_output.bias.mul_(0.3)

    for name in ("llama-biases", "gpt2", "bloom"):
        model = shaken_model(name)
        shaken_family = model.family
        with intervened(model, "attention_scaled(factor=0.3)") as changed:
            found = last(changed, token_ids)
        torch.testing.assert_close(found, last(with_network(model, scale), token_ids), rtol=0, atol=1e-6)


def test_attention_scaled_behind_a_norm_scales_what_the_norm_returns(token_ids):
    model = shaken_model("gemma3_text")

    def scale(network):
        for layer in network.model.layers:
            layer.post_attention_layernorm.weight.copy_(0.3 * (1 + layer.post_attention_layernorm.weight) - 1)

    with intervened(model, "attention_scaled(factor=0.3)") as changed:
        found = last(changed, token_ids)
        gain = changed.family.norm(model.network.model.layers[0].post_attention_layernorm).gain
    torch.testing.assert_close(found, last(with_network(model, scale), token_ids), rtol=0, atol=FLOAT32_INSIDE)
    torch.testing.assert_close(gain, 0.3 * (1 + model.network.model.layers[0].post_attention_layernorm.weight))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "bloom"])
def test_without_attention_only_the_last_position_counts(name, token_ids):
    model = shaken_model(name)
    with intervened(model, "attention_scaled(factor=0)") as changed:
        reached = influence(changed, token_ids)
    assert np.all(reached[:-1] == 0)
    assert reached[-1] > 0


@pytest.mark.parametrize("name", ["llama", "granite"])
def test_without_residual_a_block_returns_attention_and_the_mlp_on_it(name, token_ids):
    model = shaken_model(name)
    config, decoder = model.config, model.network.model
    scale = getattr(config, "residual_multiplier", 1.0)
    assert (scale != 1) == (name == "granite")
    stream = model.embed(model.token_tensor([token_ids.tolist()])) * getattr(config, "embedding_multiplier", 1.0)
    with torch.no_grad():
        angles = decoder.rotary_emb(stream, torch.arange(POSITIONS)[None])
        for layer in decoder.layers:
            stream = (
                scale
                * layer.self_attn(
                    layer.input_layernorm(stream), position_embeddings=angles, attention_mask=None, use_cache=False
                )[0]
            )
            stream = stream + scale * layer.mlp(layer.post_attention_layernorm(stream))
        expected = model.network.lm_head(decoder.norm(stream))[0, -1] / getattr(config, "logits_scaling", 1.0)
    with intervened(model, "no_residual") as changed:
        torch.testing.assert_close(last(changed, token_ids), expected, rtol=0, atol=1e-9)
        assert not changed.described
        with pytest.raises(UsageError, match="under no_residual: its attention branches have no residual"):
            power_rollout(changed, Prompts(token_ids[None]))


def test_without_content_queries_are_zero(token_ids):
    def no_queries(network):
        if hasattr(network, "transformer"):
            for block in network.transformer.h:
                block.attn.c_attn.weight[:, :32] = 0
                block.attn.c_attn.bias[:32] = 0
            return
        for layer in (network.model.decoder if hasattr(network.model, "decoder") else network.model).layers:
            layer.self_attn.q_proj.weight.zero_()
            if layer.self_attn.q_proj.bias is not None:
                layer.self_attn.q_proj.bias.zero_()

    for name in ("llama", "qwen2", "gemma3_text", "gpt2", "opt"):
        for implementation in ("sdpa", "eager"):
            model = shaken_model(name, implementation=implementation)
            with intervened(model, "no_content") as changed:
                found = last(changed, token_ids)
            torch.testing.assert_close(found, last(with_network(model, no_queries), token_ids), rtol=0, atol=1e-6)


def test_without_its_encoding_one_layer_does_not_know_the_order_before_the_last_token(token_ids):
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 1
    model = HuggingFaceModel(transformers.AutoModelForCausalLM.from_config(config).double())
    for parameter in model.network.parameters():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    shuffled = token_ids[[*reversed(range(POSITIONS - 1)), POSITIONS - 1]]
    assert not torch.allclose(last(model, token_ids), last(model, shuffled), rtol=0, atol=1e-3)
    with intervened(model, "no_rope") as changed:
        torch.testing.assert_close(last(changed, token_ids), last(changed, shuffled), rtol=0, atol=1e-5)
        assert spec_of(changed).layers[0].attention.rotation is None


def dense_rollout(changed, token_ids, mixing) -> np.ndarray:
    """From the attention that transformers itself returns."""
    with torch.no_grad():
        embeddings = changed.embed(changed.token_tensor([token_ids.tolist()]))
        layers = changed.network(inputs_embeds=embeddings, use_cache=False, output_attentions=True).attentions
    row = np.eye(POSITIONS)[-1]
    for attention in reversed(layers):
        row = (1 - mixing) * row + mixing * row @ attention[0].mean(0).double().numpy()
    return row


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt2", "gpt_oss"])
def test_the_description_attends_as_the_changed_network_does(name, token_ids):
    literals = ["window(width=3)", "sink_masked(positions=2)", "no_content", "attention_scaled(factor=0.5)"]
    literals += [] if name == "gpt2" else ["no_rope"]
    for literal in literals:
        model = shaken_model(name, implementation="eager")
        with intervened(model, literal) as changed:
            expected = dense_rollout(changed, token_ids, 0.4)
            found = attention_rollout_prompt(changed, token_ids, 0.4)
        expected /= expected.sum()  # learned sinks keep a part
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=literal)


@pytest.mark.parametrize(
    ("literal", "message"),
    [
        ("window(width=0)", "width must be a whole number >= 1"),
        ("window", "parameters of window: width"),
        ("sink_masked(positions=-1)", "positions must be a whole number >= 1"),
        ("sink_masked(positions=True)", "positions must be a whole number >= 1"),
        ("attention_scaled(factor=-1)", "factor must be a finite number >= 0, got -1"),
        ("no_ropes", "unknown intervention 'no_ropes'; known: attention_scaled, bidirectional"),
        ("no_alibi", "intervention no_alibi left posbias after 0.1.0"),
        ("no_rope(", "is not a name or a literal call"),
    ],
)
def test_bad_literals_are_refused_in_one_line(literal, message):
    with pytest.raises(UsageError) as refused:
        resolve_interventions([literal])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bad_requests_are_refused(token_ids):
    for wrong, message in (([], "no intervention given"), (["no_rope", "no_rope"], "given 2 times")):
        with pytest.raises(UsageError, match=message):
            resolve_interventions(wrong)
    with pytest.raises(UsageError, match="model must be HuggingFaceModel"):
        intervened("llama", "no_rope").__enter__()
    model = shaken_model("llama")
    too_many = pytest.raises(UsageError, match="positions must be below the prompt's 12")
    with intervened(model, f"sink_masked(positions={POSITIONS})") as changed, too_many:
        last(changed, token_ids)
    with intervened(model, f"sink_masked(positions={POSITIONS})") as changed, too_many:
        power_rollout(changed, Prompts(token_ids[None]))


def test_one_intervention_at_a_time(token_ids):
    model = shaken_model("llama")
    with intervened(model, "no_rope") as changed, pytest.raises(UsageError, match="one intervention at a time"):
        intervened(changed, "window(width=3)").__enter__()
    with intervened(model, "window(width=3)") as changed:
        assert bool(last(changed, token_ids).isfinite().all())


@pytest.mark.parametrize("literal", ["window(width=3)", "no_residual", "no_content", "no_rope"])
def test_recomputed_activations_are_changed_too(literal, token_ids):
    kinds = resolve_kinds("jacobian(probes=1)")
    found = []
    for checkpointing in (False, True):
        with intervened(shaken_model("llama"), literal) as changed:
            options = PassOptions(checkpointing=checkpointing)
            found.append(measure_prompt(changed, token_ids, kinds=kinds, key=(0, 0), options=options).norms["jacobian"])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_finite(dtype, token_ids):
    model = shaken_model("gemma3_text", dtype=dtype)
    for literal in ("window(width=3)", "sink_masked", "bidirectional", "no_content", "no_rope", "no_residual"):
        with intervened(model, literal) as changed:
            assert bool(last(changed, token_ids).isfinite().all()), literal
