"""Where a profile under an intervention comes from: the model itself, or one of four readings of theory.

`rollout_content` knows an architecture with measured mixing and content. `attention_rollout` and `power_rollout` read
the unchanged model's activations and replace the ingredient in the description alone; `power_rollout_rerun` reads the
activations of the changed model. All give one profile per prompt; the power rollout speaks of the first kind alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.errors import RunError, UsageError
from posbias.interventions import Intervention
from posbias.measurement import Kind, PassOptions, measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts import Prompts
from posbias.theory import predict
from posbias.theory.power_rollout import PowerRollout, attention_rollout_prompt, power_rollout_prompt

UNCHECKED = PassOptions(precision_prompts=0)
"""A decomposition sets half precision beside half precision; the loss against float32 is `measure`'s to report."""

MEASURED = "measured"
TARGETED = ("jacobian", "probability", "logprob")
"""Kinds that the power rollout has a target for."""

Row = Float64[np.ndarray, "n_positions"]
"""One prompt's profile."""
Profiles = Float64[np.ndarray, "count n_positions"]
"""One profile per prompt; rows sum to 1."""
Series = tuple[str, str]
"""(source, kind of influence)."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What every source reads."""

    model: HuggingFaceModel
    prompts: Prompts
    kinds: tuple[Kind, ...]
    seed: int
    mixing: Float64[np.ndarray, "count layers"]
    """Mean over tokens of |a| / (|x| + |a|), measured on the unchanged model."""
    content: Float64[np.ndarray, "count layers heads"] | None
    """Diagonal less off-diagonal content logits, likewise; None where attention cannot be recomputed."""

    def changed(self, intervention: Intervention | None) -> AbstractContextManager[None]:
        """The network under the intervention, or as it is."""
        return nullcontext() if intervention is None else intervention.change(self.model)

    def described(self, intervention: Intervention | None, *, own: bool) -> HuggingFaceModel:
        """The model as theories should read it under the intervention, or as it is."""
        return self.model if intervention is None else intervention.description(self.model, own=own)


def measured_profiles(setting: Setting, intervention: Intervention | None) -> dict[str, Profiles]:
    """Influence of every prompt by kind, with the network changed; the same random probes as on the unchanged one."""
    rows: dict[str, list[Row]] = {kind.name: [] for kind in setting.kinds}
    with setting.changed(intervention):
        model = setting.described(intervention, own=True)
        for index, token_ids in enumerate(setting.prompts.token_ids):
            measured = measure_prompt(
                model, token_ids, kinds=setting.kinds, key=(setting.seed, index), options=UNCHECKED
            )
            for kind, norms in measured.norms.items():
                if not norms.sum() > 0:
                    raise RunError(f"{kind}: every position of prompt {index} has zero influence, so it has no profile")
                rows[kind].append(norms / norms.sum())
    return {kind: np.stack(found) for kind, found in rows.items()}


def architecture_profiles(setting: Setting, intervention: Intervention | None) -> dict[str, Profiles]:
    """The residual rollout with each prompt's own mixing and content; the same for every kind."""
    if setting.content is None:
        raise UsageError("content logits need attention that can be recomputed")
    rows = []
    for mixing, content in zip(setting.mixing, setting.content, strict=True):
        architecture = Architecture.from_model(setting.model, mixing=mixing, content=content)
        if intervention is not None:
            architecture = intervention.in_architecture(architecture)
        forecast = predict(architecture, setting.prompts.n_positions, theory="rollout_content")
        rows.append(forecast.profile.influence)
    return {kind.name: np.stack(rows) for kind in setting.kinds}


def attention_profiles(setting: Setting, intervention: Intervention | None) -> dict[str, Profiles]:
    """The rollout of the model's own attention, its patterns replaced, its activations kept."""
    stays = intervention is None or intervention.patterns_stay
    model = setting.model if stays else setting.described(intervention, own=False)
    mixing = setting.mixing if intervention is None else np.stack([intervention.mixing(row) for row in setting.mixing])
    rows = [
        attention_rollout_prompt(model, token_ids, shares.tolist())
        for token_ids, shares in zip(setting.prompts.token_ids, mixing, strict=True)
    ]
    return {kind.name: np.stack(rows) for kind in setting.kinds}


def power_profiles(setting: Setting, intervention: Intervention | None) -> dict[str, Profiles]:
    """The power rollout with the description changed and the activations kept."""
    return _power(setting, setting.described(intervention, own=False))


def rerun_power_profiles(setting: Setting, intervention: Intervention | None) -> dict[str, Profiles]:
    """The power rollout on the changed model's own activations."""
    with setting.changed(intervention):
        return _power(setting, setting.described(intervention, own=True))


def _power(setting: Setting, model: HuggingFaceModel) -> dict[str, Profiles]:
    """For the first kind alone: its target differs by kind, and a pull costs as much as the measurement."""
    kind = setting.kinds[0].name
    if kind not in TARGETED:
        raise UsageError(f"the power rollout speaks of {', '.join(TARGETED)}, and the first kind measured is {kind}")
    theory = PowerRollout(target=kind)
    return {kind: np.stack([power_rollout_prompt(model, ids, theory) for ids in setting.prompts.token_ids])}


Source = Callable[[Setting, Intervention | None], dict[str, Profiles]]
SOURCES: dict[str, Source] = {
    MEASURED: measured_profiles,
    "rollout_content": architecture_profiles,
    "attention_rollout": attention_profiles,
    "power_rollout": power_profiles,
    "power_rollout_rerun": rerun_power_profiles,
}
"""By name, the measurement first."""
