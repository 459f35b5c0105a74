"""The power rollout: the profile that squared attention predicts for a trained model on given prompts.

Each prompt gives one profile from its own forward activations (docs/theory, section 5).

It is an energy per position and residual channel, pulled from the last position down:
e <- e + MLP'(e), e <- e + attention'(e), layer by layer (both of the same e in parallel blocks), each branch the
elementwise square of its exact local Jacobian and the stream's identity kept as it is. With power 1 the very same walk
is back-propagation.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.checks import OneOf
from posbias.errors import RunError, UsageError
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import Model
from posbias.models.reference.network import ReferenceTransformer
from posbias.profiles import Profile
from posbias.progress import track
from posbias.theory.power_rollout.local_maps import (
    Energy,
    Power,
    Walk,
    attention_pull,
    mlp_pull,
    norm_pull,
)
from posbias.theory.power_rollout.trace import (
    TARGETS,
    Description,
    Factor,
    Trace,
    describe_model,
    describe_reference,
    trace_prompt,
    trace_reference,
    tracing,
)
from posbias.theory.predict import THEORIES, ModelTheory, Prediction

Covectors = Float[Tensor, "*batch state"]
Row = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True)
class PromptTrace(Trace):
    """A model's forward pass on one prompt, and the steps of a walk through it."""

    description: Description
    """The model, taken apart."""

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
        power = walk.power
        above = energy
        if layer.mlp is not None:
            energy = _times(layer.mlp_stream_factor, energy, power) + mlp_pull(layer, trace, energy, walk)
        if layer.parallel:
            return energy + attention_pull(layer, trace, above, walk)
        added = _times(layer.branch_factor, attention_pull(layer, trace, energy, walk), power)
        return _times(layer.stream_factor, energy, power) + added

    def pull_end(self, energy: Energy, walk: Walk) -> Float[Tensor, "*batch position width"]:
        """The last step of `pull`: through the embedding norm and the scale of the input."""
        maps, power = self.description, walk.power
        if maps.embedding_norm is not None:
            energy = norm_pull(maps.embedding_norm, self.embeddings, energy, power)
        return _times(maps.input_scale, energy, power)

    @torch.no_grad()
    def diagonal(self, walk: Walk) -> Float[Tensor, "position"]:
        """Roots of the energies, from gradient^2 (1 for the whole state); not normalised."""
        gradient = torch.ones_like(self.state) if self.score_gradient is None else self.score_gradient
        return in_float64(self.pull(gradient.to(self.state.dtype).square(), walk)).sum(-1).sqrt()


def _times(factor: Factor, energy: Energy, power: Power) -> Energy:
    return energy if isinstance(factor, float) and factor == 1 else energy * factor**power


def trace_model(model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, target: str = "jacobian") -> PromptTrace:
    """Run one prompt through a model for walks.

    Raises:
        UsageError: undescribed family or a prompt too long for the model.
        RunError: an activation is not finite.
    """
    (ids,) = model.token_tensor([token_ids.tolist()])
    if isinstance(model, ReferenceTransformer):
        description = describe_reference(model, n_positions=len(token_ids))
        trace = trace_reference(model, description, ids, target=target)
    else:
        description = describe_model(model, n_positions=len(token_ids))
        assert isinstance(model, HuggingFaceModel)
        trace = trace_prompt(model, description, ids, target=target)
    return PromptTrace(**vars(trace), description=description)


@contextmanager
def traced_beside(model: Model, token_ids: Int64[np.ndarray, "n_positions"]) -> Iterator[Callable[[], PromptTrace]]:
    """Within the context, keep the first pass of a prompt that is measured, so that its walks need none of their own.

    What is yielded gives the trace, and raises as `trace_model` does.
    """
    own = partial(trace_model, model, token_ids)
    try:
        description = describe_model(model, n_positions=len(token_ids))
    except UsageError:  # no dense decoder, as `trace_model` will tell
        yield own
        return
    assert isinstance(model, HuggingFaceModel)
    (ids,) = model.token_tensor([token_ids.tolist()])
    with tracing(model, description, ids) as traced:

        def seen() -> PromptTrace:
            trace = traced()
            return own() if trace is None else PromptTrace(**vars(trace), description=description)

        yield seen


@THEORIES.register("power_rollout")
@dataclass(frozen=True)
class PowerRollout(ModelTheory):
    """Energies through a trained model: squared attention, values, keys and MLPs (docs/theory, section 5)."""

    key_path: bool = True
    """Let keys, which move the attention weights, carry influence beside the values."""
    target: Annotated[str, OneOf(*TARGETS)] = "jacobian"
    """Output of the last position, one of TARGETS: the whole final state, or the predicted token's score."""

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
        rows = [power_rollout_prompt(subject, ids, self) for ids in track(prompts.token_ids, "power rollout")]
        labels = {"architecture": None, "n_positions": n_positions, **self.labels(seed)}
        return Prediction(Profile.mean_of(np.stack(rows)), per_prompt=np.stack(rows), **labels)

    def profile_of(self, trace: PromptTrace) -> Row:
        """The profile of a prompt that was traced for this theory's target.

        Raises:
            RunError: energies are not finite.
        """
        with fast_products(trace.embeddings.device, reduced=trace.description.reduced):
            influence = np.asarray(trace.diagonal(Walk(key=self.key_path)).cpu().numpy())
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


def power_rollout_prompt(
    model: Model,
    token_ids: Int64[np.ndarray, "n_positions"],
    theory: PowerRollout | None = None,
) -> Row:
    """One prompt's predicted profile; pure, so that a caller may keep it and resume elsewhere.

    Returns:
        Non-negative, sums to 1.

    Raises:
        UsageError: undescribed family or a prompt too long for the model.
        RunError: activations or energies are not finite.
    """
    theory = theory or PowerRollout()
    return theory.profile_of(trace_model(model, token_ids, target=theory.target))
