"""`measure` as a whole: averaging, intervals, mixing, resuming, bad input."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from posbias import MeasureOptions, RunError, UsageError, load_model, load_prompts, load_record, measure
from posbias.measurement.measurement import combine
from posbias.measurement.prompt import PromptMeasurement
from posbias.prompts import Prompts


def test_prompts_do_not_depend_on_each_other_and_probes_alone_on_the_seed(llama, make_prompts):
    prompts = make_prompts(llama, 4, 10)
    kinds = ["jacobian", "logit", "probability"]
    whole, other = (measure(llama, prompts, kinds=kinds, seed=seed) for seed in (3, 4))
    fewer = measure(llama, Prompts(prompts.token_ids[:2]), kinds="jacobian", seed=3)
    np.testing.assert_array_equal(fewer.per_prompt["jacobian"], whole.per_prompt["jacobian"][:2])
    swapped = measure(llama, Prompts(prompts.token_ids[[0, 3, 2, 1]]), kinds="logit")
    np.testing.assert_array_equal(swapped.per_prompt["logit"], whole.per_prompt["logit"][[0, 3, 2, 1]])
    np.testing.assert_allclose(swapped.mixing, whole.mixing, rtol=1e-12)
    assert not np.array_equal(other.per_prompt["jacobian"], whole.per_prompt["jacobian"])
    np.testing.assert_array_equal(other.per_prompt["probability"], whole.per_prompt["probability"])


def test_prompts_draw_their_own_probes(llama):
    """The same tokens at two places: shared probes would make the prompts' errors add up instead of averaging out."""
    same = measure(llama, Prompts(np.tile([5, 3, 8, 2], (2, 1))), kinds=("jacobian", "logit"))
    assert not np.any(same.per_prompt["jacobian"][0] == same.per_prompt["jacobian"][1])
    np.testing.assert_array_equal(same.per_prompt["logit"][0], same.per_prompt["logit"][1])


def profile_of(norms):
    subject, _ = combine([PromptMeasurement({"logit": row}) for row in norms])
    return subject.measured["logit"].profile


def test_prompts_count_equally():
    norms = np.array([[1.0, 3.0, 4.0], [100.0, 50.0, 50.0]])
    found = profile_of(norms)
    np.testing.assert_allclose(found.influence, [0.3125, 0.3125, 0.375])


def test_mixing_by_hand(kernel_model):
    tokens = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
    measured = measure(kernel_model, Prompts(tokens), kinds="logit")
    by_token, by_frobenius = [], []
    for row in tokens:
        stream = kernel_model.table.numpy()[row]
        token_rows, frobenius_rows = [], []
        for share, matrix in zip(kernel_model.mixing.numpy(), kernel_model.attention.numpy(), strict=True):
            branch = share * matrix @ stream
            x, a = (np.linalg.norm(side, axis=1) for side in (stream, branch))
            token_rows.append(np.mean(a / (x + a)))
            x_all, a_all = np.linalg.norm(stream), np.linalg.norm(branch)
            frobenius_rows.append(a_all / (x_all + a_all))
            stream = (1 - share) * stream + branch
        by_token.append(token_rows)
        by_frobenius.append(frobenius_rows)
    np.testing.assert_allclose(measured.mixing, np.mean(by_token, axis=0), rtol=1e-12)
    np.testing.assert_allclose(measured.mixings["frobenius"].value, np.mean(by_frobenius, axis=0), rtol=1e-12)
    ends = stats.ttest_1samp(by_token, 0).confidence_interval(0.95)  # two prompts: wide, and within the range
    np.testing.assert_allclose(measured.mixings["token_mean"].low, np.maximum(ends.low, 0), rtol=1e-12)
    np.testing.assert_allclose(measured.mixings["token_mean"].high, np.minimum(ends.high, 1), rtol=1e-12)


def test_checkpointing_changes_memory_not_results(gpt2_64, make_prompts):
    prompts = make_prompts(gpt2_64, 2, 8)
    runs, saved = [], []
    block = gpt2_64.network.get_submodule("transformer.h.0")
    original = block.forward
    plain = MeasureOptions(layers="all")
    for options in (plain, replace(plain, checkpointing=True)):
        elements = 0

        def pack(tensor):
            nonlocal elements
            elements += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            runs.append(measure(gpt2_64, prompts, options=options))
        saved.append(elements)
    assert saved[1] < saved[0] / 2
    for run in runs[1:]:
        for kind in run.profiles:
            np.testing.assert_allclose(run.per_prompt[kind], runs[0].per_prompt[kind], rtol=1e-10)
        np.testing.assert_allclose(run.depth.influence, runs[0].depth.influence, rtol=1e-10)
    assert block.forward == original
    assert not gpt2_64.network.training


def test_checkpointing_needs_blocks(kernel_model, make_prompts):
    options = MeasureOptions(checkpointing=True)
    with pytest.raises(UsageError, match=r"nn\.ModuleList; Module has none"):
        measure(kernel_model, make_prompts(kernel_model, 1, 7), options=options)


def test_prompts_the_model_cannot_take_are_refused(llama, make_prompts):
    with pytest.raises(UsageError, match="prompts have 33 positions; the model takes at most 32"):
        measure(llama, make_prompts(llama, 1, 33))
    with pytest.raises(UsageError, match="token id 61 in the prompts; the model's vocabulary is 0 to 60"):
        measure(llama, Prompts(np.array([[1, 61]])))


def test_broken_embeddings_are_named(build_llama):
    broken = build_llama()
    broken.network.get_parameter("model.embed_tokens.weight").data[7] = torch.inf
    with pytest.raises(RunError, match="prompt 1 is not finite, already in the embeddings"):
        measure(broken, Prompts(np.array([[1, 2, 3], [4, 7, 5]])), kinds="logit")


def test_sure_predictions_have_profiles_in_single_precision(build_llama):
    """1 - p = 1e-60 is far below the smallest float32, the shape of its gradient is not."""
    sure = build_llama()
    prompts = Prompts(np.array([[5, 3, 8, 2, 7]]))
    first, second = sure.last(sure.embed(sure.token_tensor(prompts.token_ids.tolist()))).logits[0].topk(2).values
    sure.network.get_parameter("lm_head.weight").data *= 60 * np.log(10) / float(first - second)
    measured = measure(sure, prompts, kinds=("probability", "logprob"))
    assert 0 < measured.per_prompt["probability"].max() < 1e-50
    np.testing.assert_allclose(
        measured.profiles["probability"].influence, measured.profiles["logprob"].influence, rtol=1e-4
    )


def test_a_prompt_without_influence_is_refused():
    with pytest.raises(RunError, match="logit: every position of prompt 1 has zero influence"):
        profile_of(np.array([[1.0, 2.0], [0.0, 0.0]]))


def test_a_stored_measurement_is_the_fresh_one(tiny_llama, tmp_path):
    model = load_model(tiny_llama)
    prompts = load_prompts("synthetic", model, n_positions=8, count=3)
    fresh = measure(model, prompts, kinds="jacobian(probes=2),logprob", options=MeasureOptions(layers=[0, 1]))
    stored = load_record(fresh.save(tmp_path / "run"))
    assert type(stored) is type(fresh)
    for name in ("per_prompt", "standard_errors", "mixing", "details"):
        np.testing.assert_equal(getattr(stored, name), getattr(fresh, name), err_msg=name)
    for name, mixing in fresh.mixings.items():
        np.testing.assert_equal(vars(stored.mixings[name]), vars(mixing))
    for kind, profile in fresh.profiles.items():
        np.testing.assert_equal(vars(stored.profiles[kind]), vars(profile))
    assert (stored.record.seeds, stored.count) == (fresh.record.seeds, fresh.count)
    assert stored.record.resolved["measurement"] == fresh.record.resolved["measurement"]
    np.testing.assert_equal(vars(stored.depth), vars(fresh.depth))
    assert np.all((fresh.depth.low <= fresh.depth.influence) & (fresh.depth.influence <= fresh.depth.high))
    assert stored.verdict == fresh.verdict != ()
