"""A model of transformers with its tokenizer, as users have it in hand, is the model that its name loads."""

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
from tiny_families import CONFIGS, READS_TOKENS, shaken_model


def test_it_is_frozen_and_measures_as_the_same_model_by_name(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama).train()
    model, named = pb.load_model(network, AutoTokenizer.from_pretrained(tiny_llama)), pb.load_model(tiny_llama)
    assert model.origin.source == named.origin.source == "tiny-llama"
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())
    one, other = (
        pb.measure(each, pb.load_prompts("default", each, n_positions=12, count=2)) for each in (model, named)
    )
    np.testing.assert_equal(one.per_prompt, other.per_prompt)
    np.testing.assert_array_equal(one.mixing, other.mixing)


def test_an_audit_draws_it_anew_and_names_it_without_its_place(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model = pb.load_model(network, AutoTokenizer.from_pretrained(tiny_llama))
    audit = pb.audit(model, n_positions=12, prompts=2, options=pb.AuditOptions(kinds=("logit",), initialisations=1))
    assert [subject.name for subject in audit.subjects] == ["trained", "initialised"]
    assert audit.record.resolved["title"] == "tiny-llama"
    assert str(tiny_llama) not in str(audit.record.as_json())


def test_one_without_a_name_goes_by_its_class():
    network = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert pb.load_model(network).origin.source == "LlamaForCausalLM"


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
def test_what_is_wrapped_or_compiled_is_refused():
    """With peft's layers in place, or a graph that knows no hooks, other numbers than the model's would be read."""
    import peft

    def made():
        return shaken_model("llama", dtype=torch.float32).network

    def refused(network, said):
        with pytest.raises(pb.UsageError, match=said):
            pb.load_model(network)

    lora = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["v_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(made(), lora)
    refused(wrapped, r"PeftModelForCausalLM wraps a network; give what its merge_and_unload\(\) returns")
    prompts = pb.load_prompts("synthetic", pb.load_model(wrapped.get_base_model()), n_positions=12, count=2)
    with pytest.raises(pb.UsageError, match=r"an adapter is beside them; load what merge_and_unload\(\)"):
        pb.predict(wrapped.get_base_model(), 12, theory="power_rollout", prompts=prompts)
    assert pb.load_model(wrapped.merge_and_unload()).described
    refused(torch.compile(made(), backend="eager"), r"give it as before torch\.compile")
    for part in (lambda network: network, lambda network: network.model.layers[1].mlp):
        network = made()
        part(network).compile(backend="eager")
        refused(network, r"give it as before torch\.compile")
