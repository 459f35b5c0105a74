"""The power rollout: the profile that squared attention predicts for a trained model on given prompts.

An energy per position and residual channel is pulled from the last position down: e <- e + MLP'(e),
e <- e + attention'(e), layer by layer (both of the same e in parallel blocks), each branch the elementwise square of
its exact local Jacobian and the stream's identity kept as it is (docs/theory, section 5). With power 1 the very same
walk is back-propagation.

A model of transformers is supported when its family has a row in the table. Kept of one forward pass, per layer: the
stream before attention and before the MLP, the branches before a post-norm, and what the attention module read. Hidden
layers, queries, keys, values and attention are seen again when a pull comes to them, layer by layer, so nothing of size
layers x heads x positions x positions ever exists.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from posbias.checks import OneOf
from posbias.errors import RunError, UsageError
from posbias.models.attention_blocks import kept_attention, seen_layers
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import Block, Norm
from posbias.models.model import Model
from posbias.models.weights import REDUCED
from posbias.profiles import Profile
from posbias.progress import track
from posbias.theory.power_rollout.local_maps import (
    Energy,
    LayerDescription,
    LayerTrace,
    Walk,
    attention_pull,
    mlp_pull,
    norm_pull,
)
from posbias.theory.predict import THEORIES, Prediction, Theory

Covectors = Float[Tensor, "*batch state"]
Row = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class Description:
    """A whole model, taken apart."""

    layers: list[LayerDescription]
    final_norm: Norm
    embedding_norm: Norm | None
    """Between the vectors entering the network and the first block (BLOOM)."""
    dtype: torch.dtype
    """Type that the theory computes in: float64 for float64 models, float32 otherwise."""
    reduced: bool = False
    """True if the model's own type is below float32."""
    input_scale: float = 1.0
    """Factor by which the network multiplies the vectors entering it (Granite)."""


@dataclass(frozen=True)
class Trace:
    """Activations kept from one forward pass on one prompt, and the steps of a walk through it."""

    description: Description
    embeddings: Float[Tensor, "position width"]
    """The vectors entering the network."""
    layers: list[LayerTrace]
    final_stream: Float[Tensor, "feature"]
    """The last position's stream, which the final norm reads."""
    state: Float[Tensor, "state"]
    """The last position's final state, which the unembedding reads."""
    score_gradient: Float[Tensor, "state"] | None
    """Gradient of the target's score by the last position's final state; None for the target "jacobian"."""

    def pull(self, covector: Covectors, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """From the final state to the vectors entering the network: gradients, or energies for power 2."""
        energy = self.pull_start(covector, walk)
        for block in reversed(range(len(self.layers))):
            energy = self.pull_block(block, energy, walk)
            if walk.power == 2:
                energy = energy / energy.sum((-2, -1), keepdim=True)  # only the shape matters, and depth would overflow
        return self.pull_end(energy, walk)

    def pull_start(self, covector: Covectors, walk: Walk) -> Energy:
        """The first step of `pull`: to the stream above the last block, zero at all positions but the last."""
        last = norm_pull(self.description.final_norm, self.final_stream, covector, walk.power)
        stream = last.new_zeros(*last.shape[:-1], len(self.embeddings), last.shape[-1])
        stream[..., -1, :] = last
        return stream

    def pull_block(self, block: int, energy: Energy, walk: Walk) -> Energy:
        """One step of `pull`: through one block, whose index counts from the input; energies are not scaled."""
        layer, trace = self.description.layers[block], self.layers[block]
        above = energy + mlp_pull(layer, trace, energy, walk)
        return above + attention_pull(layer, trace, energy if layer.parallel else above, walk)

    def pull_end(self, energy: Energy, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """The last step of `pull`: through the embedding norm and the scale of the input."""
        maps, power = self.description, walk.power
        if maps.embedding_norm is not None:
            energy = norm_pull(maps.embedding_norm, self.embeddings, energy, power)
        return energy if maps.input_scale == 1 else energy * maps.input_scale**power


def describe_model(model: Model, n_positions: int) -> Description:
    """Take a Hugging Face model apart for prompts of `n_positions` tokens.

    Raises:
        UsageError: it is no dense decoder of the table, attention cannot be seen, a layer is not causal, the
            model does not take so many tokens, or its weights lie on several devices.
    """
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(
            f"the power rollout has no local maps for {type(model).__name__}; give a Hugging Face model, or take the "
            "rollout, or mean_field before training"
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
            rotates=family.rotates(block.attention, model.config),
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
        input_scale=family.input_scale(network),
    )


@contextmanager
def tracing(
    model: HuggingFaceModel, description: Description, token_ids: Int64[np.ndarray, "n_positions"]
) -> Iterator[Callable[[], Trace | None]]:
    """Within the context, keep what walks need of the network's first pass, which is the prompt's, detached.

    Later passes are another's. What is yielded gives the trace, None before such a pass.
    """
    network, dtype = model.network, description.dtype
    caught: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    final: dict[str, Tensor] = {}

    def keep_input(index: int, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else kwargs["hidden_states"]
        # OPT flattens batch and position before its MLP.
        caught[index][name] = value.detach().reshape(-1, value.shape[-1]).to(dtype)

    def keep_last(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        final[name] = args[0][0, -1].detach().to(dtype)

    def trace() -> Trace | None:
        if "state" not in final:
            return None
        layers = [
            LayerTrace(**{"middle": caught[index]["stream"], **caught[index]}, kept=kept)
            for index, kept in enumerate(attention)
        ]
        embeddings = model.embed(model.token_tensor([token_ids.tolist()]))[0].detach().to(dtype)
        return Trace(description, embeddings, layers, final["stream"], final["state"], None)

    with ExitStack() as hooks:
        for index, layer in enumerate(description.layers):
            for name, module in layer.inputs.items():
                hook = partial(keep_input, index, name)
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        attention = hooks.enter_context(kept_attention(network))
        ends = {"stream": network.get_submodule(model.family.final_norm), "state": network.get_output_embeddings()}  # type: ignore[operator]
        for name, module in ends.items():
            hooks.callback(module.register_forward_pre_hook(partial(keep_last, name)).remove)
        hooks.callback(network.register_forward_hook(lambda *_: hooks.close()).remove)
        yield trace


@contextmanager
def traced_beside(model: Model, token_ids: Int64[np.ndarray, "n_positions"]) -> Iterator[Callable[[], Trace]]:
    """Within the context, keep the first pass of a prompt that is measured, so that its walks need none of their own.

    What is yielded gives the trace, and raises as `trace_model` does.
    """
    own = partial(trace_model, model, token_ids)
    try:
        description = describe_model(model, len(token_ids))
    except UsageError:  # no dense decoder, as `trace_model` will tell
        yield own
        return
    assert isinstance(model, HuggingFaceModel)
    with tracing(model, description, token_ids) as traced:
        yield lambda: traced() or own()


def trace_model(model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, target: str = "jacobian") -> Trace:
    """Run one prompt through a model and keep the activations that walks need.

    A score's gradient by the final state is exact and needs no pass back through the blocks.

    Raises:
        UsageError: as `describe_model`.
        RunError: an activation is not finite.
    """
    description = describe_model(model, len(token_ids))
    assert isinstance(model, HuggingFaceModel)
    scored, leaves = target != "jacobian", []

    def keep_leaf(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        leaves.append(args[0].detach().requires_grad_(scored))  # of a new graph
        return (leaves[-1],)

    unembedding = model.network.get_output_embeddings()  # type: ignore[operator]
    with tracing(model, description, token_ids) as traced, unembedding.register_forward_pre_hook(keep_leaf):
        with torch.set_grad_enabled(scored):
            output = model.last(model.embed(model.token_tensor([token_ids.tolist()])).detach())
        trace = traced()
    assert trace is not None  # of the pass now
    if not bool(torch.isfinite(output.logits).all()):
        raise RunError("the model's logits are not finite on a prompt; check its weights for NaN or overflow")
    if not scored:
        return trace
    score = output.logits[0].to(leaves[0].dtype).log_softmax(-1).max()
    (by_state,) = torch.autograd.grad(score if target == "logprob" else score.exp(), leaves[0])
    return replace(trace, score_gradient=by_state[0, -1])


@THEORIES.register("power_rollout")
@dataclass(frozen=True)
class PowerRollout(Theory):
    """Energies through a trained model: squared attention, values, keys and MLPs (docs/theory, section 5)."""

    key_path: bool = True
    """Let keys, which move the attention weights, carry influence beside the values."""
    target: Annotated[str, OneOf("jacobian", "probability", "logprob")] = "jacobian"
    """Output of the last position: the whole final state, or the predicted token's (log) probability."""

    def predict(self, subject: Any, n_positions: int, prompts: Any = None, *, seed: int = 0) -> Prediction:
        """The mean over prompts, with its interval."""
        if not isinstance(subject, Model):
            raise UsageError(
                f"theory {self.name} needs a model (one of load_model or transformers, a hub id or a path), "
                f"got {type(subject).__name__}"
            )
        if prompts is None:
            raise UsageError(f"theory {self.name} reads activations: give prompts=load_prompts(...)")
        if prompts.n_positions != n_positions:
            raise UsageError(
                f"theory {self.name}: prompts of {prompts.n_positions} positions given for n_positions={n_positions}"
            )
        all_ids = track(prompts.token_ids, "power rollout")
        rows = np.stack([self.profile_of(trace_model(subject, ids, target=self.target)) for ids in all_ids])
        return Prediction(Profile.mean_of(rows), per_prompt=rows, **self.labels(seed))

    def profile_of(self, trace: Trace) -> Row:
        """The profile of a prompt that was traced for this theory's target.

        Raises:
            RunError: energies are not finite.
        """
        start = torch.ones_like(trace.state) if trace.score_gradient is None else trace.score_gradient
        with torch.no_grad(), fast_products(trace.embeddings.device, reduced=trace.description.reduced):
            energy = trace.pull(start.to(trace.state.dtype).square(), Walk(key=self.key_path))
            influence = np.asarray(in_float64(energy).sum(-1).sqrt().cpu().numpy())
        if not np.all(np.isfinite(influence)):
            raise RunError(
                "the power rollout's energies are not finite; load the model in a wider type (float32, float64)"
            )
        return np.asarray(influence / influence.sum())


@contextmanager
def fast_products(device: torch.device, *, reduced: bool) -> Iterator[None]:
    """Multiply in TF32 within the context, for a model below float32 on a CUDA device; otherwise nothing changes.

    Factors then have 10 bits of mantissa, more than bfloat16, and sums all of float32: profiles move by
    W1 2e-5 (demo model, emulated), and the products, most of a rollout's work, cost a fraction.
    """
    before = torch.get_float32_matmul_precision()
    if reduced and device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
