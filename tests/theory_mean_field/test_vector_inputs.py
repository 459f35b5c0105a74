"""Mean field of the published retrieval networks: vectors as inputs, heads without output maps, positions added."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import Architecture, UsageError, predict
from posbias.architecture import Sinusoidal
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field import mean_field, spec_of
from posbias.theory.mean_field.bins import unit_bins
from posbias.theory.mean_field.recursion import input_kernel, vector_kernel
from published_networks import retrieval_network

N = 17
WIDTH = 64
SEEDS = 32
NETWORKS = {
    "plain": retrieval_network(Architecture(4), width=WIDTH),
    "residual": retrieval_network(Architecture(4), width=WIDTH, residual=True),
    "window": retrieval_network(Architecture(4, mask="sliding_window(width=5)"), width=WIDTH),
    "prefix": retrieval_network(Architecture(2, mask="prefix(length=4)"), width=WIDTH),
    "decay": retrieval_network(Architecture(4, encoding="decay(rate=0.8)"), width=WIDTH),
    "sinusoidal": retrieval_network(Architecture(4, encoding=f"sinusoidal(width={WIDTH})"), width=WIDTH, residual=True),
    "two-heads": ReferenceConfig(
        Architecture(4, 2),
        width=WIDTH,
        vocabulary_size=None,
        outputs=4,
        attention="content",
        values="gaussian",
        output_map=False,
        residual="added",
        norm="pre",
        mlp=True,
    ),
}


def items(scale: float = 1.0) -> torch.Tensor:
    """Vectors of mean square `scale`."""
    return scale**0.5 * torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(9))


def born(config: ReferenceConfig, seed: int, vectors: torch.Tensor) -> ReferenceTransformer:
    return ReferenceTransformer(replace(config, seed=seed, dtype="float64"), items=vectors)


@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_births(name, jacobians, profile_distance):
    """W1 below .01, or below twice the noise (half of the seeds against the other) where that is more."""
    vectors, ids = items(), np.random.default_rng(0).permutation(40)[:N]
    measured = jacobians(lambda seed: born(NETWORKS[name], seed, vectors), N, SEEDS, ids)
    theory = mean_field(born(NETWORKS[name], 0, vectors), N, prompts=Prompts(ids[None].astype(np.int64)))
    away = profile_distance(theory.jacobian_norm, measured.norm)
    assert away < max(0.01, 2 * measured.noise)
    assert away < 0.2 * profile_distance(np.ones(N), measured.norm)
    assert theory.jacobian_norm.sum() == pytest.approx(measured.norm.sum(), rel=0.1)


def test_orthogonal_vectors_are_tokens() -> None:
    """A prompt that repeats orthogonal vectors of mean square 1 has the kernel of one that repeats its tokens."""
    vectors = WIDTH**0.5 * torch.eye(WIDTH, dtype=torch.float64)
    model = born(NETWORKS["residual"], 0, vectors)
    spec, bins, ids = spec_of(model), unit_bins(8), np.array([1, 2, 1, 3, 2, 1, 4, 4])
    ours, theirs = vector_kernel(spec, bins, vectors[ids].numpy()), input_kernel(spec, bins, token_ids=ids)
    np.testing.assert_allclose(ours.block, theirs.block, atol=1e-12)
    np.testing.assert_allclose(ours.same, theirs.same)


def test_added_sinusoids_are_those_of_the_spec():
    """Given vectors carry their cross terms with the positions; vectors that are not given have none on average."""
    model = born(NETWORKS["sinusoidal"], 0, items())
    spec = spec_of(model)
    assert spec.added == Sinusoidal(width=WIDTH)
    ids = np.arange(6)
    given = model.items[ids].numpy() + Sinusoidal(width=WIDTH).vectors_at(ids)
    kernel = vector_kernel(spec, unit_bins(6), model.items[ids].numpy())
    np.testing.assert_allclose(kernel.block, given @ given.T / WIDTH, rtol=1e-12)
    waves = Sinusoidal(width=WIDTH).vectors_at(ids)
    unknown = input_kernel(spec, unit_bins(6)).block
    np.testing.assert_allclose(unknown, waves @ waves.T / WIDTH + spec.embedding * np.eye(6), rtol=1e-12)


def test_what_has_no_theory_is_refused():
    with pytest.raises(UsageError, match="input vectors; give it items"):
        mean_field(ReferenceTransformer(NETWORKS["plain"]), N)
    with pytest.raises(UsageError, match="values drawn for every head"):
        mean_field(ReferenceTransformer(Architecture(2)), N)
    normed = born(replace(NETWORKS["sinusoidal"], embedding_norm=True), 0, items())
    with pytest.raises(UsageError, match="no embedding norm before positions"):
        mean_field(normed, N)
    model = born(NETWORKS["plain"], 0, items())
    with pytest.raises(UsageError, match="given vectors at up to 512 positions, got 600"):
        mean_field(model, 600, prompts=Prompts(np.zeros((1, 600), dtype=np.int64)))
    assert predict(model, N, theory="mean_field").profile.influence.sum() == pytest.approx(1)
