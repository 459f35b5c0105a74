"""Low-rank updates of linear projections, as peft has them: W becomes W + s B A.

A [rank, features read] and B [features made, rank] act beside the projection (LoRA with alpha = rank); the weights stay
as they are. From the question on (activated LoRA, arXiv 2504.12397) they act on the tokens behind the context alone, so
that its keys and values are those of the model as it is.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor, nn

from posbias.checks import Count, Natural
from posbias.errors import UsageError
from posbias.interventions.base import Padding, hooked
from posbias.interventions.keys import Begins
from posbias.mitigation.methods.base import MITIGATIONS, Mitigation, Places, Spans, question_begins
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.layout import ROLES, Projection, projections_of
from posbias.models.weights import quantised

GROUPS = {"mlp": ("gate", "up", "down"), "all": ROLES}
"""Words for several targets at once."""
SIDES = {"down": "lora_A", "up": "lora_B"}
"""A and B, as their numbers are named here and in peft."""


@MITIGATIONS.register("adapter")
@dataclass(frozen=True, repr=False)
class Adapter(Mitigation):
    """Low-rank updates of linear projections, as fitted by `fit`; with a strength s, s times the update.

    Its numbers are kept in a file beside its recipe. `posbias export` writes it for vLLM, llama.cpp and transformers.
    Source: LoRA, arXiv 2106.09685.
    """

    needs_question: ClassVar[bool] = True

    rank: Count = 4
    """Rank of every update, >= 1."""
    targets: str = "q,k"
    """Projections by commas: q, k, v, o, gate, up, down; mlp: the last three; all."""
    weights: str = ""
    """Hash of the fitted numbers; empty: they are still to be fitted."""
    invocation: tuple[Natural, ...] = ()
    """Tokens that open the question: the updates act from the last place in a prompt on where these stand, and on none
    if they stand nowhere. Empty: on all tokens."""
    updates: Mapping[str, Float32[np.ndarray, "_ _"]] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )
    """The numbers: PATH.down [rank, features read] and PATH.up [features made, rank]."""

    def __post_init__(self) -> None:
        _ = self.roles
        if self.updates and tensors_hash(self.updates) != self.weights:
            raise UsageError("adapter: its numbers are others than those that `weights` names")

    @property
    def needs_passages(self) -> bool:  # type: ignore[override]
        """To know where the question begins."""
        return bool(self.invocation)

    def known(self, passages: Spans, prompt: Sequence[int]) -> Spans:
        """All that stands before the question, as servers find it, in the place of passages."""
        if not self.invocation:
            return passages
        words = list(self.invocation)
        begins = (begin for begin in reversed(range(len(prompt))) if prompt[begin : begin + len(words)] == words)
        return [(0, next(begins, 1 << 62))]  # which no prompt reaches

    @property
    def roles(self) -> tuple[str, ...]:
        """The targets one by one, in the order of `ROLES`."""
        asked = {word.strip() for word in self.targets.split(",")} if isinstance(self.targets, str) else set()
        if not asked or not asked <= {*ROLES, *GROUPS}:
            allowed = ", ".join((*ROLES, *GROUPS))
            raise UsageError(f"adapter: targets must be among {allowed}, got {self.targets!r}")
        roles = {role for word in asked for role in GROUPS.get(word, (word,))}
        return tuple(role for role in ROLES if role in roles)

    def weight_updates(self, model: HuggingFaceModel) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of every projection, by path, at the method's strength, in float32 at least.

        Raises:
            UsageError: the numbers are not there, or are those of another model.
        """
        if not self.updates:
            why = "its numbers lie beside its recipe" if self.weights else "it is not fitted yet"
            raise UsageError(f"adapter: {why}; give what fit returns, or the path of a recipe")
        dtype = torch.promote_types(model.dtype, torch.float32)
        updates = {}
        for projection in target_projections(model, self):
            path, (made, read) = projection.path, projection.shape
            down, up = (self.updates.get(f"{path}.{side}") for side in SIDES)
            if down is None or up is None or down.shape != (self.rank, read) or up.shape != (made, self.rank):
                raise UsageError(f"{self.name}: it was fitted to another model, which has no {path} of {made} x {read}")
            updates[path] = torch.as_tensor(down).to(dtype), torch.as_tensor(self.strength * up).to(dtype)
        return updates

    def apply(self, model: HuggingFaceModel, passages: Places) -> AbstractContextManager[None]:
        """Add B A x to what every projection makes of x."""
        first = question_begins(model, passages) if self.invocation else 0
        return tuned(model.network, self.weight_updates(model), first)


@contextmanager
def tuned(network: nn.Module, updates: Mapping[str, tuple[Tensor, Tensor]], first: int | Begins = 0) -> Iterator[None]:
    """Within the context, peft's layers stand in place of projections, by their paths, with these A and B.

    Parameters are taken as they are, so that a gradient flows through them; the network's own stay as they were. They
    act on the tokens of every prompt from `first` on.
    """
    from peft.tuners.lora import LoraModel

    padding = Padding()

    def silence(_module: nn.Module, _read: Any, made: Tensor) -> Tensor:
        """Make 0 of all tokens before the first, which some networks hand to a linear map in one list."""
        begin = first if isinstance(first, int) else first().to(made.device)
        return made.masked_fill((padding.reading(made.device) < begin).reshape(*made.shape[:-1], 1), 0)

    # Apart from their network, of which peft would take other modules too, such as experts that are named alike.
    apart = nn.ModuleDict({str(number): network.get_submodule(path) for number, path in enumerate(updates)})
    originals = list(apart.values())
    trained = [parameter for parameter in apart.parameters() if parameter.requires_grad]
    LoraModel(apart, lora_config(network, updates, targets=list(apart)), "default", low_cpu_mem_usage=True)  # no draws
    try:
        for layer, (path, sides) in zip(apart.values(), updates.items(), strict=True):
            device = next(layer.base_layer.parameters()).device  # type: ignore[union-attr]
            for side, numbers in zip(SIDES.values(), sides, strict=True):
                given = isinstance(numbers, nn.Parameter)
                weight = numbers if given else nn.Parameter(numbers.to(device), requires_grad=False)
                getattr(layer, side)["default"].weight = weight
            network.set_submodule(path, layer)
        if not first:
            yield
            return
        ups: list[Any] = [layer.lora_B["default"] for layer in apart.values()]  # type: ignore[index]
        with padding.followed(network), hooked(up.register_forward_hook(silence) for up in ups):
            yield
    finally:
        for original, path in zip(originals, updates, strict=True):
            network.set_submodule(path, original)
        for parameter in trained:
            parameter.requires_grad_(True)


def lora_config(
    network: nn.Module, updates: Mapping[str, tuple[Tensor, Tensor]], *, targets: list[str], **more: Any
) -> Any:
    """peft's configuration of an adapter with these updates, none of which it scales."""
    from peft import LoraConfig

    rank = len(next(iter(updates.values()))[0])
    transposed = any(type(network.get_submodule(path)).__name__ == "Conv1D" for path in updates)
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=transposed, **more)


def target_projections(model: HuggingFaceModel, adapter: Adapter) -> list[Projection]:
    """The projections that an adapter updates, each with those of its rows alone that are targets.

    A layer without them has no update.

    Raises:
        UsageError: no layer has one of the targets, or quantised weights.
    """
    roles = set(adapter.roles)
    if quantised(model.network):
        raise UsageError(f"adapter: the weights of {model.origin.source!r} are quantised; others are allowed")
    projections = projections_of(model.network, model.family if model.described else None, model.config)
    present = {role for projection in projections for role in projection.rows}
    missing = roles - present
    if missing - {"gate"} or not roles & present:  # an MLP without a gate is one all the same
        raise UsageError(
            f"adapter: no layer of this {model.model_type} model has linear projections {_listed(missing)} under names "
            f"that are known (experts of a mixture are none); allowed targets: {_listed(present) or 'none'}"
        )
    targets = [{role: rows for role, rows in one.rows.items() if role in roles} for one in projections]
    return [replace(one, rows=rows) for one, rows in zip(projections, targets, strict=True) if rows]


def _listed(roles: set[str]) -> str:
    return ", ".join(role for role in ROLES if role in roles)


def tensors_hash(tensors: Mapping[str, np.ndarray]) -> str:
    """A hash of arrays with their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return digest.hexdigest()[:32]
