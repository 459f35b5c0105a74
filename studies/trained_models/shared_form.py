"""The power rollout with a shared direction on the study's prompts: adds its profiles beside the measured ones.

Prompt by prompt, resumable; `summary.py` compares them with the measurement and the diagonal form.
"""

from pathlib import Path

import numpy as np
from signed_walks import generators, shared_direction_of
from variants import SCRAMBLED, SEED, computed_once, draw_signs, options

from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import shuffled
from posbias.theory.power_rollout.rollout import trace_model

PROBES, DRAWN = 2, 32


def main() -> None:
    parser = options(__doc__, count=DRAWN)
    parser.add_argument("--only", metavar="NAME", help="of the texts, or scrambled: no other prompts")
    given = parser.parse_args()
    texts = dict(item.split("=", 1) for item in given.text)
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        loaded = {
            text: load_prompts(path, model, n_positions=given.length, count=DRAWN, seed=SEED)
            for text, path in texts.items()
        }
        loaded[SCRAMBLED] = shuffled(next(iter(loaded.values())), SEED)
        for text in [given.only] if given.only else loaded:
            folder = given.parts / name / str(given.length) / text
            for index in range(given.count):
                _prompt(folder, model, loaded[text].token_ids[index], index)
            print(f"{name} {given.length} {text}: {given.count} prompts", flush=True)


def _prompt(folder: Path, model: Model, token_ids: np.ndarray, index: int) -> None:
    """Both kinds' profiles and what the direction holds, block by block; computed once."""

    def compute() -> dict[str, np.ndarray]:
        trace = trace_model(model, token_ids, target="probability")
        assert trace.score_gradient is not None
        generator = next(generators(SEED + index, 1, model.device))
        jacobian = shared_direction_of(trace, draw_signs((PROBES, len(trace.state)), trace.state, generator))
        probability = shared_direction_of(trace, trace.score_gradient[None].to(trace.state))
        profiles = {"jacobian": jacobian.profile, "probability": probability.profile}
        return profiles | {"own": jacobian.own, "shared": jacobian.shared}

    computed_once(folder / "shared_form" / f"{index:03d}.safetensors", compute)


if __name__ == "__main__":
    main()
