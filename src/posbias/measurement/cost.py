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
from posbias.measurement.blocks import named_blocks
from posbias.measurement.cost_estimate import CostEstimate
from posbias.measurement.kinds import Jacobian, Kind, Pullback, resolve_kinds
from posbias.measurement.outputs import PassOptions, TokenIds
from posbias.measurement.prompt import PromptMeasurement, shares_passes
from posbias.measurement.units import Beside, MeasureOptions, Unit, UnitWork
from posbias.measurement.work import Work, calibrate, weights_in_place
from posbias.models.model import Model
from posbias.models.weights import REDUCED, not_convertible
from posbias.prompts.prompts import Prompts
from posbias.runs.engines import Arrays
from posbias.runs.engines.engine import pinned

FILLING = 4 * 10**11
"""Positions times weights of a block from which on the arithmetic of a pass takes an accelerator longer than launching
its kernels: 2,048 positions of Llama 2 7B took 1.07 of bare passes on an H200, 512 took 1.49."""
MOST_FILLING = 1 << 14
"""Positions of a batch beyond which small models would take memory for little more speed."""


def prompts_together(
    model: Model,
    prompts: Prompts,
    *,
    kinds: Sequence[Kind],
    options: MeasureOptions,
    max_memory: int | None = None,
    beside: Beside | None = None,
) -> int:
    """The number of prompts in a batch: as asked, otherwise as many as fill an accelerator and fit into its memory."""
    if options.together is not None or model.device.type == "cpu" or not shares_passes(kinds):
        return options.together or 1
    blocks = named_blocks(model.network).values()
    weights = sum(parameter.numel() for block in blocks for parameter in block.parameters()) / max(len(blocks), 1)
    positions = min(FILLING / max(weights, 1.0), MOST_FILLING)
    workers = options.engine.processes_here
    rows = min(options.rows, sum(kind.passes(model.width) for kind in kinds if isinstance(kind, Pullback)))
    most = min(int(positions / (rows * prompts.n_positions)), -(-prompts.count // workers))
    estimate = None
    if most > 1:
        estimate = estimate_cost(model, prompts.n_positions, kinds=kinds, passes=options.passes, beside=beside)
    if estimate is None:
        return 1
    allowed = estimate.allowed(max_memory)
    while most > 1 and allowed is not None and estimate.of_several(most).needed(workers) > allowed:
        most //= 2
    return most


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
        The estimate as plain values for a record, with the number of prompts `together`; empty if there is none.

    Raises:
        UsageError: it does not fit; the message says what would.
    """
    engine, passes, resolved = options.engine, options.passes, resolve_kinds(kinds)
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

    with pinned(engine.pinned_threads):
        bounds: dict[str, Any] = {"max_memory": max_memory, "beside": beside}
        together = prompts_together(model, prompts, kinds=resolved, options=options, **bounds)

        def under(*, together: int = together, **changes: Any) -> CostEstimate | None:
            changed = replace(passes, **changes)
            estimate = estimate_cost(model, prompts.n_positions, kinds=kinds, passes=changed, beside=beside)
            return replace(estimate.of_several(together), **redrawn) if estimate else None

        remedies: dict[str, dict[str, Any]] = {}
        if together > 1 and beside is None:
            remedies["together=1"] = {"together": 1}
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
        cost = work.announce()
    return {**cost, "together": together} if cost else {}
