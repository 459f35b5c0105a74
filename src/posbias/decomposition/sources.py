"""Sources of a profile under an intervention: the model itself, or one of four readings of theory.

`rollout_content` knows an architecture with measured mixing and content. `attention_rollout` and `power_rollout` read
the unchanged model's activations and replace the ingredient in what each layer makes of them; `power_rollout_rerun`
reads the activations of the changed model. All give one profile per prompt; the power rollout speaks of the first kind
alone. Each is a piece that is computed once and found again on resuming; a source that does not apply leaves its
reason.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int64

from posbias.architecture import Architecture
from posbias.errors import RunError, UsageError
from posbias.interventions import Intervention
from posbias.measurement.attention.options import AttentionOptions
from posbias.measurement.attention.streaming import statistics_of
from posbias.measurement.kinds import Kind
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt, mixing_of_layers
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.prompts import Prompts
from posbias.runs.parts import PartStore, fingerprint, packed, unpacked
from posbias.theory import predict
from posbias.theory.power_rollout import PowerRollout, attention_rollout_prompt, power_rollout_prompt
from posbias.theory.power_rollout.trace import TARGETS

UNCHECKED = PassOptions(precision_prompts=0)
"""A decomposition sets half precision beside half precision; the loss against float32 is `measure`'s to report."""

MEASURED = "measured"

Row = Float64[np.ndarray, "n_positions"]
"""One prompt's profile."""
Profiles = Float64[np.ndarray, "count n_positions"]
"""One profile per prompt; rows sum to 1."""
Series = tuple[str, str]
"""(source, kind of influence)."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Examiner:
    """One model on one set of prompts: what every source reads, and what is finished."""

    model: HuggingFaceModel
    prompts: Prompts
    kinds: tuple[Kind, ...]
    seed: int
    mixing: Float64[np.ndarray, "count layers"]
    """Mean over tokens of |a| / (|x| + |a|), measured on the unchanged model."""
    content: Float64[np.ndarray, "count layers heads"] | None
    """Diagonal less off-diagonal content logits, likewise; None if attention cannot be seen."""
    store: PartStore

    def changed(self, intervention: Intervention | None) -> AbstractContextManager[None]:
        """The network under the intervention, or as it is."""
        return nullcontext() if intervention is None else intervention.change(self.model)

    def described(self, intervention: Intervention | None, *, own: bool) -> HuggingFaceModel:
        """The model as theories should read it under the intervention, or as it is."""
        return self.model if intervention is None else intervention.description(self.model, rerun=own)

    def profiles(
        self, intervention: Intervention | None, names: Sequence[str]
    ) -> tuple[dict[Series, Profiles], dict[str, str]]:
        """Profiles of every source that applies, by (source, kind), and the others' reasons; None replaces nothing."""
        profiles: dict[Series, Profiles] = {}
        reasons: dict[str, str] = {}
        for name in names:
            piece = self._kept(intervention, name, partial(self._compute, intervention, name))
            profiles |= {(name, kind): rows for kind, rows in piece["profiles"].items()}
            if piece["reason"] is not None:
                reasons[name] = piece["reason"]
        return profiles, reasons

    def divergence(self, intervention: Intervention) -> Float64[np.ndarray, "count"]:
        """sum_t p_t (log p_t - log q_t), p unchanged and q changed, of every prompt."""

        def diverge() -> dict[str, Any]:
            unchanged = self._unchanged  # read before anything is changed
            with intervention.change(self.model):
                after = [next_token_logs(self.model, token_ids) for token_ids in self.prompts.token_ids]
            # Equal distributions may come out below zero by rounding; no divergence is.
            pairs = zip(unchanged, after, strict=True)
            divergences = [max(0.0, float(np.exp(log_p) @ (log_p - log_q))) for log_p, log_q in pairs]
            return {"divergence": np.array(divergences)}

        found: np.ndarray = self._kept(intervention, "divergence", diverge)["divergence"]
        return found

    def _kept(self, intervention: Intervention | None, name: str, compute: Callable[[], Any]) -> dict[str, Any]:
        """A piece under a name that files may have; spellings hold brackets."""
        spelled = "unchanged" if intervention is None else fingerprint({"intervention": str(intervention)})[:16]
        piece: dict[str, Any] = unpacked(self.store.get(f"{spelled}-{name}", lambda: packed(compute())))
        return piece

    def _compute(self, intervention: Intervention | None, name: str) -> dict[str, Any]:
        try:
            return {"profiles": SOURCES[name](self, intervention), "reason": None}
        except (UsageError, RunError) as error:
            return {"profiles": {}, "reason": str(error)}

    @cached_property
    def _unchanged(self) -> list[Float64[np.ndarray, "vocabulary"]]:
        return [next_token_logs(self.model, token_ids) for token_ids in self.prompts.token_ids]


def measured_profiles(case: Examiner, intervention: Intervention | None) -> dict[str, Profiles]:
    """Influence of every prompt by kind, with the network changed; the same random probes as on the unchanged one."""
    rows: dict[str, list[Row]] = {kind.name: [] for kind in case.kinds}
    with case.changed(intervention):
        model = case.described(intervention, own=True)
        for index, token_ids in enumerate(case.prompts.token_ids):
            measured = measure_prompt(model, token_ids, kinds=case.kinds, key=(case.seed, index), options=UNCHECKED)
            for kind, norms in measured.norms.items():
                if not norms.sum() > 0:
                    raise RunError(f"{kind}: every position of prompt {index} has zero influence, so it has no profile")
                rows[kind].append(norms / norms.sum())
    return {kind: np.stack(profiles) for kind, profiles in rows.items()}


def architecture_profiles(case: Examiner, intervention: Intervention | None) -> dict[str, Profiles]:
    """The residual rollout with each prompt's own mixing and content; the same for every kind."""
    if case.content is None:
        raise UsageError("content logits need attention that can be seen")
    rows = []
    for mixing, content in zip(case.mixing, case.content, strict=True):
        architecture = Architecture.from_model(case.model, mixing=mixing, content=content)
        if intervention is not None:
            architecture = intervention.in_architecture(architecture)
        forecast = predict(architecture, case.prompts.n_positions, theory="rollout_content")
        rows.append(forecast.profile.influence)
    return {kind.name: np.stack(rows) for kind in case.kinds}


def attention_profiles(case: Examiner, intervention: Intervention | None) -> dict[str, Profiles]:
    """The rollout of the model's own attention, its patterns replaced, its activations kept."""
    replaced = None if intervention is None or intervention.patterns_stay else intervention
    case.described(replaced, own=False)  # refuses what needs the changed network's own activations
    mixing = case.mixing if intervention is None else np.stack([intervention.mixing(row) for row in case.mixing])
    rows = [
        attention_rollout_prompt(case.model, token_ids, shares.tolist(), under=case.changed(replaced))
        for token_ids, shares in zip(case.prompts.token_ids, mixing, strict=True)
    ]
    return {kind.name: np.stack(rows) for kind in case.kinds}


def power_profiles(case: Examiner, intervention: Intervention | None, *, rerun: bool = False) -> dict[str, Profiles]:
    """The power rollout with the description changed and the activations kept, or on the changed model's own.

    For the first kind alone: its target differs by kind, and a pull costs as much as the measurement.
    """
    with case.changed(intervention if rerun else None):
        model, kind = case.described(intervention, own=rerun), case.kinds[0].name
        if kind not in TARGETS:
            raise UsageError(f"the power rollout speaks of {', '.join(TARGETS)}, and the first kind measured is {kind}")
        theory, under = PowerRollout(target=kind), partial(case.changed, None if rerun else intervention)
        rows = [power_rollout_prompt(model, ids, theory, under=under()) for ids in case.prompts.token_ids]
        return {kind: np.stack(rows)}


Source = Callable[[Examiner, Intervention | None], dict[str, Profiles]]
SOURCES: dict[str, Source] = {
    MEASURED: measured_profiles,
    "rollout_content": architecture_profiles,
    "attention_rollout": attention_profiles,
    "power_rollout": power_profiles,
    "power_rollout_rerun": partial(power_profiles, rerun=True),
}
"""By name, the measurement first."""


def examiner_of(
    model: HuggingFaceModel, prompts: Prompts, kinds: tuple[Kind, ...], *, seed: int, store: PartStore
) -> Examiner:
    """Mixing and content of the unchanged model on every prompt, which theories of the architecture ask for."""

    def read() -> Arrays:
        rows = [mixing_of_layers(model, token_ids, prompt=index) for index, token_ids in enumerate(prompts.token_ids)]
        arrays = {"mixing": np.stack([row.tokens for row in rows])}
        with suppress(UsageError):  # attention cannot be seen
            options = AttentionOptions(kernel_cells=1, mean_content=False)
            arrays["content"] = statistics_of(model, prompts, options).content.difference.per_prompt
        return arrays

    arrays = store.get("setting", read)
    return Examiner(model, prompts, kinds, seed, arrays["mixing"], arrays.get("content"), store)


@torch.no_grad()
def next_token_logs(
    model: HuggingFaceModel, token_ids: Int64[np.ndarray, "n_positions"]
) -> Float64[np.ndarray, "vocabulary"]:
    """Log-probabilities of the next token."""
    logits = model.last(model.embed(model.token_tensor([token_ids.tolist()]))).logits[0]
    return np.asarray(in_float64(logits).log_softmax(-1).cpu().numpy())
