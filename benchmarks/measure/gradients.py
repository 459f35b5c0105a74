"""The gradient of the predicted token's probability with respect to every input embedding, by every method.

The floor is the least that any of them can do: one forward from the embeddings with one row of logits, and one
`torch.autograd.grad` to the embeddings, weights frozen. Peers get the predicted token, or its probability, for free.
Peers that are not installed are left out.
"""

from collections.abc import Callable, Sequence
from importlib import import_module, util
from typing import Any

import numpy as np
import torch
from subject import text_of, tokenizer, tokens_of
from torch import Tensor

import posbias as pb
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts import Prompts

Method = Callable[[], np.ndarray]
"""Norm of the gradient at every position, not normalised."""


def floor(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """The bare passes."""

    def run() -> np.ndarray:
        inputs = embedded(model, prompts)
        logits = model.network(inputs_embeds=inputs, use_cache=False, logits_to_keep=1).logits[0, -1]
        (gradient,) = torch.autograd.grad(logits.softmax(dim=-1).max(), inputs)
        return norms(gradient)

    return run


def ours(model: HuggingFaceModel, prompts: Prompts, *, checkpointing: bool = False, mixing: bool = False) -> Method:
    """`posbias.measure` of one kind; without mixing, which no peer measures, as for a model of no known family."""
    if not mixing:
        model = model.described_by(model.family, misfit="mixing is not timed")
    options = pb.MeasureOptions(checkpointing=checkpointing)

    def run() -> np.ndarray:
        measured = pb.measure(model, prompts, kinds="probability", options=options).per_prompt["probability"]
        return np.asarray(measured[0])

    return run


def captum(model: HuggingFaceModel, prompts: Prompts, *, tuned: bool = False) -> Method:
    """captum's Saliency on the embeddings; tuned: with one row of logits and frozen weights, as the floor has them."""
    saliency = import_module("captum.attr").Saliency
    keep = {"logits_to_keep": 1} if tuned else {}

    def predicted(inputs: Tensor) -> Any:
        logits = model.network(inputs_embeds=inputs, use_cache=False, **keep).logits[:, -1]
        return logits.softmax(dim=-1).max(dim=-1).values

    def run() -> np.ndarray:
        model.network.requires_grad_(not tuned)
        gradient = saliency(predicted).attribute(embedded(model, prompts), abs=False)
        model.network.requires_grad_(False)
        return norms(gradient)

    return run


def inseq(model: HuggingFaceModel, prompts: Prompts) -> Method:
    """inseq's saliency of the token that the model predicts, given as the continuation."""
    wrapped = import_module("inseq").load_model(model.network, "saliency", tokenizer=tokenizer())
    text = text_of(prompts.token_ids[0])
    with torch.no_grad():
        logits = model.network(tokens_of(prompts).to(model.device), use_cache=False, logits_to_keep=1).logits[0, -1]
    continued = f"{text} t{int(logits.argmax())}"

    def run() -> np.ndarray:
        found = wrapped.attribute(text, continued, show_progress=False).sequence_attributions[0]
        return np.asarray(found.target_attributions[: prompts.n_positions, 0].norm(dim=-1))

    return run


def embedded(model: HuggingFaceModel, prompts: Prompts) -> Tensor:
    """The first prompt's embeddings, a leaf to differentiate."""
    embeddings: Tensor = model.embed(tokens_of(prompts).to(model.device))
    return embeddings.detach().requires_grad_()


def norms(gradient: Tensor) -> np.ndarray:
    """Of a batch of one, per position."""
    return gradient[0].float().norm(dim=-1).numpy(force=True)


METHODS: dict[str, Callable[[HuggingFaceModel, Prompts], Method]] = {
    "floor": floor,
    "posbias": ours,
    "posbias, checkpointing": lambda model, prompts: ours(model, prompts, checkpointing=True),
    "posbias, with mixing": lambda model, prompts: ours(model, prompts, mixing=True),
    "captum": captum,
    "captum, one logit row": lambda model, prompts: captum(model, prompts, tuned=True),
    "inseq": inseq,
}
PACKAGES = {"captum": "captum", "captum, one logit row": "captum", "inseq": "inseq"}
"""What a peer's method needs installed."""
ROUND_OFF = 2e-3
"""Relative, per position: float32 through 12 layers, sums over thousands of keys in different orders."""


def installed(name: str) -> bool:
    """Whether a method can run here; only peers need a package."""
    return name not in PACKAGES or util.find_spec(PACKAGES[name]) is not None


def build(model: HuggingFaceModel, prompts: Prompts, names: Sequence[str]) -> dict[str, Method]:
    """Methods by name, asserted to give the floor's profile."""
    methods = {name: METHODS[name](model, prompts) for name in names}
    expected = methods["floor"]()
    for name, method in methods.items():
        np.testing.assert_allclose(method(), expected, rtol=ROUND_OFF, err_msg=name)
    return methods
