"""Every mask x encoding x content: pulls equal dense products, entry by entry, tiny ones included."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posbias import Architecture
from posbias.architecture import ENCODINGS, MASKS, Encoding
from posbias.theory import Rollout
from posbias.theory.kernels import dense_heads, keys

TOLERANCE = 1e-12
"""Relative, per entry: the contract of every kernel."""

NEGLIGIBLE = 1e-290
"""Entries below this are at the end of float64 and only have to stay there."""

BIAS = np.random.default_rng(6).normal(size=(4, 900)).cumsum(axis=1).round(2).tolist()
"""Key biases of four heads: walks of tens of nats."""
MASK_SPELLINGS = {
    "causal": ["causal"],
    "sliding_window": ["sliding_window(width=1)", "sliding_window(width=6)", "sliding_window(width=150)"],
    "prefix": ["prefix(length=1)", "prefix(length=5)", "prefix(length=140)"],
    "full": ["full"],
}
ENCODING_SPELLINGS = {
    "none": ["none"],
    "alibi": ["alibi", "alibi(slopes=[0.0, 1e-9, 0.3, 700.0])"],
    "decay": ["decay(rate=0.8)", "decay(rate=0.999999)"],
    "rope": ["rope(head_dim=8)", "rope(base=100.0, head_dim=2, logit=-9.0, angle=0.4)"],
    "sinusoidal": ["sinusoidal(width=8)", "sinusoidal(width=4, base=50.0)"],
    "key_bias": [f"key_bias(values={BIAS[0]})", f"key_bias(values={BIAS})"],
    "gamma_key": [
        "gamma_key(alpha=3.0)",
        "gamma_key(alpha=[1.0, 0.01, 40.0, 2.5])",
        "gamma_key(alpha=2.0, slope=[-0.5, 0.0, 0.01, 0.3])",
    ],
    "log_spline": [
        "log_spline(values=[0.0, 3.0, -1.0], knots=[0, 7, 30])",
        "log_spline(values=[[0.0, -40.0], [0.0, 1.0], [2.0, 0.0], [9.0, 9.0]], knots=[0, 63])",
    ],
}
KEYS = [spelling for name in ("key_bias", "gamma_key", "log_spline") for spelling in ENCODING_SPELLINGS[name]]
CROSSING = ["none", "alibi", "rope(head_dim=8)", "rope(logit=9.0, angle=0.3)", *KEYS]
CROSSED = ["sliding_window(width=400)", "prefix(length=800)"]
"""Masks of contexts longer than a block, beside the causal one."""
MIXED = [[-182.0, 262.0, 0.0, -3.0]]
"""Contents of four heads: the lowest and the highest measured, none, and a moderate one."""
PAIRS = [
    (mask, encoding)
    for masks in MASK_SPELLINGS.values()
    for mask in masks
    for encodings in ENCODING_SPELLINGS.values()
    for encoding in encodings
]


@dataclass(frozen=True)
class Case:
    kernel: Rollout
    """Of one layer of attention alone."""
    matrix: np.ndarray


@cache
def encoding_of(spelling):
    """Thousands of numbers take longer to read than a kernel to build."""
    return ENCODINGS.parse(spelling)


def kernel_of(mask, encoding, n_positions, content=0.0, sinks=None):
    encoding = encoding_of(encoding) if isinstance(encoding, str) else encoding
    architecture = Architecture(
        depth=1, heads=4, mask=mask, encoding=encoding, content=content, sinks=sinks, mixing=1.0
    )
    dense = [dense_heads(group, n_positions).sum(axis=0) for group in architecture.head_groups[0]]
    return Case(Rollout(architecture, n_positions), np.sum(dense, axis=0) / architecture.heads)


def assert_equal_to_the_last_digit(got, expected):
    large = expected > NEGLIGIBLE
    np.testing.assert_allclose(got[large], expected[large], rtol=TOLERANCE, atol=0)
    assert np.all(got[~large] <= 2 * NEGLIGIBLE)
    assert np.all(got >= 0)


def assert_products(case, *vectors):
    """Pulls of vectors are those of the dense matrix."""
    for vector in vectors:
        assert_equal_to_the_last_digit(case.kernel.pull(vector), vector @ case.matrix)


def vectors(n_positions, seed):
    """The last position alone, a smooth vector, and one spanning 260 orders of magnitude."""
    last = np.zeros(n_positions)
    last[-1] = 1.0
    rough = np.exp(-np.random.default_rng(seed).uniform(0, 600, n_positions))
    return [last, np.full(n_positions, 1 / n_positions), rough]


def test_every_registered_variant_is_covered():
    assert set(MASK_SPELLINGS) == set(MASKS)
    assert set(ENCODING_SPELLINGS) == set(ENCODINGS)


@pytest.mark.parametrize(
    ("mask", "encoding", "content"),
    [
        *((mask, encoding, MIXED) for mask, encoding in PAIRS),
        *(("causal", encoding, 0.0) for encoding, *_ in ENCODING_SPELLINGS.values()),
        *((mask, encoding, 0.0) for mask, *_ in MASK_SPELLINGS.values() for encoding in ("none", KEYS[0])),
    ],
)
def test_pulls_equal_the_dense_product(mask, encoding, content):
    for n_positions in (1, 2, 131):
        assert_products(kernel_of(mask, encoding, n_positions, content), *vectors(n_positions, seed=n_positions))


@pytest.mark.parametrize(("mask", "encoding"), PAIRS)
def test_rows_sum_to_one_and_nothing_is_seen_behind_the_mask(mask, encoding):
    n_positions = 40
    case = kernel_of(mask, encoding, n_positions, content=MIXED)
    visible = MASKS.parse(mask).visible(n_positions)
    for query, row in enumerate(np.eye(n_positions)):
        pulled = case.kernel.pull(row)
        assert pulled.sum() == pytest.approx(1.0, rel=TOLERANCE)
        assert np.all(pulled[~visible[query]] == 0)


@pytest.mark.parametrize(("mask", "encoding"), PAIRS)
def test_a_sink_takes_the_same_share_of_every_key(mask, encoding):
    n_positions = 50
    case = kernel_of(mask, encoding, n_positions, MIXED, sinks=[[0.0, -5.0, 90.0, -np.inf]])
    assert_products(case, vectors(n_positions, seed=3)[2])
    assert all(case.kernel.pull(row).sum() < 1 for row in np.eye(n_positions))


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    n_positions=st.integers(1, 300),
    content=st.lists(st.floats(-300, 300), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_random_shapes(pair, n_positions, content, seed):
    assert_products(kernel_of(*pair, n_positions, [content]), *vectors(n_positions, seed))


@pytest.mark.parametrize(
    ("mask", "encoding"),
    [
        *(("causal", encoding) for encoding in CROSSING),
        *((mask, encoding) for mask in CROSSED for encoding in ("none", "rope(head_dim=8)", *KEYS[:1], *KEYS[-1:])),
    ],
)
def test_longer_contexts_cross_blocks_chunks_and_transforms(mask, encoding, monkeypatch):
    n_positions = 900
    monkeypatch.setattr(keys, "CHUNK", 4 * 256)
    assert_products(kernel_of(mask, encoding, n_positions, MIXED), *vectors(n_positions, seed=0))


def test_heads_of_different_kinds_add_up_to_their_layer():
    """Local and global heads side by side, as in hybrid stacks."""
    masks = [["sliding_window(width=9)", "causal", "prefix(length=30)", "causal"]]
    encodings = [["alibi", "none", "rope(head_dim=8)", "alibi"]]
    case = kernel_of(masks, encodings, 90, MIXED)
    assert len(case.kernel.kernels[0]) > 1
    assert_products(case, *vectors(90, seed=1))


@pytest.mark.parametrize("encoding", [spelling for group in ENCODING_SPELLINGS.values() for spelling in group])
def test_a_window_as_long_as_the_context_is_causal_and_a_prefix_as_long_is_full(encoding):
    row = vectors(70, seed=5)[2]
    for one, other in (("sliding_window(width=70)", "causal"), ("prefix(length=70)", "full")):
        np.testing.assert_array_equal(
            kernel_of(one, encoding, 70).kernel.pull(row), kernel_of(other, encoding, 70).kernel.pull(row)
        )


@dataclass(frozen=True)
class Rising(Encoding):
    """Logits in steps, -rise / 2 at distances 0 and 1, rise / 2 from 7 on."""

    name = "rising"
    rise: float

    def logits(self, distance, heads):
        steps = np.select([distance < 2, distance < 7], [-self.rise / 2, 0.0], self.rise / 2)
        return np.broadcast_to(steps, (heads, len(distance)))


RISES = [("causal", 700.0), ("causal", 590.0), ("causal", 59.0), ("prefix(length=60)", 700.0)]


@pytest.mark.parametrize(("mask", "rise"), [*RISES, ("sliding_window(9)", 700.0)])
def test_logits_that_rise_by_hundreds_of_nats_keep_the_rows_that_see_near_keys_only(mask, rise, monkeypatch):
    """Distances 0 and 1 share a logit, far ones lie up to 700 nats above: row 1 still halves between its two keys."""
    monkeypatch.setitem(ENCODINGS._variants, Rising.name, Rising)
    case = kernel_of(mask, Rising(rise), 90)
    if not mask.startswith("prefix"):
        row = np.eye(90)[1]
        np.testing.assert_allclose(case.kernel.pull(row)[:2], 0.5, rtol=TOLERANCE)
    assert_products(case, *vectors(90, seed=8))


def test_strong_rotary_logits_that_oppose_their_neighbours_are_taken_row_by_row():
    case = kernel_of("causal", "rope(base=2.0, head_dim=2, logit=-345.0)", 64)
    for row in np.eye(64):
        assert case.kernel.pull(row).sum() == pytest.approx(1.0, rel=TOLERANCE)
