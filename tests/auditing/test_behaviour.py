"""Influence and answers on the same prompts: items are found in tokens, shares are sums of influence, runs resume."""

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import UsageError
from posbias.auditing.run import audit_behaviour
from posbias.evaluation.correlate import (
    BehaviourPlan,
    Correlations,
    InfluenceSeries,
    RankCorrelation,
    check_behaviour,
    corrected,
    encoded_prompt,
)
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.options import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.statistics import Interval

TASK = "key_value(pairs=5)"
PLACES = (0, 2, 4)


@pytest.fixture(scope="module")
def model(long_llama):
    torch.set_num_threads(1)
    return pb.load_model(long_llama)


@pytest.fixture(scope="module")
def plan():
    options = pb.EvaluateOptions(count=2, positions=PLACES, max_tokens=2)
    return BehaviourPlan(TASK, options, kinds="jacobian(probes=1),logprob")


@pytest.fixture(scope="module")
def behaviour(model, plan):
    return audit_behaviour(model, plan)


@pytest.fixture(scope="module")
def record(behaviour):
    return behaviour.record


@pytest.mark.parametrize("spelled", [TASK, "key_value(pairs=4)", "documents(documents=4)"])
def test_the_item_that_holds_the_answer_is_found_in_tokens(model, spelled):
    sample, _ = check_behaviour(model, BehaviourPlan(spelled, pb.EvaluateOptions(count=2, positions="all")))
    for example in sample.examples:
        token_ids, answer = encoded_prompt(example, model.tokenizer)
        assert example.answers[0] in model.tokenizer.decode(token_ids[example.gold_token : example.gold_end])
        assert model.tokenizer.decode([answer]) == example.target[:1]


def test_shares_are_sums_of_influence_measured_on_the_same_prompts(model, plan, record):
    expected = []
    for example in check_behaviour(model, plan)[1].examples:
        token_ids, answer = encoded_prompt(example, model.tokenizer)
        options = PassOptions(output=f"target(tokens=[{answer}])")
        norms = measure_prompt(model, token_ids, kinds=resolve_kinds("logprob"), key=(0, 0), options=options)
        profile = norms.norms["logprob"] / norms.norms["logprob"].sum()
        expected.append(profile[example.gold_token : example.gold_end].sum())
    np.testing.assert_allclose(record.arrays["influence/measured/logprob/gold"][1], expected, rtol=1e-5)


def test_every_series_is_correlated_with_every_measure(record):
    series = record.scalars["influence"]["series"]
    names = {(entry["source"], entry["kind"], entry["what"]) for entry in series}
    assert names == {("measured", kind, "gold") for kind in ("jacobian", "logprob")}
    for entry in series:
        assert set(entry["correlations"]) == set(record.scalars["measures"])
        for found in entry["correlations"].values():
            assert found["n_samples"] == 2
            assert not any(correlation["established"] for correlation in found["correlations"])


def test_an_interrupted_run_goes_on_from_its_finished_prompts(model, plan, record, tmp_path, monkeypatch):
    from dataclasses import replace

    from posbias.evaluation import correlate as module

    calls = []

    def failing(*arguments, **keywords):
        calls.append(1)
        if len(calls) > 7:
            raise pb.RunError("stopped")
        return measure_prompt(*arguments, **keywords)

    monkeypatch.setattr(module, "measure_prompt", failing)
    with pytest.raises(pb.RunError, match="stopped"):
        audit_behaviour(model, plan, out=tmp_path)
    assert pb.load_record(tmp_path).record.status == "failed"
    monkeypatch.setattr(module, "measure_prompt", measure_prompt)
    again = replace(plan, evaluation=replace(plan.evaluation, resume=True))
    resumed = audit_behaviour(model, again, out=tmp_path)
    assert resumed.reused == 2
    for name, array in record.arrays.items():
        np.testing.assert_allclose(resumed.record.arrays[name], array, rtol=1e-6)
    assert not (tmp_path / "parts").exists()


def test_tasks_without_a_moved_item_are_refused(model):
    plan = BehaviourPlan("documents(documents=3, setting='closed_book')", pb.EvaluateOptions(count=1, max_tokens=1))
    with pytest.raises(UsageError, match="no item holds the answer"):
        audit_behaviour(model, plan)


def test_of_many_ties_none_is_established_by_luck_alone():
    value = Interval(0.5, 0.1, 0.9)
    rows = [RankCorrelation("nothing", value, p, True) for p in (*(6 * [0.01]), 0.001)]
    rows.append(RankCorrelation("ends", value, float("nan"), False))
    found = [Correlations((row,), 5, 8) for row in rows]
    entries = corrected([InfluenceSeries("measured", None, "gold", correlations={"accuracy": each}) for each in found])
    after = [entry.correlations["accuracy"].correlations[0] for entry in entries]
    assert [entry.established for entry in after] == [False] * 6 + [True, False]
    assert after[6].adjusted_p == pytest.approx(0.007)
    assert after[0].adjusted_p == pytest.approx(0.06)
