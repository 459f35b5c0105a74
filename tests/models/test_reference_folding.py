"""Value maps that wait, and products arranged for speed: the numbers and gradients of the plain forward."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posbias import Architecture
from posbias.models.reference.attention import attention_of, dots, mixed
from posbias.models.reference.config import ReferenceConfig, ReferenceShape, shape_of
from posbias.models.reference.forward import folds, forward
from posbias.models.reference.parameters import constants_of, draw_parameters, stacked

SAME = 1e-12
"""Double precision; products in another order."""


def network(depth: int = 2, heads: int = 1, **choices: object) -> ReferenceConfig:
    parts = {name: choices.pop(name) for name in ("mask", "encoding") if name in choices}
    settings = {
        "width": 8,
        "vocabulary_size": None,
        "outputs": 3,
        "attention": "content",
        "values": "gaussian",
        "residual": "none",
        "initialisation": "linear",
    }
    return ReferenceConfig(Architecture(depth, heads, **parts), **{**settings, **choices})


def run(config: ReferenceConfig, shape: ReferenceShape, rows: tuple[int, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of the inputs and every parameter."""
    drawn = [draw_parameters(config, torch.Generator().manual_seed(seed)) for seed in range(2)]
    leaves = {name: value.requires_grad_() for name, value in stacked(drawn).items()}
    constants = stacked([constants_of(config, shape.n_positions)] * 2)
    inputs = torch.randn(2, 3, shape.n_positions, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits = forward(shape, leaves, constants, inputs.requires_grad_(), rows=rows)
    weights = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).view_as(logits)
    found = torch.autograd.grad((logits * weights).sum(), [inputs, *leaves.values()], materialize_grads=True)
    return logits.detach(), dict(zip(["inputs", *leaves], found, strict=True))


NETWORKS = {
    "one layer": network(1),
    "two layers": network(2),
    "four layers": network(4, mask="sliding_window(width=3)", encoding="decay(rate=0.8)"),
    "rotary": network(3, encoding="rope(head_dim=8)"),
    "output map": network(3, head_width=6),
    "joined": network(3, output_map=False, readout="mlp"),
    "positional": network(3, attention="positional", encoding="alibi"),
}
OTHERS = {
    "residual": network(residual="added"),
    "heads": network(heads=2),
    "pre-norm": network(norm="pre"),
    "MLP": network(mlp=True),
    "biases": network(biases=True),
    "turned stream": network(rotate_stream=True),
    "identity": network(values="identity"),
}


@pytest.mark.parametrize("n_positions", [1, 7, 24])
@pytest.mark.parametrize("name", [*NETWORKS, *OTHERS])
def test_numbers_and_gradients_are_those_of_the_plain_forward(name: str, n_positions: int) -> None:
    config = (NETWORKS | OTHERS)[name]
    shape = shape_of(config, n_positions)
    assert folds(shape) == (name in NETWORKS)
    last = n_positions - 1
    for rows in {(last,), tuple({0, last // 2, last}), tuple(range(n_positions))}:
        plain, expected = run(config, replace(shape, merges=False), rows)
        logits, gradients = run(config, shape, rows)
        torch.testing.assert_close(logits, plain, rtol=SAME, atol=SAME)
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=SAME, atol=SAME, msg=parameter)


def test_one_row_of_the_last_layer_never_forms_the_stream_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = sys.modules[folds.__module__]
    through = module._through
    monkeypatch.setattr(module, "_through", lambda *args, **kept: seen.append(kept) or through(*args, **kept))
    config = network(3)
    run(config, shape_of(config, 9), (8,))
    assert seen == [{"rows": (8,)}]
    run(config, shape_of(config, 9), tuple(range(9)))
    rotary = NETWORKS["rotary"]
    run(rotary, shape_of(rotary, 9), (8,))
    assert len(seen) == 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keys", [1, 5])
def test_gradients_of_products_match_central_differences(rows: int, keys: int) -> None:
    draw = torch.Generator().manual_seed(0)
    left, right, maps = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((2, 3, rows, 4), (2, 3, keys, 4), (2, 3, keys, rows))
    )
    assert torch.autograd.gradcheck(dots, (left, right))
    assert torch.autograd.gradcheck(mixed, (maps.detach().transpose(2, 3).requires_grad_(), right))
    assert torch.autograd.gradcheck(mixed, (maps, left))


@pytest.mark.parametrize("keys", [2, 18, 40])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_is_the_softmax_of_logits_and_bias(keys: int, rows: int, shared: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 2, rows, 4, generator=draw, dtype=torch.float64)
    key = torch.randn(2, 3, 1 if shared else 2, keys, 4, generator=draw, dtype=torch.float64)
    bias = torch.randn(2, 1, 2, rows, keys, generator=draw, dtype=torch.float64)
    bias[..., 1:] = bias[..., 1:].where(bias[..., 1:] > 0, -torch.inf)
    expected = torch.softmax(query @ key.transpose(3, 4) + bias, dim=-1)
    torch.testing.assert_close(attention_of(query, key, bias), expected, rtol=SAME, atol=SAME)
