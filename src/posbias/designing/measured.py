"""A design held against networks that it never saw: measured at initialisation, with the key bias and without."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.designing.design import Design
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import reinitialise
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts
from posbias.records import Record
from posbias.statistics import Interval, blocks, jackknife, leave_one_out
from posbias.theory.rollout import rollout_rows

KIND = "jacobian(probes=8)"
DRAWN_ROWS = 512
"""Contexts whose rows are all kept, for the heat map."""
HALVES = 200
"""Random halvings of the initialisations, for the noise of the distance."""
Profiles = Float64[np.ndarray, "networks n_positions"]


@dataclass(frozen=True, eq=False)
class MeasuredDesign:
    """Jacobian profiles at initialisation; each row a network of its own on a prompt of its own."""

    designed: Profiles
    before: Profiles
    distance: Interval
    """W1 of the mean profile to the target, the last position apart, over networks."""
    distance_before: Interval
    noise: float
    """Mean W1 of one half of the designed networks to the other: what the distance would be were the design perfect."""


def measure_design(design: Design, model: HuggingFaceModel, prompts: Prompts, *, seed: int = 0) -> MeasuredDesign:
    """Measure the designed model and the model as it was on fresh initialisations, one for each prompt.

    Args:
        design: A key bias.
        model: Its configuration counts; its weights are drawn anew, network k with the seed `seed` + k.
        prompts: At least two, as long as one of the design's lengths.
        seed: Of initialisations, probes and halvings.
    """
    target = design.target.shape(prompts.n_positions)[:-1]
    target = target / target.sum()
    (kind,) = resolve_kinds(KIND)
    rows: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for index, ids in enumerate(track(prompts.token_ids, "measuring initialisations")):
        network = reinitialise(model, seed + index)
        for changed in rows:
            key = (seed, index)
            if changed:
                with intervened(network, design.intervention) as biased:
                    norms = measure_prompt(biased, ids, kinds=[kind], key=key, options=PassOptions()).norms
            else:
                norms = measure_prompt(network, ids, kinds=[kind], key=key, options=PassOptions()).norms
            (influence,) = norms.values()
            rows[changed].append(influence / influence.sum())
    designed, before = np.stack(rows[True]), np.stack(rows[False])
    order = np.random.default_rng(seed)
    halves = []
    for _ in range(HALVES):
        mixed = order.permutation(len(designed))
        half = len(designed) // 2
        one, other = (_inner(designed[part].mean(axis=0)) for part in (mixed[:half], mixed[half:]))
        halves.append(_apart(one, other))
    return MeasuredDesign(
        designed, before, _interval(designed, target), _interval(before, target), float(np.mean(halves))
    )


def _inner(profiles: Float64[np.ndarray, "*any n_positions"]) -> Float64[np.ndarray, "*any inner"]:
    """Without the last position, summing to 1."""
    return np.asarray(profiles[..., :-1] / profiles[..., :-1].sum(axis=-1, keepdims=True))


def _apart(one: Float64[np.ndarray, "*any inner"], other: Float64[np.ndarray, "inner"]) -> Float64[np.ndarray, "*any"]:
    gaps = np.abs(np.cumsum(one - other, axis=-1)[..., :-1])
    return np.asarray(gaps.sum(axis=-1) / (other.size - 1))


def _interval(profiles: Profiles, target: Float64[np.ndarray, "inner"]) -> Interval:
    """The distance of the mean, its interval by the jackknife over networks."""
    weights = leave_one_out(len(profiles))
    values = np.concatenate([_apart(_inner(rows @ profiles), target) for rows in blocks(weights, profiles.shape[1])])
    return jackknife(values).interval(least=0.0, most=1.0)


def design_record(
    design: Design,
    arguments: Mapping[str, Any],
    *,
    command: str = "",
    measured: MeasuredDesign | None = None,
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
    distances = [{"n_positions": n, "after": after, "before": was} for n, (after, was) in design.distances.items()]
    scalars: dict[str, Any] = {
        "exact": design.exact,
        "lengths": list(design.lengths),
        "distances": distances,
        "range_nats": design.range_nats,
        "residual": design.residual,
        "parameters": {name: list(values) for name, values in design.parameters.items()},
    }
    arrays: dict[str, np.ndarray] = {}
    for n, profile in design.profiles.items():
        arrays |= {f"profile/{n}": profile.influence, f"before/{n}": design.before[n].influence}
        arrays[f"target/{n}"] = design.targets[n]
    longest = max(design.lengths)
    if design.theory == "rollout" and longest <= DRAWN_ROWS:
        arrays["rows"] = rollout_rows(design.architecture, np.arange(longest), n_positions=longest)
    if measured is not None:
        mean = Profile.mean_of(measured.designed)
        arrays |= {f"measured/{name}": values for name, values in vars(mean).items()}
        arrays |= {"measured/networks": measured.designed, "measured/networks_before": measured.before}
        scalars["measured"] = {
            "networks": len(measured.designed),
            "distance": measured.distance.as_record(),
            "before": measured.distance_before.as_record(),
            "noise": measured.noise,
        }
    return Record("design", dict(arguments), resolved, scalars=scalars, arrays=arrays)
