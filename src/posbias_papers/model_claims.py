"""Claims on one model: premises that are checked on it, and the statement's number and verdict.

The statement is examined whether the premises are met or not; if not, the verdict says so, and what became of the
statement all the same. Claims need of a model: mean attention over heads of every layer, mask and mixing,
per prompt, as dense matrices, so contexts are short. Attention is the model's own: of a reference model as it computes
it, of a Hugging Face model recomputed from what its attention modules read.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from posbias.architecture import Causal, Full, Mask, Prefix, SlidingWindow
from posbias.checks import OneOf, checked_value
from posbias.errors import RunError, UsageError
from posbias.measurement.several import MeasurePlan
from posbias.models.attention_blocks import query_blocks
from posbias.models.devices import in_float64
from posbias.models.model import Model
from posbias.models.reference.config import constants_of, shape_of, stacked
from posbias.models.reference.forward import attention_maps
from posbias.models.reference.network import ReferenceTransformer
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.theory.power_rollout.actual_attention import trace_attention
from posbias_papers.claims import MODEL_CLAIMS, Finding, Premise, Verdict, Words, selected
from posbias_papers.kernels import ROUNDING

MOST_POSITIONS = 256
"""Layers x positions^2 float64 numbers per prompt are kept: 16 MB for 30 layers at 256 positions."""

Kernels = Float64[np.ndarray, "layers query key"]


@dataclass(frozen=True, eq=False)
class ModelRun:
    """A model's attention on some prompts."""

    kernels: Float64[np.ndarray, "prompts layers query key"]
    """A_l, the mean over heads; rows sum to 1."""
    mixing: Float64[np.ndarray, "prompts layers"]
    """m_l, mean over tokens of |a| / (|x| + |a|); 1 without a residual connection."""
    visible: Bool[np.ndarray, "layers query key"]
    """True for keys that some head of the layer may see."""

    @property
    def epsilons(self) -> Float64[np.ndarray, "prompts"]:
        """Each prompt's smallest admissible weight over all layers."""
        admissible = np.where(self.visible, self.kernels, np.inf)
        return np.asarray(admissible.min(axis=(1, 2, 3)))

    @property
    def mask(self) -> Mask | None:
        """The mask, where all layers have one of the library's; a window that sees everything reads as causal."""
        first, n_positions = self.visible[0], self.visible.shape[1]
        if (self.visible != first).any():
            return None
        reach, ahead = int(first[-1].sum()), int(first[0].sum())
        candidates = (Causal(), Full(), SlidingWindow(reach), Prefix(ahead))
        return next((mask for mask in candidates if np.array_equal(mask.visible(n_positions), first)), None)


def run_model(model: Model, prompts: Prompts) -> ModelRun:
    """Run every prompt and keep its attention.

    Args:
        model: A reference model, or a Hugging Face model of a described family.
        prompts: Equally long, 2 to 256 positions.

    Raises:
        UsageError: too short, too long, or a family whose attention cannot be recomputed.
        RunError: attention or norms are not finite.
    """
    if not 2 <= prompts.n_positions <= MOST_POSITIONS:
        raise UsageError(
            f"claims on a model need prompts of 2 to {MOST_POSITIONS} positions, got {prompts.n_positions}"
        )
    trace = _of_reference if isinstance(model, ReferenceTransformer) else _of_described
    traces = [trace(model, ids) for ids in track(prompts.token_ids, "attention")]
    kernels = np.stack([kernel for kernel, _, _ in traces])
    mixing = np.stack([shares for _, shares, _ in traces])
    if not (np.isfinite(kernels).all() and np.isfinite(mixing).all()):
        raise RunError("the model's attention or mixing is not finite on a prompt; check its weights for overflow")
    # Rows of float32 softmaxes sum to 1 within 1e-7; the claims are compared to far less.
    return ModelRun(kernels / kernels.sum(-1, keepdims=True), mixing, traces[0][2])


@torch.no_grad()
def _of_reference(
    model: Any, ids: Int64[np.ndarray, "n_positions"]
) -> tuple[Kernels, Float64[np.ndarray, "layers"], Bool[np.ndarray, "layers query key"]]:
    shape = shape_of(model.config, len(ids))
    constants = {name: value.to(model.device) for name, value in constants_of(model.config, len(ids)).items()}
    weights = {name: value.detach() for name, value in model.network.named_parameters()}
    tokens = model.token_tensor([ids.tolist()])
    inputs = tokens if model.config.vocabulary_size is not None else model.embed(tokens)
    maps = attention_maps(shape, stacked([weights]), stacked([constants]), inputs[None])
    norms = model.branch_norms(tokens)
    stream, branch = (part[:, 0].cpu().double().numpy() for part in (norms.stream, norms.branch))
    with np.errstate(divide="ignore", invalid="ignore"):
        mixing = (branch / (stream + branch)).mean(axis=1)
    visible = (constants["bias"] > -torch.inf).any(dim=1).cpu().numpy()
    return in_float64(maps[:, 0, 0]).mean(dim=1).cpu().numpy(), mixing, visible


@torch.no_grad()
def _of_described(
    model: Any, ids: Int64[np.ndarray, "n_positions"]
) -> tuple[Kernels, Float64[np.ndarray, "layers"], Bool[np.ndarray, "layers query key"]]:
    layers, mixing = trace_attention(model, model.token_tensor([ids.tolist()])[0])
    kernels = np.zeros((len(layers), len(ids), len(ids)))
    visible = np.empty(kernels.shape, dtype=bool)
    for index, traced in enumerate(layers):
        state = traced.state()
        for block in query_blocks(state):
            kernels[index, block.queries, block.keys] = in_float64(block.weights).mean((0, 1)).cpu().numpy()
        position = np.arange(len(ids))
        visible[index] = (position >= state.first.numpy()[:, None]) & (position <= position[:, None])
    return kernels, mixing.numpy(), visible


class ModelClaim(Words, ABC):
    """A published claim in the form in which one model's attention can meet it or not; named as the claim is."""

    name: ClassVar[str]

    @abstractmethod
    def premises(self, run: ModelRun) -> tuple[Premise, ...]:
        """The assumptions that show in attention, mask and mixing."""

    @abstractmethod
    def examine(self, run: ModelRun) -> Finding:
        """The statement's number on this model, worst over prompts."""

    def check(self, run: ModelRun) -> Verdict:
        """Premises and number together."""
        return Verdict(self.name, self.examine(run), premises=self.premises(run))


def verify_model(model: Model, prompts: Prompts, selection: str | None = None) -> list[Verdict]:
    """Put the claims whose premises show in attention and mixing to the test on a model.

    Args:
        model: A reference model, or a Hugging Face model of a described family.
        prompts: Equally long, 2 to 256 positions; every number is the worst over prompts unless it says otherwise.
        selection: A claim, a paper, or None for every claim with a form for models.

    Returns:
        One verdict per claim.

    Raises:
        UsageError: an unknown claim, or none with a form for models; prompts or a model that cannot be used.
        RunError: attention or norms are not finite.
    """
    names = [name for name in selected(selection) if name in MODEL_CLAIMS]
    if not names:
        raise UsageError(f"claim {selection!r} has no form for models; claims with one: {', '.join(MODEL_CLAIMS)}")
    run = run_model(model, prompts)
    return [MODEL_CLAIMS[name]().check(run) for name in names]


def verify_source(source: str, claim: str | None, plan: MeasurePlan) -> tuple[list[Verdict], dict[str, Any]]:
    """Verdicts on the model that `source` names, and the model and the prompts as they describe themselves."""
    selected(claim)  # before the model is loaded
    checked_value(
        "dtype", plan.dtype, Annotated[str, OneOf("float32", "float64")]
    )  # claims are held to single precision
    model = plan.load(source)
    texts = plan.prompts(model)
    return verify_model(model, texts, claim), {"model": model.describe(), "prompts": texts.describe()}


def causal(run: ModelRun) -> Premise:
    """No layer looks ahead."""
    return Premise("no attention to later positions", not bool(np.triu(run.visible, 1).any()))


def attention_only(run: ModelRun) -> Premise:
    """No residual connection."""
    least = float(run.mixing.min())
    return Premise("attention only: no residual connections", 1 - least <= ROUNDING, f"least mixing {least:.3f}")


def bounded_below(run: ModelRun) -> Premise:
    """Every admissible weight above one positive number: what bounded weights and values give at any finite depth."""
    epsilon = float(run.epsilons.min())
    return Premise("every admissible attention weight is positive", epsilon > 0, f"smallest {epsilon:.2e}")


def masked_as(run: ModelRun, kind: str) -> Premise:
    """One of some masks in every layer."""
    mask = run.mask
    met = mask is not None and type(mask).name == kind
    found = "layers or heads differ, or no mask of the library" if mask is None else str(mask)
    return Premise(f"mask {kind} in every layer", met, found)
