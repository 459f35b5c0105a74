"""The first order against sampled heads, which share no formula with it, and sampled heads against autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import UsageError
from posbias.architecture import Alibi, Causal, NoEncoding, SlidingWindow
from posbias.theory.mean_field import FirstOrder, SampledHeads
from posbias.theory.mean_field.bins import Kernel, smooth, unit_bins
from posbias.theory.mean_field.recursion import LEVELS, Setting, ValueOnly
from posbias.theory.mean_field.spec import AttentionSpec, LinearSpec, NormSpec

N, WIDTH, HEAD_DIM = 7, 32, 16
NORM = NormSpec(1e-6)


def attention(logit_variance: float, *, encoding=None, mask=None, **extra) -> AttentionSpec:
    """Two heads whose logits have the given variance (for inputs of unit power, without norms)."""
    return AttentionSpec(
        heads=2,
        head_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        scale=np.sqrt(logit_variance / HEAD_DIM),
        query=LinearSpec(1 / WIDTH),
        key=LinearSpec(1 / WIDTH),
        value=LinearSpec(0.5 / WIDTH),
        output=LinearSpec(0.7 / WIDTH, bias=0.01),
        mask=mask or Causal(),
        encoding=encoding or NoEncoding(),
        **extra,
    )


def input_gram() -> Kernel:
    features = np.random.default_rng(1).standard_normal((N, 12)) + 0.5
    features /= np.sqrt((features**2).mean(axis=1, keepdims=True))
    features *= np.linspace(0.8, 1.2, N)[:, None]  # unequal powers too
    return smooth(features @ features.T / 12)


def gradient_gram() -> Kernel:
    features = np.random.default_rng(2).standard_normal((N, 12))
    return smooth(features @ features.T / 12)


def setting(seed: int = 0) -> Setting:
    return Setting(unit_bins(N), WIDTH, np.random.default_rng(seed))


@pytest.mark.parametrize(
    "spec",
    [
        attention(0.1),
        attention(0.1, encoding=Alibi()),
        attention(0.1, mask=SlidingWindow(width=3)),
        attention(0.1, query_norm=NORM, key_norm=NORM),
    ],
    ids=["plain", "alibi", "window", "normed"],
)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_first_order_removes_the_error_of_the_value_level(spec, direction):
    def run(level):
        if direction == "forward":
            return level.forward(spec, input_gram(), setting()).block
        return level.backward(spec, input_gram(), gradient_gram(), setting()).block

    value, first, truth = (
        run(ValueOnly()),
        run(FirstOrder()),
        run(SampledHeads(40_000 if direction == "backward" else 320_000)),
    )
    before, after = np.abs(value - truth).max(), np.abs(first - truth).max()
    assert before > 0.02 * np.abs(truth).max()
    assert after < 0.2 * before  # what is left is of second order


def test_first_order_ignores_a_key_bias():
    biased = replace(attention(0.1), key=LinearSpec(1 / WIDTH, bias=3.0))
    plain = FirstOrder().forward(attention(0.1), input_gram(), setting())
    np.testing.assert_allclose(FirstOrder().forward(biased, input_gram(), setting()).block, plain.block, rtol=1e-9)
    plain = FirstOrder().backward(attention(0.1), input_gram(), gradient_gram(), setting())
    shifted = FirstOrder().backward(biased, input_gram(), gradient_gram(), setting())
    np.testing.assert_allclose(shifted.block, plain.block, rtol=1e-9)


@pytest.mark.parametrize("features", ["plain", "normed", "rotary", "capped", "wide"])
def test_sampled_heads_equal_real_attention(features):
    """E |d a / d x|^2 over weights, by autograd of an attention layer with all its parts, large logits."""
    norm = NormSpec(1e-6, per_head=True)
    spec = attention(1.0)
    if features == "normed":
        spec = replace(spec, query_norm=norm, key_norm=norm)
    if features == "rotary":
        spec = replace(spec, rotation=10.0 ** (-np.arange(4) / 4))
    if features == "capped":
        spec = replace(spec, softcap=1.5)
    if features == "wide":
        spec = replace(spec, value_dim=2 * HEAD_DIM)
    inputs, arriving = input_gram(), gradient_gram()
    forward, backward = _real_attention(spec, inputs.block, arriving.block, draws=3000)
    expected = SampledHeads(80_000).forward(spec, inputs, setting()).block - spec.output.bias
    np.testing.assert_allclose(expected, forward, atol=0.03 * np.abs(forward).max())
    expected = SampledHeads(10_000).backward(spec, inputs, arriving, setting()).block
    np.testing.assert_allclose(expected, backward, atol=0.04 * np.abs(backward).max())


def _real_attention(spec, gram, gradient_gram, *, draws):
    """Mean Grams of a real layer's output and of its input gradient, over random weights, inputs and functionals."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def drawn(matrix):  # features with exactly this Gram
        values, vectors = np.linalg.eigh(matrix)
        rows = torch.linalg.qr(normal(draws, WIDTH, N)).Q.transpose(1, 2) * WIDTH**0.5
        return torch.from_numpy(vectors * np.sqrt(np.maximum(values, 0))) @ rows

    x = drawn(gram).requires_grad_(True)
    queries, keys, values = (
        torch.einsum("bnd,bhde->bhne", x, normal(draws, 2, WIDTH, size) * linear.variance**0.5)
        for linear, size in ((spec.query, HEAD_DIM), (spec.key, HEAD_DIM), (spec.value, spec.value_dim))
    )
    if spec.query_norm is not None:
        queries, keys = (part / part.square().mean(dim=-1, keepdim=True).sqrt() for part in (queries, keys))
    if spec.rotation is not None:
        queries, keys = (_rotate(part, torch.from_numpy(spec.rotation)) for part in (queries, keys))
    logits = spec.scale * queries @ keys.transpose(-1, -2)
    if spec.softcap is not None:
        logits = spec.softcap * torch.tanh(logits / spec.softcap)
    logits = logits.masked_fill(~torch.tril(torch.ones(N, N, dtype=torch.bool)), -torch.inf)
    heads = torch.softmax(logits, dim=-1) @ values
    output = torch.einsum("bhne,bhed->bnd", heads, normal(draws, 2, spec.value_dim, WIDTH) * spec.output.variance**0.5)
    (gradient,) = torch.autograd.grad((output * drawn(gradient_gram)).sum(), x)
    return tuple((part @ part.transpose(1, 2)).mean(dim=0).detach().numpy() / WIDTH for part in (output, gradient))


def _rotate(features, frequency):
    half = len(frequency)
    angle = torch.arange(N)[:, None] * frequency
    first, second, rest = features[..., :half], features[..., half : 2 * half], features[..., 2 * half :]
    turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    return torch.cat([*turned, rest], dim=-1)


def test_levels_are_spelled_as_literals():
    assert LEVELS.parse("sampled(heads=50)") == SampledHeads(50)
    with pytest.raises(UsageError, match="known: first, sampled, value"):
        LEVELS.parse("second")
    with pytest.raises(UsageError, match=">= 1 and <= 50,000,000, got 0"):
        SampledHeads(0)


@pytest.mark.parametrize("heads", [1, 3])
def test_samples_take_the_models_heads_in_whole_rounds(heads):
    """A flat and a steep ALiBi head without content logits: any number of samples weighs the two equally."""
    spec = attention(0.0, encoding=Alibi([0.0, 5.0]))
    x, gradient = input_gram(), gradient_gram()
    sampled = SampledHeads(heads)
    exact = ValueOnly().forward(spec, x, setting())
    np.testing.assert_allclose(sampled.forward(spec, x, setting()).block, exact.block, rtol=1e-4)
    exact = ValueOnly().backward(spec, x, gradient, setting())
    np.testing.assert_allclose(sampled.backward(spec, x, gradient, setting()).block, exact.block, rtol=1e-4)
