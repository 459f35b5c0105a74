"""Mean field of the published retrieval networks: vectors as inputs, heads without output maps, positions added."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import Architecture, UsageError, predict
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field import mean_field
from published_networks import retrieval_network

N = 17
WIDTH = 64
SEEDS = 32
NETWORKS = {
    "plain": retrieval_network(Architecture(4), width=WIDTH),
    "prefix": retrieval_network(Architecture(2, mask="prefix(length=4)"), width=WIDTH),
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
    theory = mean_field(born(NETWORKS[name], 0, vectors), N)
    away = profile_distance(theory.jacobian_norm, measured.norm)
    assert away < max(0.01, 2 * measured.noise)
    assert away < 0.2 * profile_distance(np.ones(N), measured.norm)
    assert theory.jacobian_norm.sum() == pytest.approx(measured.norm.sum(), rel=0.1)


def test_what_has_no_theory_is_refused():
    with pytest.raises(UsageError, match="input vectors; give it items"):
        mean_field(ReferenceTransformer(NETWORKS["plain"]), N)
    with pytest.raises(UsageError, match="values drawn for every head"):
        mean_field(ReferenceTransformer(Architecture(2)), N)
    normed = born(replace(NETWORKS["sinusoidal"], embedding_norm=True), 0, items())
    with pytest.raises(UsageError, match="no embedding norm before positions"):
        mean_field(normed, N)
    model = born(NETWORKS["plain"], 0, items())
    with pytest.raises(UsageError, match=r"no prompts of given vectors, .* leave them out"):
        mean_field(model, 6, prompts=Prompts(np.zeros((1, 6), dtype=np.int64)))
    assert predict(model, N, theory="mean_field").profile.influence.sum() == pytest.approx(1)
