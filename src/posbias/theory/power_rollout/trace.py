"""One forward pass of a described model, kept as the few activations from which every local map can be rebuilt.

Kept per layer: the stream before attention and before the MLP, the branches before a post-norm, the rotary cosines and
sines the attention module received and, within a bound, the MLP's hidden layer. Queries, keys, values and attention are
recomputed from these, layer by layer, so nothing of size layers x heads x positions x positions ever exists
(docs/theory, section 5).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.errors import RunError
from posbias.models.attention import AttentionInput, AttentionLayer, norm_forward, watch_attention
from posbias.models.families import MixtureParts, MlpParts
from posbias.models.model import Model
from posbias.theory.power_rollout.description import Description, LayerDescription

TARGETS = ("jacobian", "probability", "logprob")
"""What the last position's output is: the whole final state, or the predicted token's (log) probability."""
KEPT_BYTES = 1 << 29
"""Most memory for hidden layers of MLPs, all blocks together; those of further blocks are computed again."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations of one block for one prompt, in the theory's floating type."""

    stream: Float[Tensor, "position feature"]
    """The block's input."""
    middle: Float[Tensor, "position feature"]
    """What the MLP branch reads: the stream after the attention branch was added, or `stream` in parallel blocks."""
    attention_branch: Float[Tensor, "position feature"] | None
    """The attention branch before its post-norm; None where the family has no post-norm."""
    mlp_branch: Float[Tensor, "position feature"] | None
    """The MLP branch before its post-norm; None where the family has no post-norm."""
    attention_sum: Float[Tensor, "position feature"] | None
    """The stream with the attention branch added, before the norm of the stream; None where there is none."""
    mlp_sum: Float[Tensor, "position feature"] | None
    """The stream with the MLP branch added, before the norm of the stream; None where there is none."""
    cosine: Float[Tensor, "position rotary"] | None
    """RoPE cosines of this layer; None where it has no RoPE."""
    sine: Float[Tensor, "position rotary"] | None
    up: Float[Tensor, "position hidden"] | None = None
    """What the MLP's map `up` gave, before any activation; None where it is computed again."""
    gate: Float[Tensor, "position hidden"] | None = None
    """What the MLP's map `gate` gave, before the activation; None where it is computed again or there is none."""
    chosen: Int[Tensor, "position top"] | None = None
    """The experts that each token was given to; None where the block has one MLP."""


@dataclass(frozen=True)
class Trace:
    """What one forward pass leaves behind."""

    embeddings: Float[Tensor, "position width"]
    """The vectors entering the network."""
    layers: list[LayerTrace]
    final_stream: Float[Tensor, "feature"] | None
    """The last position's stream, which the final norm reads; None where there is no final norm."""
    state: Float[Tensor, "state"]
    """The last position's final state, which the unembedding reads."""
    score_gradient: Float[Tensor, "state"] | None
    """Gradient of the target's score by the last position's final state; None for the target "jacobian"."""


@dataclass
class _Kept:
    """What the hooks caught so far."""

    layers: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rotary: dict[int, tuple[Tensor | None, Tensor | None]] = field(default_factory=dict)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    final_stream: Tensor | None = None
    state: Tensor | None = None


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
    kept = _Kept()
    embeddings = _embedded(model, token_ids)
    with torch.enable_grad(), _hooks(description, kept, len(token_ids), restart=True):
        output = model.last(embeddings)
        assert kept.state is not None
        gradient = None if target == "jacobian" else _score_gradient(output.logits[0], kept.state, target)
    if not bool(torch.isfinite(output.logits).all()):
        raise RunError("the model's logits are not finite on a prompt; check its weights for NaN or overflow")
    return _trace(description, kept, embeddings, gradient)


@contextmanager
def trace_of_pass(
    model: Model, description: Description, token_ids: Int[Tensor, "position"]
) -> Iterator[Callable[[], Trace]]:
    """Keep what the pulls need from a forward pass that somebody else runs, so that it costs no pass of its own.

    Args:
        model: Any described causal language model.
        description: The same model, taken apart.
        token_ids: The prompt that the pass within the context reads, alone in its batch and whole. The last such pass
            counts; whether its values are finite is for who runs it to check.

    Yields:
        What gives the trace, for the target "jacobian", after the pass.
    """
    kept = _Kept()

    def trace() -> Trace:
        if kept.state is None:
            raise RunError("no forward pass was run while its trace was asked for")
        return _trace(description, kept, _embedded(model, token_ids), None)

    with _hooks(description, kept, len(token_ids), restart=False):
        yield trace


@torch.no_grad()
def _embedded(model: Model, token_ids: Int[Tensor, "position"]) -> Float[Tensor, "1 position width"]:
    return model.embed(token_ids[None]).detach()


def _trace(
    description: Description,
    kept: _Kept,
    embeddings: Float[Tensor, "1 position width"],
    gradient: Float[Tensor, "state"] | None,
) -> Trace:
    assert kept.state is not None
    return Trace(
        embeddings=embeddings[0].to(description.dtype),
        layers=[_layer_trace(layer, kept) for layer in description.layers],
        final_stream=kept.final_stream,
        state=kept.state[0, -1].detach().to(description.dtype),
        score_gradient=gradient,
    )


def _layer_trace(layer: LayerDescription, kept: _Kept) -> LayerTrace:
    values = {name: value for (index, name), value in kept.layers.items() if index == layer.index}
    if "attention_sum" in values:
        values["middle"] = norm_forward(layer.attention_stream_norm, values["attention_sum"])
    cosine, sine = kept.rotary[layer.index]
    return LayerTrace(
        stream=values["stream"],
        middle=values.get("middle", values["stream"]),
        attention_branch=values.get("attention_branch"),
        mlp_branch=values.get("mlp_branch"),
        attention_sum=values.get("attention_sum"),
        mlp_sum=values.get("mlp_sum"),
        cosine=cosine,
        sine=sine,
        up=values.get("up"),
        gate=values.get("gate"),
        chosen=kept.chosen.get(layer.index),
    )


def _score_gradient(
    logits: Float[Tensor, "vocabulary"], state: Float[Tensor, "1 kept state"], target: str
) -> Float[Tensor, "state"]:
    """Gradient of the predicted token's probability or log-probability by the last final state."""
    log_probability = logits.to(state.dtype).log_softmax(-1).max()
    score = log_probability if target == "logprob" else log_probability.exp()
    (gradient,) = torch.autograd.grad(score, state)
    last: Tensor = gradient[0, -1]
    return last


def _layers_kept(description: Description, n_positions: int) -> int:
    """How many blocks' hidden layers KEPT_BYTES hold; none where the model computes in less than the theory does."""
    mlp = next((layer.mlp for layer in description.layers if isinstance(layer.mlp, MlpParts)), None)
    if mlp is None or mlp.up.dtype != description.dtype:
        return 0
    return KEPT_BYTES // (n_positions * len(mlp.up) * mlp.up.element_size() * (1 if mlp.gate is None else 2))


@contextmanager
def _hooks(description: Description, kept: _Kept, n_positions: int, *, restart: bool) -> Iterator[None]:
    """Keep block activations and the final state in `kept`; with `restart` as the leaf of a new graph."""
    dtype = description.dtype

    def keep(index: int, name: str, value: Tensor) -> None:
        # OPT flattens batch and position before its MLP.
        kept.layers[index, name] = value.detach().reshape(-1, value.shape[-1]).to(dtype)

    def keep_input(index: int, name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(index, name, args[0] if args else kwargs["hidden_states"])

        return hook

    def keep_output(index: int, name: str) -> Callable[..., None]:
        return lambda _module, _args, output: keep(index, name, output)

    def keep_chosen(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: tuple[Tensor, ...]) -> None:
            kept.chosen[index] = output[-1]

        return hook

    def keep_attention(layer: AttentionLayer, given: AttentionInput) -> None:
        kept.rotary[layer.index] = given.cosine, given.sine

    def keep_final(_: nn.Module, args: tuple[Any, ...]) -> None:
        kept.final_stream = args[0][0, -1].detach().to(dtype)

    def keep_state(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        kept.state = args[0].detach()
        return (kept.state.requires_grad_(True),) if restart else None

    with ExitStack() as hooks:
        for layer in description.layers:
            for name, module in layer.inputs().items():
                handle = module.register_forward_pre_hook(keep_input(layer.index, name), with_kwargs=True)
                hooks.callback(handle.remove)
        for layer in description.layers[: _layers_kept(description, n_positions)]:
            for name, module in layer.hidden_maps().items():
                hooks.callback(module.register_forward_hook(keep_output(layer.index, name)).remove)
        for layer in description.layers:
            if isinstance(layer.mlp, MixtureParts):
                hooks.callback(layer.mlp.router_module.register_forward_hook(keep_chosen(layer.index)).remove)
        hooks.enter_context(
            watch_attention([layer.attention for layer in description.layers], keep_attention, dtype=dtype)
        )
        if description.final_module is not None:
            hooks.callback(description.final_module.register_forward_pre_hook(keep_final).remove)
        hooks.callback(description.unembedding.register_forward_pre_hook(keep_state).remove)
        yield
