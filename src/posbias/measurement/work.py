"""`Work`: what work on prompts of a model takes, from short runs of it; announced, and refused if it cannot fit.

Bytes that tensors hold are a polynomial of the length (activations linear, attention matrices quadratic), so those of
three short prompts give those of a long one, and a short one is run itself; they are counted operation by operation,
and are the same on every run.
Sliding windows that the long prompt exceeds are made narrow meanwhile, so that the short ones have the mask of all
pairs too. Time grows with the passes' flops, 2 P N + 4 L d N^2 each for P weights outside the embedding table, and is
scaled from the longest of the short runs.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from posbias.errors import RunError, UsageError
from posbias.measurement.blocks import named_blocks
from posbias.measurement.cost_estimate import FEWEST, CostEstimate, Remedy
from posbias.memory import beside_weights, give_back_freed_memory, keep_freed_memory
from posbias.models.model import Model
from posbias.progress import announce, report
from posbias.prompts.prompts import embedded_tokens


def peak_tensor_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes of tensors made by `run` that are alive at once on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        return int(torch.cuda.max_memory_allocated(device) - before)
    counter = _LiveBytes()
    with counter:
        run()
    return counter.peak


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every new storage that an operation returns until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count the storages of its results; those of its arguments existed before."""
        named = kwargs or {}
        result = func(*args, **named)
        for new, waiting in enumerate(([*args, *named.values()], [result])):
            for value in waiting:  # what lists hold, at any depth, joins the queue: quicker than torch's trees
                if isinstance(value, list | tuple):
                    waiting.extend(value)
                elif isinstance(value, Tensor) and value.device.type != "meta":
                    storage = value.untyped_storage()
                    earlier = self._storages.get(id(storage))
                    if earlier is None or earlier() is not storage:
                        self._hold(storage, new * storage.nbytes())
        self.peak = max(self.peak, self._live)
        return result

    def _hold(self, storage: torch.UntypedStorage, size: int) -> None:
        self._live += size
        self._storages[id(storage)] = weakref.ref(storage, lambda _: self._free(size))

    def _free(self, size: int) -> None:
        self._live -= size


SHORT_LENGTHS = (64, 96, 128)
"""Tokens of the calibration runs; below these, what does not grow with the length hides what does."""
SHORTEST = 32
"""Tokens of a prompt that is itself as short as calibration runs are, and is the only one."""
HALVED = 0.75
"""Largest share of their float32 memory that passes take in bfloat16: norms and losses stay in float32."""

OnPrompt = Callable[[Int64[np.ndarray, "n"]], object]
"""Something done with the token ids of one prompt; a float that it returns counts as its seconds."""


@dataclass(frozen=True)
class Work:
    """Work on prompts of a model: probed by short runs, scaled to the longest one, announced, refused if too much."""

    model: Model
    n_positions: int
    """Tokens of the longest prompt."""
    count: int
    """Prompts."""
    probe: Callable[..., CostEstimate | None]
    """The cost of the longest prompt from short runs (`calibrate`), as the work is meant or with settings changed,
    given by keyword; None: the short runs fail, as the work will itself."""
    remedies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changed settings that may take less, by what a user would write."""
    half: str = "--dtype bfloat16"
    """Options that ask for half precision, which may take less, too."""
    shorter: str = "--length {}"
    """Options that ask for fewer positions."""
    workers: int = 1
    """Processes on this machine."""
    max_memory: int | None = None
    """Bytes that they may hold; None: what is free."""

    def announce(self) -> dict[str, Any]:
        """Say what the work will take, before it begins.

        Returns:
            The estimate as plain values for a record; empty if the short runs fail.

        Raises:
            UsageError: it does not fit; the message says what would.
        """
        bounds: dict[str, Any] = {"workers": self.workers, "max_memory": self.max_memory}
        estimate = self.probe() or without_passes(self.model, self.n_positions)
        roomy = estimate.keeping(**bounds)
        estimate = replace(roomy or estimate, shorter=self.shorter)
        remedies: dict[str, Remedy] = {way: partial(self.probe, **changes) for way, changes in self.remedies.items()}
        if self.model.dtype.itemsize > torch.bfloat16.itemsize:
            remedies[self.half] = partial(_in_half_precision, estimate, self.model.dtype)
        estimate.check(**bounds, remedies=remedies)
        if roomy:
            keep_freed_memory()
        if not estimate.coefficients:
            return {}
        report(estimate.line(self.count, workers=self.workers))
        return estimate.describe(self.count, workers=self.workers)


def _in_half_precision(estimate: CostEstimate, dtype: torch.dtype) -> CostEstimate:
    """The estimate for weights and passes in bfloat16; while they load, the weights of the file lie beside them."""
    halved = replace(
        estimate,
        weights_bytes=estimate.weights_bytes * torch.bfloat16.itemsize // dtype.itemsize,
        coefficients=tuple(HALVED * value for value in estimate.coefficients),
    )
    loading = max(0, estimate.weights_bytes - halved.passes_bytes)
    return replace(halved, kept=lambda n_positions: estimate.kept(n_positions) + loading)


def without_passes(model: Model, n_positions: int) -> CostEstimate:
    """An estimate of the process and its weights alone, for passes that cannot be estimated."""
    return _with_process(model, CostEstimate(n_positions, weights_in_place(model), coefficients=(), seconds=0.0))


def _with_process(model: Model, estimate: CostEstimate) -> CostEstimate:
    """The estimate with the memory that this process takes beside weights and passes, and took to load the model."""
    if model.device.type != "cpu":
        return replace(estimate, device=model.device)
    give_back_freed_memory()
    return replace(estimate, process_bytes=beside_weights(estimate.weights_bytes), loading_bytes=model.loading_bytes)


def calibrate(
    model: Model,
    n_positions: int,
    run: OnPrompt,
    *,
    usual: OnPrompt | None = None,
    squares: OnPrompt | None = None,
    say_why: bool = True,
) -> CostEstimate | None:
    """The cost of `run` on one prompt of a length, from short runs of it; None if these fail, as it will itself.

    Args:
        model: What it runs on.
        n_positions: The length asked for.
        run: The work on the prompt that takes most memory, given its token ids.
        usual: The work on most prompts, whose time counts; by default the same.
        squares: The part of the work whose memory may grow with the square of the length; by default all of it.
            Short runs have their peaks at different stages of the work, which a parabola through them mistakes for it.
        say_why: Whether to announce why there is no estimate.
    """
    lengths = short_lengths(n_positions)
    candidates = np.arange(min(model.vocabulary_size, 2 * SHORT_LENGTHS[-1]), dtype=np.int64)
    # A network at initialisation can read them, too: its padding token's vector is zero, and has no mixing.
    with torch.no_grad():
        tokens = np.resize(embedded_tokens(candidates, model), lengths[-1])

    def counted(work: OnPrompt) -> tuple[list[int], list[float]]:
        """Bytes and seconds at every length; counting takes few of them."""
        sizes: list[int] = []
        times: list[float] = []
        for length in lengths:
            ids = tokens[:length]
            sizes.append(peak_tensor_bytes(lambda ids=ids: times.append(_seconds(work, ids)), model.device))  # type: ignore[misc]
        return sizes, times

    try:
        with _narrow_windows(model, n_positions, width=lengths[0] // 2 if len(lengths) > 1 else n_positions):
            # The first run sets up what is set up once, which belongs to no count.
            (usual or run)(tokens[: min(FEWEST, lengths[0])])
            sizes, times = counted(run)
            squared = None if squares is None else counted(squares)[0]
            if usual is not None:
                times = [_seconds(usual, tokens[:length]) for length in dict.fromkeys((lengths[0], lengths[-1]))]
    except (RunError, UsageError) as error:  # an output may lie beyond the short runs
        if say_why:
            announce(f"no estimate of the cost: a run on {lengths[-1]} positions or fewer fails: {error}")
        return None
    estimate = CostEstimate(
        n_positions=n_positions,
        weights_bytes=weights_in_place(model),
        coefficients=_parabola(lengths, sizes) if squared is None else _line_and_square(lengths, sizes, squared),
        seconds=_extrapolate(model, (lengths[0], lengths[-1]), (times[0], times[-1]), n_positions),
    )
    return _with_process(model, estimate)


def _parabola(lengths: Sequence[int], sizes: Sequence[float]) -> tuple[float, ...]:
    """Coefficients of the polynomial through all points, constant first."""
    return tuple(float(value) for value in np.polynomial.polynomial.polyfit(lengths, sizes, len(lengths) - 1))


def _line_and_square(lengths: Sequence[int], sizes: Sequence[int], squared: Sequence[int]) -> tuple[float, ...]:
    """Coefficients of a parabola: the square of one series, and a line through the longest two of the other."""
    if len(lengths) < 3:
        return _parabola(lengths, sizes)
    square = max(_parabola(lengths, squared)[2], 0.0)
    linear = [size - square * length**2 for length, size in zip(lengths, sizes, strict=True)]
    return (*_parabola(lengths[-2:], linear[-2:]), square)


def short_lengths(n_positions: int) -> list[int]:
    """Three ascending lengths of short runs, which end at a quarter of the length asked for, at a half if that is
    short; of a short length only itself."""
    if n_positions <= SHORTEST:
        return [n_positions]
    longest = min(SHORT_LENGTHS[-1], max(n_positions // 4, min(n_positions // 2, SHORT_LENGTHS[0])))
    return [length * longest // SHORT_LENGTHS[-1] for length in SHORT_LENGTHS]


def weights_in_place(model: Model) -> int:
    """Bytes of the weights and buffers that are in the memory of the model's device, not those put away elsewhere."""
    device = model.device  # without a number it is any of its type
    total = 0
    for tensor in (*model.network.parameters(), *model.network.buffers()):
        place = tensor.device
        if place.type == device.type and (device.index is None or place.index in (None, device.index)):
            total += tensor.numel() * tensor.element_size()
    return total


def _extrapolate(model: Model, lengths: Sequence[int], times: Sequence[float], n_positions: int) -> float:
    """Seconds at the length: up to half of the longest run's time is fixed, and the rest grows by flops.

    Work that itself repeats for every position shows as a whole power more.
    """
    first, last, target = (_flops(model, length) for length in (*lengths, n_positions))
    if first == last:
        return times[1] * target / last
    fixed = float(np.clip((times[0] * last - times[1] * first) / (last - first), 0.0, times[1] / 2))
    ratio = np.log(lengths[1] / lengths[0])
    extra = max(round(float((np.log(times[1] / times[0]) - np.log(last / first)) / ratio)), 0)
    return float(fixed + (times[1] - fixed) * target / last * (n_positions / lengths[1]) ** extra)


def _flops(model: Model, n_positions: int) -> float:
    """Operations of one forward pass, up to a factor."""
    weights = sum(parameter.numel() for parameter in model.network.parameters()) - model.vocabulary_size * model.width
    layers = max(len(named_blocks(model.network)), 1)
    return 2.0 * max(weights, model.width) * n_positions + 4.0 * layers * model.width * n_positions**2


@contextmanager
def _narrow_windows(model: Model, n_positions: int, *, width: int) -> Iterator[None]:
    """Narrow the sliding windows that prompts of this length exceed, so that short prompts exceed them too."""
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


def _seconds(run: OnPrompt, token_ids: Int64[np.ndarray, "n"]) -> float:
    start = time.perf_counter()
    result = run(token_ids)
    return result if isinstance(result, float) else time.perf_counter() - start
