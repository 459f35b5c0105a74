"""Methods on networks that torch.compile or peft has wrapped: the values of the network itself, and no mark left."""

from typing import Any

import pytest
import torch
from transformers import CompileConfig

import posbias as pb
from posbias.models.hugging_face import INTERVENTION_MARK
from posbias.models.loading import COMPILED_CALL
from tiny_families import shaken_model

TABLE = [[0.5, -0.4, 0.3, 0.9]] * 3
SCALES = [[1.5, 0.7, 1.2, 1.0]] * 3
PASSAGES = [(0, 5), (5, 10)]
METHODS: dict[str, tuple[str, Any]] = {
    "context_bias": (f"context_bias(values={TABLE}, scales={SCALES})", PASSAGES),
    "key_bias": (f"key_bias(biases='gamma_key(alpha=1.5)', scales={SCALES})", ()),
    "key_bias from the question": ("key_bias(biases='gamma_key(alpha=1.5)', from_question=True)", PASSAGES),
    "positional_channel": ("positional_channel(channel=3, factor=-1.0)", ()),
    "ms_poe": ("ms_poe(first_layer=0)", PASSAGES),
}
TOKENS = torch.arange(3, 18)[None]


def network() -> Any:
    return shaken_model("llama", dtype=torch.float32).network


def logits(callable_: Any) -> torch.Tensor:
    with torch.no_grad():
        return callable_(input_ids=TOKENS).logits


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A network that was compiled before, which knows no method."""
    wrapped = torch.compile(network(), backend="eager")
    logits(wrapped)
    return wrapped


@pytest.mark.parametrize(("method", "passages"), METHODS.values(), ids=METHODS)
def test_a_compiled_network_under_a_method_is_the_network_under_it(compiled: Any, method: str, passages: Any) -> None:
    own = compiled._orig_mod
    plain = logits(own)
    torch.testing.assert_close(logits(compiled), plain)
    with pb.mitigated(own, method, passages=passages):
        changed = logits(own)
    assert (changed - plain).abs().max() > 1e-3
    with pb.mitigated(compiled, method, passages=passages) as given:
        assert given is compiled
        assert torch.equal(logits(compiled), changed)
        with pytest.raises(pb.UsageError, match="is already under"), pb.mitigated(own, "temperature"):
            pass
    assert torch.equal(logits(own), plain)
    torch.testing.assert_close(logits(compiled), plain)
    assert not {INTERVENTION_MARK, COMPILED_CALL} & set(vars(own))
    installed = pb.mitigated(compiled, method, passages=passages).install()
    assert torch.equal(logits(compiled), changed)
    assert torch.equal(logits(torch.compile(own, backend="eager")), changed)  # this one is compiled under the method
    installed.remove()
    torch.testing.assert_close(logits(compiled), plain)


def test_generate_may_compile_by_itself_under_a_method() -> None:
    """With a static cache it does so on accelerators; here it is told to on the CPU."""
    own = network()
    settings = CompileConfig(backend="eager", mode=None, fullgraph=False)
    settings._compile_all_devices = True

    def generated(**how: Any) -> list[int]:
        return own.generate(TOKENS, max_new_tokens=5, do_sample=False, pad_token_id=0, **how)[0].tolist()

    static = {"cache_implementation": "static", "compile_config": settings}
    plain = generated()
    assert generated(**static) == plain
    for name in ("context_bias", "key_bias"):
        method, passages = METHODS[name]
        with pb.mitigated(own, method, passages=passages):
            changed = generated()
            assert generated(**static) == changed
        assert generated(**static) == plain


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # asked by peft
def test_a_peft_model_under_a_method_is_its_merged_network_under_it() -> None:
    import peft

    torch.manual_seed(0)
    lora = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    wrapped = peft.get_peft_model(network(), lora).eval()
    plain = logits(wrapped)
    for method, passages in METHODS.values():
        with pb.mitigated(wrapped, method, passages=passages):
            changed = logits(wrapped)
        assert torch.equal(logits(wrapped), plain)
        wrapped.merge_adapter()
        with pb.mitigated(wrapped.get_base_model(), method, passages=passages):
            torch.testing.assert_close(changed, logits(wrapped.get_base_model()), rtol=1e-3, atol=1e-3)
        wrapped.unmerge_adapter()
        plain = logits(wrapped)  # which merging has rounded
