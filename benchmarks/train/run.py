"""Training many small models as one program, against training one at a time; the cost of a model against their number.

Run `python benchmarks/train/run.py` (`--device cuda` on a GPU). Two layers of single-head attention, d = 64, N = 17,
batch 128, in-context retrieval, AdamW. Before anything is timed, both ways are given the same weights and batches and
must report the same losses. A model-step is one update of one model, its data drawn. The floor is the matrix products
of the mathematics as the stacked program arranges it (or, for the peer, as it is usually written) at the measured peak
of this machine. Times are medians over rounds in which the ways alternate, so that a busy machine hurts them alike;
processor seconds are given beside wall seconds, because other processes do not count in them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import numpy as np
import torch
from peer import PlainTraining, Transformer

from posbias.architecture import Architecture
from posbias.models.reference.config import ReferenceConfig, draw_parameters
from posbias.training.members import AdamW, Member
from posbias.training.trainer import Stack, crew_for, default_chunk
from posbias_papers.wu2025.retrieval import InContextRetrieval

DEPTH, WIDTH, BATCH, POSITIONS, LABELS = 2, 64, 128, 17, 32
TASK = InContextRetrieval()
MEMBERS = 32
SIZES = (1, 2, 4, 8, 16, 32, 64)
LOSS_TOLERANCE = 1e-4
"""Relative, over 20 steps in float32: the two ways round differently in every product."""
ROW = "{:<46} {:>12} {:>12} {:>12} {:>12}"


@dataclass(frozen=True)
class Cost:
    """Seconds of one model-step: by the clock, and of all processors together."""

    wall: float
    processor: float


def member(seed: int) -> Member:
    config = ReferenceConfig(
        Architecture(DEPTH),
        width=WIDTH,
        vocabulary_size=None,
        outputs=LABELS,
        attention="content",
        values="gaussian",
        output_map=False,
        residual="none",
        readout="mlp",
        initialisation="linear",
        dtype="float32",
    )
    return Member(f"seed {seed}", config, TASK, seed, AdamW(learning_rate=1e-3, weight_decay=1e-6))


class Program:
    """Members as the trainer has them: small stacks shared out between threads, or one stack on a GPU."""

    def __init__(self, count: int, device: torch.device, chunk: int | None) -> None:
        members = [member(seed) for seed in range(count)]
        chunk = chunk or default_chunk(members, BATCH, device)
        self.stacks = [Stack(members[start : start + chunk], device=device) for start in range(0, count, chunk)]
        self.device = device

    def train(self, start: int, stop: int) -> None:
        with crew_for(self.device) as crew:
            crew(lambda stack: stack.steps(start, stop, batch=BATCH), self.stacks)

    def draw(self, start: int, stop: int) -> None:
        with crew_for(self.device) as crew:
            crew(lambda stack: [stack._data.batch(step, BATCH) for step in range(start, stop)], self.stacks)


def plain(seed: int, device: torch.device) -> PlainTraining:
    model = Transformer(DEPTH, WIDTH, readout=(WIDTH, 3), outputs=LABELS)
    example = member(seed)
    model.take(draw_parameters(example.config, example.generator()))
    return PlainTraining(model, TASK, batch=BATCH, device=device)


def same_losses(device: torch.device, steps: int = 20) -> float:
    """The largest relative difference of losses between the two ways, given equal weights and batches.

    The plain way sees what the stack draws for member 1 of 3.
    """
    stack, peer = Stack([member(seed) for seed in range(3)], device=device), plain(1, device)
    worst = 0.0
    for step in range(steps):
        drawn = stack._data.batch(step, BATCH)
        alone = peer.step(drawn.inputs[1], drawn.targets[1, :, 0])
        together = stack.step(step, BATCH)[1]
        worst = max(worst, float(abs(alone - together) / alone))
    assert worst < LOSS_TOLERANCE, f"the two ways differ by {worst:.1e}"
    return worst


def timed(run: Callable[[int, int], object], *, steps: int, models: int, device: torch.device) -> Cost:
    """The cost of one model-step over some steps."""
    wall, processor = time.perf_counter(), time.process_time()
    run(0, steps)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    count = steps * models
    return Cost((time.perf_counter() - wall) / count, (time.process_time() - processor) / count)


def median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(c.wall for c in costs), statistics.median(c.processor for c in costs))


def peak_flops(device: torch.device) -> Cost:
    """Flops per second, and per processor second, of a large float32 matrix product: the best of several."""
    square = torch.ones(2048, 2048, device=device)
    runs = [timed(lambda _start, _stop: square @ square, steps=1, models=1, device=device) for _ in range(12)]
    flops = 2 * 2048**3
    return Cost(flops / min(run.wall for run in runs), flops / min(run.processor for run in runs))


def stacked_flops() -> int:
    """Matrix products of one model-step as the stacked program arranges them, forward and backward.

    The first layer projects x (W_q W_k^T) and x W_v at every position and needs no gradient of its input. The last row
    asks of the last layer for a query as wide as the stream, its logits, the mixture of the stream, and its value.
    """
    projection = 2 * BATCH * POSITIONS * WIDTH * WIDTH
    logits = 2 * BATCH * POSITIONS * POSITIONS * WIDTH
    row = 2 * (2 * BATCH * WIDTH * WIDTH) + 2 * (2 * BATCH * POSITIONS * WIDTH)
    weights = 2 * (2 * WIDTH**3)
    readout = 2 * BATCH * WIDTH * (3 * WIDTH + LABELS)
    return 2 * (2 * projection + logits) + 3 * (logits + row + weights + readout)


def plain_flops() -> int:
    """Matrix products of one model-step as usually written: q, k, v and attention at every position of every layer."""
    projections = 3 * (2 * BATCH * POSITIONS * WIDTH * WIDTH)
    attention = 2 * (2 * BATCH * POSITIONS * POSITIONS * WIDTH)
    readout = 2 * BATCH * WIDTH * (3 * WIDTH + LABELS)
    return 2 * projections + 3 * (projections + 2 * attention + readout)


def compare(arguments: argparse.Namespace, device: torch.device, chunk: int | None) -> None:
    """One model at a time against 32, in alternation."""
    program, peer = Program(MEMBERS, device, chunk), plain(0, device)
    given = program.stacks[0]._data.batch(0, BATCH)
    inputs, targets = given.inputs[0], given.targets[0, :, 0]
    ways: dict[str, tuple[Callable[[int, int], object], int, int]] = {
        "plain loop, per-sample dataset": (peer.train, 1, plain_flops()),
        "plain loop, data given": (lambda start, stop: peer.train(start, stop, inputs, targets), 1, plain_flops()),
        f"stacked, M = {MEMBERS}": (program.train, MEMBERS, stacked_flops()),
        f"of which data, M = {MEMBERS}": (program.draw, MEMBERS, 0),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for round_number in range(arguments.rounds + 1):
        for name, (run, models, _) in ways.items():
            steps = max(1, arguments.steps // (1 if models == 1 else 4))
            cost = timed(run, steps=steps, models=models, device=device)
            if round_number:  # the first round warms up
                costs[name].append(cost)
    peak = peak_flops(device)
    print(
        f"measured peak (float32): {peak.wall / 1e9:.0f} Gflop per second, {peak.processor / 1e9:.0f} per CPU second; "
        f"{torch.get_num_threads()} threads, {device}"
    )
    print(ROW.format("model-step", "wall ms", "CPU ms", "wall/floor", "CPU/floor"))
    for name, (_, _, flops) in ways.items():
        cost = median(costs[name])
        ratios = [cost.wall * peak.wall / flops, cost.processor * peak.processor / flops] if flops else []
        shown = [f"{1e3 * cost.wall:.3f}", f"{1e3 * cost.processor:.3f}", *(f"{ratio:.1f}" for ratio in ratios)]
        print(ROW.format(name, *shown, *[""] * (4 - len(shown))))
    print(f"floors: {plain_flops() / 1e6:.0f} Mflop as usually written, {stacked_flops() / 1e6:.0f} as stacked")
    ours = costs[f"stacked, M = {MEMBERS}"]
    for name in ("plain loop, per-sample dataset", "plain loop, data given"):
        wall = [a.wall / b.wall for a, b in zip(costs[name], ours, strict=True)]
        processor = [a.processor / b.processor for a, b in zip(costs[name], ours, strict=True)]
        print(
            f"stacked against {name}: {statistics.median(wall):.1f} times the model-steps per second "
            f"(rounds {min(wall):.1f} ... {max(wall):.1f}), {statistics.median(processor):.1f} times per CPU second"
        )
    print(f"model-steps per second: {1 / median(ours).wall:,.0f} stacked")


def sweep(arguments: argparse.Namespace, device: torch.device, chunk: int | None) -> dict[int, Cost]:
    """The cost of a model-step against the number of members."""
    programs = {count: Program(count, device, chunk) for count in SIZES}
    costs: dict[int, list[Cost]] = {count: [] for count in SIZES}
    for round_number in range(arguments.rounds + 1):
        for count, program in programs.items():
            steps = max(2, arguments.steps // count)
            cost = timed(program.train, steps=steps, models=count, device=device)
            if round_number:
                costs[count].append(cost)
    print("\n" + ROW.format("members M", "wall ms", "CPU ms", "", ""))
    found = {count: median(each) for count, each in costs.items()}
    for count, cost in found.items():
        print(ROW.format(str(count), f"{1e3 * cost.wall:.3f}", f"{1e3 * cost.processor:.3f}", "", ""))
    return found


def draw(costs: dict[int, Cost], path: str, device: torch.device) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    counts = list(costs)
    axes.loglog(counts, [1e3 * costs[count].wall for count in counts], "o-", label="wall")
    axes.loglog(counts, [1e3 * costs[count].processor for count in counts], "s--", label="all processors")
    axes.set(xlabel="members M", ylabel="ms per model-step", title=f"Cost of one model-step ({device}, {date.today()})")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; medians count")
    parser.add_argument("--steps", type=int, default=16, help="model-steps of a round, about")
    parser.add_argument("--chunk", type=int, help="members that go through together; the trainer's own by default")
    parser.add_argument("--plot", help="a PNG of cost against M")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    chunk: int | None = arguments.chunk
    np.set_printoptions(precision=3)
    print(f"{date.today()}: losses agree to {same_losses(device):.1e} over 20 steps")
    compare(arguments, device, chunk)
    found = sweep(arguments, device, chunk)
    if arguments.plot:
        draw(found, arguments.plot, device)


if __name__ == "__main__":
    main()
