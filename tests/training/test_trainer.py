"""A stack gives its members the bits they get alone; each ends by its own rule and harms no other."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from posbias import TrainOptions, UsageError
from posbias.models.reference.config import constants_of, draw_parameters, stacked
from posbias.models.reference.forward import forward
from posbias.runs.engines import Local
from posbias.tasks.synthetic import Draws, PositionCopy, stack_tasks
from posbias.training.members import Adam, Below, TrainingSchedule
from posbias.training.trainer import train_members
from training_cases import assert_same, copier, retriever

SHORT = TrainingSchedule(steps=8, batch=16, window=4, evaluate_every=4, examples=10)
PLAIN_LOOP = 2e-6
"""Relative to the largest weight, after 8 steps in float32: a plain loop sums in another order."""


def assert_as_alone(members, trained, schedule, **options):
    """Each is what training it alone gives."""
    for member, found in zip(members, trained, strict=True):
        assert_same(found, train_members([member], schedule, **options).members[0])


def normed(target, **settings):
    return copier(target, norm="pre", mlp=True, residual="added", heads=2, width=12, **settings)


STACKS = {
    "masks, encodings and targets": [
        copier(0),
        copier(5, seed=1, mask="sliding_window(width=2)"),
        copier(2, seed=2, mask="full"),
        copier(3, seed=3, mask="prefix(length=3)", encoding="alibi"),
        copier(1, seed=1, encoding="decay(rate=0.8)"),
    ],
    "retrieval": [retriever(0), retriever(1, mask="sliding_window(width=3)"), retriever(1, encoding="decay(rate=0.8)")],
    "rotary heads": [retriever(seed, encoding="rope", heads=2) for seed in range(3)],
    "norms, MLP, residual": [normed(target, seed=target) for target in range(3)],
    "double precision": [copier(target, dtype="float64") for target in range(3)],
}


MIXED = "masks, encodings and targets"


@pytest.mark.parametrize(
    ("name", "threads", "chunk", "size"),
    [*((name, 2, 2, 64) for name in STACKS), ("retrieval", 1, 2, 64), (MIXED, 2, 5, 64), (MIXED, 2, 4, 2)],
)
def test_whatever_the_stack_every_member_gets_the_bits_it_gets_alone(name, threads, chunk, size, monkeypatch):
    members = STACKS[name]
    monkeypatch.setattr("posbias.training.trainer.default_chunk", lambda *_: chunk)
    run = TrainOptions(engine=Local(threads=threads), stack_size=size)
    together = train_members(members, SHORT, options=run)
    assert together.n_stacks == -(-len(members) // size)
    assert together.counts() == {"done": len(members)}
    assert_as_alone(members, together.members, SHORT, options=run)


def test_odd_widths_are_alone_or_together_equal_to_rounding(monkeypatch):
    members = [copier(target, width=7, seed=target) for target in range(5)]
    together = train_members(members, SHORT)
    monkeypatch.setattr("posbias.training.trainer.default_chunk", lambda *_: 1)
    alone = train_members(members, SHORT)
    for first, second in zip(alone.members, together.members, strict=True):
        for name, weights in first.parameters.items():
            difference = (weights - second.parameters[name]).abs().max()
            assert difference < PLAIN_LOOP * max(1.0, float(weights.abs().max())), name


def test_training_is_the_plain_loop_with_pytorchs_optimiser():
    member = normed(4, seed=3)
    trained = train_members([member, normed(1)], SHORT).members[0]
    constants = stacked([constants_of(member.config, member.task.n_positions)])
    drawn = draw_parameters(member.config, member.generator())
    weights = {name: nn.Parameter(values) for name, values in drawn.items()}
    optimiser = torch.optim.Adam(weights.values(), lr=1e-2)
    data = stack_tasks([member.task], [member.seed])
    losses = []
    for step in range(SHORT.steps):
        batch = data.batch(step, SHORT.batch)
        logits = forward(
            member.config, {name: each[None] for name, each in weights.items()}, constants, batch.inputs, rows=(5,)
        )
        loss = nn.functional.cross_entropy(logits[0, :, 0], batch.targets[0, :, 0])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    np.testing.assert_allclose(trained.losses, np.reshape(losses, (2, 4)).mean(axis=1), rtol=1e-5)
    for name, each in weights.items():
        difference = (trained.parameters[name] - each.detach()).abs().max()
        assert difference < PLAIN_LOOP * max(1.0, float(each.detach().abs().max())), name


def test_learning_happens_and_is_evaluated():
    options = TrainingSchedule(steps=90, batch=32, window=10, evaluate_every=30, examples=100)
    trained = train_members([copier(0), copier(0, mask="sliding_window(width=2)")], options)
    seen, unseen = trained.members
    assert list(seen.evaluation_steps) == [0, 30, 60, 90]
    assert seen.evaluations["accuracy"][0] < 0.6 < seen.evaluations["accuracy"][-1]
    assert seen.losses[-1] < 0.5 < seen.losses[0]
    # Two layers of window 2 reach three positions back; position 0 is out of sight of position 5.
    assert unseen.evaluations["accuracy"][-1] < 0.4
    assert unseen.losses[-1] > 1.4


def test_a_member_that_diverges_leaves_and_the_others_never_notice():
    wild = copier(1, seed=5, optimiser=Adam(1e30))
    calm = [copier(target, optimiser=Adam(1e-2)) for target in range(2)]
    trained = train_members([calm[0], wild, calm[1]], SHORT)
    assert trained.counts() == {"done": 2, "diverged": 1}
    diverged = trained.members[1]
    assert diverged.status == "diverged"
    assert diverged.steps == 4
    assert diverged.parameters is None
    assert "the mean loss over steps 0 ... 3 was" in diverged.reason
    assert len(diverged.losses) == 1
    assert_as_alone(calm, (trained.members[0], trained.members[2]), SHORT)


def test_an_update_that_leaves_no_finite_parameters_is_divergence():
    """The loss before the last update is finite; what it made of the parameters is not."""
    once = TrainingSchedule(steps=1, batch=16, examples=10)
    calm, wild = copier(0), copier(1, optimiser=Adam(1e39))
    trained = train_members([calm, wild], once)
    assert [each.status for each in trained.members] == ["done", "diverged"]
    assert trained.members[1].reason == "its parameters are not finite after step 0"
    assert trained.members[1].parameters is None
    assert np.isfinite(trained.members[1].losses).all()
    assert_as_alone([calm], trained.members[:1], once)


def test_members_end_by_rule_at_their_own_step():
    options = TrainingSchedule(steps=80, batch=32, window=5, examples=20, stopping=Below(0.5, windows=2))
    members = [copier(0), copier(0, mask="sliding_window(width=2)")]
    trained = train_members(members, options).members
    assert [each.status for each in trained] == ["stopped_early", "done"]
    assert trained[0].steps < 80 == trained[1].steps
    assert trained[0].steps == 5 * len(trained[0].losses)
    assert np.all(trained[0].losses[-2:] < 0.5)
    assert not np.all(trained[0].losses[-3:-1] < 0.5)
    assert list(trained[0].evaluation_steps) == [trained[0].steps]
    assert trained[0].reason == "below(loss=0.5, windows=2)"
    assert_as_alone(members, trained, options)


@dataclass(frozen=True)
class Breaking(PositionCopy):
    """A task that cannot be drawn for seed 13."""

    def stack(self, tasks, draws):
        if Draws.of(self.name, [13], draws.device).bases[0] in draws.bases:
            raise ValueError("seed 13\nis broken")
        return super().stack(tasks, draws)


def test_a_member_that_fails_is_recorded_and_stops_no_other():
    members = [replace(copier(1, seed=seed), task=Breaking(1, context=6, vocabulary=5)) for seed in (1, 13, 2)]
    trained = train_members(members, SHORT)
    assert [each.status for each in trained.members] == ["done", "failed", "done"]
    assert trained.members[1].reason == "ValueError: seed 13 is broken"
    assert trained.members[1].parameters is None
    assert_as_alone(members[::2], trained.members[::2], SHORT)


def test_what_cannot_be_trained_is_refused_at_once():
    wrong = replace(copier(0), config=replace(copier(0).config, vocabulary_size=7))
    for members, message in (
        ([], "there is nothing to train"),
        ([copier(0), copier(0)], "2 members are named"),
        (
            [wrong],
            "the model's vocabulary_size is 7, its task position_copy(target=0, context=6, vocabulary=5) needs 5",
        ),
    ):
        with pytest.raises(UsageError) as caught:
            train_members(members, SHORT)
        assert message in str(caught.value)
    for options, message in (
        ({"steps": 0}, "TrainingSchedule: steps must be a whole number >= 1"),
        ({"steps": 5, "evaluate_every": 3}, "evaluate_every must be a multiple of window (10), got 3"),
        ({"steps": 5, "diverged_above": -1}, "diverged_above must be a number > 0, got -1"),
    ):
        with pytest.raises(UsageError) as caught:
            TrainingSchedule(**options)
        assert message in str(caught.value)
    with pytest.raises(UsageError, match="device 'abacus' cannot be used"):
        train_members([copier(0)], SHORT, options=TrainOptions(device="abacus"))
