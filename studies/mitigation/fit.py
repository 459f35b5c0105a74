"""The fits of README.md: `python studies/mitigation/fit.py OUT.json [NAME [BEGIN.json]]`, half an hour on a core each.

`question_twice_again` goes on from the recipe of `question_twice`, BEGIN.json. `... fit.py judge OUT.json` counts the
exact answers of 48 samples that no fit has seen, with the question before and behind, without and with its recipe.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import posbias as pb
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.mitigation.applying import answering_under
from posbias.mitigation.fitting import FitOptions
from posbias.mitigation.recipe import read_recipe, write_recipe
from posbias.statistics import wilson
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
