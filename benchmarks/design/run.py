"""Speed of designs: exact solvers, gradients beside their rollouts, gamma keys beside ALiBi.

`python benchmarks/design/run.py`: about a minute. Peers are interleaved and medians taken; what is compared is first
asserted to be right (designs meet their targets, gradients agree with differences).
"""

import time
from collections.abc import Callable, Mapping

import numpy as np

from posbias import design
from posbias.architecture import Architecture, GammaKey
from posbias.designing.options import DesignOptions
from posbias.theory.rollout import Rollout, exponent_gradient, rollout_profile

DEPTH, HEADS, MIXING = 32, 32, 0.1
REPEATS = 5
ROW = "{:<58} {:>9} {:>12}"


def medians(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each, one after another in turns, after a first turn that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(REPEATS + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def exact_designs(n_positions: int = 100_000) -> None:
    """Exact solvers at a long context."""
    settings = DesignOptions(depth=DEPTH, mixing=MIXING, n_positions=n_positions)
    runs = {f"{target} over {over}": (target, over) for target, over in (
        ("flat", "key_bias"), ("u_shape(middle=4.0)", "key_bias"), ("flat", "gamma_key"))}  # fmt: skip
    found = medians(
        {name: lambda pair=pair: design(pair[0], over=pair[1], options=settings) for name, pair in runs.items()}
    )
    print(ROW.format(f"exact design, N = {n_positions:,}, {DEPTH} layers", "seconds", "W1 left"))
    for name, pair in runs.items():
        left = design(pair[0], over=pair[1], options=settings).distances[n_positions][0]
        assert left < 1e-9
        print(ROW.format(name, f"{found[name]:.3f}", f"{left:.0e}"))


def gradients(n_positions: int = 10_000) -> None:
    """The adjoint beside the rollout."""
    alphas = tuple(np.linspace(0.5, 9, HEADS).tolist())
    keys = {"one exponent per layer": 3.0, "32 exponents": alphas}
    stacks = {name: Architecture(DEPTH, HEADS, encoding=GammaKey(each), mixing=MIXING) for name, each in keys.items()}
    cotangent = np.random.default_rng(0).normal(size=n_positions)
    step = 1e-6
    ahead, behind = (
        cotangent
        @ rollout_profile(
            Architecture(DEPTH, HEADS, encoding=GammaKey(3.0 + sign * step), mixing=MIXING), n_positions=n_positions
        )
        for sign in (1, -1)
    )
    adjoint = exponent_gradient(Rollout(stacks["one exponent per layer"], n_positions), cotangent).sum()
    np.testing.assert_allclose(adjoint, (ahead - behind) / (2 * step), rtol=1e-6)
    print("\n" + ROW.format(f"gradient by every exponent, N = {n_positions:,}", "seconds", "x rollout"))
    for name, stack in stacks.items():
        found = medians(
            {
                "rollout": lambda stack=stack: rollout_profile(stack, n_positions=n_positions),
                "gradient": lambda stack=stack: exponent_gradient(Rollout(stack, n_positions), cotangent),
            }
        )
        print(ROW.format(name, f"{found['gradient']:.3f}", f"{found['gradient'] / found['rollout']:.1f}"))


def long_contexts(n_positions: int = 1_000_000) -> None:
    """Gamma keys beside ALiBi, the same number of layers and of different heads."""
    by_layer = [GammaKey(float(alpha)) for alpha in np.linspace(9, 0.5, DEPTH)]
    by_head = GammaKey(tuple(np.linspace(0.5, 9, HEADS).tolist()))
    encodings = {
        "ALiBi, 32 slopes": "alibi",
        "gamma keys, 32 exponents": by_head,
        "gamma keys, one per layer": by_layer,
    }
    stacks = {name: Architecture(DEPTH, HEADS, encoding=each, mixing=MIXING) for name, each in encodings.items()}
    found = medians({name: lambda s=s: rollout_profile(s, n_positions=n_positions) for name, s in stacks.items()})
    print("\n" + ROW.format(f"profile, N = {n_positions:,}, {DEPTH} layers x {HEADS} heads", "seconds", "x ALiBi"))
    for name, seconds in found.items():
        print(ROW.format(name, f"{seconds:.2f}", f"{seconds / found['ALiBi, 32 slopes']:.2f}"))


if __name__ == "__main__":
    exact_designs()
    gradients()
    long_contexts()
