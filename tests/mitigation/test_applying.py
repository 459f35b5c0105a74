"""Methods on networks that torch.compile or peft has wrapped: what is compiled is refused, peft's is changed."""

from typing import Any

import pytest
import torch

import posbias as pb
from posbias.models.hugging_face import INTERVENTION_MARK
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


def test_what_is_compiled_is_refused_for_the_network_itself() -> None:
    """A graph knows no hooks: compiled before, or by `generate` itself for a static cache, on accelerators."""
    own = network()
    with pytest.raises(pb.UsageError, match="made runs without the method; give the network that it was given"):
        pb.mitigated(torch.compile(own, backend="eager"), "temperature")
    for method, passages in METHODS.values():
        with (
            pb.mitigated(own, method, passages=passages),
            pytest.raises(pb.UsageError, match="static caches are not allowed under a method; dynamic ones are"),
        ):
            own.generate(TOKENS, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    assert INTERVENTION_MARK not in vars(own)


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
