"""Claims on a model: its own attention and mixing, premises found as they are, numbers that can be worked out."""

import numpy as np
import pytest
import torch

from posbias import Architecture, RunError, UsageError, load_model, load_prompts, measure, predict
from posbias.architecture import Causal, Full, Prefix, SlidingWindow
from posbias.models.reference.config import ReferenceConfig, constants_of, stacked
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.network import ReferenceTransformer
from posbias_papers import CLAIMS, MODEL_CLAIMS, verify_model
from posbias_papers.kernels import random_monotone_kernel
from posbias_papers.on_models import ModelRun, run_model
from published_networks import copy_network, retrieval_network

N = 8
WU = "wu2025/theorem-4."
ROLLOUT = "rollout-2602.16837/"


def prompts_of(model, n_positions=N, count=2):
    return load_prompts("synthetic", model, n_positions=n_positions, count=count)


def verdicts(model, n_positions=N):
    return {each.claim.name: each for each in verify_model(model, prompts_of(model, n_positions))}


def run_of(kernels, mixing, visible):
    """One prompt."""
    return ModelRun(kernels[None], mixing[None], np.broadcast_to(visible, kernels.shape))


def test_every_form_is_that_of_a_published_claim():
    assert set(MODEL_CLAIMS) <= set(CLAIMS)
    assert len(list(MODEL_CLAIMS)) == 10


def test_attention_and_mixing_are_the_models_own(tiny_llama):
    """Of a Hugging Face model as it computes them eagerly, of a reference model as its maps."""
    llama = load_model(tiny_llama)
    prompts = prompts_of(llama)
    run = run_model(llama, prompts)
    llama.network.set_attn_implementation("eager")
    for ids, kernels in zip(prompts.token_ids, run.kernels, strict=True):
        maps = llama.network(torch.as_tensor(ids)[None], output_attentions=True).attentions
        np.testing.assert_allclose(kernels, torch.stack(maps)[:, 0].double().mean(1).numpy(), atol=1e-6)
    np.testing.assert_allclose(run.mixing.mean(0), measure(llama, prompts, kinds=["jacobian"]).mixing, rtol=1e-5)
    assert run.mask == Causal()

    model = ReferenceTransformer(copy_network(Architecture(2, encoding="alibi"), residual=True))
    prompts = prompts_of(model)
    constants = stacked([constants_of(model.config, N)])
    weights = stacked([{name: value.detach() for name, value in model.network.named_parameters()}])
    maps = attention_maps(model.config, weights, constants, torch.as_tensor(prompts.token_ids)[None])[:, 0]
    run = run_model(model, prompts)
    np.testing.assert_allclose(run.kernels, maps.mean(2).transpose(0, 1).double().numpy(), atol=1e-6)
    np.testing.assert_allclose(run.mixing.mean(0), measure(model, prompts, kinds=["jacobian"]).mixing, rtol=1e-5)


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(3), Prefix(4), Full()])
def test_masks_are_recognised(mask):
    model = ReferenceTransformer(ReferenceConfig(Architecture(2, mask=mask), residual="none"))
    assert run_model(model, prompts_of(model)).mask == mask
    mixed = ReferenceTransformer(Architecture(2, mask=["causal", "sliding_window(width=3)"]))
    assert run_model(mixed, prompts_of(mixed)).mask is None


def test_uniform_attention_alone_has_the_exact_numbers():
    """Two layers of uniform causal attention: the last of N keeps 1 - H_N / N outside the first."""
    model = ReferenceTransformer(ReferenceConfig(Architecture(2), residual="none"))
    found = verdicts(model)
    collapse = found[WU + "1"]
    assert collapse.met
    assert collapse.verdict == "holds"
    harmonic = sum(1 / k for k in range(1, N + 1))
    assert collapse.finding.numbers["outside_last_query"] == pytest.approx(1 - harmonic / N)
    profile = predict(model, N, theory="attention_only").profile.influence
    assert collapse.finding.numbers["outside_last_query"] == pytest.approx(profile[1:].sum())
    assert found["wu2025/lemma-A.1"].finding.value == pytest.approx(1 / N)
    # One layer leaves key 1 half of query 1, which the bound gives 1 - 1/N.
    assert collapse.finding.value == pytest.approx(0.5 / (1 - 1 / N))
    for name in ("2", "3", "5"):
        assert found[ROLLOUT + f"proposition-4.{name}"].verdict == "holds"
    assert found[ROLLOUT + "theorem-5.5-finite"].verdict == "premises not met (holds all the same)"


@pytest.mark.parametrize(("mask", "theorem"), [("sliding_window(width=3)", "2"), ("prefix(length=3)", "3")])
def test_other_masks_have_theorems_of_their_own(mask, theorem):
    model = ReferenceTransformer(ReferenceConfig(Architecture(3, mask=mask), residual="none"))
    found = verdicts(model)
    assert found[WU + theorem].verdict == "holds"
    assert found["wu2025/centre-nodes"].verdict.startswith("premises not met")  # three layers of N - 1
    assert not found[WU + "1"].met
    assert [premise.met for premise in found[WU + "1"].premises] == [False, True, True]


def test_centre_nodes_gather_mass_once_there_are_layers_enough():
    model = ReferenceTransformer(ReferenceConfig(Architecture(N - 1, mask="sliding_window(width=2)"), residual="none"))
    found = verdicts(model)["wu2025/centre-nodes"]
    assert found.verdict == "holds"
    assert found.finding.value == pytest.approx(1 - 2.0 ** (1 - N))


def test_a_prefix_keeps_what_it_has():
    """Uniform attention, prefix of 3: query i has (i - 2) / (i + 1) outside after one layer, the last one most."""
    model = ReferenceTransformer(ReferenceConfig(Architecture(1, mask="prefix(length=3)"), residual="none"))
    found = verdicts(model)
    assert found["wu2025/centre-nodes"].finding.value == pytest.approx((N - 3) / N)
    assert found[WU + "3"].finding.numbers["outside_worst_query"] == pytest.approx((N - 3) / N)


def test_with_a_residual_theorem_5_5_takes_the_place_of_theorem_4_1():
    architecture = Architecture(3, mixing=0.4)
    model = ReferenceTransformer(architecture)
    found = verdicts(model)
    assert not found[WU + "1"].met
    bound, kept = found[ROLLOUT + "theorem-5.5-infinite"], found[ROLLOUT + "theorem-5.5-finite"]
    assert bound.verdict == kept.verdict == "holds"
    run = run_model(model, prompts_of(model))
    own = (1 - run.mixing + run.mixing / N).prod(axis=1).mean()
    assert kept.finding.numbers["last_position_keeps"] == pytest.approx(own)
    assert kept.finding.numbers["product"] == pytest.approx((1 - run.mixing).prod(axis=1).mean())


def test_order_needs_ordered_kernels_and_can_fail_without():
    """A last query that looks at the query which alone keeps to itself becomes more recent with a second layer."""
    visible = Causal().visible(3)
    first = np.array([[1, 0, 0], [0, 1, 0], [0.9, 0, 0.1]])
    second = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0]])
    run = run_of(np.stack([first, second]), np.ones(2), visible)
    found = MODEL_CLAIMS[ROLLOUT + "proposition-4.2"]().check(run)
    assert found.verdict == "premises not met (fails all the same)"
    assert found.finding.value == pytest.approx(0.9)
    assert "fails in 100% of 1" in found.sharper
    assert not MODEL_CLAIMS["wu2025/lemma-A.1"]().check(run).finding.as_stated

    generator = np.random.default_rng(0)
    monotone = np.stack([random_monotone_kernel(N, generator) for _ in range(4)])
    run = run_of(monotone, generator.uniform(0.1, 0.9, 4), Causal().visible(N))
    for name in ("2", "3", "5"):
        assert MODEL_CLAIMS[ROLLOUT + f"proposition-4.{name}"]().check(run).verdict == "holds"


def test_bounds_fail_where_attention_looks_ahead():
    """Everything is handed to the last position: nothing collapses onto the first."""
    kernels = np.zeros((3, N, N))
    kernels[:, :, -1] = 1
    run = run_of(kernels, np.full(3, 0.5), np.ones((N, N), dtype=bool))
    for name in (WU + "1", ROLLOUT + "theorem-5.5-infinite"):
        found = MODEL_CLAIMS[name]().check(run)
        assert not found.met
    assert not MODEL_CLAIMS[ROLLOUT + "theorem-5.5-finite"]().check(run).premises[0].met


def test_trained_like_networks_of_the_published_experiment():
    """Vectors in, single heads, rotary positions; every prompt keeps every bound."""
    items = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    config = retrieval_network(Architecture(4, encoding="rope"), width=16, residual=True)
    found = verdicts(ReferenceTransformer(config, items=items), 17)
    for verdict in found.values():
        if verdict.met:
            assert verdict.verdict == "holds"
    assert found[ROLLOUT + "theorem-5.5-infinite"].met


@pytest.mark.parametrize("n_positions", [2, 3])
def test_shortest_prompts(n_positions):
    model = ReferenceTransformer(Architecture(1, mixing=0.5))
    assert all(np.isfinite(each.finding.value) for each in verdicts(model, n_positions).values())


def test_what_cannot_be_examined_is_said():
    model = ReferenceTransformer(Architecture(1))
    with pytest.raises(UsageError, match="2 to 256 positions, got 300"):
        verify_model(model, prompts_of(model, 300, 1))
    with pytest.raises(UsageError, match=r"'wu2025/lemma-4\.4' has no form for models; claims with one: "):
        verify_model(model, prompts_of(model), "wu2025/lemma-4.4")
    with pytest.raises(UsageError, match="unknown claim or paper 'nobody'"):
        verify_model(model, prompts_of(model), "nobody")
    model.network.embedding.data.zero_()
    with pytest.raises(RunError, match="zero or not finite in layer 0"):
        verify_model(model, prompts_of(model))
