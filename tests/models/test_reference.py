"""The reference transformer: its Jacobian is the rollout, its gradients are right, its parts do what they say."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posbias import Architecture, UsageError
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.network import ReferenceTransformer

EXACT = 1e-10
"""Float64 with a handful of layers."""

ARCHITECTURES = {
    "causal": Architecture(depth=4, heads=2, mixing=0.3),
    "alibi": Architecture(depth=3, heads=6, encoding="alibi", mixing=[0.1, 0.5, 0.9]),
    "window-decay": Architecture(depth=3, mask="sliding_window(width=5)", encoding="decay(rate=0.8)", mixing=0.4),
    "prefix": Architecture(depth=2, mask="prefix(length=3)", mixing=0.6),
    "full": Architecture(depth=2, mask="full", mixing=0.6),
    "rope": Architecture(depth=3, heads=2, encoding="rope(base=100.0, head_dim=8, logit=3.0)", mixing=0.5),
    "content": Architecture(depth=3, heads=2, mixing=0.5, content=[[-30.0, 2.0], [0.5, 260.0], [1.0, -1.0]]),
    "per-layer": Architecture(depth=2, heads=2, mask=["causal", "sliding_window(width=3)"], encoding=["alibi", "none"]),
}


def slow_rollout(architecture: Architecture, n_positions: int) -> np.ndarray:
    """The definition, with loops: softmax row by row, transition by transition."""
    rollout = np.eye(n_positions)
    for layer, groups in enumerate(architecture.head_groups):
        mean = np.zeros((n_positions, n_positions))
        for group in groups:
            for place in range(len(group.heads)):
                for query in range(n_positions):
                    keys = np.flatnonzero(group.mask.visible(n_positions)[query])
                    logits = np.array([group.logits(np.array([query - key]))[place, 0] for key in keys])
                    logits[keys == query] += group.content[place]
                    weights = np.exp(logits - logits.max())
                    mean[query, keys] += weights / weights.sum() / architecture.heads
        mixing = architecture.layer_mixing[layer]
        rollout = ((1 - mixing) * np.eye(n_positions) + mixing * mean) @ rollout
    return rollout


def jacobian_norms(model: ReferenceTransformer, n_positions: int) -> np.ndarray:
    token_ids = torch.randint(0, model.vocabulary_size, (1, n_positions), generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda x: model.last(x).hidden[0], model.embed(token_ids))
    norms: np.ndarray = jacobian[:, 0].norm(dim=(0, 2)).numpy()
    return norms


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("rotate_stream", [False, True])
def test_jacobian_norms_are_the_rollout(name: str, rotate_stream: bool) -> None:
    config = ReferenceConfig(ARCHITECTURES[name], width=8, rotate_stream=rotate_stream)
    norms = jacobian_norms(ReferenceTransformer(config), n_positions=12)
    np.testing.assert_allclose(norms / np.sqrt(8), slow_rollout(ARCHITECTURES[name], 12)[-1], rtol=EXACT, atol=1e-14)


@given(depth=st.integers(1, 4), mixing=st.floats(0, 1), width=st.integers(1, 5), seed=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_jacobian_norms_sum_to_one(depth: int, mixing: float, width: int, seed: int) -> None:
    config = ReferenceConfig(Architecture(depth=depth, mixing=mixing), width=width, seed=seed)
    norms = jacobian_norms(ReferenceTransformer(config), n_positions=7)
    assert norms.sum() / np.sqrt(width) == pytest.approx(1, abs=EXACT)


def test_orthogonal_values_without_residual_are_attention_only() -> None:
    architecture = Architecture(depth=3, heads=2, encoding="alibi", mixing=1)
    model = ReferenceTransformer(ReferenceConfig(architecture, width=6, values="orthogonal", residual="none"))
    np.testing.assert_allclose(jacobian_norms(model, 9) / np.sqrt(6), slow_rollout(architecture, 9)[-1], rtol=EXACT)


@pytest.mark.parametrize("norm", ["none", "pre", "post"])
@pytest.mark.parametrize("residual", ["mixed", "added", "none"])
@pytest.mark.parametrize("attention", ["positional", "content"])
def test_gradients_match_central_differences(norm: str, residual: str, attention: str) -> None:
    architecture = Architecture(depth=2, heads=2, encoding=["rope(head_dim=2)", "alibi"], mixing=0.4)
    config = ReferenceConfig(
        architecture, width=4, norm=norm, residual=residual, attention=attention, values="gaussian", mlp=True
    )
    model = ReferenceTransformer(config)
    embeddings = model.embed(torch.tensor([[3, 1, 4]])).requires_grad_()

    def probability(x: Tensor) -> Tensor:
        return model.last(x).logits.softmax(-1)[:, 7]

    assert torch.autograd.gradcheck(probability, embeddings)


def test_it_is_causal_and_its_batch_rows_are_independent() -> None:
    config = ReferenceConfig(
        Architecture(depth=2, heads=2, encoding="rope(head_dim=4)"), width=8, attention="content", norm="pre"
    )
    model = ReferenceTransformer(config)
    first = model.embed(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]))
    second = model.embed(torch.tensor([[1, 2, 9, 9], [5, 6, 7, 8]]))
    before, after = model.network(first)[0], model.network(second)[0]
    torch.testing.assert_close(before[0, :2], after[0, :2])
    torch.testing.assert_close(before[1], after[1])
    assert not torch.allclose(before[0, 2], after[0, 2])


def test_rotary_attention_depends_on_distance_alone() -> None:
    config = ReferenceConfig(
        Architecture(depth=1, heads=2, encoding="rope(head_dim=4)", mask="full"), width=8, attention="content"
    )
    model = ReferenceTransformer(config)
    constant = model.embed(torch.full((1, 6), 5))
    maps = attention_maps(*model.network.stack(constant), constant[None])[0, 0, 0]
    logits = maps.log() - maps.diagonal(dim1=-2, dim2=-1).log()[..., None]  # up to a constant for each query
    for distance in range(-5, 6):
        diagonal = torch.diagonal(logits, offset=distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[:, :1].expand_as(diagonal))


def test_measured_mixing_is_the_configured_one_where_norms_agree() -> None:
    model = ReferenceTransformer(Architecture(depth=2, mixing=[0.25, 0.75]))
    norms = model.branch_norms(torch.full((1, 5), 3))  # equal tokens: attention averages equal vectors
    mixing = norms.branch / (norms.stream + norms.branch)
    torch.testing.assert_close(mixing[:, 0, 0], torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert norms.stream.shape == (2, 1, 5)


def test_measured_mixing_sees_the_vectors_of_position() -> None:
    added = ReferenceConfig(Architecture(depth=1, mixing=0.5), width=4, learned_positions=3)
    model = ReferenceTransformer(added)
    with torch.no_grad():
        model.network.get_parameter("positions")[:2] = 0
        model.network.get_parameter("positions")[2] = -model.embed(torch.tensor([[3]]))[0, 0]
    norms = model.branch_norms(torch.full((1, 3), 3))
    assert norms.stream[0, 0, 2] == 0 < norms.stream[0, 0, 1]


def test_the_seed_decides_everything_and_nothing_global_is_touched() -> None:
    state = torch.random.get_rng_state()
    architecture = Architecture(depth=2, heads=2)
    one, same, other = (
        ReferenceTransformer(ReferenceConfig(architecture, values="gaussian", seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.random.get_rng_state())
    for (_, first), (_, second) in zip(one.network.named_parameters(), same.network.named_parameters(), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(one.network.embedding, other.network.embedding)
    assert not any(parameter.requires_grad for parameter in one.network.parameters())


def test_traits_give_the_architecture_back() -> None:
    architecture = ARCHITECTURES["per-layer"]
    again = Architecture.from_model(ReferenceTransformer(architecture), mixing=architecture.mixing)
    assert again.describe() == architecture.describe()


def test_sinks_are_refused_rather_than_ignored() -> None:
    """Theory knows them; a model without them would be measured as if it had them."""
    with pytest.raises(UsageError, match="reference models have no sinks, the architecture has logits up to"):
        ReferenceConfig(Architecture(depth=1, heads=2, sinks=[[float("-inf"), 0.5]]))
