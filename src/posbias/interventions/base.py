"""An intervention: one ingredient of position bias replaced, in a model that runs and in the theory that describes it.

Three faces of the same change. `change` alters the network while a context is open; `description` is the model as a
theory that reads its weights should see it; `in_architecture` is the change in the rollout's terms. An intervened
model is off its training distribution: what it shows is how it computes, not what it would have learned.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64
from torch import nn
from torch.utils.hooks import RemovableHandle

from posbias.architecture import Architecture
from posbias.checks import checked
from posbias.errors import UsageError
from posbias.models.hugging_face import INTERVENTION_MARK, HuggingFaceModel
from posbias.models.layout import Layout
from posbias.registry import Registry, split_literals

INTERVENTIONS: Registry["Intervention"] = Registry(
    "intervention",
    left={
        "no_learned_sinks": "`posbias attention` tells the sinks' share",
        "scaled_rope": "no_rope, or another rope_scaling in config.json",
    },
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module's call, as a hook before it may change them."""


class Intervention(ABC):
    """One change of one ingredient."""

    name: ClassVar[str]
    ingredient: ClassVar[str]
    """The ingredient: "causal mask", "residual strength", "encoding", "content" or "sinks"."""
    patterns_stay: ClassVar[bool] = False
    """Set if the attention weights of a layer stay what they were, given the same input."""
    undescribed: ClassVar[str] = ""
    """Why the unchanged activations cannot be read with the change, if a subclass does not describe it."""
    no_ingredient: ClassVar[str] = ""
    """Why the change cannot be made in an architecture, if a subclass does not make it."""

    @abstractmethod
    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """Within the context, the network computes with the change; afterwards it is bit for bit what it was.

        Raises:
            UsageError: on entry, the model does not allow it; the message says why.
        """

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """The model as theories of its weights and activations should read it: by default as it is.

        Args:
            model: As loaded.
            rerun: Whether the activations come from running the changed network; otherwise they are the unchanged
                network's, and the description alone carries the change.

        Raises:
            UsageError: no description says what the change does; the message says why.
        """
        if rerun:
            return model
        raise UsageError(self.undescribed)

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """The architecture with the ingredient replaced.

        Raises:
            UsageError: an architecture has no such ingredient; the message says why.
        """
        raise UsageError(self.no_ingredient)

    def mixing(self, mixing: Float64[np.ndarray, "layers"]) -> Float64[np.ndarray, "layers"]:
        """The mixing |a| / (|x| + |a|) of every layer under the change; by default as it was."""
        return mixing

    def __str__(self) -> str:
        return INTERVENTIONS.spell(self)


@checked
@contextmanager
def intervened(model: Any, intervention: Intervention | str) -> Iterator[HuggingFaceModel]:
    """Context in which one ingredient of a model is replaced; measure it like any other model.

    The network is changed in place, by hooks: until the context ends, `model` computes with the change, too. No weight
    is touched, and afterwards every logit is bit for bit what it was.

    Args:
        model: A Hugging Face model of `load_model`.
        intervention: An object or its literal spelling, `"window(width=64)"`.

    Yields:
        The changed model, with a description of the change where the theories have one.

    Raises:
        UsageError: an unknown intervention, one the model does not allow, or a second one on the same network.
    """
    (resolved,) = resolve_interventions([intervention])
    checked = check_model(model)
    if checked.intervention is not None:  # a second mask would silently replace the first
        raise UsageError(f"{resolved}: the model is already intervened on; one intervention at a time is allowed")
    try:
        with resolved.change(checked):
            setattr(checked.network, INTERVENTION_MARK, str(resolved))
            yield resolved.description(checked, rerun=True)
    finally:
        vars(checked.network).pop(INTERVENTION_MARK, None)


def resolve_interventions(interventions: Sequence[Intervention | str] | Intervention | str) -> tuple[Intervention, ...]:
    """Parse interventions from literal spellings, such as "no_rope,no_content", objects, or both; none twice."""
    given = split_literals(interventions) if isinstance(interventions, str) else interventions
    requested = [given] if isinstance(given, Intervention) else list(given)
    resolved = tuple(INTERVENTIONS.parse(item) if isinstance(item, str) else item for item in requested)
    for item in resolved:
        if not isinstance(item, Intervention):
            raise UsageError(f"{item!r} is not an intervention; known: {', '.join(INTERVENTIONS)}")
    if not resolved:
        raise UsageError(f"no intervention given; known: {', '.join(INTERVENTIONS)}")
    spelled = [str(item) for item in resolved]
    for name in spelled:
        if spelled.count(name) > 1:
            raise UsageError(f"intervention {name!r} is given {spelled.count(name)} times; give each once")
    return resolved


def check_model(model: Any) -> HuggingFaceModel:
    """Return a Hugging Face model; refuse anything else. What reads its blocks refuses one without a layout."""
    if not isinstance(model, HuggingFaceModel):
        raise UsageError(
            f"interventions need a Hugging Face model (what load_model returns), got {type(model).__name__}"
        )
    return model


def described(model: HuggingFaceModel, answers: Callable[[Layout], Mapping[str, Any]]) -> HuggingFaceModel:
    """Describe the model, if its family is known, by one like it that answers some questions differently."""
    if not model.described:
        return model
    changed = copy.copy(model.family)
    vars(changed).update(answers(model.family))  # an instance precedes its class
    return model.described_by(changed)


@contextmanager
def before_calls(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Within the context, each hook(module, positional, named) stands before every call of its module."""
    with hooked(module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks):
        yield


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Within the context, hooks stay where they were registered."""
    with ExitStack() as hooks:
        for handle in handles:
            hooks.enter_context(handle)
        yield
