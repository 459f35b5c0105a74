"""Influence before and after a method: measured under it, tied to scores only where the numbers say so."""

import numpy as np
import pytest

import posbias as pb
from planted import PlantedMethod, PlantedResponder, trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, mitigated
from posbias.evaluation.responders import LocalOptions
from posbias.evaluation.spans import encoded_prompt, spans_of
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.mitigation.trial import influence as influence_module
from posbias.mitigation.trial.influence import FLAT, OVER_METHODS, OVER_POSITIONS, influence_scalars
from posbias.report import report_of
from posbias.report.page import html_of
from posbias.runs.records import read_record
from posbias.tasks.language import LANGUAGE_TASKS

TASK = "key_value(pairs=2)"
PLACES = (0, 1)
STRONG = "key_bias(biases='gamma_key(alpha=0.025)')"
METHODS = [
    "key_bias(biases='gamma_key(alpha=0.025)', strength=0.0)",
    STRONG,
    "ms_poe(first_layer=0)",
    "pine",
    "attention_calibration(temperature=0.1, together=True)",
    "positional_channel(channel=3)",
    "repeat_prompt",
]


def options(**further):
    evaluation = EvaluateOptions(count=2, positions=PLACES, generate=False)
    return MitigateOptions(
        methods=METHODS, calibration=0, evaluation=evaluation, documents=0, short=False, influence=2, **further
    )


@pytest.fixture(scope="module")
def model(long_llama):
    return pb.load_model(str(long_llama))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    record = trial_record(TASK, LocalResponder(model, LocalOptions()), options(), directory=directory)
    return record, directory


def test_influence_is_measured_under_every_method_inside_the_model(run):
    record, _ = run
    found = record.scalars["influence"]
    assert list(found["changes"]) == METHODS[:-1]
    assert found["samples"] == 2
    assert report_of(record).left_out[-1].startswith("influence under repeat_prompt was not measured: it changes req")
    idle, strong = (record.arrays[f"influence/{name}"] for name in METHODS[:2])
    np.testing.assert_array_equal(idle, record.arrays["influence/unchanged"])
    assert (strong < record.arrays["influence/unchanged"]).all(), "the first token takes what the item had"


def test_the_page_of_a_saved_run_says_what_that_of_the_run_said(run, tmp_path):
    run[0].save(tmp_path)
    said, read = report_of(run[0]), report_of(read_record(tmp_path))
    assert read.folded["Influence before and after"] == said.folded["Influence before and after"]
    assert read.verdict == said.verdict


def test_shares_are_those_of_the_model_under_the_method(run, model):
    record, _ = run
    sample = list(spans_of(LANGUAGE_TASKS.parse(TASK), model.tokenizer, EvaluateOptions(count=2, positions=PLACES)))[1]
    token_ids, answer = encoded_prompt(sample.examples[1], model.tokenizer)
    passes = PassOptions(output=f"target(tokens=[{answer}])", precision_prompts=0)
    with mitigated(model, STRONG) as changed:
        norms = measure_prompt(changed, token_ids, kinds=resolve_kinds("logprob"), key=(0, 0), options=passes).norms
    begin, end = sample.spans(1)[1]
    own = norms["logprob"][begin:end].sum() / norms["logprob"].sum()
    assert record.arrays[f"influence/{STRONG}"][1, 1] == pytest.approx(own, rel=1e-5)
    assert record.arrays[f"influence/{FLAT}"][1, 1] == (end - begin) / len(token_ids)


def test_what_is_measured_is_not_measured_again(run, model, monkeypatch):
    record, directory = run
    monkeypatch.setattr(influence_module, "measure_prompt", None)
    again = options()
    object.__setattr__(again.evaluation, "resume", True)
    found = trial_record(TASK, LocalResponder(model, LocalOptions()), again, directory=directory)
    assert found.scalars["influence"] == record.scalars["influence"]


def test_a_method_that_changes_nothing_changes_influence_by_nothing(model):
    """Alone inside the model: its change is exactly 0 everywhere, and has no interval."""
    given = MitigateOptions(
        methods=["temperature(scale=0.001)", "repeat_prompt"],
        calibration=0,
        evaluation=EvaluateOptions(count=6, positions=PLACES, generate=False),
        documents=0,
        short=False,
        influence=6,
    )
    record = trial_record(TASK, LocalResponder(model, LocalOptions()), given)
    found = record.scalars["influence"]
    nothing = {"value": 0.0, "low": None, "high": None}
    assert found["changes"] == {"temperature(scale=0.001)": [nothing, nothing]}
    assert found["average"]["temperature(scale=0.001)"] == nothing
    report = report_of(record)
    (sentence,) = [text for text in report.verdict if text.startswith("temperature(scale=0.001)")]
    assert sentence.startswith("temperature(scale=0.001) leaves the influence of the answer's item exactly as it")
    (row,) = [row for row in report.folded["Influence before and after"][0].cells if row[0].endswith("change")]
    assert row == ["temperature(scale=0.001), change", "+0.000", "+0.000"]
    assert html_of(report)


@pytest.mark.parametrize(("count", "moved"), [(1, 0.1), (10, 0.0)])
def test_influence_whose_interval_is_not_known_is_said_not_compared(run, count, moved):
    record, generator = run[0], np.random.default_rng(3)
    before = np.full((10, 2), np.nan)
    before[:count] = generator.uniform(0.1, 0.2, (count, 2))
    shares = {"unchanged": before, "a": before + moved, FLAT: before}
    scores = {name: {"logprob": generator.normal(0, 1, (10, 2))} for name in ("unchanged", "a")}
    kept = record.scalars["influence"]
    found = influence_scalars(shares, scores, positions=PLACES, n_items=2, seed=0)
    assert [mean["low"] for mean in found["changes"]["a"]] == [None, None]
    record.scalars["influence"] = {**found, "samples": 10}
    try:
        assert any(text.startswith("a ") for text in report_of(record).verdict)
    finally:
        record.scalars["influence"] = kept


def test_a_server_shows_no_influence():
    evaluation = EvaluateOptions(count=6, positions=PLACES)
    given = MitigateOptions(methods=[PlantedMethod()], calibration=0, evaluation=evaluation, influence=2)
    record = trial_record(TASK, PlantedResponder((0.5, 0.5)), given)
    assert "influence" not in record.scalars
    assert "not one behind a server" in report_of(record).left_out[-1]


def planted_tie(slope):
    """Influence that two methods move, and log-probabilities that follow it by a slope."""
    generator = np.random.default_rng(1)
    shape = 10, 5
    before = generator.uniform(0.1, 0.2, shape)
    moved = {"a": [0.1, 0.3, 0.2, 0.0, 0.4], "b": [0.0, -0.2, 0.1, 0.3, -0.1], "c": [0.2, 0.1, 0.5, 0.4, 0.3]}
    noise = {name: generator.normal(0, 0.02, shape) for name in moved}
    shares = {"unchanged": before, **{name: before + move for name, move in moved.items()}, FLAT: before}
    scores = {"unchanged": {"logprob": np.zeros(shape)}}
    for name, move in moved.items():
        after = np.zeros(shape)
        after[:] = slope * np.array(move) + noise[name]
        scores[name] = {"logprob": after}
    return influence_scalars(shares, scores, positions=tuple(range(5)), n_items=5, seed=0)


@pytest.mark.parametrize(("slope", "established"), [(1.0, True), (0.0, False)])
def test_a_tie_is_found_where_there_is_one_and_only_there(run, slope, established):
    found = planted_tie(slope)
    ties = {tie["what"]: tie["correlations"]["logprob"] for tie in found["correlations"]}
    assert list(ties) == [OVER_POSITIONS, OVER_METHODS, "a", "b", "c"]
    (pooled,) = ties[OVER_POSITIONS]["correlations"]
    assert pooled["established"] is established
    assert abs(pooled["value"]) > 0.95 or not established
    record = run[0]
    kept, positions = record.scalars["influence"], record.scalars["judgement"]["positions"]
    record.scalars["influence"], record.scalars["judgement"]["positions"] = found, [0, 1, 2, 3, 4]
    try:
        report = report_of(record)
        (sentence,) = [text for text in report.verdict if "move influence" in text]
        assert ("is not established to follow influence" in sentence) is not established
        assert ("follows influence." in sentence) is established
        assert [row[0] for row in report.folded["Influence before and after"][1].cells] == list(ties), "nulls, too"
        assert html_of(report)
    finally:
        record.scalars["influence"], record.scalars["judgement"]["positions"] = kept, positions


@pytest.mark.parametrize(
    ("move", "said"),
    [(0.1, "a gives more influence to"), (-0.1, "a takes influence from"), (0.0, "a does not demonstrably change")],
)
def test_the_verdict_says_what_the_method_does_to_influence(run, move, said):
    record, generator = run[0], np.random.default_rng(2)
    before = generator.uniform(0.1, 0.2, (10, 5))
    shares = {"unchanged": before, "a": before + move + generator.normal(0, 0.01, (10, 5)), FLAT: before}
    scores = {name: {"logprob": generator.normal(0, 1, (10, 5))} for name in ("unchanged", "a")}
    kept, positions = record.scalars["influence"], record.scalars["judgement"]["positions"]
    record.scalars["influence"] = influence_scalars(shares, scores, positions=tuple(range(5)), n_items=5, seed=0)
    record.scalars["judgement"]["positions"] = [0, 1, 2, 3, 4]
    try:
        (sentence,) = [text for text in report_of(record).verdict if text.startswith("a ")]
        assert sentence.startswith(said)
        assert f"from {before.mean():.3f}" in sentence
    finally:
        record.scalars["influence"], record.scalars["judgement"]["positions"] = kept, positions
