"""Stacked models: each computes what it computes alone, whatever its mask and encoding, and so do its gradients."""

import pytest
import torch
from torch import Tensor

from posbias import Architecture
from posbias.models.reference.config import ReferenceConfig, constants_of, draw_parameters, shape_of, stacked
from posbias.models.reference.forward import forward
from published_networks import retrieval_network

N = 7
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
    drawn = [draw_parameters(config, torch.Generator().manual_seed(seed)) for seed, config in enumerate(configs)]
    fixed = [constants_of(config, N) for config in configs]
    inputs = torch.randn(len(configs), 4, N, 8, generator=torch.Generator().manual_seed(9))
    together = gradients(configs[0], stacked(drawn), stacked(fixed), inputs)
    for member, config in enumerate(configs):
        alone = gradients(config, stacked([drawn[member]]), stacked([fixed[member]]), inputs[member : member + 1])
        torch.testing.assert_close(together[0][member], alone[0][0], rtol=SAME, atol=SAME)
        for name, value in alone[1].items():
            torch.testing.assert_close(together[1][name][member], value[0], rtol=SAME, atol=SAME)
