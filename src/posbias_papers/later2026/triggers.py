"""Sinks of trained attention with a softmax, a relu and softpick (arXiv 2603.11487 and 2504.20966), on one task.

Task and layer are those of the code of arXiv 2603.11487: position 0 is a marker, a later token is the trigger, and one
head without residual connection is to give there the mean of the tokens from position 1 to the trigger, elsewhere 0.
Initial weights, steps and their number are ours, so that layers train in seconds.

Expected, written before the runs that count (a pilot on another draw chose the number of steps): (1) with a softmax the
queries that are to give 0 have over .9 of their attention on position 0, with relu and softpick under .1; (2) if all
queries are to give a mean, a softmax has under .3 there; (3) if all are to give the first token, softpick has a sink;
(4) what a softmax leaves outside position 0 keeps to the bound that follows from its error; (5) of two layers of two
heads some head of every softmax network does as in (1), not all heads, and of no relu network. In a first draw one
softmax network of six did without, which is why `cancelling_heads` was written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posbias.registry import Registry
from posbias.statistics import mean_of, wilson
from posbias_papers.claims import Claim, curves
from posbias_papers.pages.verify import CLAIMS, Finding

NORMALISATIONS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry("normalisation")
"""From logits and the keys that are hidden to weights, 0 for those."""
SINK, NONE = 0.9, 0.1
"""Mean attention on position 0 above which there is a sink, and below which there is none."""
SINK_RATE = 0.3
"""Mean attention of a head on position 0 from which arXiv 2504.20966 counts a sink."""
SOLVED = 0.1
"""Root mean square error over that of the targets below which a layer does its task."""
CONTENT_VARIANCE = 1 / 3
"""Of a feature that is uniform in -1 ... 1."""

Tokens = Float[Tensor, "seed batch position feature"]
Maps = Float[Tensor, "seed head batch query key"]
Hidden = Bool[Tensor, "query key"]
Demand = Callable[[Tokens, Bool[Tensor, "seed batch position"]], Tokens]
"""Targets from the tokens and where the trigger stands."""


@NORMALISATIONS.register("softmax")
def softmax(logits: Maps, hidden: Hidden) -> Maps:
    """Exponentials over their sum."""
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


@NORMALISATIONS.register("relu")
def relu(logits: Maps, hidden: Hidden) -> Maps:
    """Positive logits over the number of earlier keys, as in the code of arXiv 2603.11487: rows have any sum."""
    earlier = (~hidden).sum(-1, keepdim=True).sub(1).clamp(min=1)
    return logits.masked_fill(hidden, 0.0).relu() / earlier


@NORMALISATIONS.register("softpick")
def softpick(logits: Maps, hidden: Hidden) -> Maps:
    """relu(e^x - 1) over the sum of |e^x - 1|, arXiv 2504.20966: rows sum to 1 at most."""
    raised = torch.expm1(logits.clamp(max=30.0)).masked_fill(hidden, 0.0)
    return raised.relu() / (raised.abs().sum(-1, keepdim=True) + 1e-8)


def running_mean(tokens: Tokens, trigger: Bool[Tensor, "seed batch position"]) -> Tokens:
    """The mean of all tokens after the marker, at every position."""
    count = torch.arange(tokens.shape[2]).clamp(min=1)[:, None]
    means: Tokens = (tokens.cumsum(2) - tokens[:, :, :1]) / count
    return means


def mean_at_trigger(tokens: Tokens, trigger: Bool[Tensor, "seed batch position"]) -> Tokens:
    """That mean at the trigger, 0 elsewhere."""
    return running_mean(tokens, trigger) * trigger[..., None]


def first_token(tokens: Tokens, trigger: Bool[Tensor, "seed batch position"]) -> Tokens:
    """The token of position 0, everywhere."""
    return tokens[:, :, :1].expand_as(tokens)


@dataclass(frozen=True)
class Training:
    """Sizes and steps of the networks of one normalisation, one for each seed."""

    seeds: int = 6
    length: int = 16
    width: int = 16
    batch: int = 32
    steps: int = 500
    learning_rate: float = 1e-2
    depth: int = 1
    heads: int = 1
    """Of every layer, each as wide as the stream."""

    @property
    def hidden(self) -> Hidden:
        """Keys after the query."""
        return torch.ones(self.length, self.length, dtype=torch.bool).triu(1)

    def sequences(self, size: int, generator: torch.Generator, *, marked: bool) -> tuple[Tokens, Tensor]:
        """Tokens of marker, trigger, content and constant features, and where the trigger stands.

        Args:
            size: Sequences for each seed.
            generator: Source of contents and triggers.
            marked: The first token is the marker alone, without content.
        """
        shape = (self.seeds, size, self.length)
        tokens = 2 * torch.rand((*shape, self.width), generator=generator) - 1
        trigger = torch.arange(self.length) == torch.randint(2, self.length, (*shape[:2], 1), generator=generator)
        tokens[..., 0] = torch.arange(self.length) == 0
        tokens[..., 1] = trigger
        tokens[..., -1] = ~trigger
        tokens[:, :, 0, -1] = 0
        if marked:
            tokens[:, :, 0, 1:] = 0
        return tokens, trigger


@dataclass(frozen=True, eq=False)
class Networks:
    """Trained networks of one normalisation; the heads of all layers one after another."""

    first: Float64[np.ndarray, "seeds heads queries"]
    """Mean weight on position 0 of the queries after it, the trigger's own left out."""
    total: Float64[np.ndarray, "seeds heads queries"]
    """Mean sum of those queries' weights."""
    error: Float64[np.ndarray, "seeds"]
    """Root mean square error over that of the targets."""
    content_error: Float64[np.ndarray, "seeds queries"]
    """Mean square error of those queries' content features."""
    head: Float64[np.ndarray, "seeds heads"]
    """Mean weight on position 0 of all queries."""


def trained_networks(
    generator: np.random.Generator, normalisation: str, training: Training, demand: Demand = mean_at_trigger
) -> Networks:
    """Train a network for each seed on mean squares, and look at its attention on new sequences.

    Layers of several have residual connections; what all of them add is to be the target.
    """
    draw = torch.Generator().manual_seed(int(generator.integers(2**62)))
    weights_of = NORMALISATIONS[normalisation]
    hidden = training.hidden
    shape = (training.depth, 4, training.seeds, training.heads, training.width, training.width)
    maps = (torch.randn(shape, generator=draw) / training.width**0.5).requires_grad_()
    marked = demand is not first_token

    def outputs(tokens: Tokens) -> tuple[Maps, Tokens]:
        added, attention = torch.zeros_like(tokens), []
        for layer in maps:
            stream = (tokens + added).flatten(1, 2)[:, None]
            query, key, value = ((stream @ each).unflatten(2, tokens.shape[1:3]) for each in layer[:3])
            attention.append(weights_of(query @ key.transpose(-1, -2), hidden))
            added = added + ((attention[-1] @ value).flatten(2, 3) @ layer[3]).sum(1).view_as(tokens)
        return torch.cat(attention, dim=1), added

    optimiser = torch.optim.Adam([maps], lr=training.learning_rate, betas=(0.9, 0.95))
    for _ in range(training.steps):
        tokens, trigger = training.sequences(training.batch, draw, marked=marked)
        loss = (outputs(tokens)[1] - demand(tokens, trigger)).square().mean((1, 2, 3)).sum()
        (maps.grad,) = torch.autograd.grad(loss, [maps])
        optimiser.step()
    with torch.no_grad():
        tokens, trigger = training.sequences(500, draw, marked=marked)
        attention, output = outputs(tokens)
        target = demand(tokens, trigger)
        wrong = (output - target).double().square()
        others = (~trigger[:, :, 1:]).double()

        def mean(values: Tensor) -> np.ndarray:
            return np.asarray(((values * others[:, None]).sum(2) / others.sum(1)[:, None]).numpy())

        return Networks(
            first=mean(attention[..., 1:, 0].double()),
            total=mean(attention[..., 1:, :].double().sum(-1)),
            error=(wrong.mean((1, 2, 3)) / target.double().square().mean((1, 2, 3))).sqrt().numpy(),
            content_error=mean(wrong[:, None, :, 1:, 2:-1].mean(-1))[:, 0],
            head=attention[..., 0].double().mean((2, 3)).numpy(),
        )


class TriggerClaim(Claim):
    """Base of claims on layers that were trained on this task."""

    trains = True
    sizes: ClassVar[Training] = Training()

    def __init__(self, training: Training | None = None) -> None:
        self.training = self.sizes if training is None else training

    def trained_pair(
        self, generator: np.random.Generator, normalisations: tuple[str, str], demand: Demand
    ) -> tuple[Networks, Networks, bool]:
        """Networks of two normalisations, and whether all of them do their task."""
        first, second = (trained_networks(generator, name, self.training, demand) for name in normalisations)
        return first, second, bool(max(first.error.max(), second.error.max()) < SOLVED)


@CLAIMS.register("sinks-2603.11487/trigger")
class SoftmaxSinks(TriggerClaim):
    """A default of 0 needs a sink under a softmax, and none under relu."""

    paper = (
        "Attention Sinks Are Provably Necessary in Softmax Transformers: Evidence from Trigger-Conditional Tasks, "
        "arXiv 2603.11487v1"
    )
    source = "abstract, theorem 1 by a summary, published code"
    statement = (
        "Trained to give a mean at a trigger and 0 elsewhere, softmax attention has a sink, relu attention none."
    )
    assumptions = (
        "queries without the trigger are to give 0",
        "one layer, one head, no residual connection",
        "trained",
    )
    broken_by = "every query is to give the mean, so that there is nothing to ignore"
    computed = (
        "mean attention on position 0 of queries that are to give 0, softmax (95 % {low:.4f} to {high:.4f}); relu at "
        "most {relu:.4f}; relative errors at most {error:.3f} and {relu_error:.3f}"
    )
    sharper = (
        "the error bounds what goes elsewhere: 1 - s <= (i e^2 / v)^1/2 for a query with i other keys, mean square "
        "error e^2 and content of variance v, if attention does not hang on content: at most {outside:.4f} goes "
        "elsewhere, {share:.2f} of the bound"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Attention of networks of both kinds, six seeds each."""
        demand = running_mean if broken else mean_at_trigger
        networks, others, solved = self.trained_pair(generator, ("softmax", "relu"), demand)
        sink = mean_of(networks.first[:, 0].mean(1)).interval(least=0.0)
        without = float(others.first.mean(2).max())
        queries = np.arange(1, self.training.length)
        bound = np.sqrt(queries * networks.content_error / CONTENT_VARIANCE)
        return Finding(
            value=sink.value,
            as_stated=sink.low > SINK and without < NONE and solved,
            figure=curves(
                "query",
                "mean attention on position 0",
                queries,
                {
                    "softmax": networks.first[:, 0].mean(0),
                    "relu": others.first[:, 0].mean(0),
                    "least that the softmax's error allows": (1 - bound).mean(0),
                },
            ),
            numbers={
                "low": sink.low,
                "high": sink.high,
                "relu": without,
                "error": float(networks.error.max()),
                "relu_error": float(others.error.max()),
                "outside": float((1 - networks.first).max()),
                "share": float(((1 - networks.first[:, 0]) / bound).max()),
            },
            instances=2 * self.training.seeds,
        )


def cancelling_heads(
    tokens: Tokens, trigger: Bool[Tensor, "seed batch position"], hidden: Hidden
) -> tuple[Maps, Tokens]:
    """Attention and output of a softmax layer written by hand that does the task with two heads and no sink.

    Logits are 30 from the trigger to what is not the marker, or minus that, and 0 elsewhere; values are the tokens
    without the marker, or minus those. Queries without the trigger attend evenly in both heads, which cancel.
    """
    read = tokens[..., 1] + tokens[..., -1]
    logits = 30 * trigger[..., None].float() * read[:, :, None]
    attention = softmax(torch.stack([logits, -logits], dim=1), hidden)
    values = tokens.clone()
    values[..., 0] = 0
    return attention, (attention[:, 0] - attention[:, 1]) @ values


@CLAIMS.register("sinks-2603.11487/heads")
class SomeHeadSinks(TriggerClaim):
    """With several heads networks come by a sink, and could do without."""

    paper = SoftmaxSinks.paper
    source = "abstract, published code (theorem 2, on several layers, was not at hand)"
    statement = "With layers, heads and residual connections softmax networks have a sink on that task, relu ones none."
    assumptions = ("queries without the trigger are to give 0", "two layers of two heads, no MLPs", "trained")
    broken_by = SoftmaxSinks.broken_by
    sizes = Training(length=8, width=8, steps=1000, learning_rate=5e-3, depth=2, heads=2)
    computed = (
        "share of softmax networks in which some head has over {sink:.1f} of its attention on position 0, of queries "
        "that are to give 0 (95 % {low:.2f} to {high:.2f}; the least has {least:.2f}); relu heads have at most "
        "{relu:.4f}; relative errors at most {error:.3f} and {relu_error:.3f}"
    )
    sharper = (
        "two heads can cancel: a layer written by hand, whose heads attend evenly and carry opposite values, does the "
        "task (relative error {hand_error:.0e}) with {hand:.2f} of its attention there, even attention's share: "
        "training mostly comes by a sink, but only one head alone must have it"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Attention of every head of networks of both kinds, six seeds each, and of the layer by hand."""
        demand = running_mean if broken else mean_at_trigger
        networks, others, both_solved = self.trained_pair(generator, ("softmax", "relu"), demand)
        heads, without = np.sort(networks.first.mean(2))[:, ::-1], np.sort(others.first.mean(2))[:, ::-1]
        sinking = wilson((heads[:, 0] > SINK).astype(np.float64))
        solved = both_solved and bool(without.max() < NONE)
        tokens, trigger = self.training.sequences(100, torch.Generator().manual_seed(0), marked=True)
        by_hand, output = cancelling_heads(tokens, trigger, self.training.hidden)
        target = demand(tokens, trigger)
        hand_error = float((output - target).norm() / target.norm())
        return Finding(
            value=sinking.value,
            as_stated=solved and sinking.value == 1,
            corrected=solved and sinking.value > 0.5 and hand_error < SOLVED,
            figure=curves(
                "head, those with the most attention there first",
                "mean attention on position 0",
                np.arange(heads.shape[1]),
                {"softmax": heads.mean(0), "relu": without.mean(0)},
            ),
            numbers={
                "low": sinking.low,
                "high": sinking.high,
                "least": float(heads[:, 0].min()),
                "relu": float(without.max()),
                "error": float(networks.error.max()),
                "relu_error": float(others.error.max()),
                "hand": float(by_hand[..., 1:, 0][~trigger[:, None, :, 1:].expand(-1, 2, -1, -1)].mean()),
                "hand_error": hand_error,
                "sink": SINK,
            },
            instances=2 * self.training.seeds,
        )


@CLAIMS.register("sinks-2504.20966/softpick")
class SoftpickSinks(TriggerClaim):
    """Softpick needs no sink."""

    paper = "Softpick: No Attention Sink, No Massive Activations with Rectified Softmax, arXiv 2504.20966v4"
    source = "abstract and published code (its language models and massive activations are not tested: one small task)"
    statement = "With softpick in place of the softmax no head has an attention sink: the sink rate is 0."
    assumptions = ("nothing asks for the first token: the task of 2603.11487", "one layer, one head", "trained")
    broken_by = "every query is to give the first token"
    computed = (
        f"share of softpick heads with over {SINK_RATE} of their attention on the first token (95 % {{low:.2f}} to "
        "{high:.2f}; mean attention {head:.3f}); of softmax heads {softmax:.2f} ({softmax_head:.3f}); relative errors "
        "at most {error:.3f} and {softmax_error:.3f}"
    )
    sharper = (
        "queries that are to give 0 have weights that sum to {total:.4f}, at the first token {first:.4f}: the default "
        "is no attention. Softpick needs no sink, but where the first token is asked for it has one"
    )

    def examine(self, generator: np.random.Generator, *, broken: bool) -> Finding:
        """Sink rates of networks of both kinds, six seeds each."""
        demand = first_token if broken else mean_at_trigger
        picked, others, solved = self.trained_pair(generator, ("softpick", "softmax"), demand)
        rate, softmax_rate = (
            wilson((trained.head > SINK_RATE).astype(np.float64)[:, 0]) for trained in (picked, others)
        )
        return Finding(
            value=rate.value,
            as_stated=rate.value == 0 and softmax_rate.value == 1 and solved,
            figure=curves(
                "query",
                "mean weight",
                np.arange(1, self.training.length),
                {
                    "softpick, on position 0": picked.first[:, 0].mean(0),
                    "softpick, all keys": picked.total[:, 0].mean(0),
                    "softmax, on position 0": others.first[:, 0].mean(0),
                },
            ),
            numbers={
                "low": rate.low,
                "high": rate.high,
                "head": float(picked.head.mean()),
                "softmax": softmax_rate.value,
                "softmax_head": float(others.head.mean()),
                "error": float(picked.error.max()),
                "softmax_error": float(others.error.max()),
                "total": float(picked.total.mean()),
                "first": float(picked.first.mean()),
            },
            instances=2 * self.training.seeds,
        )
