"""Mixing comes with the pass that measures influence, whatever that pass reads and however it is run."""

import numpy as np
import pytest
import torch

from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt, mixing_of_layers
from posbias.models.hugging_face import HuggingFaceModel
from tiny_families import shaken_model

TOKENS = np.arange(3, 20, dtype=np.int64)


def passes_of(model: HuggingFaceModel, options: PassOptions, kinds: str) -> tuple[int, np.ndarray]:
    """Forward passes that a measurement took, and the mixing it found."""
    counted: list[int] = []
    handle = model.network.register_forward_hook(lambda *_: counted.append(1))
    try:
        measured = measure_prompt(model, TOKENS, kinds=resolve_kinds(kinds), key=(0, 0), options=options)
    finally:
        handle.remove()
    assert measured.mixing is not None
    return len(counted), measured.mixing


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom", "opt"])
@pytest.mark.parametrize(
    "options",
    [
        PassOptions(),
        PassOptions(checkpointing=True),
        PassOptions(rows=3),
        PassOptions(output="target(tokens=[5, 6])"),
    ],
)
def test_mixing_costs_no_pass_and_equals_that_of_its_own_pass(name: str, options: PassOptions) -> None:
    model = shaken_model(name)
    passes, mixing = passes_of(model, options, "probability")
    assert passes == 1
    np.testing.assert_allclose(mixing, mixing_of_layers(model, TOKENS, prompt=0).tokens, rtol=1e-6)


def test_kinds_that_run_the_model_in_pieces_get_a_pass_for_the_mixing() -> None:
    model = shaken_model("llama")
    _, mixing = passes_of(model, PassOptions(), "perturbation(draws=1)")
    np.testing.assert_allclose(mixing, mixing_of_layers(model, TOKENS, prompt=0).tokens, rtol=1e-6)


def test_an_output_inside_the_prompt_still_speaks_of_the_whole_prompt() -> None:
    model = shaken_model("llama")
    _, mixing = passes_of(model, PassOptions(output="at(position=5)"), "probability")
    np.testing.assert_allclose(mixing, mixing_of_layers(model, TOKENS, prompt=0).tokens, rtol=1e-6)


def test_no_hook_stays_behind() -> None:
    model = shaken_model("llama")
    passes_of(model, PassOptions(), "probability")
    hooks = [
        module
        for module in model.network.modules()
        if isinstance(module, torch.nn.Module) and (module._forward_hooks or module._forward_pre_hooks)
    ]
    assert hooks == []
