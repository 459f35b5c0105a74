"""The fits of key_bias.md: `python studies/mitigation/fit.py OUT.json [NAME [MODEL]]`, half an hour each.

MODEL is the demo model without one. `question_twice_again` and `several_counts` went on from a recipe, at 573e2c34.
`... fit.py judge OUT.json` counts the exact answers of 48 samples that no fit has seen, with the question before and
behind, without and with its recipe.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import posbias as pb
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.recipe import read_recipe, write_recipe
from posbias.mitigation.options import FitOptions
from posbias.statistics import wilson
from posbias.tasks.language import KeyValue

POSITIONS = (0, 2, 4, 5, 7)
WINDOWS, WINDOW = 64, 192
FROM_QUESTION = FitOptions(steps=1000, knots=(0, 1, 4, 16, 64, 160, 320, 640), from_question=True)
EIGHT = {8: POSITIONS}
FITS = {
    "key_bias": ("after", EIGHT, 40, 100, FitOptions(scales=False)),
    "context_bias": ("after", EIGHT, 40, 100, FitOptions(scales=False)),
    "from_question": ("after", EIGHT, 200, 100, FROM_QUESTION),
    "from_question_once": ("after", EIGHT, 80, 100, replace(FROM_QUESTION, steps=400)),
    "several_counts": (
        "after",
        {2: (0, 1), 4: (0, 1, 3), **EIGHT},
        12,
        300,
        replace(FROM_QUESTION, steps=100, rate=0.03),
    ),
    "context_bias_40": ("after", {40: (0, 20, 39)}, 8, 100, FitOptions(scales=False)),
    "question_twice": ("both", EIGHT, 200, 100, FROM_QUESTION),
    "question_twice_again": ("both", EIGHT, 200, 300, replace(FROM_QUESTION, rate=0.03)),
}
"""Where the question stands, positions by number of pairs, samples of each number, each at all its positions, their
seed, to which the number is added where there are several, and how they are fitted."""


def main(out: Path, name: str = "key_bias", source: str = "demo") -> None:
    """Fit on samples at several positions, with windows of the default corpus, and write the recipe."""
    query, places, count, seed, options = FITS[name]
    model = pb.load_model(source, dtype="bfloat16" if source == "demo" else "float32")
    drawn = [
        example
        for pairs, positions in places.items()
        for example in KeyValue(pairs=pairs, query=query).examples(
            model.tokenizer, count=count, positions=positions, seed=seed + (pairs if len(places) > 1 else 0)
        )
    ]
    text = list(pb.load_prompts("default", model, n_positions=WINDOW, count=WINDOWS, seed=1).token_ids)
    method = "context_bias" if name.startswith("context_bias") else "key_bias"
    fitted = pb.fit(method, model, drawn, text=text, options=options)
    write_recipe(out, fitted.method, model, fitted.how)


def judge(out: Path, count: int = 48, seed: int = 11) -> None:
    """Exact: every token of the value is the most probable one given the right ones before it; [sample][position]."""
    model = pb.load_model("demo", dtype="bfloat16")
    drawn = list(KeyValue(pairs=8, query="both").examples(model.tokenizer, count=count, positions=POSITIONS, seed=seed))
    requests = [Request(prompt=each.prompt, answer=each.target, passages=each.passages) for each in drawn]
    plain = LocalResponder(model)
    fitted = answering_under(read_recipe(Path(__file__).with_name("question_twice_8.json"), model), plain)
    found: dict[str, list[list[bool]]] = {}
    for name, responder in (("unchanged", plain), ("question_twice_8", fitted)):
        replies = responder.respond(requests, generate=False, score=True)
        right = np.array([bool(np.all(np.asarray(reply.score.ranks) == 1)) for reply in replies]).reshape(count, -1)
        found[name] = right.tolist()
        print(name, [str(wilson(column.astype(float))) for column in right.T], f"{right.mean():.3f}")
    out.write_text(json.dumps({"count": count, "seed": seed, "positions": POSITIONS, "exact": found}) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "judge":
        judge(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), *sys.argv[2:])
