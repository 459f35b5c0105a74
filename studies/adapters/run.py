"""Does one adapter carry, what trains it, and what is learnt first: `studies/adapters/run.py run DIRECTORY`.

One JSON file a question, all cells of a seed before the next seed; what is done is kept, and another call goes on.
Every fit is an adapter of rank 4 on the demo model in bfloat16 (float32 if a cell says so), in few steps on short
prompts, so that two cores can do it:
- `families`: fitted to 2, 4, 8 and 12 families of tasks, judged on one that was left out; `oracle`: the unchanged model
  on every family, with the gold item alone
- `influence`: of the row that is asked for, before a fit
- `samples`: adapters and biases fitted to 5 up to 160 samples
- `methods`: published methods on the prompts that judge adapters; `models`: adapters on two other models, whose files
  are in the present directory; both in float32
- of bc33e4cf, tables alone: `draws` of prompts by loss and of several lengths, `forms` (where an adapter sits, and the
  loss at every position as it is fitted), `distractors` shuffled or exchanged between samples
`... run DIRECTORY QUESTION...` answers some of the questions, `... table DIRECTORY` prints the
tables and draws `curves.png`.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.stats import rankdata, zscore

import posbias as pb
from posbias.evaluation.correlate import encoded_prompt
from posbias.evaluation.responders import LocalResponder, Request
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.outputs import Target
from posbias.measurement.prompt import measure_prompt
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.options import FitOptions
from posbias.mitigation.teaching import encoded_answers
from posbias.prompts.tokens import locate
from posbias.statistics import mean_ends, mean_of
from posbias.tasks.language import LANGUAGE_TASKS, Example

NEW = ("table", "json_fields", "code_variables", "counts", "dialogue", "dates", "roles", "instructions")
FAMILIES = {
    **{name: f"{name}(entries=6)" for name in NEW},
    "example_order": "example_order(shots=6, classes=3)",
    "token_copy": "token_copy(length=6)",
    "documents": "documents(documents=2)",
    "key_value": "key_value(pairs=2)",
    "needle": "needle(tokens=160, depths=3)",
}
NUMBERS, MULTIPLES, SEEDS = (2, 12, 4, 8), (1, 2, 4), (0, 1, 2)
MORE_SEEDS, MORE_NUMBERS = (3, 4, 5), (2, 12)
"""Further families left out, of the fewest and the most that are fitted to."""
ROWS = 8
SAMPLES, JUDGED, WINDOW, WINDOWS = 48, 6, 48, 8
SIZES = {"adapter": (5, 20, 80, 160), "context_bias": (5, 20, 80), "key_bias": (20,)}
"""Samples of a fit; a bias takes minutes per hundred, most of them to choose its strength."""
FEW, ENOUGH = 5, 20
METHODS = (
    "repeat_prompt",
    "question_first",
    "self_consistency(draws=3)",
    "ms_poe",
    "temperature",
    "attention_calibration",
    "pine",
)
OTHERS = (("gemma-3-270m.gguf", "float32"), ("qwen2.5-coder-0.5b.gguf", "float32"))
"""Files in the present directory, as `studies/mitigation` takes them."""
LOGPROB = resolve_kinds(["logprob"])
OPTIONS = FitOptions(steps=24, batch=4, rate=0.004, held_out=0.0)
FAMILIES_STEPS = 96
PERMUTATIONS = 2000
ROUNDING = 1e-12
"""Of a correlation: permutations that give the same one count."""
BIAS_FIT = {"steps": 75, "rate": 0.05}
"""Steps of four prompts: as many prompts as in 300 steps of one, the default of a bias."""
MOVED = "updates at other layers"
STEPS_BETWEEN_LOOKS = 4
THRESHOLD = 0.25
"""Nats per token: a right answer whose tokens have a probability of .78 each."""
LEARNT = ("q, k", "v, o", "mlp", "all", "scales and gains")
"""Forms whose order of learning is drawn."""
FORMS = (*LEARNT, "scales alone", "gains alone", "q, k, gold always first")


def ends_and_middle(n_items: int, points: int) -> list[int]:
    """So many places, evenly from the first to the last."""
    return sorted({round(place) for place in np.linspace(0, n_items - 1, points)})


def examples(model: Any, task: Any, count: int, seed: int, points: int) -> list[Example]:
    """Samples, each at several positions."""
    task = LANGUAGE_TASKS.parse(task) if isinstance(task, str) else task
    places = ends_and_middle(task.n_items, points)
    return list(task.examples(model.tokenizer, count=count, positions=places, seed=seed))


def judged(model: Any, method: Any, asked: Sequence[Example]) -> list[list[float]]:
    """Log-probability per token of every right answer, and 1 if each of its tokens is the most probable one."""
    encoded = encoded_answers(model, asked)
    if getattr(method, "needs_passages", False):  # one prompt at a time: each has its own places
        scores = []
        for example, request in zip(asked, encoded, strict=True):
            located, _ = locate(example.prompt, example.passages, model.tokenizer)
            with pb.mitigated(model, method, passages=method.known(located or (), request.prompt.tolist())):
                scores += judged(model, None, [example])
        return scores
    lengths = [len(request.prompt) + len(request.answer) - 1 for request in encoded]
    scores = [[0.0, 0.0] for _ in encoded]
    order = np.argsort(lengths, kind="stable").tolist()
    with torch.no_grad(), pb.mitigated(model, method) if method is not None else torch.no_grad():
        for first in range(0, len(order), 6):
            group = order[first : first + 6]
            tokens = np.zeros((len(group), max(lengths[index] for index in group)), dtype=np.int64)
            for row, index in zip(tokens, group, strict=True):
                row[: lengths[index]] = np.concatenate([encoded[index].prompt, encoded[index].answer])[:-1]
            starts = [len(encoded[index].prompt) - 1 for index in group]
            rows = sorted(
                {row for index, start in zip(group, starts, strict=True) for row in range(start, lengths[index])}
            )
            logits = model.outputs(model.embed(model.token_tensor(tokens.tolist())), rows).logits.float()
            for number, (index, start) in enumerate(zip(group, starts, strict=True)):
                answer, begin = torch.as_tensor(encoded[index].answer), rows.index(start)
                of_answer = logits[number, begin : begin + len(answer)].log_softmax(-1)
                told = of_answer.gather(1, answer[:, None]).mean()
                scores[index] = [float(told), float((of_answer.argmax(-1) == answer).all())]
    return np.round(scores, 4).tolist()


def nats(model: Any, method: Any, windows: np.ndarray) -> list[float]:
    """Mean negative log-likelihood per token of each window of ordinary text."""
    if getattr(method, "needs_passages", False):
        method = None  # a text without passages is left as it is
    tokens = model.token_tensor(windows.tolist())
    with torch.no_grad(), pb.mitigated(model, method) if method is not None else torch.no_grad():
        logits = model.outputs(model.embed(tokens), list(range(windows.shape[1] - 1))).logits.float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.reshape(len(windows), -1).mean(1).tolist()


class Study:
    """The model, the texts, and the cells that are done."""

    def __init__(self, directory: Path, model: str = "demo", dtype: str = "bfloat16") -> None:
        self.model: Any = pb.load_model(model, dtype=dtype)
        self.directory, self.source, self.dtype = directory, model, dtype
        windows = pb.load_prompts("default", self.model, n_positions=WINDOW, count=32 + WINDOWS, seed=7).token_ids
        self.read, self.judge = list(windows[:32]), windows[32:]
        self.unchanged: dict[tuple[str, int, int], list[list[float]]] = {}

    def cell(self, study: str, name: str, made: Any) -> None:
        """Do one cell unless it is done, and keep it."""
        path = self.directory / f"{study}.json"
        cells = json.loads(path.read_text()) if path.exists() else {}
        if name in cells:
            return
        begun = time.process_time()
        cells[name] = {**made(), "dtype": self.dtype, "cpu_seconds": round(time.process_time() - begun, 1)}
        path.write_text(json.dumps(cells))
        print(study, name, cells[name]["cpu_seconds"], flush=True)

    def fit(self, method: str, calibration: list[Example], seed: int, **more: Any) -> Any:
        options = replace(OPTIONS, seed=seed, **more)
        return pb.fit(method, self.model, calibration, text=self.read, options=options)

    def beside(self, method: Any, task: Any, seed: int, points: int = 3) -> dict[str, Any]:
        """Unseen samples of a task, without the method and with it, by sample and position."""
        asked = examples(self.model, task, JUDGED, 1000 + seed, points)
        key = (str(task), seed, points)
        if key not in self.unchanged:
            self.unchanged[key] = judged(self.model, None, asked)
        both = {"before": self.unchanged[key], "after": judged(self.model, method, asked)}
        places = len(asked) // JUDGED
        return {name: np.reshape(scores, (JUDGED, places, 2)).tolist() for name, scores in both.items()}

    def text(self, method: Any) -> dict[str, list[float]]:
        return {"before": self.unchanged_text, "after": nats(self.model, method, self.judge)}

    @cached_property
    def unchanged_text(self) -> list[float]:
        """Nats of every window without a method."""
        return nats(self.model, None, self.judge)


def left_out_family(seed: int) -> str:
    """The first of a random order that no smaller seed leaves out."""
    earlier = [left_out_family(smaller) for smaller in range(seed)]
    order = np.random.default_rng(seed).permutation(len(NEW))
    return next(NEW[index] for index in order if NEW[index] not in earlier)


def alone(example: Example) -> Example:
    """An example with the passage that holds the answer alone, in the first slot."""
    assert example.gold_position is not None
    begin = example.passages[0][0]
    passage = example.text[slice(*example.passages[example.gold_position])]
    text = example.text[:begin] + passage + example.text[example.passages[-1][1] :]
    prompt = (
        text if isinstance(example.prompt, str) else (*example.prompt[:-1], {**example.prompt[-1], "content": text})
    )
    return replace(
        example,
        prompt=prompt,
        gold_position=0,
        passages=((begin, begin + len(passage)),),
        gold_token=None,
        gold_end=None,
        n_tokens=None,
    )


def families(study: Study, seed: int) -> None:
    """Nested sets of families, and one that is left out of all."""
    generator, left_out = np.random.default_rng(seed), left_out_family(seed)
    generator.permutation(len(NEW))  # the order that `left_out_family` reads
    others = [name for name in FAMILIES if name != left_out]
    order = [others[index] for index in generator.permutation(len(others))]
    own = next(name for name in order[:2] + order[2:] if name in NEW)
    order = [own, *(name for name in order if name != own)]

    def made(n_families: int) -> dict[str, Any]:
        fitted_to, count = order[:n_families], SAMPLES // n_families
        calibration = [
            replace(example, sample=f"{name} {example.sample}")  # or samples of two families would count as one
            for name in fitted_to
            for example in examples(study.model, FAMILIES[name], max(2, count), 100 + seed, 3)
        ]
        method = study.fit("adapter", calibration, seed, steps=FAMILIES_STEPS).method
        scores = {}
        for name, multiple in [*((left_out, multiple) for multiple in MULTIPLES), (own, 1)]:
            task = LANGUAGE_TASKS.parse(FAMILIES[name])
            scores[f"{name} x{multiple}"] = study.beside(method, task.with_items(multiple * task.n_items), seed)
        asked = examples(study.model, FAMILIES[left_out], JUDGED, 1000 + seed, 1)
        alone = [alone(one) for one in asked]
        return {
            "fitted_to": fitted_to,
            "left_out": left_out,
            "own": own,
            "text": study.text(method),
            "scores": scores,
            "alone": {"before": judged(study.model, None, alone), "after": judged(study.model, method, alone)},
        }

    for n_families in NUMBERS if seed in SEEDS else MORE_NUMBERS:
        study.cell("families", f"{n_families} families, seed {seed}", lambda n=n_families: made(n))


def influence(study: Study, seed: int) -> None:
    """Share of influence on the answer's first token that the right row has, at every position, before any fit."""

    def made() -> dict[str, Any]:
        asked = examples(study.model, f"table(entries={ROWS})", JUDGED, 1000 + seed, ROWS)
        shares = []
        for number, example in enumerate(asked):
            token_ids, answer = encoded_prompt(example, study.model.tokenizer)
            passes = PassOptions(output=str(Target(tokens=[answer])))
            measured = measure_prompt(study.model, token_ids, kinds=LOGPROB, key=(seed, number), options=passes)
            (norms,) = measured.norms.values()
            shares.append(float(norms[example.gold_token : example.gold_end].sum() / norms.sum()))
        return {"shares": np.reshape(shares, (JUDGED, ROWS)).tolist()}

    study.cell("influence", f"seed {seed}", made)


def samples(study: Study, seed: int) -> None:
    """How many samples a fit needs, each at every position: adapters beside biases."""
    task = f"table(entries={ROWS})"

    def made(method: str, size: int) -> dict[str, Any]:
        calibration = examples(study.model, task, size, 400 + seed, ROWS)
        fitted = study.fit(method, calibration, seed, **({} if method == "adapter" else BIAS_FIT)).method
        return {"text": study.text(fitted), "scores": study.beside(fitted, task, seed, ROWS)}

    for method, sizes in SIZES.items():
        for size in sizes:
            name = f"{method}, {size} samples, seed {seed}"
            study.cell("samples", name, lambda method=method, size=size: made(method, size))


def generated(model: Any, method: Any, asked: Sequence[Example]) -> list[list[float]]:
    """1 for every generated answer that begins with the right one, under a method of any sort."""
    responder: Any = LocalResponder(model)
    if method is not None:
        responder = answering_under(method, responder)
    most = max(len(request.answer) for request in encoded_answers(model, asked))
    requests = [
        Request(prompt=one.prompt, max_tokens=most, group=one.sample, stop=("\n",), passages=one.passages)
        for one in asked
    ]
    replies = responder.respond(requests, generate=True, score=False)
    return [
        [float(reply.response.text.strip().startswith(one.target.strip()))]
        for reply, one in zip(replies, asked, strict=True)
    ]


def methods(study: Study, seed: int) -> None:
    """Published methods on the samples that judge adapters; those with a grid choose on samples of a fit."""
    task = f"table(entries={ROWS})"
    asked = examples(study.model, task, JUDGED, 1000 + seed, ROWS)

    def made(name: str) -> dict[str, Any]:
        if name == "temperature":
            calibration = examples(study.model, task, FEW, 400 + seed, 3)
            method: Any = pb.fit(name, study.model, calibration).method
        else:
            method = MITIGATIONS.parse(name)
        key = ("generated", seed, ROWS)
        if key not in study.unchanged:
            study.unchanged[key] = generated(study.model, None, asked)
        both = {"before": study.unchanged[key], "after": generated(study.model, method, asked)}
        shape = (JUDGED, ROWS, 1)
        return {
            "method": str(method),
            "scores": {side: np.reshape(scores, shape).tolist() for side, scores in both.items()},
        }

    for name in METHODS:
        study.cell("methods", f"{name}, seed {seed}", lambda name=name: made(name))


def models(study: Study, seed: int) -> None:
    """An adapter on another model."""
    task, model = f"table(entries={ROWS})", Path(study.source).stem

    def made() -> dict[str, Any]:
        calibration = examples(study.model, task, ENOUGH, 400 + seed, ROWS)
        fitted = study.fit("adapter", calibration, seed).method
        return {"text": study.text(fitted), "scores": study.beside(fitted, task, seed, ROWS)}

    study.cell("models", f"{model}, {ENOUGH} samples, seed {seed}", made)


def oracle(study: Study, seed: int) -> None:
    """The unchanged model on every family with the gold item alone: what it fails then is no matter of position."""

    def made() -> dict[str, Any]:
        scores = {}
        for name in NEW:
            asked = examples(study.model, FAMILIES[name], JUDGED, 1000 + seed, 1)
            scores[name] = judged(study.model, None, [alone(one) for one in asked])
        return {"scores": scores}

    study.cell("oracle", f"seed {seed}", made)


QUESTIONS = {question.__name__: question for question in (influence, oracle, families, samples, methods, models)}
SUBJECTS = {"methods": (("demo", "float32"),), "models": OTHERS}
"""What is asked otherwise than of the demo model in bfloat16."""


def run(directory: Path, questions: Sequence[str]) -> None:
    """All cells, the first seed's of all questions before the next seed's."""
    import tasks  # noqa: F401  which registers the families

    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    studies: dict[tuple[str, str], Study] = {}
    for seed in (*SEEDS, *MORE_SEEDS):
        for question in questions or QUESTIONS:
            if seed in MORE_SEEDS and question != "families":
                continue
            for subject in SUBJECTS.get(question, (("demo", "bfloat16"),)):
                if subject not in studies:
                    studies[subject] = Study(directory, *subject)
                QUESTIONS[question](studies[subject], seed)


def table(directory: Path) -> None:
    """Exact answers, mean over positions with its spread and by position, and the change of ordinary text.

    A row for the unchanged model and for every fit, over its seeds; a column for everything it was judged on.
    """
    for question in ("families", "draws", "forms", "samples", "distractors", "methods", "models"):
        path = directory / f"{question}.json"
        if not path.exists():
            continue
        cells = json.loads(path.read_text())
        by_name: dict[str, list[dict[str, Any]]] = {}
        for name, cell in sorted(cells.items(), key=lambda item: _order(item[0])):
            by_name.setdefault(name.rpartition(", seed")[0], []).append(cell)
            if "shuffled" in cell:
                moved = {"scores": cell["shuffled"]}
                by_name.setdefault(f"q, k, {MOVED}", []).append(moved)
            if "oracle" in cell:
                lone = np.expand_dims(cell["oracle"], 1).tolist()
                by_name.setdefault("unchanged, the row alone", []).append({"scores": {"before": lone, "after": lone}})
        judged = {name: _judged(of_name) for name, of_name in by_name.items()}
        columns = list(dict.fromkeys(column for scores in judged.values() for column in scores))
        print(f"\n| {question} | {' | '.join(columns)} | text, nats per token |\n|{'---|' * (len(columns) + 2)}")
        # Fits of fewer seeds, or in float32, stand beside others: the first of the longest shows the unchanged model.
        unchanged: dict[str, np.ndarray] = {}
        for column, before in (
            (column, scores[0]) for of_name in judged.values() for column, scores in of_name.items()
        ):
            if len(before) > len(unchanged.get(column, ())):
                unchanged[column] = before
        exact = partial(_exact, places=question != "families")
        if question != "models":
            print(f"| unchanged | {' | '.join(exact(unchanged[column]) for column in columns)} | |")
        for name, of_name in by_name.items():
            texts = [np.subtract(cell["text"]["after"], cell["text"]["before"]) for cell in of_name if "text" in cell]
            text = _plain(mean_of(np.mean(texts, axis=0)).interval().text("+.3f")) if texts else ""
            if question == "models":
                print(f"| {name}, unchanged | {' | '.join(exact(judged[name][column][0]) for column in columns)} | |")
            after = [exact(judged[name][column][1]) if column in judged[name] else "" for column in columns]
            print(f"| {name} | {' | '.join(after)} | {text} |")


def _order(name: str) -> list[float]:
    """Fits by the numbers in their names."""
    return [float(number) for number in re.findall(r"\d+", name)]


def _exact(scores: np.ndarray, *, places: bool) -> str:
    """Share of exact answers of [sample position two]: of every seed, else with its interval over samples; by place.

    Every seed leaves another family out, so that samples of all seeds say nothing of other families.
    """
    exact = scores[..., -1]
    shares = exact.reshape(-1, JUDGED, exact.shape[1]).mean(axis=(1, 2))
    low, high = mean_ends(exact.mean(axis=1), least=0.0, most=1.0)
    spread = f"[{low:.2f}, {high:.2f}]" if len(shares) == 1 else f"({' '.join(f'{share:.2f}' for share in shares)})"
    by_position = ": " + " ".join(f"{share:.2f}" for share in exact.mean(axis=0)) if places else ""
    return _plain(f"{exact.mean():.2f} {spread}{by_position}")


def _plain(numbers: str) -> str:
    """Without zeros before the point."""
    return re.sub(r"(?<!\d)0\.", ".", numbers)


def order_of_learning(directory: Path) -> None:
    """Is the loss of unseen prompts while a form is fitted lowest where influence, or accuracy, was before the fit?

    Steps by position, and rank correlations over positions, means over seeds, with one-sided p-values of permuted
    positions.
    """
    forms, shares = (json.loads((directory / f"{name}.json").read_text()) for name in ("forms", "influence"))
    predictors = "influence | log-probability before | nearness to the beginning"
    print(f"\n| form | steps to {THRESHOLD}, by position | {predictors} |")
    print("|---|---|---|---|---|")
    for form in FORMS:
        if "first" in form or f"{form}, seed 0" not in forms:  # looks at one position
            continue
        seeds = [name.rpartition("seed ")[2] for name in forms if name.startswith(f"{form}, seed")]
        cells = [forms[f"{form}, seed {seed}"] for seed in seeds]
        losses = [np.mean(cell["looks"], axis=0) for cell in cells]
        before = {
            "influence": [np.mean(shares[f"seed {seed}"]["shares"], axis=0) for seed in seeds],
            "log-probability": [np.array(cell["scores"]["before"])[..., 0].mean(axis=0) for cell in cells],
            "nearness": [-np.arange(ROWS) for _ in cells],
        }
        told = [_predicted(losses, values) for values in before.values()]
        steps = np.mean([steps_until(cell["looks"]) for cell in cells], axis=0)
        print(f"| {form} | {' '.join(f'{number:.0f}' for number in steps)} | {' | '.join(told)} |")


def picture(directory: Path) -> None:
    """Two curves, over families and over samples, and the steps after which a fit has learnt every position."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.2), constrained_layout=True)
    for panel, draw in zip(panels, (families_curve, samples_curve, steps_to_threshold), strict=True):
        draw(panel, directory)
        panel.legend(frameon=False, fontsize="small", loc="best" if draw is not steps_to_threshold else "lower right")
    figure.savefig(directory / "curves.png", dpi=80, metadata={"Software": None})


def families_curve(panel: Any, directory: Path) -> None:
    """Exact answers of left-out families by the number that was fitted to: mean and worst position."""
    cells = json.loads((directory / "families.json").read_text())
    numbers = sorted(NUMBERS)
    for multiple, colour in zip(MULTIPLES, ("C0", "C1", "C2"), strict=True):
        exact = {
            number: [
                np.array(cell["scores"][f"{cell['left_out']} x{multiple}"]["after"])[..., 1].mean(axis=0)
                for name, cell in cells.items()
                if name.startswith(f"{number} families")
            ]
            for number in numbers
        }
        label = f"{multiple} times the entries" if multiple > 1 else "entries as fitted"
        panel.plot(numbers, [np.mean(exact[number]) for number in numbers], "o-", color=colour, label=label)
        worst = [np.mean([places.min() for places in exact[number]]) for number in numbers]
        panel.plot(numbers, worst, "o--", color=colour)
        if multiple == 1:
            for number in numbers:
                every = [places.mean() for places in exact[number]]
                panel.plot([number] * len(every), every, "_", color=colour)
    panel.plot([], [], "k--", label="worst position")
    panel.plot([], [], "_", color="C0", label="every left-out family")
    panel.set(
        xlabel="families fitted to",
        ylabel="exact answers, left-out family",
        title="Another left-out family in each of three seeds",
        ylim=(0, 1),
        xticks=numbers,
    )


def samples_curve(panel: Any, directory: Path) -> None:
    """Exact answers by the number of samples, mean with its interval, and worst position."""
    cells = json.loads((directory / "samples.json").read_text())
    for colour, (method, sizes) in enumerate(SIZES.items()):
        exact = [
            np.concatenate(
                [
                    np.array(cell["scores"]["after"])[..., 1]
                    for name, cell in cells.items()
                    if name.startswith(f"{method}, {size} samples")
                ]
            )
            for size in sizes
        ]
        means = np.array([scores.mean() for scores in exact])
        ends = np.array([mean_ends(scores.mean(axis=1), least=0.0, most=1.0) for scores in exact])
        bars = np.abs(ends.T - means)
        panel.errorbar(sizes, means, bars, fmt="o-", capsize=3, color=f"C{colour}", label=method)
        panel.plot(sizes, [scores.mean(axis=0).min() for scores in exact], "o--", color=f"C{colour}")
    panel.plot([], [], "k--", label="worst position")
    panel.set(
        xscale="log",
        xlabel="samples fitted to, each at eight positions",
        ylabel="exact answers, unseen samples",
        title=f"Tables of {ROWS} rows, three seeds",
        ylim=(0, 1.02),
        xticks=SIZES["adapter"],
        xticklabels=SIZES["adapter"],
    )
    panel.minorticks_off()


def steps_to_threshold(panel: Any, directory: Path) -> None:
    """Steps until the loss of unseen prompts stays below a threshold, by position and form; influence beside them."""
    forms, shares = (json.loads((directory / f"{name}.json").read_text()) for name in ("forms", "influence"))
    for form in LEARNT:
        looks = [cell["looks"] for name, cell in forms.items() if name.startswith(f"{form}, seed")]
        panel.plot(range(ROWS), np.mean([steps_until(losses) for losses in looks], axis=0), "o-", label=form)
    panel.set(
        xlabel="position of the row that is asked for",
        ylabel=f"steps until the loss is below {THRESHOLD} nats per token",
        title=f"Order of learning, mean of three seeds ({OPTIONS.steps}: or later)",
        ylim=(0, OPTIONS.steps + 0.5),
    )
    influence_before = np.mean([np.mean(cell["shares"], axis=0) for cell in shares.values()], axis=0)
    beside = panel.twinx()
    beside.plot(range(ROWS), influence_before, ":", color="gray")
    beside.set(ylabel="share of influence before the fit (dotted)", ylim=(0, None))


def steps_until(losses: Sequence[Sequence[float]]) -> np.ndarray:
    """Steps [position] after which losses [look position] stay below the threshold; all steps if they do not."""
    steps = []
    for of_position in np.transpose(losses):
        above = np.flatnonzero(of_position >= THRESHOLD)
        steps.append(min(STEPS_BETWEEN_LOOKS * (above[-1] + 2 if above.size else 1), OPTIONS.steps))
    return np.array(steps)


def _predicted(losses: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> str:
    """Mean rank correlation of the negative losses with the values, and how often permuted positions reach it."""
    generator = np.random.default_rng(0)
    left, right = (zscore([rankdata(entry) for entry in side], axis=1) for side in ([-loss for loss in losses], values))
    told = np.mean(left * right)
    permuted = [np.mean([generator.permutation(row) for row in left] * right) for _ in range(PERMUTATIONS)]
    return f"{told:+.2f} (p {(1 + np.sum(permuted >= told - ROUNDING)) / (1 + PERMUTATIONS):.3f})"


def _judged(cells: list[dict[str, Any]]) -> dict[str, list[np.ndarray]]:
    """Scores [sample position two] of all seeds, before and after, by what they were judged on."""
    pooled: dict[str, list[list[Any]]] = {}
    for cell in cells:
        own = {"the same task": cell["scores"]} if "before" in cell["scores"] else cell["scores"]
        for name, scores in own.items():
            role = name.replace(cell.get("left_out", "\0"), "left out").replace(cell.get("own", "\0"), "fitted to")
            for multiple, words in ((" x1", ""), (" x2", ", twice the entries"), (" x4", ", four times")):
                role = role.replace(multiple, words)
            pooled.setdefault(role, []).append([scores["before"], scores["after"]])
        if "alone" in cell:
            alone = [np.expand_dims(cell["alone"][side], 1) for side in ("before", "after")]
            pooled.setdefault("left out, gold alone", []).append(alone)
    return {role: [np.concatenate(side) for side in zip(*pairs, strict=True)] for role, pairs in pooled.items()}


if __name__ == "__main__":
    verb, folder, *some = sys.argv[1:]
    if verb == "run":
        run(Path(folder), some)
    else:
        table(Path(folder))
        order_of_learning(Path(folder))
        picture(Path(folder))
