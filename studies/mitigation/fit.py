"""The fits of README.md: `python studies/mitigation/fit.py OUT.json [context_bias]`, half an hour on one core.

A context bias leaves ordinary text as it is, which has no question, and is fitted without a penalty.
"""

import sys
from pathlib import Path

import posbias as pb
from posbias.mitigation.fitting import FitOptions
from posbias.mitigation.recipe import write_recipe
from posbias.tasks.language import KeyValue

POSITIONS = (0, 2, 4, 5, 7)
SAMPLES = 40
WINDOWS, WINDOW = 64, 192


def main(out: Path, method: str = "key_bias") -> None:
    """Fit on 40 samples at five positions, with windows of the default corpus, and write the recipe."""
    model = pb.load_model("demo", dtype="bfloat16")
    calibration = list(KeyValue(pairs=8).examples(model.tokenizer, count=SAMPLES, positions=POSITIONS, seed=100))
    text = list(pb.load_prompts("default", model, n_positions=WINDOW, count=WINDOWS, seed=1).token_ids)
    options = FitOptions(steps=300, penalty=1.0 if method == "key_bias" else 0.0, scales=False)
    fitted = pb.fit(method, model, calibration, text=text, options=options)
    write_recipe(out, fitted.method, model, fitted.how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
