"""A model taken apart, and one forward pass of it, kept so that every local map can be rebuilt.

A model of transformers is supported when its family has a row in the table. Kept per layer: the stream before attention
and before the MLP, the branches before a post-norm, and what the attention module read. Hidden layers, queries, keys,
values and attention are seen again when a pull comes to them, layer by layer, so nothing of size
layers x heads x positions x positions ever exists (docs/theory, section 5). In reference transformers masks and
logits by position are any matrix, and residuals have factors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posbias.errors import RunError, UsageError
from posbias.models.attention_blocks import KeptAttention, kept_attention, seen_layers
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import AttentionParts, Block, MlpParts, Norm
from posbias.models.model import Model
from posbias.models.reference.config import constants_of
from posbias.models.reference.forward import (
    entered,
    entrance,
    logit_bias,
    of_layer,
    read_out,
    split,
    with_mlp,
)
from posbias.models.reference.network import ReferenceBlock, ReferenceTransformer
from posbias.models.weights import REDUCED
from posbias.theory.reference import attention_parts, mlp_parts, norm_of

TARGETS = ("jacobian", "probability", "logprob")
"""Outputs of the last position: the whole final state, or the predicted token's (log) probability."""
Factor = float | Float[Tensor, ""]


@dataclass(frozen=True)
class LayerDescription:
    """One block's maps and facts."""

    parts: AttentionParts
    mlp: MlpParts | None
    """The block's MLP; None if it has attention alone."""
    attention_norm: Norm | None
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    parallel: bool = False
    """Both branches read the block's input."""
    stream_factor: Factor = 1.0
    """Factor of the stream beside the attention branch: 0 without a residual."""
    branch_factor: Factor = 1.0
    """Factor of the attention branch before it is added."""
    mlp_stream_factor: Factor = 1.0
    """Factor of the stream beside the MLP branch."""
    angles: Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]] | None = None
    """Rotary cosines and sines [*heads position rotary], from the named arguments of its attention module (reference
    models have none); None if nothing is rotated."""
    bias: Float[Tensor, "key_head group query key"] | None = None
    """Logits by position with the mask as -inf (reference models)."""
    inputs: Mapping[str, nn.Module] = field(default_factory=dict)
    """Modules whose inputs a trace keeps, by field of `LayerTrace` (Hugging Face models)."""


@dataclass(frozen=True)
class Description:
    """A whole model, taken apart."""

    layers: list[LayerDescription]
    final_norm: Norm | None
    embedding_norm: Norm | None
    """Between the vectors entering the network and the first block (BLOOM)."""
    dtype: torch.dtype
    """Type that the theory computes in: float64 for float64 models, float32 otherwise."""
    reduced: bool = False
    """True if the model's own type is below float32."""
    input_scale: float = 1.0
    """Factor by which the network multiplies the vectors entering it (Granite)."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations of one block for one prompt, in the theory's floating type."""

    stream: Float[Tensor, "position feature"]
    """The block's input."""
    middle: Float[Tensor, "position feature"]
    """Input of the MLP branch: the stream after the attention branch was added, or `stream` in parallel blocks."""
    kept: KeptAttention | None = None
    """What the attention module read; None in reference models, which have none."""
    attention_branch: Float[Tensor, "position feature"] | None = None
    mlp_branch: Float[Tensor, "position feature"] | None = None
    """The branches before their post-norms; None if the family has none."""


@dataclass(frozen=True)
class Trace:
    """Activations kept from one forward pass."""

    embeddings: Float[Tensor, "position width"]
    """The vectors entering the network."""
    layers: list[LayerTrace]
    final_stream: Float[Tensor, "feature"] | None
    """The last position's stream, which the final norm reads; None without a final norm."""
    state: Float[Tensor, "state"]
    """The last position's final state, which the unembedding reads."""
    score_gradient: Float[Tensor, "state"] | None
    """Gradient of the target's score by the last position's final state; None for the target "jacobian"."""


def describe_model(model: Model, *, n_positions: int) -> Description:
    """Take a Hugging Face model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: it is no dense decoder of the table, attention cannot be seen, a layer is not causal, the
            model does not take so many tokens, or its weights lie on several devices.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(
            f"the power rollout has no local maps for {type(model).__name__}; give a Hugging Face model or a reference "
            "model"
        )
    family, network = model.family, model.network
    if n_positions < 1 or (model.max_positions is not None and n_positions > model.max_positions):
        raise UsageError(f"prompts must have 1 to {model.max_positions} tokens for this model, got {n_positions}")
    places = sorted({str(parameter.device) for parameter in network.parameters()})
    if len(places) > 1:
        raise UsageError(f"the power rollout needs all weights on one device, got {', '.join(places)}")
    embedding = None if family.embedding_norm is None else family.norm(network.get_submodule(family.embedding_norm))

    def describe(block: Block) -> LayerDescription:
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        modules = {name: getattr(block, name) for name in names}
        norms: dict[str, Any] = {name: module and family.norm(module) for name, module in modules.items()}
        parallel = family.parallel(model.config)
        inputs: dict[str, nn.Module | None] = {
            "stream": block.module,
            "attention_branch": block.attention_post_norm,
            "mlp_branch": block.mlp_post_norm,
            "middle": None if parallel else block.mlp_norm or block.mlp,
        }
        return LayerDescription(
            parts=family.attention_parts(block, model.config),
            angles=partial(family.angles, block.attention) if family.rotates(block.attention, model.config) else None,
            mlp=family.mlp_parts(block, model.config),
            parallel=parallel,
            inputs={name: module for name, module in inputs.items() if module is not None},
            **norms,
        )

    seen_layers(model, n_positions=n_positions)
    return Description(
        layers=[describe(block) for block in family.blocks(network)],
        final_norm=family.norm(network.get_submodule(family.final_norm)),
        embedding_norm=embedding,
        dtype=torch.float64 if model.dtype == torch.float64 else torch.float32,
        reduced=model.dtype in REDUCED,
        input_scale=family.input_scale(model.config),
    )


@contextmanager
def tracing(
    model: HuggingFaceModel, description: Description, token_ids: Int[Tensor, "position"]
) -> Iterator[Callable[[], Trace | None]]:
    """Within the context, keep what pulls need of one pass of the prompt, detached and in `description.dtype`.

    It is the network's first pass, whose output may be of the last position alone; later ones are another's. What is
    yielded gives the trace, None before such a pass.
    """
    dtype = description.dtype
    caught: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    final: dict[str, Tensor] = {}

    def keep_input(index: int, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs["hidden_states"]
        # OPT flattens batch and position before its MLP.
        caught[index][name] = value.detach().reshape(-1, value.shape[-1]).to(dtype)

    def keep_final(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        final[name] = args[0][0, -1].detach().to(dtype)

    def trace() -> Trace | None:
        if "state" not in final:
            return None
        layers = [
            LayerTrace(**{"middle": caught[index]["stream"], **caught[index]}, kept=kept)
            for index, kept in enumerate(attention)
        ]
        embeddings = model.embed(token_ids[None])[0].detach().to(dtype)
        return Trace(embeddings, layers, final.get("stream"), final["state"], None)

    network = model.network
    with ExitStack() as hooks:
        for index, layer in enumerate(description.layers):
            for name, module in layer.inputs.items():
                hook = partial(keep_input, index, name)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        attention = hooks.enter_context(kept_attention(network))
        ends = {"stream": network.get_submodule(model.family.final_norm), "state": network.get_output_embeddings()}  # type: ignore[operator]
        for name, module in ends.items():
            hooks.callback(module.register_forward_pre_hook(partial(keep_final, name)).remove)
        hooks.callback(network.register_forward_hook(lambda *_: hooks.close()).remove)
        yield trace


def trace_prompt(
    model: HuggingFaceModel, description: Description, token_ids: Int[Tensor, "position"], *, target: str = "jacobian"
) -> Trace:
    """Run one prompt forward and keep the activations that pulls need (`tracing`).

    A score's gradient by the final state is exact and needs no pass back through the blocks.

    Raises:
        RunError: an activation is not finite.
    """
    scored = target != "jacobian"
    leaves: list[Tensor] = []

    def keep_leaf(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        leaves.append(args[0].detach().requires_grad_(scored))  # of a new graph
        return (leaves[-1],)

    unembedding = model.network.get_output_embeddings()  # type: ignore[operator]
    with tracing(model, description, token_ids) as traced, unembedding.register_forward_pre_hook(keep_leaf):
        with torch.set_grad_enabled(scored):
            output = model.last(model.embed(token_ids[None]).detach())
        trace = traced()
    assert trace is not None  # of the pass now
    if not bool(torch.isfinite(output.logits).all()):
        raise RunError("the model's logits are not finite on a prompt; check its weights for NaN or overflow")
    return replace(trace, score_gradient=score_gradient(output.logits[0], leaves[0], target)) if scored else trace


def score_gradient(
    logits: Float[Tensor, "vocabulary"], state: Float[Tensor, "1 kept state"], target: str
) -> Float[Tensor, "state"]:
    """Gradient of the predicted token's probability or log-probability by the last final state."""
    log_probability = logits.to(state.dtype).log_softmax(-1).max()
    score = log_probability if target == "logprob" else log_probability.exp()
    (gradient,) = torch.autograd.grad(score, state)
    last: Tensor = gradient[0, -1]
    return last


def describe_reference(model: ReferenceTransformer, *, n_positions: int) -> Description:
    """Take a reference model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: heads that carry the stream itself.
    """
    config, network = model.config, model.network
    constants = {name: value.to(model.device) for name, value in constants_of(config, n_positions).items()}

    def describe(index: int, block: ReferenceBlock) -> LayerDescription:
        parts = attention_parts(block)
        weights = {name: value.detach()[None] for name, value in block.named_parameters(recurse=False)}
        bias = logit_bias(config, weights, constants["bias"][index][None])
        turned = [constants[name][index].repeat(1, 1, 2) for name in ("cosine", "sine") if config.rotary]
        return LayerDescription(
            parts=parts,
            mlp=mlp_parts(block),
            attention_norm=norm_of(block, "attention"),
            attention_post_norm=None,
            mlp_norm=norm_of(block, "mlp"),
            mlp_post_norm=None,
            stream_factor=constants["kept"][index],
            branch_factor=constants["added"][index],
            mlp_stream_factor=0.0 if config.residual == "none" else 1.0,
            angles=(lambda _: (turned[0], turned[1])) if turned else None,
            bias=bias[0].reshape(parts.key_heads, -1, n_positions, n_positions),
        )

    layers = [describe(index, block) for index, block in enumerate(network.blocks) if isinstance(block, ReferenceBlock)]
    return Description(layers, norm_of(network, "final"), None, dtype=config.torch_dtype)


@torch.no_grad()
def trace_reference(
    model: ReferenceTransformer, description: Description, token_ids: Int[Tensor, "position"], *, target: str
) -> Trace:
    """Run one prompt forward and keep the activations that pulls need.

    Raises:
        RunError: an output is not finite.
    """
    vectors = model.embed(token_ids[None])
    config, (parameters, constants) = model.config, model.network.stack(vectors)
    stream, layers = entrance(constants, vectors[None]), []
    for index in range(len(description.layers)):
        weights, fixed = of_layer(parameters, constants, index)
        carried, added = split(config, weights, fixed, stream, rows=None)
        middle = added if carried is None else carried + added
        layers.append(LayerTrace(stream[0, 0], middle[0, 0]))
        stream = with_mlp(config, weights, middle) if config.mlp else middle
    final = stream[0, :, -1:]
    state = entered(config, parameters, "final", final[None])[0]
    if not bool(state.isfinite().all()):
        raise RunError("the model's last state is not finite on a prompt; check its weights for overflow")
    gradient = None
    if target != "jacobian":
        with torch.enable_grad():
            leaf = state.detach().requires_grad_(True)
            gradient = score_gradient(read_out(config, parameters, leaf[None])[0, 0, 0], leaf, target)
    return Trace(vectors[0], layers, final[0, 0], state[0, 0], gradient)
