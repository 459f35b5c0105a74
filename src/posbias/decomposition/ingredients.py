"""The worth of each ingredient of the power rollout: the distance to a measurement with one of them left out.

Prediction and measurement read the same prompts, so they are resampled together (docs/theory, section 5).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.comparison import Sample, Subject, TheoryProfile, compare_subject
from posbias.comparison.metrics import wasserstein
from posbias.comparison.stored import store_subjects
from posbias.errors import UsageError
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import measure
from posbias.measurement.several import MeasurePlan
from posbias.profiles import Profile
from posbias.runs.records import Record
from posbias.statistics import Interval, blocks, jackknife, leave_one_out
from posbias.theory.power_rollout import INGREDIENTS, WHOLE, PowerRollout, ingredients
from posbias.theory.predict import parse_theory

Table = Mapping[str, Float64[np.ndarray, "count n_positions"]]
"""Every prompt's profile by what was left out."""
WHOLE_THEORY = "power_rollout"
"""What the prediction with nothing left out is called among the theories of the record."""


def ingredient_record(
    source: str, plan: MeasurePlan, *, theory: str, arguments: Mapping[str, Any], command: str = ""
) -> Record:
    """Measure a model, predict it with and without each ingredient, and report what leaving each out costs.

    The record holds the measured kinds beside all predictions, and `ingredient_scalars` as the scalar `ingredients`.

    Raises:
        UsageError: the theory is not the diagonal `power_rollout` with its key path, for any target.
    """
    _, given = parse_theory(theory)
    if not isinstance(given, PowerRollout) or given != PowerRollout(target=given.target):
        raise UsageError(
            f"ingredients are those of power_rollout, in its diagonal form with the key path, got theory {theory!r}; "
            "allowed: power_rollout or power_rollout(target=...)"
        )
    model = plan.load(source)
    prompts = plan.prompts(model)
    kinds = resolve_kinds(list(plan.kinds))
    measurement = measure(model, prompts, kinds=kinds, seed=plan.seed, options=plan.options)
    table = ingredients(model, prompts, target=given.target)
    described = measurement.model or {}
    theories = {_theory_name(name): TheoryProfile(Profile.mean_of(rows), rows) for name, rows in table.items()}
    compared = compare_subject(measurement.subject(theories=theories), generator=np.random.default_rng(plan.seed))
    resolved = {
        "title": described.get("source", "a model"),
        "theory": WHOLE_THEORY,
        "parameters": {"target": given.target},
        "n_positions": prompts.n_positions,
        "model": described,
        "prompts": prompts.describe(),
        "measurement": measurement.describe(),
        "command": command,
    }
    record = Record("predict", dict(arguments), resolved, seeds=dict(measurement.seeds))
    record.scalars["ingredients"] = ingredient_scalars(compared, table, seed=plan.seed)
    return store_subjects(record, [compared], left_out=measurement.left_out)


def ingredient_scalars(subject: Subject, table: Table, *, seed: int) -> dict[str, Any]:
    """The flat line's distance of every kind, and by what was left out `distance` (W1 to the measurement) and `cost`.

    All with intervals over the prompts measured.
    """
    prompts = {(block.kind, block.theory): block.prompts for block in subject.comparisons if block.prompts is not None}
    scalars: dict[str, Any] = {}
    for kind, measured in subject.measured.items():
        sample = measured.sample
        assert sample is not None  # every kind was measured prompt by prompt
        costs = costs_of(table, sample)
        whole = prompts[kind, WHOLE_THEORY]
        rows = {
            name: {
                "distance": prompts[kind, _theory_name(name)].distance.as_record(),
                "cost": costs[name].as_record() if name in costs else None,
            }
            for name in table
        }
        scalars[kind] = {"flat": whole.flat.as_record(), "left_out": rows, "count": whole.n_units}
    return scalars


def costs_of(table: Table, measured: Sample) -> dict[str, Interval]:
    """How much farther from the measurement the theory is without each ingredient; negative: nearer.

    W1(without, measured) - W1(whole, measured), all three averaged over the same prompts.
    """
    observed = measured.units
    weights = leave_one_out(len(observed))

    def distances(name: str) -> Float64[np.ndarray, "rows"]:
        parts = blocks(weights, observed.shape[1])
        return np.concatenate([wasserstein(rows @ table[name], rows @ observed) for rows in parts])

    whole = distances(WHOLE)
    differences = {name: distances(name) - whole for name in table if name in INGREDIENTS}
    return {name: jackknife(values).interval(least=-1.0, most=1.0) for name, values in differences.items()}


def _theory_name(left_out: str) -> str:
    return WHOLE_THEORY if left_out == WHOLE else f"without_{left_out}"
