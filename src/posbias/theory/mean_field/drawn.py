"""Branches that no formula describes, by their own modules: linear layers and mixtures of experts.

A module runs on Gaussian vectors whose products between positions are the kernel of what the branch reads. Products of
what it returns are its output's kernel; products of gradients drawn with the kernel above it, pulled back through it,
are the kernel below (docs/theory, section 5). In a random direction the vectors meet other weights with every draw;
what is no matrix, decays and steps, differs from layer to layer: draws take the layers initialised alike in turn.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from posbias.theory.mean_field.bins import Kernel, smooth, symmetric_root

BATCH_NUMBERS = 2**17
"""Numbers drawn at a time: a state-space layer keeps a few hundred bytes for each."""


@dataclass(frozen=True, eq=False)
class Modules:
    """What a branch runs, and how it is called."""

    alike: tuple[tuple[nn.Module, ...], ...]
    """Those of all layers that are initialised alike; what the modules of one layer return adds up."""
    width: int
    """Features that they read and return."""
    call: Callable[[int, torch.device], Mapping[str, Any]]
    """Named arguments beside the input for a prompt of so many positions, on a device."""

    def through(self, x: Kernel, gradient: Kernel | None, *, draws: int, generator: np.random.Generator) -> Kernel:
        """Kernel of the output, or with a gradient's kernel at the output that of the gradient at the input.

        Args:
            x: Kernel of what the modules read, one bin per position.
            gradient: Kernel of the gradient at the output; None runs forward.
            draws: Runs of one prompt, >= 1.
            generator: Draws the vectors, and the modules if there are more than runs.
        """
        n_positions = len(x.same)
        read, above = _root(x), None if gradient is None else _root(gradient)
        total = np.zeros_like(x.block)
        turns = np.resize(generator.permutation(len(self.alike)), draws)
        size = max(1, BATCH_NUMBERS // (n_positions * self.width))
        for index, count in zip(*np.unique(turns, return_counts=True), strict=True):
            for first in range(0, count, size):
                shape = (min(size, count - first), n_positions, self.width)
                vectors = read @ generator.standard_normal(shape)
                back = None if above is None else above @ generator.standard_normal(shape)
                rows = self._run(self.alike[index], vectors, back).transpose(1, 0, 2).reshape(n_positions, -1)
                total += rows @ rows.T
        return smooth(total / (draws * self.width))

    def _run(
        self,
        modules: tuple[nn.Module, ...],
        read: Float64[np.ndarray, "batch p d"],
        back: Float64[np.ndarray, "batch p d"] | None,
    ) -> Float64[np.ndarray, "batch p d"]:
        """The output for some drawn vectors, or the gradient at them from one drawn at the output."""
        like = next(modules[0].parameters())
        entering = torch.from_numpy(read).to(like).requires_grad_(back is not None)
        with torch.set_grad_enabled(back is not None):
            named = self.call(read.shape[1], like.device)
            outputs = [module(entering, **named) for module in modules]
            result: Tensor = sum(output[0] if isinstance(output, tuple) else output for output in outputs)
            if back is not None:
                (result,) = torch.autograd.grad(result, entering, torch.from_numpy(back).to(result))
        return np.asarray(result.detach().cpu().double().numpy())


def _root(kernel: Kernel) -> Float64[np.ndarray, "p p"]:
    """A square root, relatively accurate for positions whose values are tiny."""
    deviation = np.sqrt(kernel.same)
    safe = np.where(deviation > 0, deviation, 1.0)
    return np.asarray(deviation[:, None] * symmetric_root(kernel.block / safe[:, None] / safe[None, :]))
