"""Interventions on what tells positions apart: rotary angles, learned positions, ALiBi.

Rotary angles are changed inside the rotary module, or where an attention module gets them. Changing the network's own
`position_ids` would be a trap: equal ids are taken for packed sequences, and attention becomes diagonal.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from posbias.architecture import ENCODINGS, Alibi, Architecture, Encoding, NoEncoding, Rope
from posbias.checks import NonNegative
from posbias.errors import UsageError
from posbias.interventions.base import INTERVENTIONS, Arguments, Intervention, before_calls, described
from posbias.models.attention import attention_modules
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.rotary import changing_kinds

ALIBI_ARGUMENTS = {"bloom": "alibi", "mpt": "position_bias"}
"""Argument of a family's attention modules that hands them their ALiBi logits."""


@contextmanager
def rotary_scaled(model: HuggingFaceModel, intervention: Intervention, scale: float) -> Iterator[None]:
    """Within the context, the positions that the rotary module sees, and so every angle, are multiplied by a factor."""

    def scaled(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
        if "position_ids" in named:
            return positional, {**named, "position_ids": named["position_ids"].float() * scale}
        return (positional[0], positional[1].float() * scale, *positional[2:]), named

    modules = _rotary_modules(model, intervention)
    for module in modules:
        kinds = changing_kinds(module)
        if kinds:
            raise UsageError(
                f"{intervention}: the rope type {' '.join(sorted(kinds))} takes its frequencies from the prompt's "
                "length; default, linear, yarn and llama3 are allowed"
            )
    with before_calls((module, scaled) for module in modules):
        yield


@INTERVENTIONS.register("no_rope")
@dataclass(frozen=True)
class NoRope(Intervention):
    """Every rotary angle is 0: cosines 1, sines 0, queries and keys as projected.

    A factor that a RoPE variant puts on cosines and sines (YaRN) stays where the network runs.
    """

    ingredient: ClassVar[str] = "encoding"

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Factor 0, also where an attention module is handed angles of another pass."""

        def still(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            angles = named.get("position_embeddings")
            if angles is None:
                return positional, named
            whole = angles.abs() if isinstance(angles, Tensor) else torch.hypot(*angles)
            unturned = torch.complex(whole, torch.zeros_like(whole)) if isinstance(angles, Tensor) else None
            return positional, {
                **named,
                "position_embeddings": (whole, torch.zeros_like(whole)) if unturned is None else unturned,
            }

        with (
            rotary_scaled(model, self, 0.0),
            before_calls((module, still) for module in attention_modules(model.network).values()),
        ):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """Leave the model as it is if the activations carry the angles; otherwise no layer rotates."""
        if rerun:
            return model
        _rotary_modules(model, self)
        return described(model, rotates=lambda attention, config: False)

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Encoding `none` in place of `rope`."""
        return replace(architecture, encoding=_without(architecture.encoding, Rope, self))


@INTERVENTIONS.register("scaled_rope")
@dataclass(frozen=True)
class ScaledRope(Intervention):
    """Every rotary angle is multiplied by a factor: 0.5 sets positions twice as near, 2 twice as far apart."""

    ingredient: ClassVar[str] = "encoding"
    undescribed: ClassVar[str] = "the angles come with the activations, so other angles need the changed network's own"
    no_ingredient: ClassVar[str] = "the encoding rope of an architecture has no factor on its angles"

    factor: NonNegative
    """At least 0; 0 is `no_rope`, 1 changes nothing."""

    def change(self, model: HuggingFaceModel) -> AbstractContextManager[None]:
        """That factor."""
        return rotary_scaled(model, self, float(self.factor))


@INTERVENTIONS.register("no_learned_positions")
@dataclass(frozen=True)
class NoLearnedPositions(Intervention):
    """The table of learned positions adds zero to every token (GPT-2, OPT): it changes the input, no map."""

    ingredient: ClassVar[str] = "encoding"
    undescribed: ClassVar[str] = (
        "learned positions are in the activations, so taking them out needs the changed network's own"
    )
    no_ingredient: ClassVar[str] = (
        "learned positions add no logit without content, so an architecture has none to take out"
    )

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Return zeros from the table."""
        table = model.family.position_table
        if table is None:
            raise UsageError(f"{self}: {model.family.name} models have no table of learned positions")
        module = model.network.get_submodule(table)
        with module.register_forward_hook(lambda _, _inputs, output: torch.zeros_like(output)):
            yield


@INTERVENTIONS.register("no_alibi")
@dataclass(frozen=True)
class NoAlibi(Intervention):
    """Every ALiBi slope is 0 (BLOOM, MPT)."""

    ingredient: ClassVar[str] = "encoding"

    @contextmanager
    def change(self, model: HuggingFaceModel) -> Iterator[None]:
        """Hand every attention module zeros for its biases."""
        _check_alibi(model, self)
        argument = ALIBI_ARGUMENTS[model.model_type]

        def without(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> Arguments:
            return positional, {**named, argument: torch.zeros_like(named[argument])}

        with before_calls((module, without) for module in attention_modules(model.network).values()):
            yield

    def description(self, model: HuggingFaceModel, *, rerun: bool) -> HuggingFaceModel:
        """No encoding."""
        _check_alibi(model, self)
        return described(model, encoding=lambda config, layer: NoEncoding())

    def in_architecture(self, architecture: Architecture) -> Architecture:
        """Encoding `none` in place of `alibi`."""
        return replace(architecture, encoding=_without(architecture.encoding, Alibi, self))


def _without(encoding: Any, kind: type[Encoding], intervention: Intervention) -> Any:
    """Replace one kind of encoding, which must be there, by none, in an encoding, its spelling, or lists of them."""
    replaced_any = False

    def replaced(item: Any) -> Any:
        nonlocal replaced_any
        if isinstance(item, list | tuple):
            return [replaced(part) for part in item]
        variant = ENCODINGS.parse(item) if isinstance(item, str) else item
        if not isinstance(variant, kind):
            return variant
        replaced_any = True
        return NoEncoding()

    result = replaced(encoding)
    if not replaced_any:
        raise UsageError(
            f"{intervention}: the architecture has no {kind.name} to take out (rotary positions of a model add no "
            "logit of their own without content and read as none)"
        )
    return result


def _rotary_modules(model: HuggingFaceModel, intervention: Intervention) -> list[nn.Module]:
    """Modules that turn positions into cosines and sines; at least one."""
    modules = [module for module in model.network.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    takes = [signature(type(module).forward).parameters for module in attention_modules(model.network).values()]
    config = model.config
    unused = getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "rope") != "rope"
    if not modules or unused or not any("position_embeddings" in names for names in takes):
        raise UsageError(f"{intervention}: this {model.model_type} model has no rotary module to change")
    return modules


def _check_alibi(model: HuggingFaceModel, intervention: Intervention) -> None:
    """Refuse a model without ALiBi, or one that hands it down in another way."""
    if model.model_type not in ALIBI_ARGUMENTS:
        raise UsageError(f"{intervention} is made for {', '.join(ALIBI_ARGUMENTS)}, got a {model.model_type} model")
