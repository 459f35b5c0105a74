"""Linear layers as kernels: pulls equal products of dense matrices, and rows what transformers' own layers read."""

import numpy as np
import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from posbias import UsageError
from posbias.theory.kernels import StateKernel

N, WIDTH = 70, 6
ERASED = {"state space": 0.0, "delta rule": 1.0, "negative eigenvalues": 2.0}


def kernel(gates: int, erased: float, *, n_positions: int = N) -> StateKernel:
    generator = np.random.default_rng(gates)
    query, key = generator.normal(size=(2, n_positions, WIDTH))
    key /= np.linalg.norm(key, axis=1, keepdims=True)
    written = generator.random(n_positions)
    return StateKernel(query, key, generator.random((n_positions, gates)) ** 0.1, written, erased * written)


def dense(given: StateKernel) -> np.ndarray:
    """Entry by entry, from products of dense transition matrices."""
    n_positions, width = given.key.shape
    steps = [
        np.diag(np.broadcast_to(kept, width)) @ (np.eye(width) - erased * np.outer(key, key))
        for kept, key, erased in zip(given.kept, given.key, given.erased, strict=True)
    ]
    matrix = np.zeros((n_positions, n_positions))
    for query in range(n_positions):
        transition = np.eye(width)
        for key in range(query, -1, -1):
            matrix[query, key] = given.written[key] * given.key[key] @ transition @ given.query[query]
            transition = steps[key] @ transition
    return matrix


@pytest.mark.parametrize("erased", ERASED.values(), ids=ERASED)
@pytest.mark.parametrize("gates", [1, WIDTH])
def test_rows_and_pulls_are_those_of_the_dense_product(gates: int, erased: float) -> None:
    given = kernel(gates, erased)
    matrix = dense(given)
    for query in (0, 1, N - 1):
        np.testing.assert_allclose(given.row(query), matrix[query], rtol=0, atol=1e-12 * np.abs(matrix[query]).max())
    row = np.random.default_rng(3).normal(size=N)
    expected = row @ matrix
    np.testing.assert_allclose(given.pull(row), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def test_a_row_of_a_long_context_needs_no_matrix() -> None:
    given = kernel(1, 1.0, n_positions=100_000)
    long = given.row(99_999)
    assert np.isfinite(long).all()
    assert np.abs(long[:50_000]).max() < 1e-12 * np.abs(long).max()


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    """One prompt with one head: [1, position, 1, ...]."""
    return [torch.as_tensor(array, dtype=torch.float32)[None, :, None] for array in arrays]


def test_rows_are_what_gated_deltanet_reads() -> None:
    """With the unit vectors as values, the outputs of the last position are the row."""
    given = kernel(1, 1.0)
    query, key, value, gate, beta = tensors(given.query, given.key, np.eye(N), np.log(given.kept[:, 0]), given.written)
    output, _ = torch_recurrent_gated_delta_rule(
        query, key, value, g=gate, beta=beta, initial_state=None, output_final_state=False
    )
    np.testing.assert_allclose(output[0, -1, 0].numpy() * WIDTH**0.5, given.row(N - 1), atol=1e-5)


def test_rows_are_what_a_state_space_layer_reads() -> None:
    """Mamba 2: steps write and decay, and nothing is erased."""
    given = kernel(1, 0.0)
    rate = 0.3
    given = StateKernel(given.query, given.key, np.exp(-rate * given.written)[:, None], given.written, given.erased)
    query, key, value, step = tensors(given.query, given.key, np.eye(N), given.written)
    output = mamba2_chunk_scan(value, step, torch.tensor([-rate]), key, query, chunk_size=16)
    np.testing.assert_allclose(output[0, -1, 0].numpy(), given.row(N - 1), atol=1e-5)


def test_gates_must_fit() -> None:
    given = kernel(1, 1.0)
    with pytest.raises(UsageError, match="1 gate or 6, one per channel; got 3"):
        StateKernel(given.query, given.key, np.ones((N, 3)), given.written, given.erased)
    with pytest.raises(UsageError, match=r"kept must lie in \[0, 1\]"):
        StateKernel(given.query, given.key, 2 * given.kept, given.written, given.erased)
