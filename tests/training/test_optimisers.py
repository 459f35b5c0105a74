"""The stacked optimisers against PyTorch's own, member by member, with settings of each member's own."""

import pytest
import torch

from posbias import UsageError
from posbias.training import OPTIMISERS, Adam, AdamW
from posbias.training.optimisers import fresh_state, settings_of

STEPS = 30
ROUNDING = 1e-12
"""Relative, float64: PyTorch orders the same operations differently."""

KINDS = {
    "adam": ([Adam(1e-2), Adam(3e-3, beta1=0.5, beta2=0.9, epsilon=1e-4)], torch.optim.Adam),
    "adamw": ([AdamW(1e-2), AdamW(3e-3, weight_decay=0.3)], torch.optim.AdamW),
}


def peer(kind, optimiser, parameter):
    settings = {
        "lr": optimiser.learning_rate,
        "betas": (optimiser.beta1, optimiser.beta2),
        "eps": optimiser.epsilon,
    }
    if isinstance(optimiser, AdamW):
        settings["weight_decay"] = optimiser.weight_decay
    return kind([parameter], **settings)


@pytest.mark.parametrize("name", KINDS)
def test_every_member_follows_pytorchs_optimiser(name):
    optimisers, kind = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    alone = [row.clone().requires_grad_() for row in values]
    peers = [peer(kind, optimiser, row) for optimiser, row in zip(optimisers, alone, strict=True)]
    state = fresh_state(OPTIMISERS[name], values)
    settings = settings_of(optimisers, dtype=torch.float64, device=values.device)
    for _ in range(STEPS):
        gradients = torch.randn(2, 64, generator=generator, dtype=torch.float64)
        for row, gradient, theirs in zip(alone, gradients, peers, strict=True):
            row.grad = gradient.clone()
            theirs.step()
        state["step"] += 1
        OPTIMISERS[name].update(values, gradients, state, settings)
    torch.testing.assert_close(values, torch.stack([row.detach() for row in alone]), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    ("spelled", "message"),
    [
        ("adam(learning_rate=0)", "adam: learning_rate must be a finite number > 0, got 0"),
        ("adamw(weight_decay=-1)", "adamw: weight_decay must be a finite number >= 0, got -1"),
        ("adamw(beta2=1)", "adamw: beta2 must be a number >= 0 and < 1, got 1"),
        ("adam(epsilon=0)", "adam: epsilon must be a finite number > 0, got 0"),
        ("sgd(momentum=0.5)", "optimiser sgd left posbias after 0.1.0: adam or adamw"),
        ("adagrad", "unknown optimiser 'adagrad'; known: adam, adamw"),
        ("adam(weight_decay=1)", "parameters of adam: learning_rate, beta1, beta2, epsilon"),
    ],
)
def test_wrong_settings_are_refused(spelled, message):
    with pytest.raises(UsageError) as caught:
        OPTIMISERS.parse(spelled)
    assert message in str(caught.value)
