"""||dh_last/dx_j||_F of every position: exactly, by random probes, and by `torch.func.jacrev`.

jacrev forms the whole Jacobian, width x N x width numbers; the norms need one vector-Jacobian product for each of the
`width` outputs, or a few for random probes. The floor of the exact norms is those products, one after another.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gradients import embedded
from torch import Tensor

import posbias as pb
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts import Prompts

Method = Callable[[], np.ndarray]
PROBES = (4, 16, 64)
SEEDS = 8
CHUNK = 16
"""Vector-Jacobian products at a time, for jacrev and for posbias."""


def last_state(model: HuggingFaceModel, inputs: Tensor) -> Tensor:
    """The last position's state after the final norm."""
    inner: Any = model.network.model
    state: Tensor = inner(inputs_embeds=inputs, use_cache=False).last_hidden_state[0, -1]
    return state


def floor(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """One forward, `width` backward passes."""

    def run() -> np.ndarray:
        inputs = embedded(model, prompts)
        state = last_state(model, inputs)
        squares = torch.zeros(prompts.n_positions, dtype=torch.float64, device=model.device)
        for entry in state:
            (gradient,) = torch.autograd.grad(entry, inputs, retain_graph=True)
            squares += gradient[0].double().square().sum(dim=-1)
        return squares.sqrt().numpy(force=True)

    return run


def batched(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """The same with CHUNK products at a time, which PyTorch batches where it knows how."""

    def run() -> np.ndarray:
        inputs = embedded(model, prompts)
        state = last_state(model, inputs)
        squares = torch.zeros(prompts.n_positions, dtype=torch.float64)
        for units in torch.split(torch.eye(len(state)), CHUNK):
            (gradients,) = torch.autograd.grad(state, inputs, units, retain_graph=True, is_grads_batched=True)
            squares += gradients[:, 0].double().square().sum(dim=(0, 2))
        return squares.sqrt().numpy()

    return run


def ours(model: HuggingFaceModel, prompts: Prompts, *, kind: str, seed: int = 0) -> Method:
    """`posbias.measure`, without mixing."""
    model = model.described_by(model.family, misfit="mixing is not timed")
    return lambda: pb.measure(model, prompts, kinds=kind, seed=seed).per_prompt["jacobian"][0]


def reverse(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """The whole Jacobian by jacrev, then its norms."""

    def run() -> np.ndarray:
        inputs = embedded(model, prompts).detach()
        jacobian = torch.func.jacrev(lambda x: last_state(model, x), chunk_size=CHUNK)(inputs)
        return np.asarray(jacobian[:, 0].double().square().sum(dim=(0, 2)).sqrt())

    return run


def exact_methods(model: HuggingFaceModel, eager: HuggingFaceModel, prompts: Prompts) -> dict[str, Method]:
    """Methods without sampling error, asserted equal to the floor; jacrev also eager, where it can batch attention."""
    methods = {
        "floor": floor(model, prompts),
        "posbias, exact": ours(model, prompts, kind="jacobian(exact=True)"),
        f"autograd, chunks of {CHUNK}": batched(model, prompts),
        f"jacrev, chunks of {CHUNK}": reverse(model, prompts),
        f"jacrev, chunks of {CHUNK}, eager": reverse(eager, prompts),
    }
    expected = methods["floor"]()
    for name, method in methods.items():
        np.testing.assert_allclose(method(), expected, rtol=1e-3, err_msg=name)
    return methods


def sampled(model: HuggingFaceModel, prompts: Prompts, count: int, *, seed: int = 0) -> Method:
    """`count` random probes."""
    return ours(model, prompts, kind=f"jacobian(probes={count})", seed=seed)


def sampling_error(model: HuggingFaceModel, prompts: Prompts, count: int, truth: np.ndarray) -> float:
    """Root mean square over SEEDS draws of the probes of the relative error of the norms."""
    drawn = np.stack([sampled(model, prompts, count, seed=seed)() for seed in range(SEEDS)])
    return float(np.sqrt(np.mean((drawn / truth - 1) ** 2)))
