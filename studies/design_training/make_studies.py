"""Writes the study files of this folder with the designed biases in them.

Ran at fb1d2386: `python studies/design_training/make_studies.py`. Mean field of such networks has left since.

Every design is made for the network as it is drawn (seed 1000, no seed of the study), at the length of its task: flat
and recency-shaped by gamma keys through the mean field, middle-shaped by a cubic key bias through the mean field, flat
by the rollout's telescoping gamma keys at the mixing measured at initialisation. `permuted` has the values of the flat
mean-field biases in another order of positions, one order for all layers.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from jaxtyping import Float64
from scipy.optimize import minimize

from posbias.architecture import Architecture, GammaKey, KeyBias
from posbias.designing.design import design
from posbias.designing.exact import telescoping_alphas
from posbias.designing.initialisation import Initialisation
from posbias.designing.options import DesignOptions
from posbias.designing.result import resolve_target
from posbias.designing.solving import misfit_of
from posbias.models.reference.config import draw_parameters
from posbias.models.reference.network import ReferenceTransformer
from posbias.theory.mean_field import mean_field
from posbias.training.members import Member
from posbias.training.study import study_of

HERE = Path(__file__).parent
DRAWN = 1000
"""Seed of the networks and prompts that designs are made from."""
PERMUTATION = 7
SEEDS = 10
MODEL = {"norm": "pre", "mlp": True, "mlp_width": 64, "width": 32, "heads": 2}
OPTIMISER = "adamw(learning_rate=3e-3, weight_decay=1e-6)"
RECENCY, MIDDLE = "recency(rate=3.0)", "u_shape(middle=4.0)"
Encodings = str | list[str]


@dataclass(frozen=True)
class Plan:
    """One study file."""

    name: str
    task: str
    depth: int
    steps: int
    every: int
    examples: int = 100


PLANS = (
    Plan("cued_copy", "cued_copy(context=12, vocabulary=8, cues=24)", depth=4, steps=1600, every=100),
    Plan("key_value", "key_value_retrieval(context=16, vocabulary=8, keys=32)", depth=2, steps=1200, every=100),
    Plan("cued_copy_8", "cued_copy(context=8, vocabulary=8, cues=16)", depth=8, steps=1000, every=100),
    Plan("key_value_4", "key_value_retrieval(context=16, vocabulary=8, keys=32)", depth=4, steps=1200, every=100),
)


def drawn_member(plan: Plan) -> Member:
    """The network of a plan without positions, as it is drawn."""
    document = {
        "task": plan.task,
        "model": {**MODEL, "depth": plan.depth},
        "train": {"steps": 1},
        "seeds": [DRAWN],
    }
    (member,) = study_of(document, name=plan.name).members()
    return member


def drawn_model(member: Member) -> ReferenceTransformer:
    """Its model at initialisation."""
    return ReferenceTransformer(member.config, draw_parameters(member.config, member.generator()))


def mixing_at_birth(model: ReferenceTransformer, n_positions: int) -> list[float]:
    """Share of attention in each layer's update: branch / (stream + branch), mean over positions of 16 prompts."""
    generator = torch.Generator().manual_seed(DRAWN)
    norms = model.branch_norms(torch.randint(0, model.vocabulary_size, (16, n_positions), generator=generator))
    return [float(x) for x in (norms.branch / (norms.stream + norms.branch)).mean(dim=(1, 2))]


def middle_bias(model: ReferenceTransformer, n_positions: int) -> list[float]:
    """The cubic of position, one for all layers, whose profile is the nearest to the hump in the mean field."""
    base, born, aim = Architecture.from_model(model), Initialisation(model), resolve_target(MIDDLE)
    x = np.linspace(-1, 1, n_positions)

    def bias(values: Float64[np.ndarray, "three"]) -> list[float]:
        return [float(each) for each in values @ np.stack([x, x**2, x**3])]

    def misfit(values: Float64[np.ndarray, "three"]) -> float:
        changed = Architecture(base.depth, base.heads, encoding=KeyBias(bias(values)))
        return misfit_of(mean_field(born.keyed(changed), n_positions, level="value").profile.influence, aim)[0]

    return bias(minimize(misfit, np.array([1.0, -1.0, 0.0]), method="Nelder-Mead", options={"maxiter": 150}).x)


def spelled(values: Float64[np.ndarray, "n"] | list[float]) -> str:
    """A key bias as text."""
    return f"key_bias(values={[round(float(value), 4) for value in values]})"


def encodings(plan: Plan) -> dict[str, dict[str, object]]:
    """The settings of every arm."""
    member = drawn_member(plan)
    model, n = drawn_model(member), member.task.n_positions

    def gamma(alphas: list[float]) -> Encodings:
        return [f"gamma_key(alpha={alpha:.4f})" for alpha in alphas]

    def designed(target: str) -> list[float]:
        found = design(target, model=model, options=DesignOptions(theory="mean_field", n_positions=n))
        return [float(alpha) for alpha in found.parameters]

    flat = designed("flat")
    order = np.random.default_rng(PERMUTATION).permutation(n - 1)
    biases = [GammaKey(alpha).key_logits(n, 1)[0] for alpha in flat]
    permuted: Encodings = [spelled([*each[:-1][order], each[-1]]) for each in biases]
    arms: dict[str, tuple[Encodings, int | None]] = {
        "none": ("none", None),
        "rope": ("rope(head_dim=16)", None),
        "alibi": ("alibi", None),
        "flat_gamma": (gamma(list(telescoping_alphas(0.0, np.array(mixing_at_birth(model, n))))), None),
        "flat_mean_field": (gamma(flat), None),
        "recency": (gamma(designed(RECENCY)), None),
        "middle": (spelled(middle_bias(model, n)), None),
        "permuted": (permuted, None),
        "learned_zero": ("none", n),
        "learned_design": (gamma(flat), n),
    }
    return {
        arm: {"model.encoding": encoding} | ({} if trained is None else {"model.trained_key_bias": trained})
        for arm, (encoding, trained) in arms.items()
    }


def document(plan: Plan) -> dict[str, Any]:
    """The study file."""
    return {
        "name": plan.name,
        "task": plan.task,
        "model": {**MODEL, "depth": plan.depth},
        "optimiser": OPTIMISER,
        "train": {
            "steps": plan.steps,
            "batch": 32,
            "window": 50,
            "evaluate_every": plan.every,
            "examples": plan.examples,
        },
        "grid": {"arm": encodings(plan)},
        "seeds": SEEDS,
    }


if __name__ == "__main__":
    for each in PLANS:
        text = yaml.safe_dump(document(each), sort_keys=False, width=120)
        (HERE / f"{each.name}.yaml").write_text(f"# Written by make_studies.py.\n{text}")
