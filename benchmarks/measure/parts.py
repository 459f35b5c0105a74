"""The parts of the benchmark: each asserts that its methods agree, then gives tables of their time or memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gradients
import jacobians
import numpy as np
import throughput
from clock import extra_megabytes, interleaved
from journal import Table, against
from scipy.optimize import nnls
from subject import Size, random_llama, random_prompts

import attention
from posbias import load_model, load_prompts
from posbias.models.hugging_face import HuggingFaceModel

DEMO_METHODS = [name for name in gradients.METHODS if name != "inseq"]
"""inseq would tokenise the prompt anew, and differently."""
LARGE, SMALL = Size(), Size(layers=4, width=128, heads=4)
BUDGET_GIGABYTES = 20
LONGEST = 1 << 22


@dataclass(frozen=True)
class Plan:
    """What a run measures; lengths are in positions."""

    size: Size = LARGE
    small: Size = SMALL
    """The model of the Jacobians."""
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    """Of the gradient profiles and their memory."""
    demo_positions: int = 512
    attention_lengths: tuple[int, ...] = (1024, 2048)
    attention_memory_lengths: tuple[int, ...] = (512, 1024, 2048)
    jacobian_positions: int = 128
    prompts: int = 64
    prompt_positions: int = 64
    repeats: int = 5
    """Timed runs of every method."""
    methods: tuple[str, ...] = tuple(gradients.METHODS)
    """Of the gradient profiles, the floor among them."""


def time_gradients(plan: Plan) -> Iterator[Table]:
    """The profile of one prompt."""
    model = random_llama(plan.size)
    for n_positions in plan.lengths:
        methods = gradients.build(model, random_prompts(1, n_positions), plan.methods)
        seconds = interleaved(methods, plan.repeats)
        yield against(f"gradient profile, N = {n_positions}", "seconds", seconds, "floor")


def time_demo(plan: Plan) -> Iterator[Table]:
    """The profile of one prompt of the default corpus, on the demo model."""
    model = load_model("demo")
    assert isinstance(model, HuggingFaceModel)
    prompts = load_prompts("default", model, n_positions=plan.demo_positions, count=1)
    methods = gradients.build(model, prompts, [name for name in plan.methods if name in DEMO_METHODS])
    seconds = interleaved(methods, plan.repeats)
    yield against(f"gradient profile, demo model, N = {plan.demo_positions}", "seconds", seconds, "floor")


def gradient_memory(plan: Plan) -> Iterator[Table]:
    """Peak memory of the same, each method in a process of its own; results asserted equal at the shortest length."""
    gradients.build(random_llama(plan.size), random_prompts(1, min(plan.lengths)), plan.methods)
    for n_positions in plan.lengths:
        megabytes = {name: extra_megabytes(name, n_positions, plan.size) for name in plan.methods}
        yield against(f"extra memory, N = {n_positions}", "MB", megabytes, "floor")


def time_attention(plan: Plan) -> Iterator[Table]:
    """Statistics and rollout of one prompt."""
    model, eager = random_llama(plan.size), random_llama(plan.size, attention="eager")
    for n_positions in plan.attention_lengths:
        methods = attention.build(model, eager, random_prompts(1, n_positions))
        seconds = interleaved(methods, plan.repeats)
        yield against(f"attention, N = {n_positions}", "seconds", seconds, "eager, dense rollout")


def attention_memory(plan: Plan) -> Iterator[Table]:
    """Peak memory at growing lengths, and the length at which its law reaches the budget.

    The law is a + b N + c N^2, none of them negative, fitted to these lengths; nothing near the budget is allocated.
    Results are asserted equal at the shortest length.
    """
    lengths = plan.attention_memory_lengths
    model, eager = random_llama(plan.size), random_llama(plan.size, attention="eager")
    attention.build(model, eager, random_prompts(1, min(lengths)))
    rows, longest = {}, {}
    for name in attention.METHODS:
        megabytes = [extra_megabytes(name, n_positions, plan.size) for n_positions in lengths]
        rows[name] = {f"N = {n}": value for n, value in zip(lengths, megabytes, strict=True)}
        longest[name] = {"positions, extrapolated": longest_within(lengths, megabytes)}
    yield Table("attention: extra memory, MB", rows, digits=0)
    reached = f"{{}}: {BUDGET_GIGABYTES} GB are reached at N = {{:,}} (extrapolated)"
    yield Table(f"attention: N within {BUDGET_GIGABYTES} GB", longest, line=reached)


def longest_within(lengths: Sequence[int], megabytes: Sequence[float]) -> int:
    """The largest N whose extrapolated memory stays within the budget."""
    powers = np.arange(3)
    coefficients, _ = nnls(np.array(lengths, dtype=np.float64)[:, None] ** powers, np.array(megabytes))
    candidates = np.arange(max(lengths), LONGEST, 64)
    above = np.flatnonzero(candidates[:, None] ** powers @ coefficients > 1024 * BUDGET_GIGABYTES)
    return int(candidates[above[0]]) if above.size else LONGEST


def time_jacobians(plan: Plan) -> Iterator[Table]:
    """Exact norms, then sampled ones with the error they have."""
    model, eager = random_llama(plan.small), random_llama(plan.small, attention="eager")
    prompts = random_prompts(1, plan.jacobian_positions)
    exact = jacobians.exact_methods(model, eager, prompts)
    sampled = {f"posbias, {count} probes": jacobians.sampled(model, prompts, count) for count in jacobians.PROBES}
    seconds = interleaved({**exact, **sampled}, plan.repeats)
    title = f"Jacobian norms, N = {plan.jacobian_positions}, width {plan.small.width}"
    yield against(title, "seconds", seconds, "floor")
    truth = exact["floor"]()
    errors = {
        f"{count} probes": {"relative error": jacobians.sampling_error(model, prompts, count, truth)}
        for count in jacobians.PROBES
    }
    line = f"{{}}: relative error {{:.3f}}, root mean square over {jacobians.SEEDS} draws"
    yield Table("Jacobian norms: error of the probes", errors, line=line)


def time_prompts(plan: Plan) -> Iterator[Table]:
    """Many short prompts."""
    methods = throughput.build(random_llama(plan.size), random_prompts(plan.prompts, plan.prompt_positions))
    seconds = interleaved(methods, plan.repeats)
    title = f"{plan.prompts} prompts of {plan.prompt_positions} tokens"
    yield against(title, "seconds", seconds, "floor")
    rates = {name: {"prompts per second": plan.prompts / value} for name, value in seconds.items()}
    yield Table(f"{title}: rates", rates, line="{}: {:.1f} prompts per second")


PARTS: dict[str, Callable[[Plan], Iterator[Table]]] = {
    "gradients": time_gradients,
    "demo": time_demo,
    "memory": gradient_memory,
    "attention": time_attention,
    "attention-memory": attention_memory,
    "jacobians": time_jacobians,
    "prompts": time_prompts,
}
