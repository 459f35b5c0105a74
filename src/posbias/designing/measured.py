"""A design held against networks that it never saw: measured at initialisation, with the key bias and without."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import PromptComparison, Sample, compare_with_prompts
from posbias.comparison.metrics import finite
from posbias.designing.design import TOLERANCE, Design
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
from posbias.theory.rollout import rollout_rows

KIND = "jacobian(probes=8)"
DRAWN_ROWS = 512
"""Contexts whose rows are all kept, for the heat map."""
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
    about = "an architecture" if model is None else str(model.get("source", "a model"))
    resolved = {
        "title": f"{design.target} over {', '.join(design.over)}, for {about}",
        "target": str(design.target),
        "over": list(design.over),
        "theory": design.theory,
        "architecture": design.architecture.describe(),
        "model": model,
        "command": command,
    }
    arrays = _profiles_of(design)
    for at in measured:
        mean, name = Profile.mean_of(at.designed), f"measured/{at.n_positions}"
        arrays |= {f"{name}/{part}": values for part, values in vars(mean).items()}
        arrays |= {f"{name}/networks": at.designed, f"{name}/networks_before": at.before}
    scalars = _distances_of(design) | ({"measured": [at.as_record() for at in measured]} if measured else {})
    return Record("design", dict(arguments), resolved, seeds={"design": design.seed}, scalars=scalars, arrays=arrays)


def _distances_of(design: Design) -> dict[str, Any]:
    """Distances to the target at every length, of the design and of what else was tried, and its parameters."""
    scalars: dict[str, Any] = {
        "exact": design.exact,
        "met": design.met,
        "tolerance": TOLERANCE,
        "whole": design.target.whole,
        "at_ends": {name: {"count": count, "of": of} for name, (count, of) in design.at_ends.items()},
        "alternatives": [
            {
                "over": list(alternative.over),
                "mixing": float(alternative.architecture.layer_mixing.mean()),
                "met": alternative.met,
                "distances": [
                    {"n_positions": n, "after": finite(alternative.distances[n][0])} for n in alternative.lengths
                ],
            }
            for alternative in design.alternatives
        ],
        "lengths": list(design.lengths),
        "distances": [
            {
                "n_positions": n,
                "after": finite(after),
                "before": finite(before),
                "flat": design.distance(Profile.uniform(n)),
            }
            for n, (after, before) in design.distances.items()
        ],
        "range_nats": design.range_nats,
        "residual": design.residual,
        "parameters": {name: list(values) for name, values in design.parameters.items()},
    }
    if design.choices:
        scalars["choices"] = {
            name: [{"n_positions": n, "after": design.distance(profile)} for n, profile in profiles.items()]
            for name, profiles in design.choices.items()
        }
    return scalars


def _profiles_of(design: Design) -> dict[str, np.ndarray]:
    """Profiles of the design, of every choice, before and aimed at; of a short rollout all rows, for the heat map."""
    arrays: dict[str, np.ndarray] = {}
    for name, profiles in design.choices.items():
        arrays |= {f"choice/{name}/{n}": profile.influence for n, profile in profiles.items()}
    for n, profile in design.profiles.items():
        arrays |= {f"profile/{n}": profile.influence, f"before/{n}": design.before[n].influence}
        arrays[f"target/{n}"] = design.targets[n]
    longest = max(design.lengths)
    if design.theory == "rollout" and longest <= DRAWN_ROWS:
        arrays["rows"] = rollout_rows(design.architecture, np.arange(longest), n_positions=longest)
    return arrays
