"""The fits of README.md: `python studies/mitigation/fit.py OUT.json [NAME]`, half an hour on one core each."""

import sys
from pathlib import Path

import posbias as pb
from posbias.mitigation.fitting import FitOptions
from posbias.mitigation.recipe import write_recipe
from posbias.tasks.language import KeyValue

POSITIONS = (0, 2, 4, 5, 7)
WINDOWS, WINDOW = 64, 192
FITS = {
    "key_bias": (40, FitOptions(scales=False)),
    "context_bias": (40, FitOptions(scales=False)),
    "from_question": (
        200,
        FitOptions(steps=1000, knots=(0, 1, 4, 16, 64, 160, 320, 640), from_question=True),
    ),
}
"""Samples, each at all positions, and how they are fitted."""


def main(out: Path, name: str = "key_bias") -> None:
    """Fit on samples at five positions, with windows of the default corpus, and write the recipe."""
    count, options = FITS[name]
    model = pb.load_model("demo", dtype="bfloat16")
    calibration = list(KeyValue(pairs=8).examples(model.tokenizer, count=count, positions=POSITIONS, seed=100))
    text = list(pb.load_prompts("default", model, n_positions=WINDOW, count=WINDOWS, seed=1).token_ids)
    method = "context_bias" if name == "context_bias" else "key_bias"
    fitted = pb.fit(method, model, calibration, text=text, options=options)
    write_recipe(out, fitted.method, model, fitted.how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
