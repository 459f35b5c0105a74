"""Single networks about the mean field: few heads with large logits leave much to chance (docs/theory, section 4).

The prediction is a mean over endlessly many heads. A network has a few per layer; where its logits are large, each
attends to keys of its own choice. Networks with as many heads as the model, and endless width, show by how much.
"""

import numpy as np
from jaxtyping import Float64

from posbias.prompts.prompts import Prompts
from posbias.theory.mean_field.levels import SampledHeads
from posbias.theory.mean_field.prediction import mean_field
from posbias.theory.mean_field.spec import MeanFieldSpec

Profiles = Float64[np.ndarray, "network n_positions"]


def network_profiles(
    spec: MeanFieldSpec, n_positions: int, *, prompts: Prompts | None = None, count: int = 8, seed: int = 0
) -> Profiles:
    """Profiles of networks that have no more heads than the model; the prompts are taken in turn.

    Args:
        spec: The model.
        n_positions: Context length N, up to 2048.
        prompts: As for `mean_field`.
        count: Networks, >= 1.
        seed: Of their heads.

    Returns:
        Rows sum to 1. Their mean compares with a mean over seeds of normalised profiles.
    """
    rows = []
    for index, drawn in enumerate(np.random.SeedSequence(seed).generate_state(count)):
        prompt = None if prompts is None else Prompts(prompts.token_ids[[index % prompts.count]])
        found = mean_field(spec, n_positions, prompts=prompt, level=SampledHeads(1), seed=int(drawn))
        rows.append(found.profile.influence)  # SampledHeads fills up one round of the model's heads
    return np.stack(rows)


def scatter(profiles: Profiles) -> float:
    """How far one network's profile lies from the mean of many: root mean square W1, at least two networks.

    Shape alone: what finite width adds (W1 .01 at width 128) is not in it.
    """
    distances = distance(profiles, profiles.mean(axis=0))
    return float(np.sqrt((distances**2).sum() / (len(profiles) - 1)))


def distance(profiles: Profiles, other: Float64[np.ndarray, "n_positions"]) -> Float64[np.ndarray, "network"]:
    """W1 of each profile to another one, the context scaled to [0, 1]."""
    gaps = np.abs(np.cumsum(profiles - other, axis=1)[:, :-1])
    return np.asarray(gaps.sum(axis=1) / max(profiles.shape[1] - 1, 1))


def scatter_caveat(profiles: Profiles, *, initialisations: int | None = None) -> str:
    """What to know before a measurement is held against the prediction, in one sentence.

    Args:
        profiles: Of networks, at least two.
        initialisations: How many initialisations were measured, if any.
    """
    one = scatter(profiles)
    flat = distance(profiles.mean(axis=0)[None], np.full(profiles.shape[1], 1 / profiles.shape[1]))[0]
    many = 100 if initialisations is None else initialisations
    return (
        f"mean field: attention logits are large at this initialisation, and a network has few heads: a single one "
        f"lies at least W1 {one:.3f} from the mean of all, the mean of {many} about {one / np.sqrt(many):.3f}, a flat "
        f"line {flat:.3f}; a distance no larger than that is chance"
    )
