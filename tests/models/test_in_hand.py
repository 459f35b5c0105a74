"""A model of transformers with its tokenizer, as users have it in hand, is the model that its name loads."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaModel,
    T5Config,
    T5ForConditionalGeneration,
)

import posbias as pb
from posbias.models.networks import reinitialise
from posbias.models.weights import network_sha256
from tiny_families import CONFIGS, MIXTURES, READS_TOKENS, shaken_model


def test_it_measures_as_the_same_model_by_name(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama).train()
    model = pb.load_model(network, AutoTokenizer.from_pretrained(tiny_llama))
    named = pb.load_model(tiny_llama)
    assert model.origin.source == named.origin.source == "tiny-llama"
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    one, other = (
        pb.measure(each, pb.load_prompts("default", each, n_positions=12, count=2)) for each in (model, named)
    )
    for kind, profile in one.profiles.items():
        np.testing.assert_array_equal(profile.influence, other.profiles[kind].influence)
    np.testing.assert_array_equal(one.mixing, other.mixing)


def test_an_audit_draws_it_anew_and_names_it_without_its_place(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model = pb.load_model(network, AutoTokenizer.from_pretrained(tiny_llama))
    audit = pb.audit(model, n_positions=12, prompts=2, options=pb.AuditOptions(kinds=("logit",), initialisations=1))
    assert [subject.name for subject in audit.subjects] == ["trained", "initialised"]
    assert audit.record.resolved["title"] == "tiny-llama"
    assert str(tiny_llama) not in str(audit.record.as_json())


def test_one_without_a_name_goes_by_its_class():
    config = LlamaConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert pb.load_model(AutoModelForCausalLM.from_config(config)).origin.source == "LlamaForCausalLM"


SMALL = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: BertForMaskedLM(BertConfig(**SMALL)), r"\(bert\) is an encoder; allowed: decoder-only"),
        (lambda: T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1)),
         r"\(t5\) is an encoder-decoder"),
        (lambda: LlamaModel(LlamaConfig(**SMALL)), r"\(LlamaModel\) has no language modelling head; take"),
        (lambda: torch.nn.Linear(2, 2), "a model of load_model or of transformers is needed, got Linear"),
    ],
)  # fmt: skip
def test_what_is_no_causal_language_model_is_refused_in_one_line(make, said):
    with pytest.raises(pb.UsageError, match=said) as error:
        pb.load_model(make())
    assert "\n" not in str(error.value)


def test_options_of_loading_and_tokenizers_go_where_they_belong(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama)
    said = {"init_seed": 0, "dtype": "bfloat16", "device": "cpu"}
    for name, value in said.items():
        with pytest.raises(pb.UsageError, match=f"{name}={value!r} goes with a model's name; 'Llama.*' is loaded alr"):
            pb.load_model(network, **{name: value})
    with pytest.raises(pb.UsageError, match="tokenizer must be one of transformers, got 'gpt2'"):
        pb.load_model(network, "gpt2")
    with pytest.raises(pb.UsageError, match="a tokenizer goes with a model of transformers"):
        pb.load_model(tiny_llama, AutoTokenizer.from_pretrained(tiny_llama))


@pytest.mark.parametrize("name", READS_TOKENS)
def test_one_that_reads_more_of_a_token_than_its_embedding_is_run_by_tokens_or_refused(name):
    """Embeddings for every layer by token id (Gemma 3n, Gemma 4 E) stay out of what `inputs_embeds` says."""
    network = shaken_model(name, dtype=torch.float32).network
    model = pb.load_model(network)
    tokens = torch.arange(3, 19)[None]
    with torch.no_grad():
        expected = network(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(model.logits(tokens, list(range(16))), expected)
    for refused in (model, reinitialise(model, 1)):
        with pytest.raises(pb.UsageError, match=r"reads more of its tokens than their embeddings \((without|it fails)"):
            refused.outputs(model.embed(tokens), [15])
        with pytest.raises(pb.UsageError, match="allowed: evaluating it"):
            pb.measure(refused, pb.load_prompts("synthetic", model, n_positions=8, count=1), kinds="perturbation")


@pytest.mark.parametrize("name", [*(name for name in CONFIGS if "-" not in name), *MIXTURES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_described_families_read_embeddings_alone(name, dtype):
    model = shaken_model(name, dtype=torch.float32)
    model = pb.load_model(model.network.to(dtype))
    assert model.reads_tokens is None


ADAPTING = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
"""peft asks a network for it by its old name."""


def adapted(network: Any, **settings: Any) -> Any:
    """A PeftModel whose adapter changes what the network computes."""
    import peft

    lora = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    torch.manual_seed(0)
    return peft.get_peft_model(network, lora).eval()


ADAPTED = {
    "projections": {"target_modules": ["q_proj", "v_proj"]},
    "every linear map": {"target_modules": "all-linear"},
    "embeddings": {"target_modules": ["embed_tokens", "k_proj"]},
    "rows of the embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "whole modules": {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@ADAPTING
@pytest.mark.parametrize("settings", ADAPTED.values(), ids=ADAPTED)
def test_a_peft_model_measures_as_its_merged_network(settings):
    network = shaken_model("llama", dtype=torch.float32).network
    plain = pb.load_model(copy.deepcopy(network))
    wrapped = adapted(network, **settings)
    merged = pb.load_model(copy.deepcopy(wrapped).merge_and_unload())
    model = pb.load_model(wrapped)
    assert model.described
    assert model.origin.source == "LlamaForCausalLM with adapter default (LORA)"
    prompts = pb.load_prompts("synthetic", model, n_positions=8, count=2)
    one, other, without = (
        pb.measure(each, prompts, kinds=("probability", "perturbation")) for each in (model, merged, plain)
    )
    for kind, profile in one.profiles.items():
        np.testing.assert_allclose(profile.influence, other.profiles[kind].influence, rtol=1e-3)
        assert np.abs(profile.influence / without.profiles[kind].influence - 1).max() > 0.01
    np.testing.assert_allclose(one.mixing, other.mixing, rtol=1e-4)


@ADAPTING
def test_weights_beside_an_adapter_are_not_read_as_if_they_acted_alone():
    """peft's layers answer `.weight` with that of the layer below them."""
    wrapped = adapted(shaken_model("llama", dtype=torch.float32).network, target_modules=["v_proj"])
    model = pb.load_model(wrapped)
    prompts = pb.load_prompts("synthetic", model, n_positions=12, count=2)
    with pytest.raises(pb.UsageError, match=r"an adapter is beside them; load what merge_and_unload\(\)"):
        pb.predict(model, 12, theory="power_rollout", prompts=prompts)
    wrapped.merge_adapter()
    assert pb.attention(model, prompts).distance.per_prompt.all()


@ADAPTING
def test_adapters_of_several_kinds_at_once_are_run_within_their_network():
    import peft

    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(shaken_model("llama", dtype=torch.float32).network, lora, mixed=True)
    wrapped.add_adapter("other", lora)
    wrapped.set_adapter(["default", "other"])
    model, tokens = pb.load_model(wrapped), torch.arange(3, 19)[None]
    assert model.origin.source == "LlamaForCausalLM with adapter default (LORA) with adapter other (LORA)"
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens, [15])[:, 0], wrapped(input_ids=tokens).logits[:, 15])


@ADAPTING
def test_runs_under_an_adapter_and_without_it_are_not_taken_for_one():
    wrapped = adapted(shaken_model("llama", dtype=torch.float32).network, target_modules=["v_proj"])
    known = network_sha256(wrapped.get_base_model())
    with wrapped.disable_adapter():
        assert network_sha256(wrapped.get_base_model()) != known
    assert network_sha256(wrapped.get_base_model()) == known


@ADAPTING
def test_adapters_that_lengthen_prompts_are_refused():
    import peft

    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapped = peft.get_peft_model(shaken_model("llama", dtype=torch.float32).network, settings)
    with pytest.raises(pb.UsageError, match=r"'default' \(PROMPT_TUNING\) adds vectors to prompts"):
        pb.load_model(wrapped)


def test_a_compiled_network_is_measured_uncompiled_and_parts_of_one_are_refused():
    network = shaken_model("llama", dtype=torch.float32).network
    model = pb.load_model(torch.compile(network, backend="eager"))
    assert model.network is network
    network.model.layers[1].mlp.compile(backend="eager")
    with pytest.raises(pb.UsageError, match=r"compiled in place or in parts \(model.layers.1.mlp is\)"):
        pb.load_model(network)
    network = shaken_model("llama", dtype=torch.float32).network
    network.model.layers[2] = torch.compile(network.model.layers[2], backend="eager")
    with pytest.raises(pb.UsageError, match=r"\(model.layers.2 is\)"):
        pb.load_model(network)
    network = shaken_model("llama", dtype=torch.float32).network
    network.compile(backend="eager")
    with pytest.raises(pb.UsageError, match=r"\(as a whole is\); allowed: one that is not compiled"):
        pb.load_model(network)
