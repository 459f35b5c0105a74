"""A design held against networks that it never saw: measured at initialisation, with the key bias and without."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison.metrics import finite
from posbias.comparison.subject import PromptComparison, Sample, compare_with_prompts
from posbias.designing.design import TOLERANCE, Design
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import reinitialise
from posbias.profiles import Profile, uniform_profile
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
    """W1 of the designed networks' average to the target, as `Design.distance` counts, over networks; the noise: of one
    half of them to the other, what the distance would be were the design perfect."""
    compared_before: PromptComparison
    """The same without the design."""

    @property
    def n_positions(self) -> int:
        """At which length."""
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
        model: Its configuration counts; its weights are drawn anew, network k with the seed `seed` + k.
        prompts: At least two, of any length that the key bias reaches.
        seed: Of initialisations, probes and halvings.
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
            with context as given:
                norms = measure_prompt(given, ids, kinds=[kind], key=(seed, index), options=PassOptions()).norms
            rows[state].append(norms[kind.name] / norms[kind.name].sum())
    designed, before = np.stack(rows["designed"]), np.stack(rows["before"])
    generator = np.random.default_rng(seed)
    wanted = Profile.normalised(target[counted])
    compared = [_compared(each[:, counted], wanted, generator) for each in (designed, before)]
    return MeasuredDesign(designed, before, *compared)


def _compared(profiles: Profiles, wanted: Profile, generator: np.random.Generator) -> PromptComparison:
    """The target beside the networks' average; averaged before they are normalised again."""
    return compare_with_prompts(wanted, Sample.of(profiles, scales=profiles.sum(axis=1)), generator=generator)


def design_record(
    design: Design,
    arguments: Mapping[str, Any],
    *,
    command: str = "",
    measured: Sequence[MeasuredDesign] = (),
    model: Mapping[str, Any] | None = None,
) -> Record:
    """A design as a record: with what the user passed, what repeats it in a shell, and what was measured of it."""
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
    flat = {n: design.distance(uniform_profile(n)) for n in design.profiles}
    distances = [
        {"n_positions": n, "after": finite(after), "before": finite(was), "flat": flat[n]}
        for n, (after, was) in design.distances.items()
    ]
    scalars: dict[str, Any] = {
        "exact": design.exact,
        "met": design.met,
        "tolerance": TOLERANCE,
        "whole": design.target.whole,
        "at_ends": {name: {"count": count, "of": of} for name, (count, of) in design.at_ends.items()},
        "alternatives": [
            {
                "over": list(other.over),
                "mixing": float(other.architecture.layer_mixing.mean()),
                "met": other.met,
                "distances": [{"n_positions": n, "after": finite(other.distances[n][0])} for n in other.lengths],
            }
            for other in design.alternatives
        ],
        "lengths": list(design.lengths),
        "distances": distances,
        "range_nats": design.range_nats,
        "residual": design.residual,
        "parameters": {name: list(values) for name, values in design.parameters.items()},
    }
    arrays: dict[str, np.ndarray] = {}
    for name, profiles in design.choices.items():
        arrays |= {f"choice/{name}/{n}": profile.influence for n, profile in profiles.items()}
        left = {n: design.distance(profile) for n, profile in profiles.items()}
        scalars.setdefault("choices", {})[name] = [{"n_positions": n, "after": after} for n, after in left.items()]
    for n, profile in design.profiles.items():
        arrays |= {f"profile/{n}": profile.influence, f"before/{n}": design.before[n].influence}
        arrays[f"target/{n}"] = design.targets[n]
    longest = max(design.lengths)
    if design.theory == "rollout" and longest <= DRAWN_ROWS:
        arrays["rows"] = rollout_rows(design.architecture, np.arange(longest), n_positions=longest)
    for at in measured:
        mean, name = Profile.mean_of(at.designed), f"measured/{at.n_positions}"
        arrays |= {f"{name}/{part}": values for part, values in vars(mean).items()}
        arrays |= {f"{name}/networks": at.designed, f"{name}/networks_before": at.before}
    if measured:
        scalars["measured"] = [at.as_record() for at in measured]
    return Record("design", dict(arguments), resolved, seeds={"design": design.seed}, scalars=scalars, arrays=arrays)
