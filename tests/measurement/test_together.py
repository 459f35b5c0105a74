"""Prompts that are measured in one batch have the numbers of each alone, and take fewer passes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, RunError, UsageError, measure
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.units import halving, passes_bytes, prompts_together
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.runs.engines import Local
from tiny_families import CONFIGS, VOCABULARY, shaken_model

KINDS = ("jacobian(probes=2)", "probability")
EQUAL = {torch.float64: 1e-10, torch.float32: 1e-5}
ROUNDED_INSIDE = {"gpt_neo"}
"""Networks whose attention, or powers in norms, are taken in float32 whatever their weights are, in other orders."""
PROMPTS = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (5, 12)))


def passes_of(model: HuggingFaceModel, **options) -> tuple[int, dict[str, np.ndarray]]:
    """Forward passes of the network that a measurement took, and every prompt's numbers."""
    counted: list[int] = []
    handle = model.network.register_forward_hook(lambda *_: counted.append(1))
    try:
        measured = measure(model, PROMPTS, kinds=KINDS, options=MeasureOptions(**options))
    finally:
        handle.remove()
    rows = {**measured.per_prompt, "errors": measured.standard_errors["jacobian"]}
    if measured.depth is not None:
        rows["depth"] = measured.depth.influence
    rows |= {name: mixing.value for name, mixing in measured.mixings.items()}
    return len(counted), rows


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_family_is_the_same_in_batches(name: str) -> None:
    model = shaken_model(name)
    alone, expected = passes_of(model, together=1)
    batched, found = passes_of(model, together=3)
    assert (alone, batched) == (5, 2)
    within = EQUAL[torch.float32 if name in ROUNDED_INSIDE else model.dtype]
    for what, values in expected.items():
        rounded = within * np.abs(values).max() if name in ROUNDED_INSIDE else 0.0
        np.testing.assert_allclose(found[what], values, rtol=within, atol=rounded, err_msg=what)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": True},
        {"layers": "all"},
        {"output": "mean(last=3)"},
        {"output": "at(position=-4)"},
    ],
    ids=str,
)
def test_batches_go_with_every_setting_of_the_passes(options) -> None:
    model = shaken_model("gemma3_text")
    _, expected = passes_of(model, together=1, **options)
    _, found = passes_of(model, together=4, **options)
    for what, values in expected.items():
        np.testing.assert_allclose(found[what], values, rtol=EQUAL[model.dtype], err_msg=what)


@pytest.mark.parametrize("kinds", ["logprob", "logit", "perturbation(draws=1)"])
def test_every_kind_is_the_same_in_batches(kinds: str) -> None:
    model = shaken_model("llama")
    expected, found = (
        measure(model, PROMPTS, kinds=kinds, options=MeasureOptions(together=size)).per_prompt for size in (1, 3)
    )
    for what, values in expected.items():
        np.testing.assert_allclose(found[what], values, rtol=EQUAL[model.dtype])


def test_a_target_is_read_in_batches() -> None:
    model = shaken_model("bloom")
    options = MeasureOptions(together=1, output="target(tokens=[5, 6])")
    expected, found = (
        measure(model, PROMPTS, kinds="probability", options=replace(options, together=size)).per_prompt["probability"]
        for size in (1, 5)
    )
    np.testing.assert_allclose(found, expected, rtol=EQUAL[model.dtype])


def test_a_batch_is_kept_whole_and_taken_up_again(tmp_path, monkeypatch) -> None:
    model = shaken_model("llama")
    options = MeasureOptions(together=2, directory=tmp_path)
    whole = measure(model, PROMPTS, kinds=KINDS, options=replace(options, directory=None))

    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posbias.measurement.measurement.combine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(model, PROMPTS, kinds=KINDS, options=options)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [path.stem for path in parts] == ["prompt-000000", "prompt-000002", "prompt-000004"]
    parts[1].unlink()
    count, network = [], model.network.register_forward_hook(lambda *_: count.append(1))
    again = measure(model, PROMPTS, kinds=KINDS, options=replace(options, resume=True))
    network.remove()
    assert len(count) == 1
    for kind, values in whole.per_prompt.items():
        np.testing.assert_array_equal(again.per_prompt[kind], values)


def test_prompts_of_a_processor_are_measured_one_by_one_unless_asked() -> None:
    model = shaken_model("llama")
    assert passes_of(model)[0] == 5
    described = measure(model, PROMPTS, kinds=KINDS, options=MeasureOptions(together=4)).describe()
    assert described["together"] == 4
    with pytest.raises(UsageError, match="together must be a whole number >= 1"):
        MeasureOptions(together=0)


def test_batches_fill_an_accelerator_and_fit_into_its_memory(monkeypatch) -> None:
    model = shaken_model("llama")
    model.device = torch.device("cuda", 0)  # nothing runs there
    weights = sum(weight.numel() for weight in model.network.model.layers[0].parameters())
    monkeypatch.setattr("posbias.measurement.units.FILLING", 8 * 12 * weights)
    each = passes_bytes(model, 12)
    prompts, kinds = Prompts(np.tile(PROMPTS.token_ids, (4, 1))), resolve_kinds(KINDS)

    def together(memory=10**9, kinds=kinds, **options) -> int:
        monkeypatch.setattr("posbias.measurement.units.free_bytes", lambda device: memory)
        return prompts_together(model, prompts, kinds=kinds, options=MeasureOptions(**options))

    assert together() == 8
    assert together(engine=Local(workers=10)) == 2
    assert together(memory=5 * each) == 5
    assert together(memory=10) == 1
    assert together(together=3) == 3
    assert together(kinds=resolve_kinds("perturbation")) == 1


def test_a_batch_is_halved_where_memory_runs_out_and_layers_are_computed_again_at_last() -> None:
    tried: list[int] = []

    def run(together: int) -> str:
        tried.append(together)
        if together > fitting:
            raise torch.OutOfMemoryError("none left")
        return f"{together} at once"

    fitting = 3
    assert halving(run, 16) == "2 at once"
    assert tried == [16, 8, 4, 2]
    fitting = 0
    assert halving(run, 2, at_last=lambda: "computed again") == "computed again"
    with pytest.raises(RunError, match=r"passes of one prompt; try --checkpointing"):
        halving(run, 2)


def test_what_a_processor_cannot_hold_is_refused_before_it_starts(monkeypatch) -> None:
    monkeypatch.setattr("posbias.memory.available_bytes", lambda: 10_000)
    with pytest.raises(UsageError, match=r"passes over 12 positions take \d+ KB, and 10 KB of memory are free; try"):
        measure(shaken_model("llama"), PROMPTS, kinds="probability")
