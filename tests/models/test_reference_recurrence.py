"""Linear layers of the reference transformer: the recurrence as defined, in a network, in measures and theories."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

import posbias as pb
from posbias import Architecture, UsageError
from posbias.models.reference.config import NORM_EPSILON, ReferenceConfig, draw_parameters
from posbias.models.reference.forward import CHUNK, attention_maps, recurrence
from posbias.models.reference.network import ReferenceTransformer, load_reference, save_reference
from posbias.prompts.prompts import Prompts

N = 7
EXACT = 1e-10
LINEAR = "recurrent(slopes=[0.05, 0.6])"
PATTERNS = {
    "pure": [LINEAR] * 3,
    "attention first": ["none", LINEAR, LINEAR],
    "attention last": [LINEAR, LINEAR, "rope(head_dim=4)"],
    "alternating": [LINEAR, "alibi", LINEAR],
}


def config(encoding: Any, *, heads: int = 2, **changes: Any) -> ReferenceConfig:
    made = Architecture(len(encoding), heads, encoding=encoding)
    base = {"attention": "content", "values": "gaussian", "residual": "added", "norm": "pre", "mlp": True}
    return ReferenceConfig(made, width=8, **{**base, **changes})


def build(chosen: ReferenceConfig) -> ReferenceTransformer:
    """A model as after training: gates and gains of its own."""
    parameters = draw_parameters(chosen, torch.Generator().manual_seed(3))
    generator = torch.Generator().manual_seed(5)
    for name, value in parameters.items():
        if name.endswith(("gain", "bias", "rate")):
            value += 0.4 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    return ReferenceTransformer(chosen, parameters)


def prompts(count: int = 2, n_positions: int = N) -> Prompts:
    return Prompts(np.random.default_rng(1).integers(0, 64, (count, n_positions)))


def one_by_one(query: Tensor, key: Tensor, value: Tensor, fall: Tensor) -> Tensor:
    """The definition: a state that fades, is written to and read, token by token."""
    state, rows = query.new_zeros(*query.shape[:-2], query.shape[-1], value.shape[-1]), []
    for t in range(query.shape[-2]):
        state = torch.exp(-fall[..., t])[..., None, None] * state + key[..., t, :, None] * value[..., t, None, :]
        rows.append((query[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(rows, dim=-2)


@given(n=st.integers(1, 12), chunk=st.integers(1, 13), steepest=st.floats(0, 400), seed=st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_chunks_are_the_sequential_recurrence_and_so_are_their_gradients(
    n: int, chunk: int, steepest: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, n, 3), (2, n, 3), (2, n, 4), (2, n)]
    drawn = [torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for shape in shapes]
    leaves = [*drawn[:3], (drawn[3] + 0.5) * steepest]
    of_chunks, by_token = ([leaf.clone().requires_grad_() for leaf in leaves] for _ in range(2))
    fast, slow = recurrence(*of_chunks, chunk=chunk), one_by_one(*by_token)
    torch.testing.assert_close(fast, slow, rtol=EXACT, atol=EXACT)
    weights = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    of_fast, of_slow = (
        torch.autograd.grad((rows * weights).sum(), of) for rows, of in ((fast, of_chunks), (slow, by_token))
    )
    torch.testing.assert_close(of_fast, of_slow, rtol=EXACT, atol=EXACT)


def test_a_long_context_is_read_across_chunks() -> None:
    model = build(config([LINEAR, "none"]))
    ids = torch.from_numpy(prompts(1, CHUNK + 9).token_ids)
    whole, beginning = (model.network(model.embed(ids[:, :n]))[0] for n in (CHUNK + 9, CHUNK - 5))
    torch.testing.assert_close(whole[:, : CHUNK - 5], beginning, rtol=EXACT, atol=EXACT)
    changed = ids.clone()
    changed[0, 0] += 1
    assert not torch.allclose(model.network(model.embed(changed))[0][0, -1], whole[0, -1], rtol=1e-9, atol=0)


def test_the_layer_is_the_one_that_is_described() -> None:
    """Written out once more with loops over heads and tokens, gates and slopes included."""
    chosen = config([LINEAR], norm="none", residual="none", mlp=False, biases=True)
    model = build(chosen)
    (block,) = model.network.blocks
    weights = {name: value.detach() for name, value in block.named_parameters()}
    stream = model.embed(torch.from_numpy(prompts(1).token_ids))[0]
    carried = []
    for head, slope in enumerate((0.05, 0.6)):
        state, rows = torch.zeros(4, 4, dtype=torch.float64), []
        for x in stream:
            written = softplus(x @ weights["step"][:, head] + weights["step_bias"][head])
            key, value = (x @ weights[name][head] + weights[f"{name}_bias"][head] for name in ("key", "value"))
            lost = slope * torch.exp(weights["rate"][head]) * written / np.log(2)
            state = torch.exp(-lost) * state + written * torch.outer(key, value)
            read = (x @ weights["query"][head] + weights["query_bias"][head]) @ state / 2
            rows.append(read / (read.square().mean() + NORM_EPSILON).sqrt())
        carried.append(torch.stack(rows) @ weights["output"][head])
    expected = carried[0] + carried[1] + weights["output_bias"]
    torch.testing.assert_close(model.network(stream[None])[0][0], expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_measured_influence_is_autograd_and_the_power_rollout_is_refused(pattern: str) -> None:
    model, one = build(config(PATTERNS[pattern])), prompts(1)
    embeddings = model.embed(torch.from_numpy(one.token_ids))
    jacobian = torch.autograd.functional.jacobian(lambda x: model.last(x).hidden[0], embeddings)[:, 0]
    norms = jacobian.norm(dim=(0, 2))
    measured = pb.measure(model, one, kinds="jacobian(exact=True)").profiles["jacobian"].influence
    np.testing.assert_allclose(measured, (norms / norms.sum()).numpy(), rtol=EXACT)
    with pytest.raises(UsageError, match="power_rollout, are refused; rollout is allowed"):
        pb.predict(model, theory="power_rollout", prompts=one)


def test_theories_read_its_own_decays_and_nothing_takes_it_for_attention(tmp_path) -> None:
    chosen = config(PATTERNS["attention first"])
    born = ReferenceTransformer(chosen)
    assert Architecture.from_model(born).describe()["encoding"][1] == [LINEAR] * 2
    model = load_reference(save_reference(tmp_path, chosen, parameters=dict(build(chosen).network.named_parameters())))
    (group,) = Architecture.from_model(model).head_groups[2]
    block = model.network.blocks[2]
    bare = softplus(block.step_bias) * block.rate.exp() / np.log(2)
    np.testing.assert_allclose(group.linear_slopes(), bare.numpy() * [0.05, 0.6], rtol=1e-12)
    prediction = pb.predict(model, theory="rollout", prompts=prompts())
    assert any("decays at bare gates" in caveat for caveat in prediction.caveats)
    stack = model.network.stack(model.embed(torch.zeros(1, N, dtype=torch.int64)))
    with pytest.raises(UsageError, match=r"its layers 1, 2 are linear ones \(recurrent\), which have no attention"):
        attention_maps(chosen, *stack, torch.zeros(1, 1, N, 8).double())
    with pytest.raises(UsageError, match="a linear layer"):
        pb.predict(born, N, theory="mean_field")
    with pytest.raises(UsageError, match="cannot be seen"):
        pb.attention(model, prompts())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"encoding": [[LINEAR, "none"]]}, "in all of its heads"),
        ({"mask": "full"}, "with the mask causal, got full"),
        ({"values": "identity"}, "with values gaussian, got identity"),
        ({"content": 0.5}, "without a content offset"),
    ],
)
def test_what_a_linear_layer_would_ignore_is_refused(change: dict[str, Any], reason: str) -> None:
    settings = {name: change[name] for name in ("encoding", "mask", "content") if name in change}
    rest = {name: value for name, value in change.items() if name not in settings}
    made = Architecture(1, 2, **{"encoding": LINEAR, **settings})
    with pytest.raises(UsageError, match=f"reference layer 0 is linear .recurrent., which is allowed {reason}"):
        replace(config([LINEAR]), architecture=made, **rest)
