"""Every method inside a model: its strength, caches and padding, users' own networks; nothing is left behind."""

import copy
import gc
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import UsageError, mitigated
from posbias.mitigation.methods.applying import resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation
from posbias.models.hugging_face import INTERVENTION_MARK
from tiny_families import SCALES, VOCABULARY, shaken_model, spelled

POSITIONS = 14
SPANS = [(2, 5), (6, 9), (9, 11)]
FAMILIES = ["llama", "qwen2-window", "qwen3", "gemma3_text", "mistral"]
INSIDE = [name for name in MITIGATIONS if issubclass(MITIGATIONS[name], Mitigation)]
ALONE = ["attention_calibration", "ms_poe", "pine"]
"""Methods that take one prompt at a time."""
RAGGED = [
    *INSIDE,
    f"key_bias(biases='gamma_key(alpha=3.0)', from_question=True, scales={SCALES})",
    "adapter(rank=2, targets='all', invocation=[48, 40])",
]
"""With variants that act from the question on."""
PLACED = [*ALONE, "context_bias", "positional_channel", *RAGGED[len(INSIDE) :]]
"""Methods that are told the places of passages."""
SHORT, LONG = 12, 16
"""Tokens of the prompts of a ragged batch."""
TURNED = {"rtol": 1e-4, "atol": 1e-4}
"""Tolerance where padding moves positions, whose cosines the network takes in float32; in float64 else."""
GENERATED = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model(request):
    return shaken_model(getattr(request, "param", "llama"))


def with_families(methods):
    """Every method in the first family and in one or two others; every other family under a third of the methods."""
    first, *others = FAMILIES
    pairs = [(first, method) for method in methods]
    pairs += [
        (family, method)
        for shift, family in enumerate(others)
        for place, method in enumerate(methods)
        if (place + shift) % 3 == 0
    ]
    return pytest.mark.parametrize(("model", "name"), pairs, indirect=["model"])


def token_ids(model, seed=3):
    return model.token_tensor([np.random.default_rng(seed).integers(3, VOCABULARY, POSITIONS).tolist()])


def logits(model):
    with torch.no_grad():
        return model.network(token_ids(model)).logits


@with_families(INSIDE)
def test_strength_leads_from_the_model_as_it_is_to_the_method(model, name):
    before = logits(model)
    found = []
    for strength in (0.0, 1e-4, 1.0):
        with mitigated(model, spelled(name, model), strength=strength, passages=SPANS):
            found.append(logits(model))
    assert torch.equal(found[0], before)
    assert 0 < float((found[1] - before).abs().max()) < 0.01 * float((found[2] - before).abs().max())
    assert torch.equal(logits(model), before), "afterwards the model is what it was"


@torch.no_grad()
@with_families(INSIDE)
def test_generation_with_a_cache_is_one_pass_in_a_padded_batch_too(model, name):
    alone = name in ALONE
    ids = token_ids(model) if alone else torch.cat([token_ids(model), token_ids(model, 5)])
    padded, shown = (torch.cat([torch.zeros_like(ids[:, :3]), kept], 1) for kept in (ids, torch.ones_like(ids)))
    wanted = {"max_new_tokens": 6, "output_logits": True, **GENERATED}
    with mitigated(model, spelled(name, model), passages=SPANS):
        found = model.network.generate(ids, attention_mask=torch.ones_like(ids), **wanted)
        whole = model.network(found.sequences).logits[:, POSITIONS - 1 : -1]
        torch.testing.assert_close(torch.stack(found.logits, 1), whole.float(), **TURNED)
        if not alone:
            filled = model.network.generate(padded, attention_mask=shown, **wanted)
            assert torch.equal(filled.sequences[:, 3:], found.sequences)


@torch.no_grad()
@with_families([name for name in INSIDE if name != "pine"])
def test_a_prompt_that_is_read_in_two_calls_is_one_prompt(model, name):
    ids = token_ids(model)
    with mitigated(model, spelled(name, model), passages=SPANS):
        cut = model.network(ids[:, :8], use_cache=True)  # amid the passages
        rest = model.network(ids[:, 8:], past_key_values=cut.past_key_values).logits[:, -1]
        torch.testing.assert_close(rest, model.network(ids).logits[:, -1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_5_text"])
@pytest.mark.parametrize("name", ["temperature", "context_bias"])
def test_methods_act_beside_linear_layers(family, name):
    model = shaken_model(family)
    for check in (
        test_strength_leads_from_the_model_as_it_is_to_the_method,
        test_generation_with_a_cache_is_one_pass_in_a_padded_batch_too,
    ):
        check(model, name)


def ragged(model, side):
    """Two prompts of different lengths, one batch of them, and what of it is shown."""
    drawn = [np.random.default_rng(seed).integers(3, VOCABULARY, LONG).tolist() for seed in (3, 5)]
    prompts = [drawn[0], drawn[1][:SHORT]]
    lacking = [0] * (LONG - SHORT)
    short, ones = ((lacking + one if side == "left" else one + lacking) for one in (prompts[1], [1] * SHORT))
    batch, shown = model.token_tensor([prompts[0], short]), model.token_tensor([[1] * LONG, ones])
    return [model.token_tensor([prompt]) for prompt in prompts], batch, shown


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@with_families([name for name in RAGGED if name not in PLACED])
def test_every_prompt_of_a_ragged_batch_is_as_alone(model, name, side):
    prompts, batch, shown = ragged(model, side)
    options = {"max_new_tokens": 6, "output_logits": True, **GENERATED}
    with mitigated(model, spelled(name, model)):
        found = model.network(batch, attention_mask=shown).logits
        for row, prompt, kept in zip(found, prompts, shown.bool(), strict=True):
            torch.testing.assert_close(row[kept], model.network(prompt).logits[0], **TURNED)
        if side == "left":
            together = model.network.generate(batch, attention_mask=shown, **options)
            for row, prompt in enumerate(prompts):
                alone = model.network.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
                torch.testing.assert_close(
                    torch.stack(together.logits, 1)[row], torch.stack(alone.logits, 1)[0], **TURNED
                )
                assert torch.equal(together.sequences[row, LONG:], alone.sequences[0, prompt.shape[1] :])


@torch.no_grad()
@with_families([name for name in RAGGED if name not in ALONE])
def test_beams_with_a_cache_score_what_whole_passes_do(model, name):
    prompts = torch.cat([token_ids(model), token_ids(model, 5)])
    beams = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "max_new_tokens": 5, **GENERATED}
    with mitigated(model, spelled(name, model), passages=SPANS):
        found = model.network.generate(prompts, attention_mask=torch.ones_like(prompts), output_scores=True, **beams)
        assert (found.beam_indices.diff(dim=1) != 0).any(), "beams have to change places for this to be a test"
        for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
            asked = torch.arange(POSITIONS - 1, len(sequence) - 1)
            logits = model.network(sequence[None], logits_to_keep=asked).logits[0].log_softmax(-1)
            wanted = logits.gather(1, sequence[POSITIONS:, None]).sum()
            torch.testing.assert_close(score.to(wanted), wanted, **TURNED)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("method", PLACED)
def test_one_list_of_passages_serves_prompts_of_one_length(method, side):
    model = shaken_model("llama")
    prompts, batch, shown = ragged(model, side)
    name = method.partition("(")[0]
    alone = name in ALONE
    allowed = "one prompt at a time, without padding" if alone else "prompts of one length"
    message = f"{name}: passages= is one list for all prompts that are read; allowed: {allowed}"
    with mitigated(model, spelled(method, model), passages=SPANS):
        for given in ({"input_ids": batch}, {"inputs_embeds": model.embed(batch)}):
            with pytest.raises(UsageError, match=message):
                model.network(attention_mask=shown, **given)
        if alone:
            with pytest.raises(UsageError, match=message):
                model.network(prompts[0].expand(2, -1))


@torch.no_grad()
@pytest.mark.parametrize("name", INSIDE)
def test_prompts_may_take_turns_between_their_steps(name):
    """What is kept of a prompt is known again by its cache."""
    model, long = shaken_model("llama"), token_ids(shaken_model("llama"), 5)
    step = {"logits_to_keep": 1, "use_cache": True}
    with mitigated(model, spelled(name, model), passages=SPANS):
        alone = model.network(long, **step).past_key_values
        expected = model.network(token_ids(model)[:, :1], past_key_values=alone, **step).logits
        cache = model.network(long, **step).past_key_values
        model.network(token_ids(model, 8), **step)
        found = model.network(token_ids(model)[:, :1], past_key_values=cache, **step).logits
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", RAGGED)
def test_what_is_installed_stays_without_its_handle_and_is_not_copied(name):
    model = shaken_model("llama")
    network, prompt = model.network, torch.arange(3, 3 + POSITIONS)[None]
    before = network(prompt, logits_to_keep=1).logits
    mitigated(network, spelled(name, model), passages=SPANS).install()
    gc.collect()
    assert not torch.equal(network(prompt, logits_to_keep=1).logits, before)
    with pytest.raises(UsageError, match=r": a model under a method is not copied; allowed: before it is, or after$"):
        copy.deepcopy(network)


@torch.no_grad()
@pytest.mark.parametrize("gamma", [0.5, 3.0])
def test_the_first_token_is_weighed_against_learned_sinks_too(gamma):
    """GPT-OSS: the softmax has a logit that belongs to no key, so what all keys get in common counts."""
    model = shaken_model("gpt_oss", implementation="eager")
    asked = {"output_attentions": True, "use_cache": False}
    before = model.network(token_ids(model), **asked).attentions[0][0]
    first = MITIGATIONS.build("key_bias", biases=f"key_bias(values={[math.log(gamma), *[0.0] * (POSITIONS - 1)]})")
    with mitigated(model, first):
        after = model.network(token_ids(model), **asked).attentions[0][0]
    expected = before.clone()
    expected[..., 0] *= gamma
    total = 1 + (gamma - 1) * before[..., :1]  # the sink's share is what is missing in a row
    torch.testing.assert_close(after, expected / total, rtol=1e-5, atol=1e-6)


HALF_ERROR = 4.0
"""Times the plain model's own error in half precision, which a method may have: it rounds at other places."""


@torch.no_grad()
@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_full_as_the_plain_model(name, dtype):
    half, full = shaken_model("llama", dtype=dtype), shaken_model("llama", dtype=torch.float32)
    full.network.load_state_dict(half.network.state_dict())
    tokens = token_ids(full, 7)  # of other seeds rounding changes the order that `pine` gives to passages

    def whole(model):
        return model.network(tokens).logits

    def stepped(model):
        found = model.network(tokens[:, :12], use_cache=True)
        for place in (12, 13):
            found = model.network(tokens[:, place : place + 1], past_key_values=found.past_key_values)
        return found.logits

    def error(run):
        return float((run(half).float() - run(full).float()).abs().max())

    plain = error(whole)
    with mitigated(half, spelled(name, half), passages=SPANS), mitigated(full, spelled(name, full), passages=SPANS):
        assert error(whole) < HALF_ERROR * plain
        assert error(stepped) < HALF_ERROR * plain


@torch.no_grad()
@pytest.mark.parametrize("model", ["llama", "qwen3", "gpt2", "opt"], indirect=True)
def test_keys_and_values_before_the_question_are_the_models_own_under_an_adapter_from_there_on(model):
    caches, method = [], spelled(RAGGED[-1], model)
    for context in (nullcontext(), mitigated(model, method, passages=SPANS)):
        with context:
            caches.append(model.network(token_ids(model), use_cache=True).past_key_values)
    first = SPANS[-1][1]
    for plain, changed in zip(*(cache.layers for cache in caches), strict=True):
        for before, after in ((plain.keys, changed.keys), (plain.values, changed.values)):
            assert torch.equal(after[:, :, :first], before[:, :, :first])
            assert not torch.equal(after[:, :, first:], before[:, :, first:])


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@pytest.mark.parametrize("name", ["positional_channel", RAGGED[len(INSIDE)]])
def test_from_the_question_on_queries_are_changed_and_earlier_ones_are_not(model, name):
    before, first = logits(model), SPANS[-1][1]
    with mitigated(model, spelled(name), passages=SPANS):
        after = logits(model)
    torch.testing.assert_close(after[:, :first], before[:, :first], rtol=1e-6, atol=1e-6)
    assert (after - before)[:, first:].abs().amax(-1).min() > 0


def test_a_network_of_transformers_is_changed_in_place_and_stays_trainable():
    network = shaken_model("llama").network.requires_grad_(True).train()
    tokens = torch.arange(3, 12)[None]
    with torch.no_grad():
        before = network(tokens).logits
    installed = mitigated(network, "temperature(scale=0.6)").install()
    with torch.no_grad():
        assert not torch.equal(network(tokens).logits, before)
    with pytest.raises(UsageError, match="already under"):
        mitigated(network, "temperature").install()
    installed.remove()
    assert network.training
    assert all(parameter.requires_grad for parameter in network.parameters())
    with torch.no_grad():
        assert torch.equal(network(tokens).logits, before)


def test_influence_is_measured_under_a_method():
    model = shaken_model("llama")
    prompts = pb.load_prompts("synthetic", model, n_positions=12, count=2, seed=0)
    with mitigated(model, "key_bias(biases='gamma_key(alpha=0.05)')") as changed:
        after = pb.measure(changed, prompts, kinds="jacobian")
    before = pb.measure(model, prompts, kinds="jacobian")
    first = [measured.profiles["jacobian"].influence[0] for measured in (before, after)]
    assert first[1] > first[0]


REFUSED = [
    ("llama", "ms_pole", (), "unknown mitigation"),
    ("llama", "temperature(strength=1.5)", (), "strength must be a number >= 0 and <= 1, got 1.5"),
    ("llama", "initial_token(gamma=3.0)", (), "^mitigation initial_token left posbias after 0.1.0: it helped in 2 of"),
    ("llama", "temperature(scale=-1.0)", (), "scale must be a number > 0 and < 100"),
    ("llama", "key_bias(biases='alibi')", (), "biases must be"),
    ("llama", "key_bias(biases='gamma_key(alpha=2.0)', from_question=True)", (), "needs the passages"),
    ("llama", "positional_channel(channel=3)", (), "needs the passages"),
    ("llama", spelled("attention_calibration"), (), "attention_calibration needs the passages"),
    ("llama", "positional_channel", (), "parameters of positional_channel: channel, factor, from_question, strength$"),
    ("llama", "context_bias(values=[[1.0]], scales=[[0.0]])", (), "scales must be a list, each a list"),
    ("llama", "key_bias(biases='gamma_key(alpha=2.0)', scales=[[-1.0]])", (), "scales must be a list, each a list"),
    ("llama", "key_bias(biases='gamma_key(alpha=2.0)', scales=[[1.0]])", (), "has 3 layers of 4 heads"),
    ("llama", "positional_channel(channel=32)", SPANS, "channel must lie in 0 ... 31, got 32"),
    *(
        (family, "positional_channel(channel=5)", SPANS, f"{family} models takes no further heads; allowed are")
        for family in ("phi3", "olmo2", "opt")
    ),
    ("cohere-norms", "positional_channel(channel=5)", SPANS, "the layout of cohere models is not in the table"),
    ("bloom", "positional_channel(channel=5)", SPANS, "bloom models do not let attention be replaced"),
    ("llama", "attention_calibration", SPANS, "no tokenizer; allowed is a dummy in token ids"),
    ("llama", "attention_calibration(temperature=0.0)", SPANS, "temperature must be a finite number > 0"),
    ("llama", "attention_calibration(dummy=[99])", SPANS, "dummy must be a list, each a whole number >= 0 and < 50"),
    ("glm", "ms_poe", SPANS, "the layout of glm models is not in the table"),
    ("gpt2", "ms_poe", SPANS, "gpt2 models have no rotary positions"),
    ("llama", "ms_poe(low=0.0)", SPANS, "low must be"),
    ("llama", "ms_poe(low=2.0)", SPANS, "ms_poe: high must be a finite number >= 2.0, got 1.8"),
    ("llama", "ms_poe(first_layer=9)", SPANS, "first_layer"),
    ("llama", "repeat_prompt(times=3)", (), "argument 'times'; parameters of repeat_prompt: strength"),
    ("llama", "self_consistency(draws=1)", (), "self_consistency: draws must be a whole number >= 2"),
    ("llama", "self_consistency(seed=-1)", (), "seed must be a whole number >= 0"),
    ("llama", "ordered(run='x')", (), "ordered left posbias after 0.1.0: it helped in none of 9 places"),
    ("llama", "repeat_prompt(strength=2.0)", (), "strength must be a number >= 0"),
    ("llama", "adapter(rank=0)", (), "adapter: rank must be a whole number >= 1"),
    ("llama", "adapter(targets='q,w')", (), "targets must be among q, k, v, o, gate, up, down, mlp, all, got 'q,w'"),
    ("llama", "adapter", (), "adapter: it is not fitted yet; give what fit returns, or the path of a recipe"),
    ("llama", "adapter(weights='ab')", (), "adapter: its numbers lie beside its recipe; give what fit returns"),
    *(
        ("qwen3_5_text", spelled(name), SPANS, f"{name}: qwen3_5_text models have linear layers")
        for name in ("attention_calibration", "pine", "positional_channel")
    ),
    *(
        ("llama", spelled(name), passages, rf"{name}: passages must be in order, .* got {said}")
        for name in (*ALONE, "context_bias")
        for passages, said in (
            ([(8, 10), (2, 4)], r"\(2, 4\) behind 10"),
            ([(10, 3)], r"\(10, 3\)"),
            ([(-9, -4)], r"\(-9, -4\)"),
        )
    ),
]


@pytest.mark.parametrize(("family", "spelling", "passages", "message"), REFUSED)
def test_what_is_not_allowed_is_refused_in_one_line(family, spelling, passages, message):
    model = shaken_model(family)
    with pytest.raises(UsageError, match=message) as caught, mitigated(model, spelling, passages=passages):
        pass
    assert "\n" not in str(caught.value)


def test_networks_that_are_compiled_are_refused():
    """A graph knows no hooks: compiled before, or by `generate` itself for a static cache, on accelerators."""
    network = shaken_model("llama", dtype=torch.float32).network
    with pytest.raises(UsageError, match=r"runs without hooks; give it as before torch\.compile"):
        mitigated(torch.compile(network, backend="eager"), "temperature")
    for name in ("ms_poe", "context_bias", "key_bias", "positional_channel", RAGGED[len(INSIDE)]):
        with (
            mitigated(network, spelled(name), passages=SPANS),
            pytest.raises(UsageError, match="static caches are not allowed under a method; dynamic ones are"),
        ):
            network.generate(torch.arange(3, 18)[None], max_new_tokens=2, cache_implementation="static", **GENERATED)
    assert INTERVENTION_MARK not in vars(network)


@pytest.mark.parametrize("model", ["llama", "gemma3_text"], indirect=True)
@pytest.mark.parametrize("name", ["context_bias(values={zeros}", "key_bias(biases='gamma_key(alpha=1.0)'"])
def test_scales_of_all_heads_are_another_scaling_in_transformers(model, name):
    blocks = [layer.self_attn for layer in model.network.model.layers]
    heads = model.sizes["heads"]
    given = name.format(zeros=[[0.0] * heads] * len(blocks))
    method = f"{given}, scales={[[1.7] * heads] * len(blocks)})"
    with mitigated(model, method, passages=[(0, 1)]):
        found = logits(model)
    own = [block.scaling for block in blocks]
    try:
        for block, scaling in zip(blocks, own, strict=True):
            block.scaling = 1.7 * scaling
        wanted = logits(model)
    finally:
        for block, scaling in zip(blocks, own, strict=True):
            block.scaling = scaling
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(wanted, logits(model), atol=1e-2)


@pytest.mark.parametrize("name", list(MITIGATIONS))
def test_a_method_shows_itself_in_one_short_line(name):
    method = resolve_method(spelled(name), None, strength=0.5)
    assert repr(method).startswith(f"{name}(strength=0.5")
    assert len(repr(method)) <= 120


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives(model):
    there = type(model)(copy.deepcopy(model.network).cuda())
    for name in INSIDE:
        found = []
        for each in (model, there):
            with torch.no_grad(), mitigated(each, spelled(name, each), passages=SPANS):
                made = each.network.generate(token_ids(each), max_new_tokens=6, output_logits=True, **GENERATED)
                found.append(torch.stack([logits(each)[:, -1].cpu(), *(step.cpu() for step in made.logits)]))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4, msg=lambda why, name=name: f"{name}: {why}")


def test_a_method_runs_on_any_family_or_is_refused():
    refused = 0
    for name in ("bloom", "gpt_oss", "llama", "qwen3_next"):
        model = shaken_model(name, dtype=torch.float32)
        for method in [*map(spelled, INSIDE), "adapter"]:
            try:
                with mitigated(model, method, passages=[(2, 5), (5, 8)]):
                    model.last(model.embed(model.token_tensor([list(range(3, 15))])))
            except UsageError:
                refused += 1
    assert refused > len(INSIDE)
