"""Every family is measured, by depth too, alone and in batches, which are kept whole, filled, halved, and refused where
they cannot fit (checkpointing changes nothing: tests/contracts)."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, RunError, UsageError, measure, predict
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.units import halving, passes_bytes, prompts_together
from posbias.memory import available_bytes
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts import Prompts
from posbias.runs.engines import Local
from tiny_families import DESCRIBED, UNLISTED, VOCABULARY, shaken_model

KINDS = ("jacobian(probes=2)", "probability")
PROMPTS = Prompts(np.random.default_rng(0).integers(3, VOCABULARY, (5, 12)))
EQUAL = {torch.float64: 1e-10, torch.float32: 1e-5}


def passes_of(model, kinds=KINDS, **options):
    """Forward passes of the network that a measurement took, and every prompt's numbers."""
    counted = []
    handle = model.network.register_forward_hook(lambda *_: counted.append(1))
    try:
        measured = measure(model, PROMPTS, kinds=kinds, options=MeasureOptions(**options))
    finally:
        handle.remove()
    assert measured.left_out == ()
    rows = {**measured.per_prompt, **{f"errors of {kind}": rows for kind, rows in measured.standard_errors.items()}}
    if measured.depth is not None:
        rows["depth"] = measured.depth.influence
    return len(counted), rows | {name: mixing.value for name, mixing in measured.mixings.items()}


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_every_family_is_measured_and_the_same_in_batches(name):
    model = shaken_model(name)
    alone, expected = passes_of(model, together=1, layers="all")
    batched, found = passes_of(model, together=3, layers="all")
    assert (alone, batched) == (5, 2)
    assert expected["depth"].shape == (3, 12)
    assert all(np.all((expected[mixing] > 0) & (expected[mixing] < 1)) for mixing in ("token_mean", "frobenius"))
    within = EQUAL[model.dtype]
    for what, values in expected.items():
        assert np.all(values[..., -1] > 0 if what == "depth" else values > 0), what
        np.testing.assert_allclose(found[what], values, rtol=within, atol=0, err_msg=what)


@pytest.mark.parametrize(
    ("name", "kinds", "options"),
    [
        ("gemma3_text", KINDS, {"checkpointing": True}),
        ("gemma3_text", KINDS, {"output": "mean(last=3)"}),
        ("gemma3_text", KINDS, {"output": "at(position=-4)"}),
        ("bloom", "probability", {"output": "target(tokens=[5, 6])"}),
        ("llama", "logprob", {}),
        ("llama", "logit", {}),
        ("llama", "perturbation(draws=1)", {}),
    ],
    ids=str,
)
def test_batches_go_with_every_kind_and_every_setting_of_the_passes(name, kinds, options):
    model = shaken_model(name)
    (_, expected), (_, found) = (passes_of(model, kinds, together=size, **options) for size in (1, 4))
    for what, values in expected.items():
        np.testing.assert_allclose(found[what], values, rtol=EQUAL[model.dtype], err_msg=what)


@pytest.mark.parametrize("name", sorted(set(UNLISTED) - {"gemma4_text"}))
def test_models_without_a_row_are_measured_and_refused_by_theories_of_weights(name):
    model = HuggingFaceModel(random_network(UNLISTED[name](), seed=0), origin=Origin("tiny", init_seed=0))
    model.compare_inputs()
    prompts = Prompts(PROMPTS.token_ids[:1])
    found = measure(model, prompts, kinds=KINDS)
    assert (found.mixing is None) == name.startswith(("mamba2", "nemotron_h", "opt-350m"))
    assert all(np.all(profile.influence > 0) for profile in found.profiles.values())
    refused = r"layout of \w+ models is not in the table|do_layer_norm_before = False is set"
    for theory in ("power_rollout", "mean_field"):
        with pytest.raises(UsageError, match=refused):
            predict(model, theory=theory, prompts=prompts)


def test_a_batch_is_kept_whole_and_taken_up_again(tmp_path, monkeypatch):
    model = shaken_model("llama")
    options = MeasureOptions(together=2, directory=tmp_path)
    whole = measure(model, PROMPTS, kinds=KINDS, options=replace(options, directory=None))

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("posbias.measurement.measurement.combine", interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure(model, PROMPTS, kinds=KINDS, options=options)
    parts = sorted((tmp_path / "parts").iterdir())
    assert [path.stem for path in parts] == ["trained-000000", "trained-000002", "trained-000004"]
    parts[1].unlink()
    count, network = [], model.network.register_forward_hook(lambda *_: count.append(1))
    again = measure(model, PROMPTS, kinds=KINDS, options=replace(options, resume=True))
    network.remove()
    assert len(count) == 1
    for kind, values in whole.per_prompt.items():
        np.testing.assert_array_equal(again.per_prompt[kind], values)


def test_batches_fill_an_accelerator_and_fit_into_its_memory(monkeypatch):
    model = shaken_model("llama")
    model.device = torch.device("cuda", 0)  # nothing runs there
    weights = sum(weight.numel() for weight in model.network.model.layers[0].parameters())
    monkeypatch.setattr("posbias.measurement.units.FILLING", 8 * 12 * weights)
    each = passes_bytes(model, 12)
    prompts, kinds = Prompts(np.tile(PROMPTS.token_ids, (4, 1))), resolve_kinds(KINDS)

    def together(memory=10**9, kinds=kinds, **options):
        monkeypatch.setattr("posbias.measurement.units.free_bytes", lambda device: memory)
        return prompts_together(model, prompts, kinds=kinds, options=MeasureOptions(**options))

    assert together() == 8
    assert together(engine=Local(workers=10)) == 2
    assert together(memory=5 * each) == 5
    assert together(memory=10) == 1
    assert together(together=3) == 3
    assert together(kinds=resolve_kinds("perturbation")) == 1
    model.device = torch.device("cpu")
    assert together() == 1
    with pytest.raises(UsageError, match="together must be a whole number >= 1"):
        MeasureOptions(together=0)


FULL = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB, max allowed: 9.07 GiB)."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."
    ),
}
"""What torch raises where a device's memory has run out."""


@pytest.mark.parametrize("device", FULL)
def test_a_batch_is_halved_where_memory_runs_out_and_layers_are_computed_again_at_last(device):
    tried = []

    def run(together):
        tried.append(together)
        if together > fitting:
            raise FULL[device]
        return f"{together} at once"

    fitting = 3
    assert halving(run, 16) == "2 at once"
    assert tried == [16, 8, 4, 2]
    fitting = 0
    assert halving(run, 2, at_last=lambda: "computed again") == "computed again"
    with pytest.raises(RunError, match=r"passes of one prompt; try --checkpointing"):
        halving(run, 2)


def test_what_a_processor_cannot_hold_is_refused_before_it_starts(monkeypatch):
    monkeypatch.setattr("posbias.memory.available_bytes", lambda: 10_000)
    with pytest.raises(UsageError, match=r"passes over 12 positions take .+ GB, and 0\.0 GB of memory are free; try"):
        measure(shaken_model("llama"), PROMPTS, kinds="probability")


@pytest.mark.parametrize(
    "own", ["0::/", "0::/job/step", "4:memory:/", "1:cpu:/a\n4:memory:/job/step\n0::/", "2:cpu,memory:/"]
)
def test_the_limits_of_control_groups_bind(tmp_path, monkeypatch, own):
    """Those of the process's own and of all above it, in both versions of Linux's."""
    for folder, limit, used, files in (
        (tmp_path, "memory.max", "memory.current", "inactive_file"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        (folder / "job").mkdir(parents=True)
        (folder / "job" / limit).write_text("max\n")
        for name, text in ((limit, "5000\n"), (used, "4000\n"), ("memory.stat", f"anon 7\n{files} 300\n")):
            (folder / name).write_text(text)
    (tmp_path / "own").write_text(f"{own}\n")
    monkeypatch.setattr("posbias.memory.CGROUPS", tmp_path)
    monkeypatch.setattr("posbias.memory.OWN_GROUPS", tmp_path / "own")
    assert available_bytes() == 1300
    for statistics in tmp_path.rglob("memory.stat"):
        statistics.unlink()
    assert available_bytes() == 1000
