"""What measuring costs, beside the bare passes and beside captum, inseq, transformers' matrices and jacrev.

Run `python benchmarks/measure/run.py` in an environment with the `bench` extra. In every part the methods' results are
asserted equal first; then they are timed in turn, and the median of each is set beside the floor's.
"""

import argparse
import os
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata

os.environ.setdefault("OMP_NUM_THREADS", "1")

import attention
import gradients
import jacobians
import numpy as np
import throughput
import torch
from clock import extra_megabytes, interleaved
from scipy.optimize import nnls
from subject import Size, random_llama, random_prompts

from posbias import load_model, load_prompts

ROW = "{:<34} {:>10} {:>14} {:>10}"
SMALL = Size(layers=4, width=128, heads=4)
JACOBIAN_POSITIONS = 128
PROMPTS, PROMPT_POSITIONS = 64, 64
DEMO_POSITIONS = 512
DEMO_METHODS = [name for name in gradients.METHODS if name != "inseq"]
"""inseq would tokenise the prompt anew, and differently."""
BUDGET_GIGABYTES = 20
LONGEST = 1 << 22


def table(title: str, unit: str, values: Mapping[str, float], against: str) -> None:
    """One line per method: the number, and how many times that of `against`."""
    print(f"\n{ROW.format(title, unit, 'times', '')}".rstrip())
    for name, value in values.items():
        print(ROW.format(f"  {name}", f"{value:.3f}", f"{value / values[against]:.3f}", "").rstrip())


def time_gradients(lengths: Sequence[int], repeats: int, names: Sequence[str]) -> None:
    """The profile of one prompt."""
    model = random_llama(Size())
    for n_positions in lengths:
        methods = gradients.build(model, random_prompts(1, n_positions), list(names))
        seconds = interleaved(methods, repeats)
        table(f"gradient profile, N = {n_positions}", "seconds", seconds, "floor")


def time_demo(repeats: int, names: Sequence[str]) -> None:
    """The profile of one prompt of the default corpus, on the demo model."""
    model = load_model("demo")
    prompts = load_prompts("default", model, n_positions=DEMO_POSITIONS, count=1)
    methods = gradients.build(model, prompts, [name for name in names if name in DEMO_METHODS])
    table(f"gradient profile, demo model, N = {DEMO_POSITIONS}", "seconds", interleaved(methods, repeats), "floor")


def gradient_memory(lengths: Sequence[int], names: Sequence[str]) -> None:
    """Peak memory of the same, each method in a process of its own."""
    for n_positions in lengths:
        megabytes = {name: extra_megabytes(name, n_positions) for name in names}
        table(f"extra memory, N = {n_positions}", "MB", megabytes, "floor")


def time_attention(lengths: Sequence[int], repeats: int) -> None:
    """Statistics and rollout of one prompt."""
    model, eager = random_llama(Size()), random_llama(Size(), attention="eager")
    for n_positions in lengths:
        methods = attention.build(model, eager, random_prompts(1, n_positions))
        table(f"attention, N = {n_positions}", "seconds", interleaved(methods, repeats), "eager, dense rollout")


def attention_memory(lengths: Sequence[int]) -> None:
    """Peak memory at growing lengths, and the length at which its law reaches the budget.

    The law is a + b N + c N^2, none of them negative, fitted to these lengths; nothing near the budget is allocated.
    """
    print(f"\n{ROW.format('attention: extra memory, MB', *(f'N = {n}' for n in lengths))}")
    longest = {}
    for name in attention.METHODS:
        megabytes = [extra_megabytes(name, n_positions) for n_positions in lengths]
        print(ROW.format(f"  {name}", *(f"{value:.0f}" for value in megabytes)))
        longest[name] = longest_within(lengths, megabytes)
    for name, n_positions in longest.items():
        print(f"  {name}: {BUDGET_GIGABYTES} GB are reached at N = {n_positions:,} (extrapolated)")


def longest_within(lengths: Sequence[int], megabytes: Sequence[float]) -> int:
    """The largest N whose extrapolated memory stays within the budget."""
    powers = np.arange(3)
    coefficients, _ = nnls(np.array(lengths, dtype=np.float64)[:, None] ** powers, np.array(megabytes))
    candidates = np.arange(max(lengths), LONGEST, 64)
    above = np.flatnonzero(candidates[:, None] ** powers @ coefficients > 1024 * BUDGET_GIGABYTES)
    return int(candidates[above[0]]) if above.size else LONGEST


def time_jacobians(repeats: int) -> None:
    """Exact norms, then sampled ones with the error they have."""
    model, eager = random_llama(SMALL), random_llama(SMALL, attention="eager")
    prompts = random_prompts(1, JACOBIAN_POSITIONS)
    exact = jacobians.exact_methods(model, eager, prompts)
    sampled = {f"posbias, {count} probes": jacobians.sampled(model, prompts, count) for count in jacobians.PROBES}
    seconds = interleaved({**exact, **sampled}, repeats)
    table(f"Jacobian norms, N = {JACOBIAN_POSITIONS}, width {SMALL.width}", "seconds", seconds, "floor")
    truth = exact["floor"]()
    for count in jacobians.PROBES:
        error = jacobians.sampling_error(model, prompts, count, truth)
        print(f"  {count} probes: relative error {error:.3f}, root mean square over {jacobians.SEEDS} draws")


def time_prompts(repeats: int) -> None:
    """Many short prompts."""
    methods = throughput.build(random_llama(Size()), random_prompts(PROMPTS, PROMPT_POSITIONS))
    seconds = interleaved(methods, repeats)
    table(f"{PROMPTS} prompts of {PROMPT_POSITIONS} tokens", "seconds", seconds, "floor")
    for name, value in seconds.items():
        print(f"  {name}: {PROMPTS / value:.1f} prompts per second")


def header() -> None:
    """Versions, threads and load: what the numbers depend on."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "captum", "inseq"))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{versions}; {torch.get_num_threads()} thread of {os.cpu_count()} cores; load before {load}")
    print("seconds are processor time, medians of interleaved runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("gradients", "demo", "memory", "attention", "attention-memory", "jacobians", "prompts")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1024, 2048, 4096], help="of the gradient profiles and their memory"
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of every method")
    parser.add_argument("--methods", nargs="+", choices=gradients.METHODS, default=list(gradients.METHODS))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    header()
    run = {
        "gradients": lambda: time_gradients(arguments.lengths, arguments.repeats, arguments.methods),
        "demo": lambda: time_demo(arguments.repeats, arguments.methods),
        "memory": lambda: gradient_memory(arguments.lengths, arguments.methods),
        "attention": lambda: time_attention([1024, 2048], arguments.repeats),
        "attention-memory": lambda: attention_memory([512, 1024, 2048]),
        "jacobians": lambda: time_jacobians(arguments.repeats),
        "prompts": lambda: time_prompts(arguments.repeats),
    }
    for part in arguments.parts:
        run[part]()


if __name__ == "__main__":
    main()
