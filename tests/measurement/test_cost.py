"""The cost of a run before it begins: counted bytes, extrapolation, refusal with what would fit."""

import re
from copy import copy, deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import posbias as pb
from model_inputs import reset_peak
from posbias import RunError, UsageError
from posbias.measurement.cost import _few_covectors, estimate_cost, preflight
from posbias.measurement.cost_estimate import HEADROOM, KEPT_HEADROOM, MARGIN, CostEstimate
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.units import Unit
from posbias.measurement.work import _flops, calibrate, peak_tensor_bytes, weights_in_place
from posbias.memory import (
    available_bytes,
    keeps_freed_memory,
    parse_bytes,
    peak_bytes,
    resident_bytes,
    show_at_most,
    show_bytes,
)
from posbias.models.devices import free_bytes
from posbias.prompts.prompts import Prompts

CPU = torch.device("cpu")
KINDS = resolve_kinds(["jacobian(probes=2)", "probability"])


@pytest.fixture(autouse=True)
def tensors_alone(monkeypatch):
    """The process of the tests holds hundreds of megabytes beside models of kilobytes, and not always the same."""
    monkeypatch.setattr("posbias.measurement.work.beside_weights", lambda weights: 0)


def test_live_bytes_are_counted_exactly():
    weights = torch.ones(1000)

    def run():
        first = weights + 1  # 4000 bytes
        second = first * 2  # 8000
        view = second[:10].view(2, 5)  # a view holds nothing
        del first  # 4000
        third = torch.zeros(500, dtype=torch.float64)  # 8000
        third += 1  # in place
        return view, third

    assert peak_tensor_bytes(run, CPU) == 8000
    assert peak_tensor_bytes(lambda: weights + 1, CPU) == 4000
    assert peak_tensor_bytes(lambda: weights.view(10, 100), CPU) == 0


def test_what_backward_keeps_is_counted():
    inputs = torch.ones(1000, requires_grad=True)

    def run():
        first = inputs.exp()
        second = first.exp()
        return torch.autograd.grad(second.sum(), inputs)

    # exp keeps its results, 2 x 4000; going back, a gradient beside them and the one made from it.
    assert 12000 <= peak_tensor_bytes(run, CPU) <= 20100


@pytest.mark.parametrize("checkpointing", [False, True])
def test_bytes_of_long_prompts_follow_from_short_ones(deep_model, checkpointing):
    model = deep_model
    passes = PassOptions(checkpointing=checkpointing)
    estimate = estimate_cost(model, 512, kinds=KINDS, passes=passes)
    tokens = np.arange(512) % model.vocabulary_size

    def run():
        pb.measurement.prompt.measure_prompt(model, tokens, kinds=KINDS, key=(0, 0), options=passes)

    counted = peak_tensor_bytes(run, CPU)
    assert estimate.passes_bytes == pytest.approx(HEADROOM * counted, rel=0.05)
    assert estimate.weights_bytes == weights_in_place(model)
    assert estimate.seconds > 0


def test_checkpointing_is_estimated_to_take_less(deep_model):
    model = deep_model
    plain, less = (
        estimate_cost(model, 512, kinds=KINDS, passes=PassOptions(checkpointing=checkpointing))
        for checkpointing in (False, True)
    )
    assert less.passes_bytes < plain.passes_bytes / 2


def test_masks_of_sliding_windows_that_short_runs_do_not_exceed_are_counted():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, sliding_window=200, eos_token_id=0,
    )  # fmt: skip
    model = pb.models.hugging_face.HuggingFaceModel(MistralForCausalLM(config))
    for n_positions in (180, 1024):
        estimate = estimate_cost(model, n_positions, kinds=KINDS)
        tokens = np.arange(n_positions) % 64
        counted = peak_tensor_bytes(
            lambda t=tokens: pb.measurement.prompt.measure_prompt(model, t, kinds=KINDS, key=(0, 0)), CPU
        )
        assert estimate.passes_bytes == pytest.approx(HEADROOM * counted, rel=0.1)
    assert model.network.config.sliding_window == 200


def test_a_float32_copy_counts_once_and_turning_it_off_is_advised(deep_model, monkeypatch):
    half = copy(deep_model)
    half.network = deepcopy(deep_model.network).to(torch.bfloat16)
    half.dtype = torch.bfloat16
    weights = weights_in_place(half)
    checked, unchecked = (
        estimate_cost(half, 64, kinds=["probability"], passes=PassOptions(checkpointing=True, precision_prompts=count))
        for count in (1, 0)
    )
    assert (checked.copy_bytes, checked.copies, unchecked.copy_bytes) == (2 * weights, 1, 0)
    assert checked.needed(4) - 4 * checked.passes_bytes == (5 + 2) * weights
    plain = estimate_cost(deep_model, 64, kinds=["probability"], passes=PassOptions(checkpointing=True))
    assert checked.passes_bytes == pytest.approx(plain.passes_bytes, rel=0.1)
    monkeypatch.setattr("posbias.measurement.work.announce", lambda line: None)
    prompts = Prompts(np.arange(128).reshape(2, 64) % 64)
    for model, share, advised in (
        (deep_model, 0.93, "--dtype bfloat16 --precision-prompts 0"),
        (half, 0.9, "--precision-prompts 0"),
    ):
        settings = {"kinds": ["probability"], "options": pb.MeasureOptions()}
        allowed = int(share * estimate_cost(model, 64, kinds=["probability"]).needed(1))
        with pytest.raises(UsageError, match=f"{advised}$"):
            preflight(model, prompts, **settings, max_memory=allowed)


def test_a_network_at_birth_whose_first_token_is_padding_has_an_estimate():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=2048, pad_token_id=0,
    )  # fmt: skip
    model = pb.models.hugging_face.HuggingFaceModel(LlamaForCausalLM(config))
    assert not model.network.get_input_embeddings().weight[0].any()
    assert estimate_cost(model, 256, kinds=KINDS).passes_bytes > 0


@pytest.mark.parametrize("n_positions", [1, 3, 11])
def test_few_positions_have_an_estimate_too(deep_model, n_positions):
    estimate = estimate_cost(deep_model, n_positions, kinds=KINDS)
    tokens = np.arange(n_positions)
    counted = peak_tensor_bytes(
        lambda: pb.measurement.prompt.measure_prompt(deep_model, tokens, kinds=KINDS, key=(0, 0)), CPU
    )
    assert estimate.passes_bytes == pytest.approx(HEADROOM * counted, rel=0.05)
    with pytest.raises(UsageError, match=f"{n_positions} positions need up to"):
        estimate.check(max_memory=estimate.needed(1) - 1)


def test_an_output_beyond_the_short_runs_is_estimated_as_the_last(deep_model):
    names = ["jacobian(probes=2)", "probability"]
    far = estimate_cost(deep_model, 512, kinds=names, passes=PassOptions(output="at(position=400)"))
    last = estimate_cost(deep_model, 512, kinds=KINDS)
    assert far.passes_bytes == last.passes_bytes


def test_without_an_estimate_it_is_said(deep_model, monkeypatch):
    def fail(*_, **__):
        raise RunError("no")

    said = []
    monkeypatch.setattr("posbias.measurement.units.measure_together", fail)
    monkeypatch.setattr("posbias.measurement.work.announce", said.append)
    prompts = Prompts(np.arange(64).reshape(2, 32))
    assert preflight(deep_model, prompts, kinds=KINDS, options=pb.MeasureOptions()) == {}
    assert said == ["no estimate of the cost: a run on 32 positions or fewer fails: no"]
    weights = weights_in_place(deep_model)
    settings = {"kinds": KINDS, "options": pb.MeasureOptions()}
    assert preflight(deep_model, prompts, **settings, max_memory=weights) == {}
    with pytest.raises(UsageError, match="are allowed; try a smaller model"):
        preflight(deep_model, prompts, **settings, max_memory=weights - 1)


def test_a_reinitialised_network_counts_beside_the_loaded_one(tiny_llama, monkeypatch):
    lines = []
    monkeypatch.setattr("posbias.measurement.work.report", lines.append)
    model, prompts = pb.load_model(tiny_llama), Prompts(np.arange(16).reshape(1, 16))
    model.loading_bytes = 0  # the peak of loading is larger than that of so small a model's passes
    settings = {"kinds": "probability", "options": pb.MeasureOptions()}
    loaded, redrawn = (preflight(model, prompts, units=[Unit(0, seed)], **settings) for seed in (None, 3))
    assert redrawn["passes_bytes"] == loaded["passes_bytes"]
    assert redrawn["peak_bytes"] >= loaded["peak_bytes"] + weights_in_place(model)
    assert "re-initialised" not in lines[0]
    assert "re-initialised weights" in lines[1]
    assert "for 1 prompts, re-initialised networks included" in lines[1]


@pytest.mark.parametrize("n_positions", range(3, 20))
def test_short_runs_have_as_many_positions_as_the_work_takes(deep_model, n_positions):
    lengths = set()
    assert calibrate(deep_model, n_positions, lambda ids: lengths.add(len(ids))).n_positions == n_positions
    assert min(lengths) >= 3
    assert max(lengths) <= n_positions


class Cuda:
    """The readings of one device with 10 MB free and 3 of 5 MB taken by PyTorch in use."""

    mem_get_info = staticmethod(lambda device: (10_000_000, 80_000_000))
    memory_reserved = staticmethod(lambda device: 5_000_000)
    memory_allocated = staticmethod(lambda device: 3_000_000)


def test_a_run_on_an_accelerator_is_held_against_its_memory_and_not_the_hosts(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert free_bytes(gpu, module=Cuda) == 12_000_000
    assert free_bytes(CPU) == pytest.approx(available_bytes(), rel=0.2)
    assert free_bytes(torch.device("meta")) is None
    for name in ("mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(Cuda, name))
    monkeypatch.setattr("posbias.models.devices.available_bytes", lambda: 1)
    monkeypatch.setattr("posbias.measurement.cost_estimate.resident_bytes", lambda: 1)
    fitting = replace(ESTIMATE, device=gpu, coefficients=(0.0, 10_000.0))
    fitting.check()  # 12 MB of passes in 12 MB, whatever the host has
    with pytest.raises(
        UsageError, match=r"13 MB for the memory of cuda:0 \(weights 1 MB, passes 12 MB\); 13 MB are free"
    ):
        replace(fitting, coefficients=(1.0, 10_000.0)).check()
    with pytest.raises(UsageError, match="are free"):
        replace(fitting, device=CPU).check()


def test_weights_elsewhere_do_not_count_for_the_device(deep_model):
    whole = weights_in_place(deep_model)
    assert whole >= sum(weight.nbytes for weight in deep_model.network.parameters())
    elsewhere = copy(deep_model)
    elsewhere.device = torch.device("cuda", 0)
    assert weights_in_place(elsewhere) == 0


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
        max_position_embeddings=2048, eos_token_id=0,
    )  # fmt: skip
    return pb.models.hugging_face.HuggingFaceModel(LlamaForCausalLM(config))


ESTIMATE = CostEstimate(n_positions=1000, weights_bytes=10**6, coefficients=(0.0, 1000.0, 2.0), seconds=2.0)


def test_a_run_that_cannot_fit_is_refused_with_what_would():
    needed = 4_600_000
    assert HEADROOM == 1.2
    assert ESTIMATE.needed(1) == needed
    ESTIMATE.check(max_memory=needed)
    less = replace(ESTIMATE, coefficients=(0.0, 1000.0, 1.0))
    remedies = {"--checkpointing": lambda: less, "rows=1": lambda: ESTIMATE, "--kernel-cells 256": lambda: None}
    with pytest.raises(UsageError) as caught:
        ESTIMATE.check(max_memory=needed - 1, remedies=remedies)
    told = "1000 positions need up to 4.6 MB for the process (weights 1 MB, passes 3.6 MB); 4.6 MB are allowed; "
    # Whatever is named would fit, with something to spare.
    fits = ESTIMATE.longest_fitting(int((needed - 1) * (1 - MARGIN)))
    assert str(caught.value) == f"{told}try --length {fits} or --checkpointing"
    assert 970 < fits < 990
    assert ESTIMATE.longest_fitting(10**6 + int(HEADROOM * (1000 * 100 + 2 * 100**2))) == 100
    assert ESTIMATE.longest_fitting(10) == 0
    with pytest.raises(UsageError, match=r"1 B are allowed; try a smaller model; 1\.1 MB would do for 8 positions$"):
        ESTIMATE.check(max_memory=1)
    replace(ESTIMATE, n_positions=8).check(max_memory=1_100_000)


def test_freed_memory_is_kept_where_its_holes_fit(deep_model):
    able = replace(ESTIMATE, may_keep=True)
    room = 10**6 + int(KEPT_HEADROOM * 3_000_000)
    assert able.keeping(max_memory=room).needed(1) == room
    assert able.keeping(max_memory=room - 1) is None
    assert ESTIMATE.keeping(max_memory=10**12) is None
    prompts = Prompts(np.arange(128).reshape(2, 64) % 64)
    settings = {"kinds": KINDS, "max_memory": 10**12}
    for checkpointing in (False, True):
        options = pb.MeasureOptions(checkpointing=checkpointing)
        preflight(deep_model, prompts, options=options, **settings)
        assert keeps_freed_memory() is not checkpointing


def test_workers_each_hold_the_weights():
    assert ESTIMATE.needed(3) == 4 * 10**6 + 3 * ESTIMATE.passes_bytes
    assert ESTIMATE.describe(10, workers=4)["seconds"] == 6.0
    parts = "weights 1 MB, passes 3.6 MB, Python, libraries and the rest 2 MB"
    whole = replace(ESTIMATE, process_bytes=2 * 10**6)
    assert whole.line(10) == f"estimate: at most 6.6 MB for the process ({parts}) and 20 s for 10 prompts"
    assert (
        whole.line(10, workers=4) == f"estimate: at most 29.4 MB for 5 processes (each: {parts}) and 6 s for 10 prompts"
    )
    with pytest.raises(UsageError, match=r"16\.1 MB are allowed; try --length \d+ or --workers 1$"):
        whole.check(workers=2, max_memory=16_100_000)


def test_the_peak_of_loading_is_told_and_counts_for_workers_who_load_too():
    loaded = replace(ESTIMATE, process_bytes=2 * 10**6, loading_bytes=9 * 10**6)
    assert "at most 9 MB for the process (weights" in loaded.line(10)
    assert "), its peak while loading, and" in loaded.line(10)
    assert loaded.describe(10)["peak_bytes"] == 9 * 10**6
    loaded.check(max_memory=7_000_000)  # loading is over
    assert loaded.needed(2) == 3_000_000 + 2 * 9_000_000


def test_seconds_grow_by_flops_beside_a_fixed_part_and_repeated_work_by_a_power_more(deep_model):
    def flops(n_positions):
        return _flops(deep_model, n_positions)

    works = {
        "flops": (lambda n: flops(n), flops(1024)),
        "a fixed part": (lambda n: flops(n) + flops(128) / 2, flops(1024) + flops(128) / 2),
        "nothing grows": (lambda n: 2.0, 1 + flops(1024) / flops(128)),
        "repeated": (lambda n: flops(n) * n, flops(1024) * 1024),
    }
    for name, (seconds, expected) in works.items():
        found = calibrate(deep_model, 1024, lambda ids, seconds=seconds: float(seconds(len(ids))))
        assert found.seconds == pytest.approx(expected), name


@pytest.mark.parametrize(
    ("kinds", "few"),
    [
        (["jacobian", "probability"], ["jacobian(probes=1)", "probability"]),
        (["jacobian(exact=True)"], ["jacobian(probes=2)"]),
        (["jacobian(probes=2)"], ["jacobian(probes=2)"]),
        (["jacobian", "integrated_gradients"], ["jacobian", "integrated_gradients"]),
    ],
)
def test_few_covectors_take_the_bytes_of_all(deep_model, kinds, few):
    asked, tried = resolve_kinds(kinds), resolve_kinds(few)
    found, left_out = _few_covectors(asked, deep_model.width, PassOptions())
    assert found == tried
    jacobian = asked[0].passes(deep_model.width), tried[0].passes(deep_model.width)
    assert left_out == jacobian[0] - jacobian[1]
    tokens = np.arange(12) % deep_model.vocabulary_size

    def counted(kinds):
        def run():
            pb.measurement.prompt.measure_prompt(deep_model, tokens, kinds=kinds, key=(0, 0))

        return peak_tensor_bytes(run, CPU)

    if left_out:
        assert counted(asked) == counted(tried) + 8 * deep_model.width * left_out


def test_preflight_refuses_before_any_work_and_tells_the_record(posbias_settings, tiny_llama):
    model = pb.load_model(tiny_llama)
    prompts = Prompts(np.arange(96).reshape(2, 48))
    cost = preflight(model, prompts, kinds=KINDS, options=posbias_settings)
    assert cost["peak_bytes"] > cost["weights_bytes"] == weights_in_place(model)
    assert cost["seconds"] == 2 * cost["seconds_per_prompt"]
    with pytest.raises(UsageError, match=r"200 KB are allowed; try --length \d+$"):
        preflight(model, prompts, kinds=KINDS, options=posbias_settings, max_memory=200_000)


@pytest.fixture
def posbias_settings():
    return pb.MeasureOptions()


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GB", 6 * 10**9), ("512MiB", 512 * 2**20), ("1.5 kb", 1500), ("7", 7), (" 2TiB ", 2**41), ("100 B", 100)],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "six GB", "-1GB", "0", "1e9", "5 bananas", "0.1B"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(UsageError, match="is no amount of memory; allowed"):
        parse_bytes(text)


def test_the_system_is_asked():
    assert available_bytes() > 0
    assert reset_peak()
    before = peak_bytes()
    block = np.ones(40_000_000)
    assert peak_bytes() - before > 200_000_000
    assert resident_bytes() > 0
    assert show_bytes(block.nbytes) == "320 MB"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (7, "7 B"),
        (999.6, "1 KB"),
        (1500, "1.5 KB"),
        (999.6e6, "1 GB"),
        (2.5e9, "2.5 GB"),
        (3e12, "3 TB"),
        (1e18, "1000000 TB"),
    ],
)
def test_sizes_for_readers(count, text):
    assert show_bytes(count) == text


@given(st.floats(0, 1e15))
def test_sizes_have_three_digits_of_the_fitting_unit_and_are_read_back(count):
    number, unit = (text := show_bytes(count)).split()
    assert re.fullmatch(r"\d{1,3}(\.\d{1,2})?|1000", number)
    assert float(number) < 1000 or unit == "TB"
    assert float(number) >= 1 or unit == "B"
    if count >= 1:
        assert parse_bytes(text) == pytest.approx(count, rel=0.005, abs=0.5)
        assert count <= parse_bytes(show_at_most(count)) <= max(count * 1.01, count + 1)
