"""The cost of a measurement, from a few short runs with as few covectors as take the memory of all (`Work`)."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from posbias.checks import checked
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.kinds import Jacobian, Kind, Pullback, resolve_kinds
from posbias.measurement.measurement import Beside, MeasureOptions, Unit, UnitWork
from posbias.measurement.outputs import PassOptions, TokenIds
from posbias.measurement.prompt import PromptMeasurement
from posbias.measurement.work import Work, calibrate, weights_in_place
from posbias.models.model import Model
from posbias.models.weights import REDUCED, not_convertible
from posbias.prompts.prompts import Prompts
from posbias.runs.engines import Arrays
from posbias.runs.engines.engine import pinned


def estimate_cost(
    model: Model,
    n_positions: int,
    *,
    kinds: str | Kind | Sequence[str | Kind],
    passes: PassOptions | None = None,
    beside: Beside | None = None,
) -> CostEstimate | None:
    """The cost of one prompt at a length, from a few runs at up to 128 positions; None if these fail.

    The runs have as few covectors as take the memory of all. `beside` is what else is computed of the prompt. An output
    that lies beyond the short runs is taken as the last position's, whose passes are as large.
    """
    passes, resolved = passes or PassOptions(), resolve_kinds(kinds)

    def estimated(options: PassOptions, *, say_why: bool) -> CostEstimate | None:
        few, omitted = _few_covectors(resolved, model.width, options)
        per_covector = 2 if options.checkpointing else 1  # passes through the network
        run_passes = options.rows + per_covector * sum(
            kind.passes(model.width) for kind in few if isinstance(kind, Pullback)
        )

        def run(options: PassOptions, token_ids: Int64[np.ndarray, "n"]) -> float:
            """The seconds that all covectors would have taken."""
            start, alongside = time.perf_counter(), [0.0]
            work = UnitWork(None, None, token_ids[None], (Unit(0),), few, 0, options, _timed(beside, alongside))
            work.compute(model, 0)
            passed = time.perf_counter() - start - alongside[-1]
            return passed * (1 + per_covector * omitted / run_passes) + alongside[-1]

        # The first prompts of a run may be measured in full precision too: most memory, but not every prompt's time.
        twice = model.dtype in REDUCED and options.precision_prompts > 0
        usual = partial(run, replace(options, precision_prompts=0)) if twice else None
        estimate = calibrate(model, n_positions, partial(run, options), usual=usual, say_why=say_why)
        return estimate and estimate.with_constant(omitted * model.width * torch.float64.itemsize)

    estimate = estimated(passes, say_why=passes.output == "last")
    if estimate is None and passes.output != "last":
        estimate = estimated(replace(passes, output="last"), say_why=True)
    if estimate is None:
        return None
    # Checkpointing leaves holes of several times what it holds.
    estimate = replace(estimate, may_keep=not passes.checkpointing and model.device.type == "cpu")
    if model.dtype not in REDUCED or not passes.precision_prompts or not_convertible(model) is not None:
        return estimate
    # The copy was counted with the short runs' tensors, but neither leaves holes nor is every worker's.
    size = weights_in_place(model) * torch.float32.itemsize // model.dtype.itemsize
    return replace(estimate.with_constant(-size), copy_bytes=size, copies=passes.precision_prompts)


def _few_covectors(kinds: tuple[Kind, ...], width: int, options: PassOptions) -> tuple[tuple[Kind, ...], int]:
    """The kinds with as few covectors of the Jacobian as still fill two backward passes, and the number left out."""
    pulled = [kind for kind in kinds if isinstance(kind, Pullback)]
    of_others = sum(kind.passes(width) for kind in pulled if not isinstance(kind, Jacobian))
    fewest = max(1, options.rows + 1 - of_others)
    spare = [isinstance(kind, Jacobian) and kind.passes(width) > fewest for kind in pulled]
    if len(pulled) < len(kinds):  # passes of their own are not counted
        return kinds, 0
    few = tuple(Jacobian(probes=fewest) if fewer else kind for kind, fewer in zip(pulled, spare, strict=True))
    return few, sum(kind.passes(width) - fewest for kind, fewer in zip(pulled, spare, strict=True) if fewer)


def _timed(beside: Beside | None, seconds: list[float]) -> Beside | None:
    """`beside` with a note in `seconds` of the time that it takes once the passes are over."""
    if beside is None:
        return None

    @contextmanager
    def timed(model: Model, token_ids: TokenIds, unit: Unit) -> Iterator[Callable[[PromptMeasurement], Arrays]]:
        with beside(model, token_ids, unit) as untimed:

            def arrays(measured: PromptMeasurement) -> Arrays:
                start = time.perf_counter()
                result = untimed(measured)
                seconds.append(time.perf_counter() - start)
                return result

            yield arrays

    return timed


@checked
def preflight(
    model: Model,
    prompts: Prompts,
    *,
    kinds: str | Kind | Sequence[str | Kind],
    options: MeasureOptions,
    max_memory: int | None = None,
    beside: Beside | None = None,
    units: Sequence[Unit] | None = None,
) -> dict[str, Any]:
    """Announce the cost of `measure` with the same arguments, and refuse a measurement that cannot fit.

    `max_memory` bytes may be held (None: what is free); `beside` is what else is computed of every prompt. `units` are
    measured (None: every prompt once); a re-initialised network lies beside the loaded one.

    Returns:
        The estimate as plain values for a record; empty if there is none.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    engine, passes = options.engine, options.passes
    redrawn: dict[str, Any] = {}
    if any(unit.init_seed is not None for unit in units or ()):
        # It is drawn on the CPU, in float32 whatever the model's precision.
        least = torch.float32.itemsize if model.device.type == "cpu" else 0
        network: Any = model.network
        tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
        redrawn = {
            "redrawn_bytes": weights_in_place(model) // model.dtype.itemsize * max(least, model.dtype.itemsize),
            "drawing_bytes": tied * least * model.vocabulary_size * model.width,
        }

    def under(**changes: Any) -> CostEstimate | None:
        changed = replace(passes, **changes)
        estimate = estimate_cost(model, prompts.n_positions, kinds=kinds, passes=changed, beside=beside)
        return replace(estimate, **redrawn) if estimate else None

    with pinned(engine.pinned_threads):
        remedies: dict[str, dict[str, Any]] = {}
        if not passes.checkpointing:
            remedies["--checkpointing"] = {"checkpointing": True}
        if passes.rows > 1:
            remedies["rows=1"] = {"rows": 1}
        if model.dtype in REDUCED and passes.precision_prompts:
            remedies["--precision-prompts 0"] = {"precision_prompts": 0}
        count = prompts.count if units is None else len(units)
        half = "--dtype bfloat16 --precision-prompts 0"
        workers = engine.processes_here
        work = Work(model, prompts.n_positions, count, under, remedies, half, workers=workers, max_memory=max_memory)
        return work.announce()
