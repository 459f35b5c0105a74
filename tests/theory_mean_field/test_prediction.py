"""The prediction's interface: levels, prompts, long contexts, refusals."""

from dataclasses import replace

import numpy as np
import pytest

from posbias import Architecture, DesignOptions, UsageError, design, predict
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field import FirstOrder, SampledHeads, mean_field, spec_of
from posbias.theory.mean_field.bins import growing_bins, unit_bins
from posbias.theory.mean_field.prediction import choose_bins, resolve_level
from posbias.theory.mean_field.recursion import Setting, input_kernel, run_backward, run_forward


def test_networks_that_train_makes_are_refused():
    for refused in (
        lambda model: predict(model, 8, theory="mean_field"),
        lambda model: design("flat", model=model, options=DesignOptions(theory="mean_field", n_positions=8)),
    ):
        with pytest.raises(
            UsageError, match="models of transformers, got ReferenceTransformer; the rollout is allowed"
        ):
            refused(ReferenceTransformer(Architecture(depth=1)))


def squares_in(bins, spec, token_ids=None):
    setting = Setting(bins, spec.width, np.random.default_rng())
    forward = run_forward(spec, input_kernel(spec, bins, token_ids=token_ids), FirstOrder(), setting)
    return run_backward(spec, forward, FirstOrder(), setting).same


@pytest.mark.parametrize(
    ("model_type", "tokens", "tolerance"),
    [
        ("llama", None, 2e-3),
        ("gpt2", None, 2e-3),
        ("llama", np.minimum(np.random.default_rng(0).zipf(1.3, 300), 200), 0.02),
    ],
)
def test_growing_bins_agree_with_single_positions(model_type, tokens, tolerance, fresh):
    spec = spec_of(fresh(model_type, hidden_size=64, num_hidden_layers=3))
    bins = growing_bins(300)
    assert bins.count < 170
    exact, same = (squares_in(each, spec, tokens) for each in (unit_bins(300), bins))
    np.testing.assert_allclose(np.sqrt(bins.spread(same)), np.sqrt(exact), rtol=tolerance)


def test_windows_are_resolved_in_long_contexts(fresh):
    spec = spec_of(fresh("mistral", hidden_size=64, num_hidden_layers=2, sliding_window=128))
    bins = choose_bins(spec, 560)
    assert bins.sizes.max() == 8
    assert 560 - 128 in bins.starts
    exact, same = (squares_in(each, spec) for each in (unit_bins(560), bins))
    near = slice(560 - 200, 560)  # further back than two windows nothing arrives
    np.testing.assert_allclose(np.sqrt(bins.spread(same))[near], np.sqrt(exact)[near], rtol=0.02)


def test_long_contexts_are_quick_and_finite(fresh):
    theory = mean_field(fresh("llama", num_hidden_layers=2), 131_072)
    assert theory.profile.n_positions == 131_072
    assert np.all(np.isfinite(theory.jacobian_norm))
    assert theory.jacobian_norm.min() > 0


def test_repeated_tokens_enter_through_the_input_kernel(fresh):
    spec = spec_of(fresh("llama"))
    tokens = np.array([3, 5, 3, 7, 5, 3])
    kernel = input_kernel(spec, unit_bins(6), token_ids=tokens)
    np.testing.assert_allclose(kernel.block, spec.embedding * (tokens[:, None] == tokens[None, :]))
    same = Prompts(np.full((1, 32), 9))
    distinct = Prompts(np.arange(32)[None] + 3)
    np.testing.assert_allclose(mean_field(spec, 32, prompts=distinct).jacobian_norm, mean_field(spec, 32).jacobian_norm)
    assert mean_field(spec, 32, prompts=same).jacobian_norm.sum() != pytest.approx(
        mean_field(spec, 32).jacobian_norm.sum(), rel=0.05
    )


def test_binned_input_kernel_is_the_share_of_equal_pairs(fresh):
    spec = spec_of(fresh("llama"))
    tokens = np.random.default_rng(0).integers(0, 5, size=50)
    bins = growing_bins(50, relative_width=0.3)
    kernel = input_kernel(spec, bins, token_ids=tokens)
    exact = spec.embedding * (tokens[:, None] == tokens[None, :])
    expected = np.add.reduceat(np.add.reduceat(exact, bins.starts, axis=0), bins.starts, axis=1)
    np.testing.assert_allclose(kernel.mass(bins), expected, rtol=1e-12)


def test_several_prompts_average_in_squares(fresh):
    spec = spec_of(fresh("llama"))
    both = np.random.default_rng(0).integers(3, 8, size=(2, 20))
    single = [mean_field(spec, 20, prompts=Prompts(row[None])).jacobian_norm for row in both]
    joint = mean_field(spec, 20, prompts=Prompts(both)).jacobian_norm
    np.testing.assert_allclose(joint, np.sqrt((single[0] ** 2 + single[1] ** 2) / 2))


def test_auto_chooses_by_the_logit_variance(fresh):
    assert isinstance(mean_field(fresh("llama"), 8).level, FirstOrder)
    assert resolve_level(spec_of(fresh("qwen3", head_dim=32)), "auto", 8) == SampledHeads(2000)
    wide = fresh("llama")
    spec = spec_of(wide)
    loud = replace(spec, layers=tuple(replace(x, attention=replace(x.attention, scale=2.0)) for x in spec.layers))
    assert isinstance(resolve_level(loud, "auto", 8), SampledHeads)
    variances = [mean_field(each, 8, level="value").logit_variance[0] for each in (loud, spec)]
    assert variances[0] == pytest.approx(128 * variances[1], rel=1e-2)


def test_auto_sees_the_gain_of_the_norms(fresh):
    """Nemotron's norms multiply by 2 from the start: its logits vary 16 times as much as its weights alone say."""
    spec = spec_of(fresh("nemotron", initializer_range=0.04))
    variances = mean_field(spec, 8, level="value").logit_variance
    assert variances.max() == pytest.approx(16 * 0.25 * (0.04**2 * 128) ** 2 * 4, rel=0.1)
    assert isinstance(resolve_level(spec, "auto", 8), SampledHeads)


def test_bad_requests_name_what_is_allowed(fresh):
    spec = spec_of(fresh("llama"))
    with pytest.raises(UsageError, match="20 tokens each"):
        mean_field(spec, 16, prompts=Prompts(np.full((1, 20), 3)))
    with pytest.raises(UsageError, match="at least 1 position, got 0"):
        mean_field(spec, 0)
    with pytest.raises(UsageError, match="at most 2048"):
        mean_field(spec, 5000, level="sampled")
    with pytest.raises(UsageError, match="at most 2048"):
        mean_field(fresh("bloom", n_head=4, n_layer=4), 5000)
    with pytest.raises(UsageError, match="at most 64, the learned positions; got 65"):
        mean_field(fresh("gpt2", n_embd=128, n_head=4, n_layer=2, max_position_embeddings=64), 65)


def test_trained_weights_are_refused_and_their_description_is_not(fresh):
    drawn = fresh("llama")
    trained = HuggingFaceModel(drawn.network, origin=Origin("some/checkpoint"))
    for refused in (lambda: mean_field(trained, 8), lambda: predict(trained, 8, theory="mean_field")):
        with pytest.raises(UsageError, match=r"'some/checkpoint' are trained or of unknown origin: .*init_seed=0"):
            refused()
    np.testing.assert_array_equal(mean_field(spec_of(trained), 8).jacobian_norm, mean_field(drawn, 8).jacobian_norm)


def test_births_scatter_so_the_mean_of_their_profiles_is_not_the_root_mean_square(fresh, births, profile_distance):
    """8 layers of width 64: W1 .010 between the two, and the theory describes the root mean square."""
    narrow = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 256}
    squares = births(lambda seed: fresh("llama", seed, **narrow), 64, 32)
    norms = np.sqrt(squares)
    root_mean_square = np.sqrt(squares.mean(axis=0))
    mean = (norms / norms.sum(axis=1, keepdims=True)).mean(axis=0)
    assert profile_distance(root_mean_square, mean) == pytest.approx(0.010, abs=0.004)
    theory = mean_field(fresh("llama", **narrow), 64).jacobian_norm
    assert 2 * profile_distance(theory, root_mean_square) < profile_distance(theory, mean)


def test_a_configuration_is_enough(fresh, tmp_path):
    model = fresh("llama")
    model.config.save_pretrained(tmp_path / "config")
    read = predict(f"config:{tmp_path / 'config'}", 24, theory="mean_field").profile.influence
    np.testing.assert_allclose(read, mean_field(model, 24).profile.influence, rtol=1e-6)
    with pytest.raises(UsageError, match=r"needs a model .*, got Architecture"):
        predict(Architecture(depth=2), 24, theory="mean_field")
