"""Speed and memory of the content-free rollout: pulls against the dense method and against the physical floor.

Run `python benchmarks/theory/run.py`. Results are asserted equal before anything is timed. The floor of a profile over
N positions, L layers, H heads is the larger of its 4 flops per position, layer and head (decay the running sum, add the
position, add to the output: two fused multiply-adds) at the machine's measured peak, and its 16 bytes per position and
layer (read a row, write a row) at the measured bandwidth.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from posbias.architecture import Architecture, HeadGroup
from posbias.theory import Rollout, rollout_profile

LAYERS, HEADS, MIXING = 32, 32, 0.1
DENSE_POSITIONS = 4096
LONG, SHORT = 1_000_000, 100_000
ROW = "{:<44} {:>14} {:>14}"


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The fastest of several runs: noise only ever adds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_flops() -> float:
    """Multiply-add throughput of this machine, all cores, flops per second (a matrix product)."""
    square = np.ones((2048, 2048))
    return 2 * 2048**3 / best_seconds(lambda: square @ square, 5)


def bandwidth() -> float:
    """Bytes per second read and written by a copy far larger than any cache."""
    source = np.ones(2**25)
    target = np.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: np.copyto(target, source), 5)


def dense_layer(group: HeadGroup) -> np.ndarray:
    """The mean attention matrix of a layer as one would write it: softmax of masked biases, one head at a time."""
    position = np.arange(DENSE_POSITIONS)
    distance = (position[:, None] - position[None, :]).astype(np.float64)
    distance[distance < 0] = np.inf
    total, weights = np.zeros_like(distance), np.empty_like(distance)
    for slope in group.linear_slopes():
        np.exp(np.multiply(distance, -slope, out=weights), out=weights)
        weights /= weights.sum(axis=1, keepdims=True)
        total += weights
    return total / group.n_heads


def resident_megabytes(code: str) -> float:
    """Peak memory of a fresh interpreter that runs `code`."""
    # Not ru_maxrss: a child inherits its parent's.
    script = f"{code}\nprint(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return int(shown.split()[1]) / 1024


def architecture() -> Architecture:
    return Architecture(depth=LAYERS, heads=HEADS, encoding="alibi", mixing=MIXING)


def compare_with_dense(dense_repeats: int) -> None:
    """One layer at N = 4096: the same numbers, then the times."""
    model = architecture()
    rollout = Rollout(model, DENSE_POSITIONS)
    group = model.head_groups[0][0]
    row = np.full(DENSE_POSITIONS, 1 / DENSE_POSITIONS)
    matrix = dense_layer(group)
    np.testing.assert_allclose(rollout.kernels[0].pull(row), row @ matrix, rtol=1e-12)
    pull = best_seconds(lambda: rollout.kernels[0].pull(row), 50)
    build = best_seconds(lambda: dense_layer(group), dense_repeats)
    multiply = best_seconds(lambda: row @ matrix, 10)
    product = best_seconds(lambda: matrix @ matrix, 1)
    print(ROW.format(f"one layer, N = {DENSE_POSITIONS}", "seconds", "times the pull"))
    for label, seconds in (
        ("pull", pull),
        ("dense: build the layer, then row @ matrix", build + multiply),
        ("dense: build, then matrix @ matrix", build + product),
        ("dense: row @ matrix alone, matrix given", multiply),
    ):
        print(ROW.format(label, f"{seconds:.6f}", f"{seconds / pull:,.0f}"))


def profile_table(repeats: int) -> None:
    """Full profiles at two lengths, beside the floor."""
    model = architecture()
    flops, bytes_per_second = peak_flops(), bandwidth()
    print(f"\nmeasured peak {flops / 1e9:.0f} Gflop/s, bandwidth {bytes_per_second / 1e9:.1f} GB/s")
    print(ROW.format(f"profile, {LAYERS} layers x {HEADS} ALiBi heads", "seconds", "times the floor"))
    seconds = {}
    for n_positions in (SHORT, LONG):
        seconds[n_positions] = best_seconds(lambda n=n_positions: rollout_profile(model, n_positions=n), repeats)
        operations = 4 * n_positions * LAYERS * HEADS
        traffic = 16 * n_positions * LAYERS
        floor = max(operations / flops, traffic / bytes_per_second)
        ratio = seconds[n_positions] / floor
        print(ROW.format(f"N = {n_positions:,}", f"{seconds[n_positions]:.3f}", f"{ratio:.1f}"))
        print(ROW.format("  floor: flops", f"{operations / flops:.3f}", f"{operations / 1e9:.2f} Gflop"))
        print(ROW.format("  floor: bytes", f"{traffic / bytes_per_second:.3f}", f"{traffic / 1e9:.2f} GB"))
    print(ROW.format("growth from the shorter to the longer", "", f"{seconds[LONG] / seconds[SHORT]:.1f}"))


def memory_line() -> None:
    """Peak memory of the long profile over a bare interpreter, libraries included."""
    code = (
        "from posbias.architecture import Architecture\nfrom posbias.theory import rollout_profile\n"
        f"model = Architecture({LAYERS}, {HEADS}, encoding='alibi', mixing={MIXING})\n"
        "rollout_profile(model, n_positions={})"
    )
    bare = resident_megabytes("pass")
    for n_positions in (10, LONG):
        used = resident_megabytes(code.format(n_positions)) - bare
        print(ROW.format(f"memory over the interpreter, N = {n_positions:,}", f"{used:.0f} MB", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each profile; the best counts")
    parser.add_argument("--dense-repeats", type=int, default=1, help="timed runs of the dense method")
    arguments = parser.parse_args()
    profile_table(arguments.repeats)
    memory_line()
    compare_with_dense(arguments.dense_repeats)
    print(f"peak memory of this whole run: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
