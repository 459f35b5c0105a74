"""The fits of README.md: `python studies/mitigation/fit.py OUT.json [NAME [BEGIN.json]]`, half an hour on a core each.

`question_twice_again` goes on from the recipe of `question_twice`, BEGIN.json.
"""

import sys
from dataclasses import replace
from pathlib import Path

import posbias as pb
from posbias.mitigation.fitting import FitOptions
from posbias.mitigation.recipe import write_recipe
from posbias.tasks.language import KeyValue

POSITIONS = (0, 2, 4, 5, 7)
WINDOWS, WINDOW = 64, 192
FROM_QUESTION = FitOptions(steps=1000, knots=(0, 1, 4, 16, 64, 160, 320, 640), from_question=True)
FITS = {
    "key_bias": ("after", 40, 100, FitOptions(scales=False)),
    "context_bias": ("after", 40, 100, FitOptions(scales=False)),
    "from_question": ("after", 200, 100, FROM_QUESTION),
    "question_twice": ("both", 200, 100, FROM_QUESTION),
    "question_twice_again": ("both", 200, 300, replace(FROM_QUESTION, rate=0.03)),
}
"""Where the question stands, samples, each at all positions, their seed, and how they are fitted."""


def main(out: Path, name: str = "key_bias", begin: str = "") -> None:
    """Fit on samples at five positions, with windows of the default corpus, and write the recipe."""
    query, count, seed, options = FITS[name]
    model = pb.load_model("demo", dtype="bfloat16")
    drawn = KeyValue(pairs=8, query=query).examples(model.tokenizer, count=count, positions=POSITIONS, seed=seed)
    text = list(pb.load_prompts("default", model, n_positions=WINDOW, count=WINDOWS, seed=1).token_ids)
    method = "context_bias" if name == "context_bias" else "key_bias"
    fitted = pb.fit(method, model, list(drawn), text=text, options=replace(options, begin=begin))
    write_recipe(out, fitted.method, model, fitted.how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
