"""The loop: planted relations are found, absent ones are not, and the profiles are those of the theories."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posbias import Architecture, predict
from posbias.display.static import fragment_of, image_of
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.prompts.prompts import Prompts
from posbias.runs.records import read_record
from posbias.tasks.synthetic import InContextRetrieval, PositionCopy
from posbias.training import Member
from posbias_papers import reproduction_record
from posbias_papers.closing_loop import (
    CONTROL,
    POOLED,
    Loop,
    agreements,
    loop_figure,
    loop_table,
    unit_measures,
    with_control,
)
from posbias_papers.influence_profiles import influence_profiles, initial, mean_field_profiles
from posbias_papers.pages.reproduce import ReproductionRun
from posbias_papers.reproduction import Reproduction
from published_networks import copy_network, retrieval_network
from theory_calls import power_rollout

PLACES = 8


def generator():
    return np.random.default_rng(0)


def profiles(seeds=6):
    rows = np.random.default_rng(3).dirichlet(np.ones(PLACES), seeds)
    return np.maximum(rows, 1e-3)


def loops(relation):
    found = []
    for number in range(6):
        influence = profiles() * (1 + 0.01 * number)
        found.append(Loop(f"model {number}", {("rollout", "initial"): influence}, {"learning": relation(influence)}))
    return found


def pooled(found):
    return next(entry for entry in found if entry.architecture == POOLED)


def answers(found):
    """What the table says of all architectures."""
    return [row[-2] for row in loop_table(found).cells if row[0] == POOLED]


def test_an_outcome_that_follows_influence_is_predicted():
    found = agreements(loops(lambda influence: 0.5 * np.log(influence)))
    entry = pooled(found)
    assert entry.correlation.interval.value == pytest.approx(1)
    assert entry.slope.interval.value == pytest.approx(0.5)
    assert entry.variance == pytest.approx(1)
    assert answers(found) == ["predicts"]
    assert len(loop_table(found).cells) == 7
    assert loop_figure("loop", found, "learning") is not None


def test_the_picture_has_a_row_for_every_architecture_and_survives_the_record(tmp_path):
    found = agreements(loops(lambda influence: 0.5 * np.log(influence)))
    figure = loop_figure("loop", found, "learning")
    assert figure is not None
    names = dict.fromkeys(entry.architecture for entry in found if entry.architecture != POOLED)
    assert figure.rows == tuple(names)
    made = Reproduction("icl-2502.01951", "title", rows=(), tables=(), figures=(figure,))
    reproduction_record(made, {}).save(tmp_path)
    (stored,) = ReproductionRun.from_record(read_record(tmp_path)).figures
    assert stored.rows == figure.rows
    assert all(name in fragment_of(stored, anchor="loop") for name in figure.rows)
    assert image_of(stored).startswith(b"\x89PNG")


def test_the_reverse_and_nothing_are_said_as_such():
    reverse = agreements(loops(lambda influence: -influence))
    assert answers(reverse) == ["predicts the reverse"]
    noise = np.random.default_rng(5)
    nothing = agreements(loops(lambda influence: noise.normal(size=influence.shape)))
    assert answers(nothing) == ["not shown to predict"]


def test_fewer_than_six_architectures_predict_nothing():
    few = agreements(loops(lambda influence: 0.5 * np.log(influence))[:5])
    assert pooled(few).correlation.interval.low > 0
    assert answers(few) == ["not shown to predict"]


def test_what_has_no_order_is_left_out():
    flat = np.full((2, PLACES), 1 / PLACES)
    assert np.isnan(unit_measures(flat, profiles(2))).all()
    found = agreements([Loop("flat", {("rollout", "initial"): flat}, {"learning": profiles(2)})])
    assert found[0].correlation is None
    assert found[0].row()["correlation"] is None
    assert answers(found) == []
    assert loop_figure("loop", found, "learning") is None


def test_the_control_falls_and_theories_are_held_against_it():
    rows = with_control({("rollout", "initial"): profiles()})
    assert (np.diff(rows[CONTROL], axis=1) < 0).all()
    both = [
        Loop(
            loop.architecture, with_control(loop.predicted), {"learning": np.log(loop.predicted["rollout", "initial"])}
        )
        for loop in loops(lambda influence: influence)
    ]
    pooled_rows = [row for row in loop_table(agreements(both)).cells if row[0] == POOLED]
    assert [row[-1][0] for row in pooled_rows] == ["+", "–"], "the control is not held against itself"


def trained(**settings):
    architecture = Architecture(depth=3, mask=settings.pop("mask", "causal"), encoding=settings.pop("encoding", "none"))
    config = ReferenceConfig(
        architecture,
        width=4,
        vocabulary_size=10,
        attention="content",
        values="gaussian",
        dtype="float32",
        **settings,
    )
    return Member("one", config, PositionCopy(3), 1)


@pytest.mark.parametrize(("mask", "encoding"), [("causal", "none"), ("prefix(length=4)", "decay(rate=0.8)")])
def test_without_residual_the_architectures_rollout_is_the_librarys(mask, encoding):
    member = trained(residual="none", mask=mask, encoding=encoding)
    ours = influence_profiles([initial(member)], seed=0)[0]["uniform_rollout"]
    theirs = predict(member.config.architecture, 10, theory="attention_only").profile.influence
    np.testing.assert_allclose(ours, theirs, atol=1e-7)


def test_every_profile_sums_to_one_and_stacking_changes_nothing():
    members = [initial(trained(residual=residual)) for residual in ("added", "none", "added")]
    together = influence_profiles(members, seed=0)
    alone = [influence_profiles([each], seed=0)[0] for each in members]
    for first, second in zip(together, alone, strict=True):
        for kind, profile in first.items():
            assert profile.sum() == pytest.approx(1)
            assert (profile >= 0).all()
            np.testing.assert_allclose(profile, second[kind], atol=1e-5)


def test_the_jacobian_is_that_of_the_model():
    """Against the exact Jacobian of the same network, sequence by sequence."""
    from posbias.tasks.synthetic import stack_tasks
    from posbias_papers.influence_profiles import SEQUENCES

    member = trained(residual="added")
    start = initial(member)
    model = ReferenceTransformer(member.config, start.parameters)
    tokens = stack_tasks([member.task], [member.seed]).batch(0, SEQUENCES).inputs[0]
    shares = []
    for sequence in tokens:
        jacobian = torch.autograd.functional.jacobian(
            lambda vectors: model.outputs(vectors, [9]).hidden[0, 0], model.embed(sequence[None])
        )
        norms = jacobian[:, 0].square().sum(dim=(0, 2)).sqrt()
        shares.append(norms / norms.sum())
    exact = torch.stack(shares).mean(0).numpy()
    measured = influence_profiles([start], seed=0)[0]["jacobian"]
    assert np.abs(measured - exact).max() < 0.03


def test_mean_field_is_computed_once_per_start_and_none_where_it_does_not_apply():
    member = trained(residual="added")
    other = Member("other", member.config, PositionCopy(5), member.seed)
    first, second = mean_field_profiles([member, other])
    assert first is second
    assert first.sum() == pytest.approx(1)
    identity = Member("identity", replace(member.config, values="identity"), PositionCopy(3))
    assert mean_field_profiles([identity]) == [None]


def test_mean_field_of_retrieval_networks_is_that_of_many_initialisations(monkeypatch):
    """From the sequences' own vectors; a single Jacobian is as near as initialisations are to each other."""
    monkeypatch.setattr("posbias_papers.influence_profiles.SEQUENCES", 8)
    for residual in (False, True):
        network = retrieval_network(Architecture(depth=4), width=32, residual=residual)
        task = InContextRetrieval(features=32)
        members = [Member(f"birth {seed}", network, task, seed) for seed in range(8)]
        measured = [found["jacobian"] for found in influence_profiles([initial(each) for each in members], seed=0)]
        predicted = mean_field_profiles(members)
        assert predicted[0] is not predicted[1]
        gaps = np.abs(np.cumsum(np.mean(predicted, axis=0) - np.mean(measured, axis=0)))
        flat = np.abs(np.cumsum(1 / 17 - np.mean(measured, axis=0)))
        assert gaps.mean() < 0.01
        assert gaps.mean() < 0.1 * flat.mean()


def test_the_power_rollout_is_that_of_the_model():
    """Sequence by sequence, as `posbias predict --theory power_rollout` computes it."""
    from posbias.tasks.synthetic import stack_tasks
    from posbias_papers.influence_profiles import SEQUENCES

    start = initial(trained(residual="added"))
    model = ReferenceTransformer(start.member.config, start.parameters)
    tokens = stack_tasks([start.member.task], [start.member.seed]).batch(0, SEQUENCES).inputs[0]
    alone = power_rollout(model, Prompts(tokens.numpy())).profile.influence
    np.testing.assert_allclose(influence_profiles([start], seed=0)[0]["power_rollout"], alone, atol=1e-5)


def test_networks_of_equal_parameters_have_mean_fields_of_their_own():
    """A residual connection has no parameters: with and without, training begins with the same ones."""
    networks = [copy_network(Architecture(depth=3), residual=residual) for residual in (False, True)]
    members = [Member(f"residual {n}", network, PositionCopy(0)) for n, network in enumerate(networks)]
    for member, found in zip(members, mean_field_profiles(members), strict=True):
        (alone,) = mean_field_profiles([member])
        np.testing.assert_array_equal(found, alone)
    plain, residual = mean_field_profiles(members)
    assert residual[-1] > plain[-1] + 0.3
