"""What a measurement will cost, from a few short runs of the same measurement on the same model.

Bytes that tensors hold are a polynomial of the length (activations linear, attention matrices quadratic), so those of
three short prompts give those of a long one. Sliding windows that the long prompt exceeds are made narrow meanwhile, so
that the short ones have the mask of all pairs too. Time grows with the passes' flops, 2 P N + 4 L d N^2 each for P
weights outside the embedding table, and is scaled from the longest of the short runs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from posbias.checks import checked
from posbias.engines.threads import pinned
from posbias.errors import RunError, UsageError
from posbias.measurement.checkpointing import network_blocks
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.live_memory import peak_tensor_bytes
from posbias.measurement.measurement import MeasureOptions
from posbias.measurement.passes import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.memory import available_bytes, show_bytes
from posbias.models.model import Model
from posbias.models.precision import REDUCED, not_convertible
from posbias.progress import announce, tell
from posbias.prompts.controls import embedded_tokens
from posbias.prompts.prompts import Prompts

SHORT_LENGTHS = (64, 96, 128)
"""Tokens of the calibration runs; below these, what does not grow with the length hides what does."""
SHORTEST = 3
"""Of their tokens for the shortest prompts: attention statistics take no fewer."""
FEWEST = 8
"""Positions below which no length is suggested."""
LATER_PROMPT = 1 << 20
"""A number that no prompt of a run's beginning has."""
HEADROOM = 1.25
"""Process memory over tensor memory: kernels' own buffers and what the allocator holds back."""
RECOMPUTED_HEADROOM = 2.75
"""The same on a CPU where layers are run again, with checkpointing or for their attention: that leaves holes between
the streams that are kept, which the C library's allocator holds; 2.1 to 2.8 with checkpointing on the demo model at 256
to 1024 positions, and 0.9 where it hands all back; 2.7 for attention at 8192."""
CPU = torch.device("cpu")

Work = Callable[[Int64[np.ndarray, "n"]], object]
"""Something done with the token ids of one prompt."""


def _nothing(_: int) -> int:
    return 0


@dataclass(frozen=True)
class CostEstimate:
    """What one prompt of one length is expected to take in one process."""

    n_positions: int
    weights_bytes: int
    """Of the weights in place."""
    coefficients: tuple[float, ...]
    """Bytes of one prompt's passes: a polynomial in the length, constant first."""
    seconds: float
    """Of one prompt."""
    headroom: float = HEADROOM
    """Memory taken over bytes of tensors."""
    copy_bytes: int = 0
    """Of the float32 copy that what half precision costs is measured by; 0 where there is none."""
    copies: int = 0
    """Most processes that hold such a copy at a time."""
    device: torch.device = CPU
    """Whose memory it is."""
    kept: Callable[[int], int] = _nothing
    """Bytes at a length that are counted beforehand: held through all prompts, with no headroom."""

    @property
    def passes_bytes(self) -> int:
        """What the passes of one prompt take beyond the weights."""
        return self._bytes_at(self.n_positions)

    @property
    def peak_bytes(self) -> int:
        """Weights, a copy of them and passes; not what Python and its libraries take (about half a gigabyte)."""
        return self.needed(1)

    def describe(self, count: int, *, workers: int = 1) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "weights_bytes": self.weights_bytes,
            "peak_bytes": self.needed(workers),
            "seconds_per_prompt": self.seconds,
            "seconds": self.seconds * -(-count // workers),
        }

    def line(self, count: int, *, workers: int = 1) -> str:
        """What to expect, for a reader."""
        seconds = self.seconds * -(-count // workers)
        spent = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f"estimate: {show_bytes(self.needed(workers))} at most and {spent} for {count} prompts"

    def needed(self, workers: int) -> int:
        """Bytes of all processes on this machine: several workers each hold the weights, as does this process."""
        processes = 1 if workers == 1 else workers + 1
        copies = min(workers, self.copies) * self.copy_bytes
        return processes * self.weights_bytes + copies + workers * self.passes_bytes

    def check(self, *, workers: int = 1, max_memory: int | None = None, advice: Sequence[str] = ()) -> None:
        """Refuse what cannot fit.

        Args:
            workers: Processes on this machine that measure.
            max_memory: Bytes allowed; None: what is free now on the device, the weights in place taken as given.
            advice: What would take less, for the message.

        Raises:
            UsageError: it does not fit; the message says what would.
        """
        allowed = self.allowed(max_memory)
        if allowed is None or self.needed(workers) <= allowed:
            return
        fits = self.longest_fitting(allowed, workers=workers)
        ways = [f"--length {fits}"] if fits else []
        word = "allowed" if max_memory is not None else "free"
        raise UsageError(
            f"{self.n_positions} positions need about {show_bytes(self.needed(workers))}, of which weights "
            f"{show_bytes(self.weights_bytes)} per process; {show_bytes(allowed)} are {word}; "
            f"try {' or '.join([*ways, *advice]) or 'a smaller model'}"
        )

    def allowed(self, max_memory: int | None = None) -> int | None:
        """Bytes weights and passes may take: as given, or what is free with the weights in place; None: unknown."""
        if max_memory is not None:
            return max_memory
        free = free_bytes(self.device)
        return None if free is None else free + self.weights_bytes

    def longest_fitting(self, allowed: int, *, workers: int = 1) -> int:
        """The most positions, fewer than asked for, that fit; 0 where not even a few do."""
        rest = allowed - (self.needed(workers) - workers * self.passes_bytes)
        low, high = 0, self.n_positions
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if workers * self._bytes_at(middle) <= rest else (low, middle - 1)
        return low if low >= FEWEST else 0

    def _bytes_at(self, n_positions: int) -> int:
        tensors = sum(value * n_positions**power for power, value in enumerate(self.coefficients))
        return int(self.headroom * max(tensors, 0.0)) + self.kept(n_positions)


def estimate_cost(
    model: Model, n_positions: int, *, kinds: str | Kind | Sequence[str | Kind], passes: PassOptions | None = None
) -> CostEstimate | None:
    """What `measure_prompt` will take at a length, from a few runs at up to 128 positions.

    An output that lies beyond the short runs is taken as the last position's, whose passes are as large.

    Returns:
        The estimate; None where the short runs fail, which the run itself will report.
    """
    passes, known = passes or PassOptions(), resolve_kinds(kinds)

    def estimated(options: PassOptions, *, say_why: bool) -> CostEstimate | None:
        def measured(prompt: int) -> Work:
            return lambda ids: measure_prompt(model, ids, kinds=known, key=(0, prompt), options=options)

        # The first prompts of a run may be measured in full precision too: most memory, but not every prompt's time.
        return calibrate(model, n_positions, measured(0), usual=measured(LATER_PROMPT), say_why=say_why)

    found = estimated(passes, say_why=passes.output == "last")
    if found is None and passes.output != "last":
        found = estimated(replace(passes, output="last"), say_why=True)
    if found is None:
        return None
    if passes.checkpointing and model.device.type == "cpu":
        found = replace(found, headroom=RECOMPUTED_HEADROOM)
    if model.dtype not in REDUCED or not passes.precision_prompts or not_convertible(model) is not None:
        return found
    # The copy was counted with the short runs' tensors, but neither leaves holes nor is every worker's.
    size = weights_in_place(model) * torch.float32.itemsize // model.dtype.itemsize
    constant, *others = found.coefficients
    return replace(found, coefficients=(constant - size, *others), copy_bytes=size, copies=passes.precision_prompts)


@checked
def preflight(
    model: Model,
    prompts: Prompts,
    *,
    kinds: str | Kind | Sequence[str | Kind],
    options: MeasureOptions,
    max_memory: int | None = None,
) -> dict[str, Any]:
    """Say what a measurement will cost before it begins, and refuse one that cannot fit.

    Args:
        model: As for `measure`.
        prompts: As for `measure`; their number and length count.
        kinds: As for `measure`.
        options: Passes and engine.
        max_memory: Bytes allowed; None: what is free.

    Returns:
        The estimate as plain values for a record; empty where there is none.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    engine = options.run.engine
    with pinned(engine.pinned_threads):
        estimate = estimate_cost(model, prompts.n_positions, kinds=kinds, passes=options.passes)
    workers = engine.processes_here
    if estimate is None:
        check_weights(model, prompts.n_positions, workers=workers, max_memory=max_memory)
        return {}
    estimate.check(workers=workers, max_memory=max_memory, advice=_advice(model, options.passes, workers))
    tell(estimate.line(prompts.count, workers=workers))
    return estimate.describe(prompts.count, workers=workers)


def tell_cost(
    estimate: CostEstimate, count: int, *, max_memory: int | None = None, advice: Sequence[str] = ()
) -> dict[str, Any]:
    """Say what `count` prompts in this process will cost, and refuse what cannot fit.

    Returns:
        The estimate as plain values for a record.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    estimate.check(max_memory=max_memory, advice=advice)
    tell(estimate.line(count))
    return estimate.describe(count)


def check_weights(model: Model, n_positions: int, *, workers: int = 1, max_memory: int | None = None) -> None:
    """Where no estimate can be made, refuse what exceeds the memory allowed by the model's weights alone.

    Args:
        model: What would run.
        n_positions: The length asked for, for the message.
        workers: Processes on this machine that measure.
        max_memory: Bytes allowed; None: no check, the weights are in place already.

    Raises:
        UsageError: the weights do not fit.
    """
    if max_memory is not None:
        weights = CostEstimate(n_positions, weights_in_place(model), coefficients=(0.0,), seconds=0.0)
        weights.check(workers=workers, max_memory=max_memory)


def _advice(model: Model, passes: PassOptions, workers: int) -> list[str]:
    """What would take less memory and is not in use."""
    ways = {
        "--checkpointing": not passes.checkpointing,
        "rows=1": passes.rows > 1,
        "--precision-prompts 0": model.dtype in REDUCED and passes.precision_prompts > 0,
        "--dtype bfloat16 --precision-prompts 0": model.dtype.itemsize > 2,
        "fewer --workers": workers > 1,
    }
    return [way for way, open_ in ways.items() if open_]


def calibrate(
    model: Model,
    n_positions: int,
    run: Work,
    *,
    usual: Work | None = None,
    squares: Work | None = None,
    say_why: bool = True,
) -> CostEstimate | None:
    """What `run` on one prompt of a length will take, from short runs of it.

    Args:
        model: What it runs on.
        n_positions: The length asked for.
        run: The work on the prompt that takes most memory, given its token ids.
        usual: The work on most prompts, whose time counts; the same unless given.
        squares: The part of the work whose memory may grow with the square of the length; all of it unless given.
            Short runs have their peaks at different stages of the work, which a parabola through them mistakes for it.
        say_why: Whether to say why there is no estimate.

    Returns:
        The estimate; None where the short runs fail, which the run itself will report.
    """
    usual = usual or run
    lengths = _short_lengths(n_positions)
    tokens = np.resize(_tokens(model), lengths[-1])
    try:
        with _narrow_windows(model, n_positions, width=max(SHORTEST - 1, lengths[0] // 2)):
            # The first run sets up what is set up once, which belongs to no count.
            times = [_seconds(usual, tokens[: lengths[0]])]
            sizes = _peaks(model, run, tokens, lengths)
            squared = None if squares is None else _peaks(model, squares, tokens, lengths)
            times.append(_seconds(usual, tokens))
    except (RunError, UsageError) as error:  # an output may lie beyond the short runs
        if say_why:
            announce(f"no estimate of the cost: a run on {lengths[-1]} positions or fewer fails: {error}")
        return None
    return CostEstimate(
        n_positions=n_positions,
        weights_bytes=weights_in_place(model),
        coefficients=_parabola(lengths, sizes) if squared is None else _line_and_square(lengths, sizes, squared),
        seconds=_extrapolate(model, (lengths[0], lengths[-1]), times, n_positions),
        device=model.device,
    )


def _peaks(model: Model, run: Work, tokens: Int64[np.ndarray, "n"], lengths: Sequence[int]) -> list[int]:
    """Most bytes of tensors that the work holds at once, for prompts of these lengths."""
    return [peak_tensor_bytes(lambda n=n: run(tokens[:n]), model.device) for n in lengths]  # type: ignore[misc]


def _parabola(lengths: Sequence[int], sizes: Sequence[float]) -> tuple[float, ...]:
    """Coefficients, constant first, through all points."""
    return tuple(float(value) for value in np.polynomial.polynomial.polyfit(lengths, sizes, len(lengths) - 1))


def _line_and_square(lengths: Sequence[int], sizes: Sequence[int], squared: Sequence[int]) -> tuple[float, ...]:
    """The square of one series, and beside it a line through the longest two of the other."""
    if len(lengths) < 3:
        return _parabola(lengths, sizes)
    square = max(_parabola(lengths, squared)[2], 0.0)
    rest = [size - square * length**2 for length, size in zip(lengths, sizes, strict=True)]
    return (*_parabola(lengths[-2:], rest[-2:]), square)


def _short_lengths(n_positions: int) -> list[int]:
    """Up to three lengths, ascending, at most half of the one asked for, or up to itself where that is FEWEST or so."""
    if n_positions < 2 * FEWEST:
        shares = (n_positions // 4, n_positions // 2, n_positions)
        return sorted({min(n_positions, max(SHORTEST, length)) for length in shares})
    scale = min(1.0, n_positions / (2 * SHORT_LENGTHS[-1]))
    return [int(length * scale) for length in SHORT_LENGTHS]


def free_bytes(device: torch.device, *, cuda: Any = torch.cuda) -> int | None:
    """What this process could still take of a device's memory; None where it is not known.

    Args:
        device: The CPU, whose memory and limits the system tells, or a CUDA device.
        cuda: Where the readings of CUDA devices come from.
    """
    if device.type == "cpu":
        return available_bytes()
    if device.type != "cuda":
        return None
    free, _ = cuda.mem_get_info(device)
    # What PyTorch has taken from the device and holds no tensor in is there for the next tensors.
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


def weights_in_place(model: Model) -> int:
    """Bytes of the weights and buffers that are in the memory of the model's device, not those put away elsewhere."""
    tensors = [*model.network.parameters(), *model.network.buffers()]
    here = [tensor for tensor in tensors if _lies_on(tensor.device, model.device)]
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def _lies_on(place: torch.device, device: torch.device) -> bool:
    """Whether one is the other; a device without a number is any of its type."""
    return place.type == device.type and (device.index is None or place.index in (None, device.index))


def _extrapolate(model: Model, lengths: Sequence[int], times: Sequence[float], n_positions: int) -> float:
    """Seconds at the length, by flops; work that itself repeats for every position shows as a whole power more."""
    scaled = times[-1] * _flops(model, n_positions) / _flops(model, lengths[-1])
    if lengths[0] == lengths[1]:
        return scaled
    grows = np.log(times[1] / times[0]) / np.log(lengths[1] / lengths[0])
    expected = np.log(_flops(model, lengths[1]) / _flops(model, lengths[0])) / np.log(lengths[1] / lengths[0])
    extra = max(round(float(grows - expected)), 0)
    return float(scaled * (n_positions / lengths[-1]) ** extra)


def _flops(model: Model, n_positions: int) -> float:
    """Of one forward pass, up to a factor."""
    weights = sum(parameter.numel() for parameter in model.network.parameters()) - model.vocabulary_size * model.width
    layers = max(len(network_blocks(model.network)), 1)
    return 2.0 * max(weights, model.width) * n_positions + 4.0 * layers * model.width * n_positions**2


@torch.no_grad()
def _tokens(model: Model) -> Int64[np.ndarray, "n"]:
    """Tokens that a network at birth can read, too: its padding token's vector is zero, and has no mixing."""
    known = np.arange(min(model.vocabulary_size, 2 * SHORT_LENGTHS[-1]), dtype=np.int64)
    return embedded_tokens(known, model)


@contextmanager
def _narrow_windows(model: Model, n_positions: int, *, width: int) -> Iterator[None]:
    """Meanwhile sliding windows that prompts of this length exceed hold so few positions that short ones do too."""
    whole: Any = getattr(model.network, "config", None)
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or not width < window < n_positions:
        yield
        return
    config.sliding_window = width
    try:
        yield
    finally:
        config.sliding_window = window


def _seconds(run: Work, token_ids: Int64[np.ndarray, "n"]) -> float:
    start = time.perf_counter()
    run(token_ids)
    return time.perf_counter() - start
