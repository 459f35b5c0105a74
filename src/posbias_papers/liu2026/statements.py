"""Position copy (Liu 2026): its statements tested on trained members; signs are judged over seeds."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float64

from posbias.comparison import UNITS_FOR_CLAIM
from posbias_papers.findings import (
    IN_PART,
    NOT_REPRODUCED,
    NOT_RUN,
    REPRODUCED,
    UNDECIDED,
    UNTRAINED,
    Difference,
    Finding,
    Seeded,
    difference,
    paired,
    weighed,
)
from posbias_papers.liu2026.published import (
    CONFIGURATIONS,
    ONE,
    READING_ERROR,
    RESIDUAL,
    RESIDUAL_MLP,
    THREE,
    THREE_WIDE,
    TWO,
    TWO_WIDE,
    Configuration,
    blind_loss,
    published_losses,
)

Rows = Float64[np.ndarray, "n_seeds context"]
Losses = dict[Configuration, Seeded]
"""Final loss by configuration: a row per seed, a column per target position."""
SOLVED = 0.1
"""Nats below which a target counts as retrieved."""
NEAR = 0.15
"""Nats within which a loss counts as the published one: five reading errors, for optimiser and steps are unknown."""
MIDDLE = slice(3, 8)
"""Targets 3 ... 7: where the post shows its plateau."""
FLAT = 0.25
"""A plateau varies by less than this share of ln V."""


def position_copy_findings(losses: Losses) -> list[Finding]:
    """Every statement of the post, in its order.

    Args:
        losses: Whatever configurations were trained; statements about others are marked as not run.
    """
    return [
        _one_layer(losses),
        _two_layers(losses),
        _plateau(losses),
        _flat_plateau(losses),
        _no_plateau(losses),
        _spiky(losses),
        _middle_is_harder(losses),
        *[
            _numbers(losses, configuration)
            for configuration in CONFIGURATIONS
            if published_losses(configuration) is not None
        ],
    ]


def _one_layer(losses: Losses) -> Finding:
    tests = {}
    if ONE in losses:
        rows = losses[ONE].rows
        easiest = rows[:, :-1].min(axis=1)
        tests = {
            "easiest earlier token above half of ln V by": difference(easiest - blind_loss() / 2),
            f"current token below {SOLVED} nats by": difference(SOLVED - rows[:, -1]),
        }
    return weighed(
        "Figure 1, left",
        "one layer cannot retrieve any previous token, but retrieves the current one.",
        tests,
    )


def _two_layers(losses: Losses) -> Finding:
    tests = {}
    if TWO in losses:
        tests = {f"{TWO}: {name}": value for name, value in _ends(losses[TWO].rows).items()}
    if TWO in losses and ONE in losses:
        shallow, deep, alone = paired(losses[ONE], losses[TWO])
        if len(shallow):
            gain = shallow[:, 0] - deep[:, 0]
            tests[f"first token, one layer minus two{_left_out(alone)}"] = difference(gain)
    return weighed(
        "Figure 1, right",
        "two layers differ in kind: early and late tokens are retrieved, those in the middle hardly.",
        tests,
    )


def _plateau(losses: Losses) -> Finding:
    tests = {
        f"{configuration}: {name}": value
        for configuration in (TWO, THREE, TWO_WIDE, THREE_WIDE)
        if configuration in losses
        for name, value in _ends(losses[configuration].rows).items()
    }
    return weighed(
        "Figure 2",
        "width 2 or 10 and 2 or 3 layers change nothing in kind: only first and last tokens are retrieved reliably.",
        tests,
    )


def _ends(rows: Rows) -> dict[str, Difference]:
    """Loss of the middle above that of the first and of the last target."""
    middle = rows[:, MIDDLE].mean(axis=1)
    return {
        "middle minus first": difference(middle - rows[:, 0]),
        "middle minus last": difference(middle - rows[:, -1]),
    }


def _flat_plateau(losses: Losses) -> Finding:
    tests = {
        str(configuration): difference(FLAT * blind_loss() - np.ptp(losses[configuration].rows[:, MIDDLE], axis=1))
        for configuration in (TWO, THREE, TWO_WIDE, THREE_WIDE)
        if configuration in losses
    }
    return weighed(
        "Figure 2",
        "without residual the losses of the middle form a long plateau.",
        tests,
        quantity=f"range over targets 3 to 7 below {FLAT:g} ln V by",
    )


def _no_plateau(losses: Losses) -> Finding:
    tests = _against_plain(losses, lambda rows: -rows[:, 1:-1].mean(axis=1))
    return weighed(
        "Figure 3",
        "residual connections and MLPs destroy the plateau.",
        tests,
        quantity="mean loss of targets 1 to 8, plain minus extended:",
    )


def _spiky(losses: Losses) -> Finding:
    def jump(rows: Rows) -> Float64[np.ndarray, "n_seeds"]:
        return np.asarray(np.abs(np.diff(rows[:, 1:-1], axis=1)).max(axis=1))

    return weighed(
        "Figure 3",
        "and replace it by a more spiky structure.",
        _against_plain(losses, jump),
        quantity="largest step between neighbouring targets 1 to 8, extended minus plain:",
    )


def _against_plain(losses: Losses, quantity: Callable[[Rows], Float64[np.ndarray, "n_seeds"]]) -> dict[str, Difference]:
    """A quantity of the extended networks minus that of the plain one, seed by seed."""
    tests = {}
    for configuration in (RESIDUAL, RESIDUAL_MLP):
        if configuration in losses and THREE_WIDE in losses:
            extended, plain, alone = paired(losses[configuration], losses[THREE_WIDE])
            if len(plain):
                gap = quantity(extended) - quantity(plain)
                tests[f"{configuration}{_left_out(alone)}"] = difference(gap)
    return tests


def _left_out(alone: int) -> str:
    """Note on seeds that only one of two networks has."""
    return f" ({alone} seeds without their pair left out)" if alone else ""


def _middle_is_harder(losses: Losses) -> Finding:
    """Means of fixed places: a maximum over eight interior places would exceed one over two ends by noise alone."""
    tests = {}
    for configuration, seeded in losses.items():
        if configuration.depth > 1:
            interior, ends = seeded.rows[:, 1:-1].mean(axis=1), seeded.rows[:, [0, -1]].mean(axis=1)
            tests[str(configuration)] = difference(interior - ends)
    return weighed(
        "Comment",
        "stacked causal attention has an architectural bias towards losing the middle.",
        tests,
        quantity="mean loss of targets 1 to 8 minus mean of the two ends:",
    )


def _numbers(losses: Losses, configuration: Configuration) -> Finding:
    """The values read off the figure against the mean and the best seed."""
    published = published_losses(configuration)
    assert published is not None
    where = f"Numbers, {configuration}"
    reported = f"final losses {_listed(published)} (read off the figure, +-{READING_ERROR})."
    if configuration not in losses:
        return Finding(where, reported, UNTRAINED, NOT_RUN)
    mean, best = losses[configuration].rows.mean(axis=0), losses[configuration].rows.min(axis=0)
    near, near_best = (int(np.sum(np.abs(values - published) <= NEAR)) for values in (mean, best))
    count = len(published)
    found = (
        f"mean over seeds {_listed(mean)}, {near} of {count} within {NEAR} nats; best seed {_listed(best)}, "
        f"{near_best} of {count}; mean absolute difference {np.abs(mean - published).mean():.2f}."
    )
    verdict = REPRODUCED if near == count else IN_PART if near > count // 2 else NOT_REPRODUCED
    return Finding(where, reported, found, UNDECIDED if len(losses[configuration]) < UNITS_FOR_CLAIM else verdict)


def _listed(values: Float64[np.ndarray, "context"]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
