"""What a fitted key bias owes to its form: `python studies/mitigation/controls.py OUT.json [DEVICE]`.

Every form is fitted alike (40 samples of key-value retrieval with four pairs, 200 steps, divergence on windows of the
default corpus) and judged by the log-probability per token of right answers to held-out samples of two, four and eight
pairs, and by nats per token of ordinary text: other windows of that corpus, and the documentation of Python, which no
fit reads. Ten minutes a form on one core. The largest numbers of one form are judged alone, and all the others; and
an adapter fitted to eight pairs, by whole answers. What is done is kept, and another call goes on with the rest; at the
end what controls.csv holds is printed.
"""

import csv
import json
import pydoc_data.topics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import posbias as pb
from posbias.architecture.keys import log_spline_basis
from posbias.evaluation.responders import LocalResponder, Request
from posbias.interventions.keys import biased
from posbias.mitigation.fitting.base import FitOptions
from posbias.mitigation.fitting.descent import Answers, descend, encoded_answers
from posbias.tasks.language import KeyValue
from posbias.tasks.language.base import Example

POSITIONS = {2: (0, 1), 4: (0, 1, 3), 8: (0, 4, 7)}
ALL_OF_EIGHT = (0, 2, 4, 5, 7)
"""Of the right pair, by the number of pairs."""
FITTED_PAIRS, SAMPLES, HELD_OUT, WINDOWS, WINDOW = 4, 40, 12, 12, 192
OPTIONS = FitOptions(steps=200, rate=0.05, batch=1, scales=False)
KNOTS = OPTIONS.knots
MOST_KEPT = 5000
"""Numbers of a form that are kept in the output."""
LARGEST = 27
"""Of the numbers of a form, a tenth."""
ADAPTED = "adapter of rank 1, fitted to eight pairs"
ADAPTED_SAMPLES, ADAPTED_STEPS, EXACT_SAMPLES = 60, 300, 24

Basis = Callable[[int], Tensor]
"""[n numbers]: what each number of a head adds to the logits of the first n keys."""


def place(n: int) -> Tensor:
    """ln(1 + j) / ln 512."""
    return torch.arange(n).double().log1p() / np.log(512)


def first(n: int) -> Tensor:
    """1 at the first token."""
    return (torch.arange(n) == 0).double()


BASES: dict[str, Basis] = {
    "first token": lambda n: first(n)[:, None],
    "power of the position": lambda n: place(n)[:, None],
    "power and first token": lambda n: torch.stack([place(n), first(n)], dim=1),
    "curve": lambda n: torch.stack([place(n), place(n) ** 2], dim=1),
    "curve and first token": lambda n: torch.stack([place(n), place(n) ** 2, first(n)], dim=1),
    "splines": lambda n: torch.tensor(log_spline_basis(KNOTS, n)[:, :-1]),
}


class Bias:
    """Numbers by layer and head; `layers` and `heads` are 1 where these share them. Layers outside `among` stay."""

    def __init__(
        self,
        model: Any,
        basis: Basis,
        *,
        layers: int | None = None,
        heads: int | None = None,
        among: range | None = None,
    ) -> None:
        self.heads, self.basis = model.family.heads(model.config), basis
        self.among = among or range(model.family.depth(model.config))
        shape = (layers or len(self.among), heads or self.heads, basis(2).shape[1])
        self.free = torch.zeros(shape, dtype=torch.float64, requires_grad=True)

    def applied(self, model: Any, _begins: int) -> Any:
        """The model with the bias, for all queries."""

        def logits(layer: int, n_positions: int) -> Tensor:
            if layer not in self.among:
                return torch.zeros(self.heads, n_positions, dtype=torch.float64)
            own = self.free[self.among.index(layer) if len(self.free) > 1 else 0].expand(self.heads, -1)
            return own @ self.basis(n_positions).T

        return biased(model, "fit", logits)


class Adapter:
    """Low-rank changes of the projections of queries and keys: `W x + B (A x)`; what is trained starts at no change."""

    RATE = 0.2
    """Of the rate of biases."""

    def __init__(self, model: Any, *, core: int = 0, projections: Sequence[str] = ("q_proj", "k_proj")) -> None:
        modules = [module for name, module in model.network.named_modules() if name.endswith(tuple(projections))]
        generator = torch.Generator().manual_seed(0)
        self.parts: list[tuple[Any, Tensor, Tensor, Tensor | None, slice]] = []
        """Module, A [rank in], B [out rank]; of LoRA-XS the core between them is trained, else A and B."""
        begins = 0
        for module in modules:
            weight = module.weight.detach().float()
            if core:
                u, s, v = torch.linalg.svd(weight, full_matrices=False)
                down, up = s[:core, None].sqrt() * v[:core], u[:, :core] * s[:core].sqrt()
                size = core * core
                self.parts.append((module, down, up, None, slice(begins, begins + size)))
            else:
                down = torch.randn(1, weight.shape[1], generator=generator) / weight.shape[1] ** 0.5
                size = weight.shape[0] + weight.shape[1]
                self.parts.append((module, down, torch.zeros(weight.shape[0], 1), down, slice(begins, begins + size)))
            begins += size
        self.core = core
        self.free = torch.zeros(begins, dtype=torch.float64, requires_grad=True)

    @contextmanager
    def applied(self, _model: Any, _begins: int) -> Iterator[None]:
        """The model with the adapter."""
        with ExitStack() as hooks:
            for module, down, up, trained, own in self.parts:
                free = self.RATE * self.free[own].float()
                if trained is None:
                    a, b = down, up @ free.reshape(self.core, self.core)
                else:
                    a = down + free[: down.shape[1]].reshape(1, -1)
                    b = free[down.shape[1] :].reshape(-1, 1)

                def add(_module: Any, given: tuple[Tensor], found: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
                    return found + ((given[0].float() @ a.T) @ b.T).to(found)

                hooks.callback(module.register_forward_hook(add).remove)
            yield


def forms(model: Any) -> dict[str, Callable[[], Any]]:
    """By name, as they begin."""
    found: dict[str, Callable[[], Any]] = {
        name: lambda basis=basis: Bias(model, basis)  # type: ignore[misc]
        for name, basis in BASES.items()
    }
    depth = model.family.depth(model.config)
    half = depth // 2
    return {
        **found,
        "splines, lower half of the layers": lambda: Bias(model, BASES["splines"], among=range(half)),
        "splines, upper half of the layers": lambda: Bias(model, BASES["splines"], among=range(half, depth)),
        "splines, one for each layer": lambda: Bias(model, BASES["splines"], heads=1),
        "splines, one for each head": lambda: Bias(model, BASES["splines"], layers=1),
        "adapter of equal size": lambda: Adapter(model, core=6, projections=["q_proj"]),
        "adapter of rank 1": lambda: Adapter(model),
    }


def examples(model: Any, pairs: int, count: int, seed: int) -> list[Example]:
    """Samples, each at every position."""
    drawn = KeyValue(pairs=pairs).examples(model.tokenizer, count=count, positions=POSITIONS[pairs], seed=seed)
    return list(drawn)


def answers(model: Any, pairs: int) -> list[list[float]]:
    """Log-probability per token of right answers, [sample][position]."""
    drawn = examples(model, pairs, HELD_OUT, seed=7)
    requests = [Request(prompt=item.prompt, answer=item.target, passages=item.passages) for item in drawn]
    replies = LocalResponder(model).respond(requests, generate=False, score=True)
    return np.reshape([reply.score.logprob / reply.score.n_tokens for reply in replies], (HELD_OUT, -1)).tolist()


def nats(model: Any, windows: Any) -> list[float]:
    """Mean negative log-likelihood per token of each window."""
    found = []
    for window in windows:
        tokens = model.token_tensor([window.tolist()])
        with torch.no_grad():
            logits = model.outputs(model.embed(tokens), list(range(len(window) - 1))).logits[0].float()
        found.append(float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:])))
    return found


def texts(model: Any) -> dict[str, Any]:
    """Windows that judge: of the corpus that fits read, and of another source."""
    with tempfile.TemporaryDirectory() as directory:
        other = Path(directory) / "python.txt"
        other.write_text("\n\f\n".join(pydoc_data.topics.topics.values()))
        both = {
            "default corpus": ("default", 7),
            "documentation of Python": (str(other), 7),
        }
        return {
            name: pb.load_prompts(source, model, n_positions=WINDOW, count=WINDOWS, seed=seed).token_ids
            for name, (source, seed) in both.items()
        }


def judged(model: Any, form: Any) -> dict[str, Any]:
    """Under one form, or None."""
    with ExitStack() as opened:
        if form is not None:
            opened.enter_context(torch.no_grad())
            opened.enter_context(form.applied(model, 0))
        found: dict[str, Any] = {f"{pairs} pairs": answers(model, pairs) for pairs in POSITIONS}
        return {**found, **{name: nats(model, windows) for name, windows in texts(model).items()}}


def parted(model: Any, values: Any) -> dict[str, Any]:
    """The largest numbers of a power of the position alone, and all the others."""
    whole = torch.tensor(values, dtype=torch.float64)
    large = whole.abs() >= whole.abs().flatten().sort().values[-LARGEST]
    found = {}
    for name, kept in ((f"its {LARGEST} largest alone", large), ("all others", ~large)):
        form = Bias(model, BASES["power of the position"])
        form.free = whole * kept
        found[f"power of the position, {name}"] = {"numbers": int(kept.sum()), "judged": judged(model, form)}
    return found


def exact(model: Any) -> list[list[bool]]:
    """Whether every token of the answer is the most probable one given the right ones before it, [sample][position]."""
    task = KeyValue(pairs=8)
    drawn = list(task.examples(model.tokenizer, count=EXACT_SAMPLES, positions=ALL_OF_EIGHT, seed=7))
    found = []
    for one in encoded_answers(model, drawn):
        whole = np.concatenate([one.prompt, one.answer])[:-1]
        rows = list(range(len(one.prompt) - 1, len(whole)))
        with torch.no_grad():
            logits = model.outputs(model.embed(model.token_tensor([whole.tolist()])), rows).logits[0]
        found.append(bool((logits.argmax(-1).numpy() == one.answer).all()))
    return np.reshape(found, (EXACT_SAMPLES, -1)).tolist()


def adapted(model: Any, windows: Sequence[Any]) -> dict[str, Any]:
    """An adapter fitted to eight pairs at five positions."""
    task = KeyValue(pairs=8)
    drawn = list(task.examples(model.tokenizer, count=ADAPTED_SAMPLES, positions=ALL_OF_EIGHT, seed=100))
    encoded, form = encoded_answers(model, drawn), Adapter(model)
    options, begins = replace(OPTIONS, steps=ADAPTED_STEPS), [0] * len(encoded)
    before = exact(model)
    descent = descend(model, form, Answers(model, encoded, begins), begins, windows, options, None)
    with torch.no_grad(), form.applied(model, 0):
        after = exact(model)
    found = {"numbers": form.free.numel(), "losses": descent.losses.round(5).tolist(), "judged": judged(model, form)}
    return {**found, "exact": {"before": before, "after": after}}


def summary(found: dict[str, Any]) -> None:
    """As CSV the change from the unchanged model: mean over positions, 95 % bootstrap over samples."""
    generator = np.random.default_rng(0)
    before = found["unchanged"]["judged"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["form", "numbers", *(f"{measure}{end}" for measure in before for end in ("", ", low", ", high"))])
    for name, entry in found.items():
        line = [name, entry["numbers"]]
        for measure, values in entry["judged"].items():
            level, change = (np.asarray(each) for each in (values, np.subtract(values, before[measure])))
            level, change = (each.mean(axis=1) if each.ndim == 2 else each for each in (level, change))
            draws = change[generator.integers(0, len(change), (4000, len(change)))].mean(axis=1)
            ends = [f"{each:.3f}" for each in (change.mean(), *np.percentile(draws, [2.5, 97.5]))]
            line += ends if entry["numbers"] else [f"{level.mean():.3f}", "", ""]
        writer.writerow(line)


def main(out: Path, device: str = "cpu") -> None:
    """Fit, judge and print."""
    model = pb.load_model("demo", dtype="bfloat16", device=device)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if "unchanged" not in found:
        found["unchanged"] = {"numbers": 0, "judged": judged(model, None)}
    encoded = encoded_answers(model, examples(model, FITTED_PAIRS, SAMPLES, seed=100))
    windows = list(
        pb.load_prompts("default", model, n_positions=WINDOW, count=64 + WINDOWS, seed=7).token_ids[WINDOWS:]
    )
    for name, made in forms(model).items():
        if name in found:
            continue
        form, begins = made(), [0] * len(encoded)
        descent = descend(model, form, Answers(model, encoded, begins), begins, windows, OPTIONS, None)
        found[name] = {
            "numbers": form.free.numel(),
            "losses": descent.losses.round(5).tolist(),
            "values": np.round(form.free.detach().numpy(), 5).tolist() if form.free.numel() < MOST_KEPT else None,
            "judged": judged(model, form),
        }
        out.write_text(json.dumps(found))
    if not any(name.endswith("largest alone") for name in found):
        found |= parted(model, found["power of the position"]["values"])
        out.write_text(json.dumps(found))
    if ADAPTED not in found:
        found[ADAPTED] = adapted(model, windows)
        out.write_text(json.dumps(found))
    summary(found)
    for when, answered in found[ADAPTED]["exact"].items():
        print(f"exact answers to eight pairs, {when} {ADAPTED}: {np.mean(answered, axis=0).round(3)}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
