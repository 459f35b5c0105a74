"""Half precision: its loss against a float32 copy, and which layer's name stops a run that is not finite."""

import copy

import numpy as np
import pytest
import torch

from posbias import MeasureOptions, RunError, load_model, measure
from posbias.comparison.metrics import wasserstein
from posbias.prompts import Prompts
from posbias.results.page import tables_of
from posbias.results.result import report_of

TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6])
PROMPTS = Prompts(np.stack([TOKENS, TOKENS[::-1], TOKENS + 7]))


def _in(model, dtype):
    return load_model(copy.deepcopy(model.network).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_that_against_the_same_weights_in_float32(llama, dtype):
    reduced = _in(llama, dtype)
    upcast = _in(reduced, torch.float32)
    kinds = ("jacobian", "probability")
    measured, full = measure(reduced, PROMPTS, kinds=kinds), measure(upcast, PROMPTS, kinds=kinds)
    assert full.details == {}
    for kind, loss in measured.details.items():
        own, exact = (run.per_prompt[kind][0] / run.per_prompt[kind][0].sum() for run in (measured, full))
        relative = np.abs(own - exact) / exact
        np.testing.assert_allclose(loss["W1_to_float32"], [wasserstein(own, exact)], rtol=1e-9)
        np.testing.assert_allclose(loss["median_change_to_float32"], [np.median(relative)], rtol=1e-9)
        np.testing.assert_allclose(loss["largest_change_to_float32"], [relative.max()], rtol=1e-9)
        # Half an ulp per operation: 2^-9 and 2^-12; a few of them add up, and the probes are the same.
        assert 1e-5 < loss["median_change_to_float32"][0] < (0.05 if dtype == torch.bfloat16 else 0.008)
    assert reduced.network.dtype == dtype
    two = measure(reduced, PROMPTS, kinds="logit", options=MeasureOptions(precision_prompts=2))
    assert two.details["logit"]["W1_to_float32"].size == 2
    assert "W1 to float32" in str(tables_of(report_of(two)))


def test_a_finished_run_without_the_check_is_not_taken_over(llama, tmp_path):
    reduced = _in(llama, torch.bfloat16)
    for count in (0, 1):
        options = MeasureOptions(directory=tmp_path, resume=True, precision_prompts=count)
        assert len(measure(reduced, PROMPTS, kinds="logit", options=options).details) == count


def test_weights_that_cannot_be_converted_are_told(llama):
    spread = _in(llama, torch.bfloat16)
    spread.network.hf_device_map = {"": "cpu"}
    (why,) = measure(spread, PROMPTS, kinds="logit").left_out
    assert why.startswith("what half precision costs: weights that are quantised, spread or too large")


class _Steep(torch.autograd.Function):
    """The identity with an infinite derivative: a finite output whose gradient is not."""

    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * torch.inf


@pytest.mark.parametrize(
    ("kind", "layers", "named"),
    [
        ("jacobian", None, "jacobian"),
        ("probability", None, "probability"),
        ("integrated_gradients(steps=2)", None, "integrated_gradients"),
        ("perturbation", (0, 1), "layer 1"),
    ],
)
def test_a_gradient_that_overflows_is_refused_by_kind_or_layer(build_llama, kind, layers, named):
    steep = build_llama()
    path = "model.layers.1.self_attn.o_proj" if layers is None else "model.layers.1.mlp.down_proj"
    steep.network.get_submodule(path).register_forward_hook(lambda _module, _inputs, output: _Steep.apply(output))
    with pytest.raises(RunError, match=f"{named}: the gradient on prompt 0 is not finite; in a wider type it may be"):
        measure(steep, PROMPTS, kinds=kind, options=MeasureOptions(layers=layers))


def test_a_real_overflow_of_float16_in_the_backward_pass_alone(build_llama):
    """Tiny streams: the first norm's derivative 1 / sqrt(eps) times its weight exceeds 65504, no activation does."""
    model = build_llama()
    model.network.get_submodule("model.embed_tokens").weight.data *= 1e-5
    model.network.get_submodule("model.layers.0.input_layernorm").weight.data *= 3e3
    model.network.get_submodule("model.layers.0.post_attention_layernorm").weight.data *= 0
    half = _in(model, torch.float16)
    assert measure(model, PROMPTS, kinds="jacobian").per_prompt["jacobian"].max() > 1e3
    with pytest.raises(RunError, match="jacobian: the gradient on prompt 0 is not finite; in a wider type"):
        measure(half, PROMPTS, kinds="jacobian")


@pytest.mark.parametrize("kind", ["perturbation", "integrated_gradients(steps=2)", "logit"])
def test_an_output_that_overflows_names_its_layer(build_llama, kind):
    broken = build_llama()
    broken.network.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = torch.nan
    with pytest.raises(RunError, match=r"the output on prompt 0 is not finite, first in model\.layers\.1$"):
        measure(broken, PROMPTS, kinds=kind)
