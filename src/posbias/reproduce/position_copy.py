"""Position copy (Liu 2026) run again: one small network per target position, over seeds.

Final losses beside those read off the post's figures, its statements with verdicts, and whether influence at
initialisation and after training predicts which targets are learnt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.report.reproductions import Reproduction
from posbias.reproduce.closing_loop import (
    Loop,
    agreements,
    loop_arrays,
    loop_figure,
    loop_sentences,
    loop_table,
    with_control,
)
from posbias.reproduce.findings import findings_table, tally
from posbias.reproduce.influence_profiles import KINDS, Profiled, influence_profiles, initial, mean_field_profiles
from posbias.reproduce.outcomes import Outcome, Outcomes
from posbias.reproduce.position_copy_published import CONFIGURATIONS, CONTEXT, SOURCE, Configuration, blind_loss
from posbias.reproduce.position_copy_statements import Losses, position_copy_findings
from posbias.reproduce.position_copy_views import losses_table, position_copy_figures
from posbias.reproduce.study_runs import StudySettings, clear_studies, run_studies
from posbias.training import TrainedMember

PAPER = "position-copy-liu2026"
MOMENTS = ("initial", "trained")
FINAL, SPEED = "a low final loss", "fast learning"


def reproduce_position_copy(settings: object = None) -> Reproduction:
    """Train the post's networks again and put its statements to the test.

    Args:
        settings: `StudySettings`, or None for its defaults.

    Raises:
        UsageError: settings of another kind, or no such study.
        RunError: a checkpoint or model cannot be written.
    """
    chosen = StudySettings() if settings is None else settings
    if not isinstance(chosen, StudySettings):
        raise UsageError(f"{PAPER} takes StudySettings, got {type(chosen).__name__}")
    runs = run_studies(PAPER, chosen)
    members = [member for run in runs.values() for member in run.trained.members]
    steps = next(iter(runs.values())).trained.options.steps
    made = position_copy_reproduction(position_copy_outcomes(members, seed=chosen.seed), steps=steps, settings=chosen)
    if chosen.run.directory is not None:
        clear_studies(chosen.run.directory, list(runs))
    return made


def position_copy_outcomes(members: Sequence[TrainedMember], *, seed: int) -> Outcomes:
    """Final loss, learning and influence profiles of every member."""
    finished = [each for each in members if each.parameters is not None]
    trained = influence_profiles([Profiled(each.member, each.parameters or {}) for each in finished], seed=seed)
    at_birth = influence_profiles([initial(each.member) for each in finished], seed=seed)
    profiles = {
        each.member.name: {
            f"{kind}/{moment}": row[kind] for moment, row in (("initial", a), ("trained", b)) for kind in KINDS
        }
        for each, a, b in zip(finished, at_birth, trained, strict=True)
    }
    for each, profile in zip(finished, mean_field_profiles([each.member for each in finished]), strict=True):
        if profile is not None:
            profiles[each.member.name]["mean_field/initial"] = profile
    return Outcomes([_outcome(each, profiles.get(each.member.name, {})) for each in members])


def _outcome(trained: TrainedMember, profiles: Mapping[str, np.ndarray]) -> Outcome:
    config = trained.member.config
    factors = {
        "depth": config.architecture.depth,
        "width": config.width,
        "residual": config.residual == "added",
        "mlp": config.mlp,
        "target": getattr(trained.member.task, "target"),  # noqa: B009 - tasks of this study are position copies
    }
    arrays: dict[str, np.ndarray] = {"course": np.array(np.mean(trained.losses) / blind_loss()), **profiles}
    if "loss" in trained.evaluations:
        arrays["loss"] = trained.evaluations["loss"][-1]
    return Outcome(factors, trained.member.seed, trained.status, arrays)


def position_copy_reproduction(outcomes: Outcomes, *, steps: int, settings: StudySettings) -> Reproduction:
    """Statements, tables and figures from trained members."""
    generator = np.random.default_rng(settings.seed)
    losses, speeds = (by_target(outcomes, name) for name in ("loss", "course"))
    findings = position_copy_findings(losses, generator)
    loops = position_copy_loops(outcomes)
    found = agreements(loops, generator)
    seeds = max((len(rows) for rows in losses.values()), default=0)
    figures = [loop_figure(f"position-copy-loop-{n}", found, name) for n, name in enumerate((FINAL, SPEED))]
    return Reproduction(
        paper=SOURCE,
        title=f"Position copy: {len(losses)} networks, {CONTEXT} targets, {seeds} seeds, {steps} steps",
        statements=[
            tally(findings),
            *[finding.sentence() for finding in findings],
            *loop_sentences(found),
            *lost_sentence(outcomes),
        ],
        rows=[*[finding.row() for finding in findings], *[agreement.row() for agreement in found]],
        tables=[findings_table(findings), losses_table(losses), loop_table(found)],
        figures=[*position_copy_figures(losses, speeds), *[figure for figure in figures if figure is not None]],
        arrays={**_arrays(losses, speeds), **loop_arrays(loops)},
        settings={**settings.describe(), "steps": steps},
        seeds={"seed": settings.seed},
    )


def by_target(outcomes: Outcomes, name: str) -> Losses:
    """A number of every member as [seed, target] by configuration; only seeds with all targets finished."""
    found: dict[Configuration, Float64[np.ndarray, "n_seeds context"]] = {}
    for configuration in CONFIGURATIONS:
        cells = [{**configuration.factors, "target": target} for target in range(CONTEXT)]
        seeds = outcomes.common_seeds(*cells)
        if seeds:
            found[configuration] = np.stack([outcomes.values(name, cell, seeds) for cell in cells], axis=1)
    return found


def position_copy_loops(outcomes: Outcomes) -> list[Loop]:
    """Influence of the k-th position in the network that is to copy it, beside how that went."""
    loops = []
    losses, speeds = by_target(outcomes, "loss"), by_target(outcomes, "course")
    for configuration, rows in losses.items():
        predicted = {}
        for kind, moment in (("mean_field", "initial"), *((kind, moment) for kind in KINDS for moment in MOMENTS)):
            profiles = _profiles(outcomes, configuration, f"{kind}/{moment}")
            predicted[kind, moment] = np.stack([profiles[target][:, target] for target in range(CONTEXT)], axis=1)
        loops.append(Loop(str(configuration), with_control(predicted), {FINAL: -rows, SPEED: -speeds[configuration]}))
    return loops


def _profiles(outcomes: Outcomes, configuration: Configuration, name: str) -> list[Float64[np.ndarray, "n_seeds n"]]:
    cells = [{**configuration.factors, "target": target} for target in range(CONTEXT)]
    seeds = outcomes.common_seeds(*cells)
    return [outcomes.values(name, cell, seeds) for cell in cells]


def lost_sentence(outcomes: Outcomes) -> list[str]:
    """What did not finish; nothing where all did."""
    lost = outcomes.lost()
    if not lost:
        return []
    return [f"{len(lost)} of {len(outcomes.members)} members did not finish and are left out: {'; '.join(lost[:8])}."]


def _arrays(losses: Losses, speeds: Losses) -> dict[str, Any]:
    arrays = {f"{configuration}/loss": rows for configuration, rows in losses.items()}
    return {**arrays, **{f"{configuration}/course": rows for configuration, rows in speeds.items()}}
