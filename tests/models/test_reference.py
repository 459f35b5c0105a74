"""The reference transformer: its gradients are right, its parts do what they say.

That its Jacobian is the rollout: `tests/measurement/test_linear_model.py`.
"""

import pytest
import torch
from torch import Tensor

from posbias import Architecture, UsageError
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.network import ReferenceTransformer


@pytest.mark.parametrize("norm", ["none", "pre"])
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
    maps = attention_maps(config, *model.network.stack(constant), constant[None])[0, 0, 0]
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
    masks, encodings = ["causal", "sliding_window(width=3)"], ["alibi", "none"]
    architecture = Architecture(depth=2, heads=2, mask=masks, encoding=encodings)
    again = Architecture.from_model(ReferenceTransformer(architecture), mixing=architecture.mixing)
    assert again.describe() == architecture.describe()


def test_sinks_are_refused_rather_than_ignored() -> None:
    """Theory knows them; a model without them would be measured as if it had them."""
    with pytest.raises(UsageError, match="reference models have no sinks, the architecture has logits up to"):
        ReferenceConfig(Architecture(depth=1, heads=2, sinks=[[float("-inf"), 0.5]]))
