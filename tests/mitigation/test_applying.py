"""Methods on networks that are compiled: refused."""

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
    "positional_channel": ("positional_channel(channel=3, factor=-1.0)", PASSAGES),
    "ms_poe": ("ms_poe(first_layer=0)", PASSAGES),
}
TOKENS = torch.arange(3, 18)[None]


def network() -> Any:
    return shaken_model("llama", dtype=torch.float32).network


def test_what_is_compiled_is_refused_for_the_network_itself() -> None:
    """A graph knows no hooks: compiled before, or by `generate` itself for a static cache, on accelerators."""
    own = network()
    with pytest.raises(pb.UsageError, match=r"runs without hooks; give it as before torch\.compile"):
        pb.mitigated(torch.compile(own, backend="eager"), "temperature")
    for method, passages in METHODS.values():
        with (
            pb.mitigated(own, method, passages=passages),
            pytest.raises(pb.UsageError, match="static caches are not allowed under a method; dynamic ones are"),
        ):
            own.generate(TOKENS, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    assert INTERVENTION_MARK not in vars(own)
