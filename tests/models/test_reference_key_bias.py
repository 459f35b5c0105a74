"""A trained key bias of the reference transformer: what it adds, that it is learnt, kept, and seen by every theory."""

import numpy as np
import pytest
import torch

from posbias import Architecture, UsageError, load_model
from posbias.architecture import KeyBias
from posbias.models.reference.config import ReferenceConfig, constants_of, draw_parameters
from posbias.models.reference.forward import logit_bias
from posbias.models.reference.network import ReferenceTransformer, save_reference
from posbias.tasks.synthetic import CuedCopy
from posbias.theory import rollout_profile
from posbias.training.members import AdamW, Member, TrainingSchedule
from posbias.training.trainer import train_members

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
    fixed = constants_of(short, 5)["bias"][:1]
    added = logit_bias(short, weights, fixed)[0, 0, -1]
    assert torch.equal(added, torch.cat((VALUES[:3], VALUES[2:3], VALUES[2:3])))
    assert torch.equal(logit_bias(short, weights, fixed, rows=(1, 4))[0, 0, 1], added)


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
