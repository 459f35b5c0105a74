"""Adapters fitted to right answers or to the model's own: `python studies/distilled/run.py DIRECTORY ARM SEED`.

One JSON file for an arm and a seed, which is a fit; parts that are there are kept, and another call goes on. The fit's
recipe lies beside it. `... DIRECTORY families` measures first which families of short tasks the unchanged model answers
with the gold entry alone. `summary.py` makes the tables.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy, kl_div

import posbias as pb
from posbias.evaluation.responders import LocalResponder, Request
from posbias.evaluation.responders.encoding import encode_requests
from posbias.mitigation.fitting import FITTED_TEXT, JUDGED_TEXT
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.recipe import read_recipe, write_recipe
from posbias.mitigation.teaching import answer_logits, teaching_request
from posbias.tasks.language import LANGUAGE_TASKS, Example, RulesAtTurns

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
from tasks import CITIES, COMMON, LABELS, NAMES, ROLES, THREE_DIGITS, family

ARMS: dict[str, dict[str, Any]] = {
    "unchanged": {},
    "answers": {},
    "answers_question": {"from_question": True},
    "gold_alone": {"teacher": "gold_alone"},
    "gold_alone_question": {"teacher": "gold_alone", "from_question": True},
    "best_place": {"teacher": "best_place"},
}
OPTIONS = pb.FitOptions(steps=40, batch=4, rate=0.004, held_out=0.0)
TASK, LONGER = "documents(documents=4)", "documents(documents=8)"
FITTED, JUDGED, OF_A_FAMILY, PLACES = 40, 24, 8, 4
"""Samples of a fit, samples that judge it, those of every other family, and places of the gold passage."""
TOKENS, REPLY = 20, 32
"""Tokens of an answer, and of an everyday reply."""
WINDOWS, WINDOW, READ = 16, 256, 64
"""Windows of ordinary text that judge and their tokens, and tokens of those that a fit reads."""
LEAST = 0.6
"""Share right with the gold entry alone from which on a family is judged."""
NEW = ("table", "json_fields", "code_variables", "counts", "dialogue", "dates", "roles", "instructions")
DIGITS = tuple(map(str, THREE_DIGITS))
SAID = {
    "rooms": ("The {key} is in the {value}.", "Where is the {key}?", COMMON, ("kitchen", "cellar", "attic", "garage")),
    "pets": ("{key} keeps a {value}.", "Which animal does {key} keep?", NAMES, ("dog", "horse", "goat", "rabbit")),
    "drinks": ("{key} ordered {value}.", "What did {key} order?", NAMES, ("coffee", "tea", "milk", "juice")),
    "towns": ("{key} lives in {value}.", "In which city does {key} live?", NAMES, CITIES),
    "phones": ("{key} has the number {value}.", "Which number does {key} have?", NAMES, DIGITS),
    "ages": ("{key} is {value} years old.", "How old is {key}?", NAMES, tuple(map(str, range(20, 90)))),
    "colours": ("The {key} is {value}.", "Which colour is the {key}?", COMMON[:48], LABELS),
    "platforms": (
        "The train to {key} leaves from {value}.",
        "Where does the train to {key} leave from?",
        CITIES,
        DIGITS,
    ),
    "instruments": ("{key} plays the {value}.", "What does {key} play?", NAMES, ("piano", "harp", "flute", "violin")),
    "owners": ("The {key} belongs to {value}.", "Who owns the {key}?", COMMON, NAMES),
    "prices": ("The {key} costs {value} dollars.", "What does the {key} cost?", COMMON, DIGITS),
    "heights": ("The tower of {key} is {value} metres high.", "How high is the tower of {key}?", CITIES, DIGITS),
    "seats": ("{key} sits in seat {value}.", "In which seat does {key} sit?", NAMES, DIGITS),
    "votes": ("{key} got {value} votes.", "How many votes did {key} get?", NAMES, DIGITS),
    "pages": ("The book about {key} has {value} pages.", "How long is the book about {key}?", CITIES, DIGITS),
    "hotels": ("The hotel of {key} is in {value}.", "In which city is the hotel of {key}?", NAMES, CITIES),
    "jobs": ("{key} works as a {value}.", "What does {key} work as?", NAMES, ROLES),
}
"""Families of one sentence an entry: what it says, what is asked, and the words of both."""


def told(name: str) -> None:
    """Register a family of sentences."""
    said, asked, keys, values = SAID[name]

    def sampler(source: random.Random, count: int) -> tuple[list[str], str, str]:
        pairs = list(zip(source.sample(keys, count), source.sample(values, count), strict=True))
        entries = [said.format(key=key, value=value) for key, value in pairs]
        return entries, f"Question: {asked.format(key=pairs[0][0])}\nAnswer:", pairs[0][1]

    sampler.__name__, sampler.__doc__ = name, said
    family("contains", min(len(keys), len(values)))(sampler)


for sentence in SAID:
    told(sentence)
FAMILIES = [f"{name}(entries={PLACES})" for name in (*NEW, *SAID)] + [f"key_value(pairs={PLACES})"]


def places_of(task: Any) -> list[int]:
    """Evenly from the first place to the last."""
    return sorted({round(place) for place in np.linspace(0, task.n_items - 1, PLACES)})


def examples(model: Any, spelling: str, count: int, seed: int) -> list[Example]:
    """Samples of a task, each at every place."""
    task = LANGUAGE_TASKS.parse(spelling)
    return list(task.examples(model.tokenizer, count=count, positions=places_of(task), seed=seed))


class Study:
    """The demo model, and what judges every fit."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)
        self.directory, self.model = directory, pb.load_model("demo", dtype="bfloat16")
        self.responder = LocalResponder(self.model)
        directory.mkdir(parents=True, exist_ok=True)

    def right(self, method: Any, spelling: str, asked: Sequence[Example], *, alone: bool = False) -> list[float]:
        """1 for every generated answer that the task's rule finds right."""
        task = LANGUAGE_TASKS.parse(spelling)
        requests = [
            replace(
                teaching_request(one, "gold_alone" if alone else "best_place"),
                max_tokens=TOKENS,
                stop=task.stop,
                passages=() if alone else one.passages,
            )
            for one in asked
        ]
        responder = self.responder if method is None else answering_under(method, self.responder)
        replies = responder.respond(requests)
        return [
            task.answer_rule.right(reply.response.text, one.answers) for reply, one in zip(replies, asked, strict=True)
        ]

    def by_place(self, method: Any, spelling: str, count: int, seed: int) -> list[list[float]]:
        """Right answers of unseen samples [sample, place]."""
        asked = examples(self.model, spelling, count, 1000 + seed)
        return np.reshape(self.right(method, spelling, asked), (count, -1)).tolist()

    def under(self, method: Any, tokens: Sequence[int]) -> AbstractContextManager[Any]:
        """The model under a method, for one text, in which the question may stand or not."""
        if method is None:
            return nullcontext()
        return pb.mitigated(self.model, method, passages=method.known((), list(tokens)))

    @torch.no_grad()
    def text(self, method: Any) -> list[float]:
        """Nats per token of every window of ordinary text."""
        windows = pb.load_prompts(JUDGED_TEXT, self.model, n_positions=WINDOW, count=WINDOWS, seed=7).token_ids
        found = []
        for window in windows:
            tokens = self.model.token_tensor([window.tolist()])
            with self.under(method, window.tolist()):
                logits = self.model.logits(tokens, list(range(WINDOW - 1)))[0].float()
            found.append(float(cross_entropy(logits, tokens[0, 1:])))
        return found

    @cached_property
    def everyday(self) -> list[Any]:
        """Everyday questions with the unchanged model's own replies, in tokens."""
        asked = [Request(messages[:2], max_tokens=REPLY) for _, messages in RulesAtTurns().told]
        encoded, replies = encode_requests(self.model.tokenizer, asked), self.responder.respond(asked)
        pairs = zip(encoded, replies, strict=True)
        return [replace(one, answer=np.array(reply.response.token_ids)) for one, reply in pairs]

    @torch.no_grad()
    def replies(self, method: Any) -> list[list[float]]:
        """Of every everyday reply, KL(unchanged || changed) per token, and the share of tokens still chosen."""
        found = []
        for request in self.everyday:
            before = answer_logits(self.model, request).log_softmax(-1)
            with self.under(method, request.prompt.tolist()):
                after = answer_logits(self.model, request).log_softmax(-1)
            kept = float((after.argmax(-1) == before.argmax(-1)).float().mean())
            found.append([float(kl_div(after, before, reduction="batchmean", log_target=True)), kept])
        return found

    def kept(self, name: str) -> dict[str, Any]:
        path = self.directory / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def parts(self, name: str, made: dict[str, Callable[[], Any]]) -> Iterator[str]:
        """Make what is not there yet, one part after another."""
        for part, make in made.items():
            done, begun = self.kept(name), time.time()
            if part not in done:
                done |= {part: make(), f"{part} seconds": round(time.time() - begun, 1)}
                (self.directory / f"{name}.json").write_text(json.dumps(done))
                yield f"{name}: {part}, {done[f'{part} seconds']} s"

    def families(self) -> Iterator[str]:
        """The unchanged model on every candidate, with the gold entry alone."""

        def alone(spelling: str) -> list[float]:
            asked = examples(self.model, spelling, JUDGED, 900)[::PLACES]
            return self.right(None, spelling, asked, alone=True)

        return self.parts("families", {spelling: lambda one=spelling: alone(one) for spelling in FAMILIES})

    def fit(self, arm: str, seed: int, steps: int) -> dict[str, Any]:
        """Fit an arm, and write its recipe."""
        calibration = examples(self.model, TASK, FITTED, 100 + seed)
        text = pb.load_prompts(FITTED_TEXT, self.model, n_positions=READ, count=32, seed=seed).token_ids
        options = replace(OPTIONS, seed=seed, steps=steps, **ARMS[arm])
        fitted = pb.fit("adapter", self.model, calibration, text=list(text), options=options)
        write_recipe(self.directory / f"{arm}-{seed}-recipe.json", fitted.method, self.model, fitted.how)
        return {name: value for name, value in fitted.how.items() if name not in ("samples", "teacher_answers")}

    def arm(self, arm: str, seed: int, steps: int) -> Iterator[str]:
        """Fit, and judge."""
        if arm != "unchanged":
            yield from self.parts(f"{arm}-{seed}", {"fit": lambda: self.fit(arm, seed, steps)})
        recipe = self.directory / f"{arm}-{seed}-recipe.json"
        method = None if arm == "unchanged" else read_recipe(recipe, self.model)
        qualified = [
            name for name, right in self.kept("families").items() if name in FAMILIES and np.mean(right) >= LEAST
        ]
        lone = examples(self.model, TASK, JUDGED, 1000 + seed)[::PLACES]
        made = {
            "gold alone": lambda: self.right(method, TASK, lone, alone=True),
            "four": lambda: self.by_place(method, TASK, JUDGED, seed),
            "eight": lambda: self.by_place(method, LONGER, JUDGED, seed),
            "text": lambda: self.text(method),
            "replies": lambda: self.replies(method),
            **{name: lambda one=name: self.by_place(method, one, OF_A_FAMILY, seed) for name in qualified},
        }
        yield from self.parts(f"{arm}-{seed}", made)


def main(words: Sequence[str]) -> None:
    study = Study(Path(words[0]))
    if words[1] == "families":
        done = study.families()
    else:
        done = study.arm(words[1], int(words[2]), int(words[3]) if len(words) > 3 else OPTIONS.steps or 0)
    for line in done:
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
