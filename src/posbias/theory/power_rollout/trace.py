"""One forward pass of a described model, kept as the few activations from which every local map can be rebuilt.

Kept per layer: the stream before attention and before the MLP, the branches before a post-norm, and the rotary cosines
and sines the attention module received. Queries, keys, values and attention are recomputed from these, layer by layer,
so nothing of size layers x heads x positions x positions ever exists (docs/theory, section 5).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.errors import RunError
from posbias.models.model import Model
from posbias.theory.power_rollout.description import Description, LayerDescription

TARGETS = ("jacobian", "probability", "logprob")
"""What the last position's output is: the whole final state, or the predicted token's (log) probability."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations of one block for one prompt, in the theory's floating type."""

    stream: Float[Tensor, "position feature"]
    """The block's input."""
    middle: Float[Tensor, "position feature"]
    """The stream after the attention branch was added: what the MLP branch reads."""
    attention_branch: Float[Tensor, "position feature"] | None
    """The attention branch before its post-norm; None where the family has no post-norm."""
    mlp_branch: Float[Tensor, "position feature"] | None
    """The MLP branch before its post-norm; None where the family has no post-norm."""
    cosine: Float[Tensor, "position rotary"] | None
    """RoPE cosines of this layer; None where it has no RoPE."""
    sine: Float[Tensor, "position rotary"] | None


@dataclass(frozen=True)
class Trace:
    """What one forward pass leaves behind."""

    layers: list[LayerTrace]
    final_stream: Float[Tensor, "feature"]
    """The last position's stream, which the final norm reads."""
    logits: Float[Tensor, "vocabulary"]
    """The last position's next-token logits."""
    score_gradient: Float[Tensor, "feature"] | None
    """Gradient of the target's score by the last position's final state; None for the target "jacobian"."""


def trace_prompt(
    model: Model, description: Description, token_ids: Int[Tensor, "position"], *, target: str = "jacobian"
) -> Trace:
    """Run one prompt forward and keep what the pulls need.

    Args:
        model: Any described causal language model.
        description: The same model, taken apart.
        token_ids: One prompt.
        target: One of TARGETS; a score's gradient by the final state is exact and needs no pass through the blocks.

    Returns:
        The activations, detached, in `description.dtype`.

    Raises:
        RunError: an activation is not finite.
    """
    kept: dict[tuple[int, str], Tensor] = {}
    final: dict[str, Tensor] = {}
    with torch.no_grad():
        embeddings = model.embed(token_ids[None])
    with torch.enable_grad(), _hooks(description, kept, final):
        output = model.last(embeddings.detach())
        gradient = None if target == "jacobian" else _score_gradient(output.logits[0], final["state"], target)
    if not bool(torch.isfinite(output.logits).all()):
        raise RunError("the model's logits are not finite on a prompt; check its weights for NaN or overflow")

    def layer_trace(layer: LayerDescription) -> LayerTrace:
        values = {name: kept[index, name] for index, name in kept if index == layer.index}
        return LayerTrace(
            stream=values["stream"],
            middle=values["middle"],
            attention_branch=values.get("attention_branch"),
            mlp_branch=values.get("mlp_branch"),
            cosine=values["cosine"] if layer.rotary else None,
            sine=values["sine"] if layer.rotary else None,
        )

    layers = [layer_trace(layer) for layer in description.layers]
    return Trace(layers, final["stream"], output.logits[0].detach(), gradient)


def _score_gradient(
    logits: Float[Tensor, "vocabulary"], state: Float[Tensor, "1 position feature"], target: str
) -> Float[Tensor, "feature"]:
    """Gradient of the predicted token's probability or log-probability by the last final state."""
    log_probability = logits.to(state.dtype).log_softmax(-1).max()
    score = log_probability if target == "logprob" else log_probability.exp()
    (gradient,) = torch.autograd.grad(score, state)
    last: Tensor = gradient[0, -1]
    return last


@contextmanager
def _hooks(description: Description, kept: dict[tuple[int, str], Tensor], final: dict[str, Tensor]) -> Iterator[None]:
    """Keep block activations in `kept` and the final state, as the leaf of a new graph, in `final`."""
    dtype = description.dtype
    handles = []

    def keep_input(index: int, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            kept[index, name] = value[0].detach().to(dtype)

        return hook

    def keep_rotary(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rotary = kwargs["position_embeddings"] if "position_embeddings" in kwargs else args[1]
            kept[index, "cosine"], kept[index, "sine"] = (part[0].detach().to(dtype) for part in rotary)

        return hook

    def restart(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        final["stream"] = args[0][0, -1].detach().to(dtype)
        final["state"] = output.detach().requires_grad_(True)
        return final["state"]

    for layer in description.layers:
        for name, module in layer.inputs().items():
            handles.append(module.register_forward_pre_hook(keep_input(layer.index, name), with_kwargs=True))
        if layer.rotary:
            attention = layer.block.attention
            handles.append(attention.register_forward_pre_hook(keep_rotary(layer.index), with_kwargs=True))
    handles.append(description.final_module.register_forward_hook(restart))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
