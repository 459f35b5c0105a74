"""A design held against networks that it never saw: measured at initialisation, with the key bias and without."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import PromptComparison, Sample, compare_with_prompts
from posbias.designing.result import Design
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import reinitialise
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.runs.records import Record

KIND = "jacobian(probes=8)"
Profiles = Float64[np.ndarray, "networks n_positions"]
Vector = Float64[np.ndarray, "n_positions"]


@dataclass(frozen=True, eq=False)
class MeasuredDesign:
    """Jacobian profiles at initialisation at one length; each row a network of its own on a prompt of its own."""

    designed: Profiles
    before: Profiles
    compared: PromptComparison
    """W1 of the designed networks' average to the target, as `Design.distance` counts, over networks; its noise is that
    of one half of them to the other, the distance that a perfect design would have."""
    compared_before: PromptComparison
    """W1 to the target without the design."""

    @property
    def n_positions(self) -> int:
        """Length of the prompts."""
        return int(self.designed.shape[1])

    def as_record(self) -> dict[str, Any]:
        """Distances with their intervals, and the noise."""
        return {
            "n_positions": self.n_positions,
            "networks": len(self.designed),
            "distance": self.compared.distance.as_record(),
            "before": self.compared_before.distance.as_record(),
            "noise": self.compared.noise.mean,
        }


def measure_design(design: Design, model: HuggingFaceModel, prompts: Prompts, *, seed: int = 0) -> MeasuredDesign:
    """Measure the designed model and the model as it was on fresh initialisations, one for each prompt.

    Args:
        design: A key bias.
        model: A model whose configuration counts; its weights are drawn anew, network k with the seed `seed` + k.
        prompts: At least two, of any length that the key bias reaches.
        seed: Seed of initialisations, probes and halvings.
    """
    target = design.target.shape(prompts.n_positions)
    # The residual stream decides the last position, unless the target says what is there.
    counted = slice(None if design.target.whole else -1)
    (kind,) = resolve_kinds(KIND)
    rows: dict[str, list[np.ndarray]] = {"designed": [], "before": []}
    for index, ids in enumerate(track(prompts.token_ids, f"measuring initialisations at {prompts.n_positions}")):
        network = reinitialise(model, seed + index)
        for state, context in (
            ("designed", intervened(network, design.intervention)),
            ("before", nullcontext(network)),
        ):
            with context as changed:
                norms = measure_prompt(changed, ids, kinds=[kind], key=(seed, index), options=PassOptions()).norms
            rows[state].append(norms[kind.name] / norms[kind.name].sum())
    designed, before = np.stack(rows["designed"]), np.stack(rows["before"])
    generator = np.random.default_rng(seed)
    aim = Profile.normalised(target[counted])
    # Networks are averaged before they are normalised again.
    samples = [Sample.of(part, scales=part.sum(axis=1)) for part in (designed[:, counted], before[:, counted])]
    return MeasuredDesign(designed, before, *(compare_with_prompts(aim, part, generator=generator) for part in samples))


def design_record(
    design: Design,
    arguments: Mapping[str, Any],
    *,
    command: str = "",
    measured: Sequence[MeasuredDesign] = (),
    model: Mapping[str, Any] | None = None,
) -> Record:
    """A design as a record, with what the user passed, what repeats it in a shell, and what was measured of it."""
    record = design.to_record(arguments, command=command, model=model)
    for at in measured:
        mean, name = Profile.mean_of(at.designed), f"measured/{at.n_positions}"
        record.arrays |= {f"{name}/{part}": values for part, values in vars(mean).items()}
        record.arrays |= {f"{name}/networks": at.designed, f"{name}/networks_before": at.before}
    if measured:
        record.scalars["measured"] = [at.as_record() for at in measured]
    return record
