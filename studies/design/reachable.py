"""What can be reached: bounded exponents, one shared exponent, and over length. Writes reachable.png beside this.

`python studies/design/reachable.py`: rollouts only, no model; about 2 minutes on one core. Every distance is W1 to a
flat profile, the last position apart.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from scipy.optimize import brentq

from posbias import design
from posbias.architecture import Architecture, GammaKey
from posbias.designing.exact import telescoping_alphas
from posbias.designing.options import DesignOptions
from posbias.designing.result import Flat, distance_apart
from posbias.designing.solving import Problem
from posbias.profiles import Profile
from posbias.theory.rollout import rollout_profile

N_POSITIONS = 512
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
STACKS = ((6, 0.1), (12, 0.1), (24, 0.1), (12, 0.3))
DEPTH, MIXING = 24, 0.1


def distance(architecture: Architecture, n_positions: int) -> float:
    """W1 of the rollout to flat, the last position apart."""
    found = Profile.normalised(rollout_profile(architecture, n_positions=n_positions))
    return distance_apart(found, Flat().shape(n_positions))


def shared_alpha(mixing: np.ndarray) -> float:
    """The exponent that, shared by all layers, gives the mean position of a flat row: i prod (1 - m_l/(alpha + 1))."""
    middle = (1 + np.prod(1 - mixing)) / 2
    return float(brentq(lambda alpha: np.prod(1 - mixing / (alpha + 1)) - middle, 1e-9, 1e9))


def bounded(axes: Axes) -> None:
    """The best that exponents up to a bound can do."""
    print("bounded exponents: depth, mixing, bound, W1")
    for depth, mixing in STACKS:
        end = (1 - mixing) ** -(depth - 1.0)
        bounds = np.exp(np.linspace(0, np.log(end), 9))
        found = []
        for bound in bounds:
            base = Architecture(depth=depth, mixing=mixing)
            problem = Problem(base, Flat(), [N_POSITIONS], bound)
            best = problem.architecture(problem.solve(starts=3, seed=0))
            exact = Architecture(
                depth=depth,
                mixing=mixing,
                encoding=[GammaKey(a) for a in telescoping_alphas(0.0, np.full(depth, mixing))],
            )
            found.append(min(distance(best, N_POSITIONS), distance(exact, N_POSITIONS) if bound == bounds[-1] else 1.0))
            print(f"  {depth} {mixing} {bound:.2f} {found[-1]:.4f}")
        axes.plot(bounds, np.maximum(found, 1e-5), "o-", label=f"{depth} layers, m = {mixing}")
        axes.axvline(end, color=axes.lines[-1].get_color(), lw=0.6, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="largest exponent allowed (dotted: the theorem's)", ylabel="W1 to flat")
    axes.set_title("Bounded exponents")
    axes.legend(fontsize=7)


def shared(axes: Axes) -> None:
    """One exponent for all layers, by the rule of the mean position, over depth and mixing."""
    print("one exponent: mixing, depth, alpha, W1 (undesigned)")
    for mixing in (0.02, 0.05, 0.1, 0.2, 0.4):
        depths = [2, 4, 8, 16, 32, 64]
        found = []
        for depth in depths:
            alpha = shared_alpha(np.full(depth, mixing))
            found.append(distance(Architecture(depth=depth, mixing=mixing, encoding=GammaKey(alpha)), N_POSITIONS))
            before = distance(Architecture(depth=depth, mixing=mixing), N_POSITIONS)
            print(f"  {mixing} {depth} {alpha:.2f} {found[-1]:.4f} ({before:.3f})")
        axes.plot(-np.array(depths) * np.log(1 - mixing), found, "o-", label=f"m = {mixing}")
    axes.set(xscale="log", yscale="log", xlabel="nats of mixing, -L ln(1 - m)", ylabel="W1 to flat")
    axes.set_title("One exponent shared by all layers")
    axes.legend(fontsize=7)


def designs() -> dict[str, Architecture]:
    """What is free, and the design for N = 512."""
    settings = DesignOptions(depth=DEPTH, mixing=MIXING, n_positions=N_POSITIONS)
    alpha = shared_alpha(np.full(DEPTH, MIXING))
    return {
        "none": Architecture(depth=DEPTH, mixing=MIXING),
        "one key bias": design("flat", over="key_bias", options=settings).architecture,
        "one shared exponent": Architecture(depth=DEPTH, mixing=MIXING, encoding=GammaKey(alpha)),
        "exponents by the theorem": design("flat", over="gamma_key", options=settings).architecture,
    }


def transfer(axes: Axes, stacks: dict[str, Architecture]) -> None:
    """Designs for N = 512, at other lengths."""
    print("transfer: W1 at N =", *LENGTHS)
    for name, stack in stacks.items():
        reach = [n for n in LENGTHS if name != "one key bias" or n <= N_POSITIONS]
        found = [distance(stack, n) for n in reach]
        print(f"  {name}:", " ".join(f"{one:.4f}" for one in found))
        axes.plot(reach, np.maximum(found, 1e-5), "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel=f"N (designed for {N_POSITIONS})", ylabel="W1 to flat (from 1e-5)")
    axes.set_title(f"Transfer over length, {DEPTH} layers, m = {MIXING}")
    axes.legend(fontsize=6)


def profiles(axes: Axes, stacks: dict[str, Architecture]) -> None:
    """Profiles at the length of the design."""
    for name, stack in stacks.items():
        if name != "one key bias":
            found = rollout_profile(stack, n_positions=N_POSITIONS)[:-1]
            axes.plot(np.arange(N_POSITIONS - 1), found / found.mean(), label=name)
    axes.set(yscale="log", ylim=(0.05, 50), xlabel="position", ylabel="influence (flat = 1)")
    axes.set_title(f"Profiles at N = {N_POSITIONS}")
    axes.legend(fontsize=7)


def main() -> None:
    """All four on one picture."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    bounded(panels[0, 0])
    shared(panels[0, 1])
    stacks = designs()
    transfer(panels[1, 0], stacks)
    profiles(panels[1, 1], stacks)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
