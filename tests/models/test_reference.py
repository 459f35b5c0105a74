"""The reference transformer: its gradients are right, its parts do what they say, a trained key bias among them.

That its Jacobian is the rollout: `tests/measurement/test_depth.py`.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from posbias import Architecture, UsageError, load_model
from posbias.architecture import KeyBias
from posbias.models.reference.config import ReferenceConfig, constants_of, draw_parameters
from posbias.models.reference.forward import attention
from posbias.models.reference.network import ReferenceTransformer, save_reference
from posbias.tasks.synthetic import CuedCopy
from posbias.theory import rollout_profile
from posbias.training.members import AdamW, Member, TrainingSchedule
from posbias.training.trainer import train_members


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


N = 7
VALUES = torch.linspace(-1.0, 1.5, N, dtype=torch.float64)


def config(encoding: str = "none", *, trained: int | None = N, **settings: object) -> ReferenceConfig:
    made = Architecture(depth=2, heads=2, encoding=encoding, mixing=0.4)
    return ReferenceConfig(made, width=8, trained_key_bias=trained, **settings)  # type: ignore[arg-type]


def with_bias(of: ReferenceConfig) -> dict[str, torch.Tensor]:
    parameters = draw_parameters(of, torch.Generator().manual_seed(0))
    for name in parameters:
        if name.endswith("trained_key_bias"):
            assert not parameters[name].any(), "0 at initialisation"
            parameters[name] = parameters[name] + VALUES
    return parameters


@pytest.mark.parametrize("encoding", ["none", "gamma_key(alpha=2.5)"])
def test_it_is_added_to_the_encoding(encoding: str) -> None:
    base = Architecture(depth=2, heads=2, encoding=encoding)
    own = base.head_groups[0][0].encoding.pair_logits(np.zeros(1, int), np.arange(N), 2)[0, 0]
    fixed = config(f"key_bias(values={(own + VALUES.numpy()).tolist()})", trained=None, attention="content")
    both = ReferenceTransformer(config(encoding, attention="content"), with_bias(config(encoding, attention="content")))
    parts = {name: value for name, value in both.network.named_parameters() if "trained_key_bias" not in name}
    same = ReferenceTransformer(fixed, parts)
    tokens = torch.arange(N)[None]
    torch.testing.assert_close(both.network(both.embed(tokens))[1], same.network(same.embed(tokens))[1])


def test_keys_beyond_the_table_get_its_last_number() -> None:
    short, weights = config(trained=3), {"trained_key_bias": VALUES[None, None, :3].expand(1, 2, 3)}
    fixed = {"bias": constants_of(short, 5)["bias"][:1]}
    expected = torch.cat((VALUES[:3], VALUES[2:3], VALUES[2:3])).softmax(0)
    for rows in (None, (1, 4)):
        maps = attention(short, weights, fixed, torch.zeros(1, 1, 5, 8, dtype=torch.float64), rows=rows)
        torch.testing.assert_close(maps[0, 0, 0, -1], expected)


def test_it_is_learnt_saved_and_loaded(tmp_path) -> None:
    task = CuedCopy(N - 1, vocabulary=4)
    start = config("gamma_key(alpha=2.0)", attention="content", values="gaussian", residual="added",
                   vocabulary_size=task.vocabulary_size, outputs=task.n_outputs)  # fmt: skip
    member = Member("one", start, task, optimiser=AdamW(1e-2))
    (trained,) = train_members([member], TrainingSchedule(steps=4, batch=8, window=2, examples=8)).members
    assert trained.parameters is not None
    learnt = trained.parameters["blocks.0.trained_key_bias"]
    assert learnt.shape == (2, N)
    assert bool((learnt[:, :-1] != 0).all())
    model = load_model(save_reference(tmp_path, start, parameters=trained.parameters), dtype="float32")
    assert torch.equal(model.network.get_parameter("blocks.0.trained_key_bias"), learnt.float())
    fresh = load_model(tmp_path, init_seed=3)
    assert not fresh.network.get_parameter("blocks.0.trained_key_bias").any()


def test_the_architecture_of_a_model_has_it() -> None:
    made = config("gamma_key(alpha=2.0)")
    model = ReferenceTransformer(made, with_bias(made))
    found = Architecture.from_model(model, mixing=0.4)
    (group,) = found.head_groups[0]
    assert isinstance(group.encoding, KeyBias)
    vectors = model.embed(torch.zeros(1, N, dtype=torch.int64)).requires_grad_()
    # Values are the stream itself: the Jacobian is the rollout.
    influence = torch.autograd.grad(model.network(vectors)[0][0, -1, 0], vectors)[0][0, :, 0]
    assert influence.numpy() == pytest.approx(rollout_profile(found, n_positions=N), rel=1e-10)


def test_other_encodings_are_refused() -> None:
    with pytest.raises(UsageError, match="trained_key_bias is added to the encodings none, key_bias or gamma_key, got"):
        config("alibi")
    with pytest.raises(UsageError, match="reference weights"):
        config(trained=10**12)
    with pytest.raises(UsageError, match="reference weights"):
        ReferenceConfig(Architecture(depth=1), readout="mlp", readout_layers=10**9)
