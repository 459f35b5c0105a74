"""Outputs that influence is measured on, settings of the passes that read them, and the blocks that these run through.

An output (the last position's, another's, the mean of several, a given continuation) is a rule; `read` applies it to
one prompt and gives a `Reading`: the tokens to run, the positions to read, and how they are combined. All kinds of
influence differentiate or compare this one combined output.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from annotated_types import Ge
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from posbias.errors import UsageError
from posbias.models.attention import named_blocks
from posbias.models.model import Model, Outputs
from posbias.models.weights import dispatched
from posbias.registry import Registry, Spelled

OUTPUTS: Registry["Output"] = Registry("output")

TokenIds = Int64[np.ndarray, "n_positions"]
"""Token ids of one prompt."""
Key = tuple[int, int]
"""(seed, index of the prompt): random draws depend on these and the kind's name, on nothing else."""


@dataclass(frozen=True, eq=False)
class Reading:
    """An output applied to one prompt."""

    token_ids: Int64[np.ndarray, "n_inputs"]
    """The prompt, then the target's tokens but its last."""
    n_positions: int
    """Positions of the prompt: those whose influence is measured."""
    positions: tuple[int, ...]
    """Positions whose output is read, strictly ascending, within the inputs."""
    share: float
    """Weight of each of them in the combined output: 1, or 1 / their number for a mean."""
    targets: tuple[int, ...] | None = None
    """The token that each of them is to predict; None if the model's own prediction counts."""


class Output(Spelled, ABC):
    """A rule that says which output of a prompt the influence is on."""

    targeted: ClassVar[bool] = False
    """True if tokens are given, so that only scores of tokens can be read."""

    @abstractmethod
    def read(self, model: Model, token_ids: TokenIds) -> Reading:
        """The rule applied to one prompt.

        Raises:
            UsageError: the prompt is too short for it, or the model cannot serve it.
        """


@OUTPUTS.register("last")
@dataclass(frozen=True)
class Last(Output):
    """The last position's output."""

    def read(self, model: Model, token_ids: TokenIds) -> Reading:
        """One position, N - 1."""
        return _reading(token_ids, [-1])


@OUTPUTS.register("at")
@dataclass(frozen=True)
class At(Output):
    """One position's output; positions after it have exactly no influence on it in a causal model."""

    position: int
    """Index from the start (0 is the first), or negative from the end (-1 is the last)."""

    def read(self, model: Model, token_ids: TokenIds) -> Reading:
        """The position alone."""
        return _reading(token_ids, [self.position])


@OUTPUTS.register("mean")
@dataclass(frozen=True)
class Mean(Output):
    """The mean of several positions' outputs, differentiated as one vector or score.

    The influence is that on the mean, ||1/k sum_p dh_p/dx_j||, one function with one pass per covector, and not the
    mean of the k influences: what moves two outputs in opposite directions cancels. Where the outputs react in
    unrelated directions it is (1/k) sqrt(sum_p ||dh_p/dx_j||^2). Scores of tokens are averaged likewise.
    """

    positions: tuple[int, ...] = ()
    """Distinct positions, negative ones counted from the end."""
    last: Annotated[int, Ge(1)] | None = None
    """Number of positions at the end, >= 1, in place of a list."""

    def __post_init__(self) -> None:
        if (self.last is None) == (not self.positions):
            raise UsageError("mean: give either positions, such as mean(positions=[-8, -1]), or last, as mean(last=16)")

    def read(self, model: Model, token_ids: TokenIds) -> Reading:
        """The positions, each weighing 1/k."""
        if self.last is not None and self.last > len(token_ids):
            raise UsageError(f"output {self}: the prompt has only {len(token_ids)} positions")
        return _reading(token_ids, self.positions if self.last is None else range(-self.last, 0))


@OUTPUTS.register("target")
@dataclass(frozen=True)
class Target(Output):
    """A given continuation: its log-probability after the prompt, the target's tokens appended (teacher forcing).

    log p(target) = sum_i log p(t_i | prompt, t_1 ... t_{i-1}). The influence is that of the prompt's positions; the
    target's own tokens, which also act on the later ones, have none. Kinds that look at tokens take it; for
    `probability` the score is exp of the above, so that its profile of a single prompt is that of `logprob`.
    """

    text: str = ""
    """The continuation, tokenised by itself, without special tokens; mind the leading space."""
    tokens: tuple[int, ...] = ()
    """Token ids of the continuation, in place of its text."""

    targeted: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.tokens):
            raise UsageError(
                'target: give either text, such as target(text=" Paris"), or tokens, as target(tokens=[5])'
            )

    def read(self, model: Model, token_ids: TokenIds) -> Reading:
        """Every position that predicts a token of the target."""
        targets = self._targets(model)
        size = len(token_ids)
        if model.max_positions is not None and size + len(targets) - 1 > model.max_positions:
            raise UsageError(
                f"output {self}: the prompt and {len(targets) - 1} of the target's {len(targets)} tokens exceed the"
                f" model's {model.max_positions} positions"
            )
        return Reading(
            token_ids=np.concatenate([token_ids, np.asarray(targets[:-1], dtype=np.int64)]),
            n_positions=size,
            positions=tuple(range(size - 1, size - 1 + len(targets))),
            share=1.0,
            targets=targets,
        )

    def _targets(self, model: Model) -> tuple[int, ...]:
        if self.tokens:
            targets = tuple(self.tokens)
        elif model.tokenizer is None:
            raise UsageError(f"output {self}: {model.no_tokenizer}; give target(tokens=[...])")
        else:
            targets = tuple(int(token) for token in model.tokenizer(self.text, add_special_tokens=False)["input_ids"])
        for token in targets:
            if not 0 <= token < model.vocabulary_size:
                largest = model.vocabulary_size - 1
                raise UsageError(f"output {self}: token id {token} is outside the model's vocabulary 0 ... {largest}")
        if not targets:
            raise UsageError(f"output {self}: the model's tokenizer makes no token of the text")
        return targets


def _reading(token_ids: TokenIds, requested: Sequence[int]) -> Reading:
    size = len(token_ids)
    for position in requested:
        if not -size <= position < size:
            raise UsageError(f"output position {position} is outside the prompt; allowed: {-size} to {size - 1}")
    positions = sorted(position % size for position in requested)
    if len(set(positions)) < len(positions):
        raise UsageError(f"output positions {list(requested)} name a position twice in a prompt of {size} positions")
    return Reading(token_ids, size, tuple(positions), 1 / len(positions))


@dataclass(frozen=True, eq=False)
class Influence:
    """One kind of influence on one prompt, not normalised."""

    norms: Float64[np.ndarray, "n_positions"]
    """||.||_j, non-negative."""
    standard_errors: Float64[np.ndarray, "n_positions"] | None
    """Errors of the norms, from the spread over random draws (infinite with a single one); None without draws."""
    details: dict[str, float] = field(default_factory=dict)
    """Further numbers of the kind on the prompt, such as the gap of integrated gradients."""
    left_out: tuple[str, ...] = ()
    """Limits of the norms, the same on every prompt that has them."""


def over_draws(values: Float64[np.ndarray, "draws n_positions"], *, root: bool) -> Influence:
    """The mean over random draws, or its root, with the standard error (of the root by the delta method)."""
    mean, spread = values.mean(axis=0), np.full(values.shape[1], np.inf)
    if root:
        mean = np.sqrt(mean)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1) / np.sqrt(len(values))
        if root:  # d sqrt(s) = ds / (2 sqrt(s)); a position without any influence has no spread either
            spread = np.divide(spread, 2 * mean, out=np.zeros_like(mean), where=mean > 0)
    return Influence(mean, spread)


@dataclass(frozen=True, eq=False)
class Question:
    """One output of one model on one prompt."""

    model: Model
    reading: Reading
    key: Key

    @cached_property
    def embeddings(self) -> Float[Tensor, "one n_inputs feature"]:
        """The vectors that enter the network, not differentiable."""
        return self.model.embed(self.model.token_tensor([self.reading.token_ids.tolist()])).detach()

    def outputs(self, embeddings: Float[Tensor, "batch n_inputs feature"]) -> Outputs:
        """The outputs that are read, differentiable by the embeddings."""
        return self.model.outputs(embeddings, self.reading.positions)

    def generator(self, name: str) -> torch.Generator:
        """A generator of the prompt's and the name's own."""
        seed = np.random.SeedSequence([*self.key, zlib.crc32(name.encode())]).generate_state(1, np.uint64)[0]
        return torch.Generator().manual_seed(int(seed))


WIDER = "; in a wider type it may be: --dtype float32 or float64"
"""What to do about gradients that overflow: a half precision model may run to a finite output all the same."""


@contextmanager
def checkpointed(network: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Checkpoint every block while the context lasts; nothing when not `enabled`."""
    if not enabled:
        yield
        return
    blocks = list(named_blocks(network).values())
    if not blocks:
        raise UsageError(f"checkpointing needs blocks in an nn.ModuleList; {type(network).__name__} has none")
    # A forward of the instance's own (set by a device dispatcher, say) must come back afterwards.
    own_forwards = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        # Whole blocks are run again where weights are fetched for them: cut short, the last would not be put away.
        with set_checkpoint_early_stop(not dispatched(network)):
            yield
    finally:
        for block, forward in zip(blocks, own_forwards, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward


def first_in_forward(model: Model, embeddings: Float[Tensor, "batch position feature"]) -> str:
    """The first block whose output holds NaN or infinity, by one more forward pass, as the end of a sentence."""
    if not bool(embeddings.isfinite().all()):
        return ", already in the embeddings"
    with block_outputs(model.network) as streams, torch.no_grad():
        model.last(embeddings.detach())
    finite = [bool(stream.isfinite().all()) for stream in streams]
    return "" if all(finite) else f", first in {list(named_blocks(model.network))[finite.index(False)]}"


@contextmanager
def block_outputs(network: nn.Module) -> Iterator[list[Tensor]]:
    """Within the context, collect the stream after every block, differentiable, in the order of the blocks."""
    streams: list[Tensor] = []

    def hook(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
        streams.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks:
        for block in named_blocks(network).values():
            hooks.callback(block.register_forward_hook(hook).remove)
        yield streams
