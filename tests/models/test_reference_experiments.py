"""The networks of published experiments, written out once more with loops; stacked, each is as alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from posbias import Architecture, UsageError
from posbias.models.reference.config import ReferenceConfig, constants_of, draw_parameters, shape_of, stacked
from posbias.models.reference.forward import attention_maps, forward
from published_networks import copy_network, retrieval_network

EXACT = 1e-12
N, BATCH = 8, 2
MASKS = ["full", "causal", "sliding_window(width=5)", "prefix(length=4)"]
ENCODINGS = ["none", "sinusoidal(width=8)", "rope(head_dim=8)", "decay(rate=0.8)"]


def drawn(config: ReferenceConfig, seed: int = 0) -> dict[str, Tensor]:
    return draw_parameters(config, torch.Generator().manual_seed(seed))


def run(config: ReferenceConfig, parameters: dict[str, Tensor], inputs: Tensor, rows: tuple[int, ...]) -> Tensor:
    """One model as a stack of one."""
    n_positions = inputs.shape[1]
    constants = stacked([constants_of(config, n_positions)])
    return forward(config, stacked([parameters]), constants, inputs[None], rows=rows)[0]


def visible(mask: str, query: int, key: int) -> bool:
    return {
        "full": True,
        "causal": key <= query,
        "sliding_window(width=5)": query - 5 < key <= query,
        "prefix(length=4)": key <= query or (query < 4 and key < 4),
    }[mask]


def turn(vector: Tensor, position: int) -> Tensor:
    """Rotary positions through complex numbers."""
    half = len(vector) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag])


def retrieval_by_hand(
    parameters: dict[str, Tensor], sequence: Tensor, *, mask: str, encoding: str, kept: float
) -> tuple[Tensor, Tensor]:
    """Logits of the last token, and all attention weights [layer, query, key]."""
    stream = sequence.clone()
    if encoding.startswith("sinusoidal"):
        for position in range(N):
            for pair in range(4):
                angle = position * 10000.0 ** (-2 * pair / 8)
                stream[position, 2 * pair] += np.sin(angle)
                stream[position, 2 * pair + 1] += np.cos(angle)
    maps = []
    for layer in range(2):
        query, key, value = (parameters[f"blocks.{layer}.{name}"][0] for name in ("query", "key", "value"))
        weights = torch.zeros(N, N, dtype=torch.float64)
        for i in range(N):
            for j in range(N):
                q, k = stream[i] @ query, stream[j] @ key
                if encoding.startswith("rope"):
                    q, k = turn(q, i), turn(k, j)
                if visible(mask, i, j):
                    weights[i, j] = torch.exp(q @ k / 8**0.5)
        weights = weights / weights.sum(dim=1, keepdim=True)
        if encoding.startswith("decay"):  # the softmaxed weights times 0.8^|i - j|, normalised again
            distance = torch.arange(N)[:, None] - torch.arange(N)[None, :]
            weights = weights * 0.8 ** distance.abs().double()
            weights = weights / weights.sum(dim=1, keepdim=True)
        maps.append(weights)
        stream = kept * stream + weights @ stream @ value
    hidden = stream[-1]
    for layer in range(3):
        hidden = torch.relu(hidden @ parameters[f"readout.{layer}.weight"] + parameters[f"readout.{layer}.bias"])
    return hidden @ parameters["readout.3.weight"] + parameters["readout.3.bias"], torch.stack(maps)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_the_retrieval_network_is_what_its_definition_says(mask: str, encoding: str, kept: float) -> None:
    config = retrieval_network(Architecture(2, mask=mask, encoding=encoding), width=8, labels=5, residual=kept > 0)
    config = replace(config, dtype="float64")
    parameters = drawn(config)
    inputs = torch.randn(BATCH, N, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits = run(config, parameters, inputs, rows=(N - 1,))
    constants = stacked([constants_of(config, N)])
    maps = attention_maps(config, stacked([parameters]), constants, inputs[None])
    for row in range(BATCH):
        expected, weights = retrieval_by_hand(parameters, inputs[row], mask=mask, encoding=encoding, kept=kept)
        torch.testing.assert_close(logits[row, 0], expected, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(maps[:, 0, row, 0], weights, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_the_copy_network_is_what_its_definition_says(residual: bool, mlp: bool) -> None:
    config = replace(copy_network(Architecture(2), width=6, residual=residual, mlp=mlp), dtype="float64")
    parameters = drawn(config)
    token_ids = torch.randint(0, 10, (BATCH, N), generator=torch.Generator().manual_seed(2))
    found = run(config, parameters, token_ids, rows=(N - 1,))[:, 0]
    stream = parameters["embedding"][token_ids]
    for layer in range(2):
        own = {name.split(".")[2]: value for name, value in parameters.items() if name.startswith(f"blocks.{layer}.")}

        query, key, value = (stream @ own[name][0] for name in ("query", "key", "value"))
        logits = query @ key.transpose(1, 2) / 6**0.5
        logits = logits.masked_fill(torch.ones(N, N).triu(1).bool(), -torch.inf)
        branch = torch.softmax(logits, dim=-1) @ value @ own["output"][0]
        stream = stream + branch if residual else branch
        if mlp:
            update = torch.nn.functional.gelu(stream @ own["up"]) @ own["down"]
            stream = stream + update if residual else update
    expected = stream[:, -1] @ parameters["unembedding"].T
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("rows", [(N - 1,), (0,), (7, 1)])
def test_wanted_rows_are_rows_of_the_whole(rows: tuple[int, ...]) -> None:
    config = ReferenceConfig(
        Architecture(2, 2, encoding="alibi", mixing=0.4),
        width=8,
        attention="content",
        values="gaussian",
        norm="pre",
        mlp=True,
        initialisation="linear",
    )
    token_ids = torch.randint(0, 64, (BATCH, N), generator=torch.Generator().manual_seed(3))
    every = run(config, drawn(config), token_ids, rows=tuple(range(N)))
    torch.testing.assert_close(run(config, drawn(config), token_ids, rows=rows), every[:, list(rows)])


@pytest.mark.parametrize(("initialisation", "deviation"), [("linear", 3**-0.5 / 8), ("gaussian", 1 / 8)])
def test_weights_are_drawn_as_configured(initialisation: str, deviation: float) -> None:
    config = ReferenceConfig(
        Architecture(1), width=64, attention="content", initialisation=initialisation, readout="mlp"
    )
    parameters = drawn(config)
    assert float(parameters["blocks.0.query"].std()) == pytest.approx(deviation, rel=0.05)
    assert float(parameters["blocks.0.query"].abs().max()) <= (1 / 8 if initialisation == "linear" else 1)
    assert bool(parameters["readout.0.bias"].any()) == (initialisation == "linear")
    single = drawn(replace(config, dtype="float32"))
    assert all(torch.equal(single[name], parameters[name].float()) for name in parameters)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 7, "attention": "content"}, "reference width 7 is not a multiple of 2 heads"),
        ({"dtype": "float16"}, "reference: dtype must be one of float32, float64, got 'float16'"),
        ({"vocabulary_size": None}, "reference outputs must be given if there is no vocabulary"),
        ({"outputs": 0}, "reference: outputs must be a whole number >= 1"),
        ({"width": True}, "reference: width must be a whole number >= 1"),
        (
            {"architecture": Architecture(1, encoding="sinusoidal(width=8)"), "absolute": "added"},
            "reference width 16 differs from the 8 features of sinusoidal",
        ),
        (
            {"architecture": Architecture(1, encoding="rope"), "attention": "content", "width": 5},
            "rotary positions need an even number of features per head, got 5",
        ),
    ],
)
def test_bad_configurations_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ReferenceConfig(**{"architecture": Architecture(depth=1, heads=2), **change})


SAME = 1e-5
"""Single precision; products over members may be summed in another order than for one."""

PLAIN = [
    Architecture(2),
    Architecture(2, mask="sliding_window(width=3)", encoding="decay(rate=0.8)"),
    Architecture(2, mask="prefix(length=2)"),
    Architecture(2, mask="full", encoding="alibi"),
]
ROTARY = [
    Architecture(2, encoding=["rope(head_dim=8)", "none"]),
    Architecture(2, encoding="rope(base=100.0, head_dim=8)"),
]
ADDED = [Architecture(2, encoding="sinusoidal(width=8)"), Architecture(2, encoding="sinusoidal(width=8, base=50.0)")]


def gradients(
    config: ReferenceConfig, parameters: dict[str, Tensor], constants: dict[str, Tensor], inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    logits = forward(config, leaves, constants, inputs, rows=(N - 1,))
    found = torch.autograd.grad(logits.square().sum(), list(leaves.values()))
    return logits.detach(), dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("architectures", [PLAIN, ROTARY, ADDED], ids=["plain", "rotary", "added"])
def test_a_member_is_itself_in_any_company(architectures: list[Architecture], residual: bool) -> None:
    configs = [retrieval_network(each, width=8, labels=5, residual=residual) for each in architectures]
    assert len({shape_of(config, N) for config in configs}) == 1
    weights = [drawn(config, seed) for seed, config in enumerate(configs)]
    fixed = [constants_of(config, N) for config in configs]
    inputs = torch.randn(len(configs), 4, N, 8, generator=torch.Generator().manual_seed(9))
    together = gradients(configs[0], stacked(weights), stacked(fixed), inputs)
    for member, config in enumerate(configs):
        alone = gradients(config, stacked([weights[member]]), stacked([fixed[member]]), inputs[member : member + 1])
        torch.testing.assert_close(together[0][member], alone[0][0], rtol=SAME, atol=SAME)
        for name, value in alone[1].items():
            torch.testing.assert_close(together[1][name][member], value[0], rtol=SAME, atol=SAME)
