"""A design held against networks that it never saw: measured at initialisation, with the key bias and without."""

from contextlib import nullcontext

import numpy as np

from posbias.comparison import Sample, compare_with_prompts
from posbias.designing.result import Design, MeasuredNetworks
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import reinitialise
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.prompts import Prompts

KIND = "jacobian(probes=8)"


def measure_design(design: Design, model: HuggingFaceModel, prompts: Prompts, *, seed: int = 0) -> MeasuredNetworks:
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
    after, was = (compare_with_prompts(aim, part, generator=generator) for part in samples)
    return MeasuredNetworks(designed, before, after.distance, was.distance, noise=after.noise.mean)
