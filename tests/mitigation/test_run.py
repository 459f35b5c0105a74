"""`mitigate` from a task to the page: planted effects are found, what is finished is never asked again, bad input."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import posbias as pb
from planted import PlantedMethod, PlantedResponder, trial_record
from posbias.evaluation.levels import Requirement
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import Response
from posbias.mitigation import run as running
from posbias.mitigation.fitting import FITTED_TEXT, JUDGED_TEXT
from posbias.mitigation.judging import HARM, NOTHING, RAISES, WITHHELD
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.run import UNCHANGED
from posbias.prompts.sources import default_corpus
from posbias.results.page import html_of
from posbias.results.records import read_record
from posbias.results.result import report_of
from posbias.runs.parts import clear_parts

TASK = "key_value(pairs=5)"
CURVE = (0.8, 0.3, 0.7)
HELPFUL, HARMFUL, IDLE = (PlantedMethod(curve=curve) for curve in ((0.8, 0.8, 0.8), (0.2, 0.1, 0.2), CURVE))


def options(*methods, count=24, **further):
    evaluation = {name: further.pop(name) for name in ("resume", "positions", "generate") if name in further}
    return pb.MitigateOptions(
        methods=list(methods), evaluation=pb.EvaluateOptions(count=count, **evaluation), **{"calibration": 4, **further}
    )


def names_of(record):
    return [arm["name"] for arm in record.scalars["arms"]]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A finished run, and where it lies."""
    directory = tmp_path_factory.mktemp("run")
    given = options(HELPFUL, HARMFUL, IDLE, require=Requirement.parse("worst>=0.3"))
    record = trial_record(TASK, PlantedResponder(CURVE), given, directory=directory)
    record.save(directory)
    return record, directory


def test_planted_effects_are_judged_as_planted(planted):
    record, _ = planted
    judgement = record.scalars["judgement"]
    assert [each["verdict"] for each in judgement["verdicts"]] == [RAISES, HARM, NOTHING]
    assert judgement["recommended"] == str(HELPFUL)
    assert record.scalars["requirement"]["met"]
    assert record.scalars["requirement"]["arm"] == str(HELPFUL)
    short = judgement["verdicts"][1]["effects"]["key_value(pairs=2)"]
    assert short["value"]["high"] < 0, "the harmful method harms two pairs, too"
    assert record.scalars["arms"][0]["effort"]["requests"] == 24 * 5
    np.testing.assert_array_equal(record.arrays["scores/accuracy/0"], record.arrays["scores/accuracy/3"])


def test_the_test_begins_after_the_calibration_samples(planted):
    _, directory = planted
    lines = (directory / "arms" / "unchanged" / "outputs.jsonl").read_text().splitlines()
    asked = {json.loads(line)["sample"] for line in lines}
    assert asked == {f"0-{number}" for number in range(4, 28)}


def test_a_killed_run_goes_on_and_ends_the_same(planted, tmp_path):
    whole, _ = planted

    class Failing(PlantedResponder):
        """Gives up within the first arm."""

        def respond(self, requests, **how):
            if self.requests >= 5 * 16:
                raise pb.RunError("the server went away")
            return super().respond(requests, **how)

    given = options(HELPFUL, HARMFUL, IDLE, require=Requirement.parse("worst>=0.3"))
    with pytest.raises(pb.RunError, match="went away"):
        trial_record(TASK, Failing(CURVE), given, directory=tmp_path)
    again = PlantedResponder(CURVE)
    given = options(HELPFUL, HARMFUL, IDLE, require=Requirement.parse("worst>=0.3"), resume=True)
    record = trial_record(TASK, again, given, directory=tmp_path)
    assert again.requests == 5 * (24 - 16) + 2 * 24, "of the unchanged model what was left, and its short form"
    assert record.scalars["judgement"] == whole.scalars["judgement"]
    idle = PlantedResponder(CURVE)
    assert trial_record(TASK, idle, given, directory=tmp_path).run_id == record.run_id
    assert pb.load_record(tmp_path).record.run_id == record.run_id
    with pytest.raises(pb.UsageError, match=r"evaluation.directory is not read"):
        replace(given, evaluation=replace(given.evaluation, directory=tmp_path))
    assert idle.requests == 0


def test_a_run_goes_on_with_other_methods_and_fits_nothing_again(long_llama, monkeypatch, tmp_path):
    responder = pb.LocalResponder(pb.load_model(str(long_llama)))
    run_fit, fitted = running.run_fit, []

    def counted(fit, *given, **how):
        fitted.append(fit.__name__.removeprefix("fit_"))
        return run_fit(fit, *given, **how)

    def asked(*methods, resume=True):
        evaluation = pb.EvaluateOptions(count=2, positions=(0, 1), generate=False, resume=resume)
        kept = {"documents": 0, "short": False, "fitting": pb.FitOptions(steps=1)}
        given = pb.MitigateOptions(list(methods), calibration=4, evaluation=evaluation, **kept)
        return trial_record("key_value(pairs=2)", responder, given, directory=tmp_path)

    def killed(*_, **__):
        raise pb.RunError("killed")

    monkeypatch.setattr(running, "run_fit", counted)
    with monkeypatch.context() as patched:
        patched.setattr(running, "answer", killed)
        with pytest.raises(pb.RunError, match="killed"):
            asked("temperature", "repeat_prompt", resume=False)
    record = asked("context_bias", "temperature")
    assert fitted == ["temperature", "context_bias"]
    assert names_of(record) == ["unchanged", "context_bias", "temperature"]
    record.save(tmp_path)
    clear_parts(tmp_path)  # as a finished run does
    further = asked("temperature", "context_bias", "repeat_prompt")
    fits = [{arm["name"]: arm["fitted"] for arm in each.scalars["arms"]} for each in (record, further)]
    assert fits[0].items() <= fits[1].items()
    assert fitted == ["temperature", "context_bias"]


def test_a_record_with_what_is_no_longer_measured_is_read_and_shown():
    """Influence and replies to everyday requests; the numbers stay in the record."""
    record = read_record(Path(__file__).parents[2] / "studies" / "mitigation" / "records" / "demo_documents_influence")
    record.scalars["conversations"] = {"pine": {"value": 0.1, "low": 0.05, "high": 0.2}}
    assert record.scalars["influence"]["changes"].keys() <= set(names_of(record))
    report = report_of(record)
    assert report.verdict
    assert any(line.startswith("influence under attention_sorting was not measured") for line in report.left_out)
    assert html_of(report)


@pytest.mark.parametrize("around", [(0, 1, 2, 3, 0), range(5)])
def test_calibration_and_test_must_not_overlap(around, tmp_path):
    """The first line stands there again as the last, with the same documents around the right one or with others."""
    lines = []
    for n, other in zip((0, 1, 2, 3, 0), around, strict=True):
        gold = {"text": f"Person {n} was born in town{n}, long ago", "is_gold": True}
        documents = [gold, {"text": f"Nobody was born in place {other}"}]
        lines.append(json.dumps({"question": f"q{n}", "answers": [f"town{n}"], "documents": documents}))
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(lines))
    for calibration, count, message in (
        (1, 4, r"test sample 0-4 is calibration sample 0-0 again, but the two must not"),
        (3, 9, r"holds 5 examples; 12 asked$"),
    ):
        given = options(PlantedMethod(), calibration=calibration, count=count)
        with pytest.raises(pb.UsageError, match=message):
            trial_record(f"documents(documents=2, file={str(path)!r})", PlantedResponder((0.5, 0.5)), given)


def test_bad_input_is_refused_in_one_line():
    responder = PlantedResponder(CURVE)
    for methods, message in (
        (["temperature"], "temperature needs the model itself, not one behind a server"),
        (["temperature(scale=0.2)"], "needs the model itself, not one behind a server"),
        ([IDLE, IDLE], "is given twice"),
        ([], "no method to try"),
    ):
        with pytest.raises(pb.UsageError, match=message):
            trial_record(TASK, responder, pb.MitigateOptions(methods=methods, evaluation=pb.EvaluateOptions(count=6)))
    scored = pb.EvaluateOptions(count=6, generate=False)
    for possible in ("worst>=-0.6", "spread<=0.2", "mean<=0"):
        pb.MitigateOptions(evaluation=scored, require=Requirement.parse(possible))


def test_inside_a_model_at_strength_0_nothing_changes_and_a_fit_is_kept(long_llama, tmp_path, capsys):
    responder = pb.LocalResponder(pb.load_model(str(long_llama)), LocalOptions())
    none = "temperature(scale=0.3, strength=0.0)"
    given = pb.MitigateOptions(
        methods=[none, "temperature", "repeat_prompt"],
        calibration=4,
        evaluation=pb.EvaluateOptions(count=6, positions=(0, 1), generate=False),
        documents=6,
        length=32,
    )
    record = trial_record("key_value(pairs=2)", responder, given, directory=tmp_path)
    assert record.scalars["judgement"]["measure"] == "logprob"
    np.testing.assert_array_equal(record.arrays["scores/logprob/0"], record.arrays["scores/logprob/1"])
    np.testing.assert_array_equal(record.arrays["text/0"], record.arrays["text/1"])
    assert np.abs(record.arrays["text/0"] - np.log(300)).max() < 1, "a model that has learnt nothing"
    assert record.scalars["arms"][2]["fitted"]["calibration_samples"] == 4
    assert "with 3 methods" in capsys.readouterr().err
    recipe = next((tmp_path / "arms").glob("temperature-*/recipe.json"))
    assert json.loads(recipe.read_text())["method"].startswith("temperature(scale=")
    with pytest.raises(pb.UsageError, match=r"was fitted to 4 of the 6 test samples \(0-0 first\); take others"):
        trial_record("key_value(pairs=3)", responder, replace(given, methods=[str(recipe)], calibration=0))
    assert responder.model.intervention is None


def test_fits_read_no_text_that_judges():
    judged, fitted = ({group.name for group in default_corpus(text[8:])} for text in (JUDGED_TEXT, FITTED_TEXT))
    assert judged.isdisjoint(fitted)
    assert len(judged) == 2
    with pytest.raises(pb.UsageError, match="fits read the default corpus, too; give a file, or leave it out"):
        pb.MitigateOptions(text="default#austen")


def test_the_page_says_how_a_recommended_method_is_put_to_use(planted):
    record = copy.deepcopy(planted[0])
    (arm,) = (arm for arm in record.scalars["arms"] if arm["name"] == record.scalars["judgement"]["recommended"])
    assert "Use it" not in report_of(record).folded, "a planted method is on no model"
    for spelling, needing, said in (
        ("temperature(scale=0.2)", False, ["pb.mitigated(model, 'planted"]),
        ("adapter(weights='ab')", False, ["install()", "posbias export . --to adapter --gguf ", "--merged "]),
        ("context_bias(values=[[1.0, 2.", False, ["passages="]),
        ("key_bias(values=[[1.0, 2.", True, ["passages="]),
        ("repeat_prompt(strength=0.5)", False, ["The prompt twice"]),
    ):
        arm |= {"method": spelling, "needs_passages": needing}
        (table,) = report_of(record).folded["Use it"]
        for (line,), words in zip(table.cells, said, strict=True):
            assert words in line


def test_all_methods_are_judged_in_one_run(long_llama, tmp_path):
    fitting = pb.FitOptions(steps=1)
    given = options(count=2, calibration=6, generate=False, documents=1, fitting=fitting, positions=(0, 2))
    given = replace(given, methods="all", short=False)
    responder = pb.LocalResponder(pb.load_model(str(long_llama)), LocalOptions())
    record = trial_record("key_value(pairs=3)", responder, given, directory=tmp_path)
    said = " was not tried: "
    left_out = {text.partition(said)[0] for text in record.scalars["left_out"] if said in text}
    judged = set(names_of(record)) - {UNCHANGED}
    assert judged | left_out == set(MITIGATIONS)
    assert {each["name"] for each in record.scalars["judgement"]["verdicts"]} == judged


SINGLE = 800
"""Characters that only a repeated prompt exceeds."""


class Spoilt(PlantedResponder):
    """Responds otherwise to every so many prompts, of those that stand there twice or of those that do not."""

    def __init__(self, curve, response, *, twice=True, every=1):
        super().__init__(curve)
        self.response, self.twice, self.every = response, twice, every

    def respond(self, requests, *, generate=True, score=False):
        found = super().respond(requests, generate=generate, score=score)
        return [
            replace(reply, response=self.response)
            if generate and (len(request.text) > SINGLE) == self.twice and not number % self.every
            else reply
            for number, (request, reply) in enumerate(zip(requests, found, strict=True))
        ]


def test_a_method_under_which_answers_are_empty_is_named():
    record = trial_record(TASK, Spoilt(CURVE, Response("", "stop")), options("repeat_prompt", HELPFUL))
    empty = "120 of 120 answers cannot be judged, more than 10%: 120 empty"
    assert [caveat for caveat in report_of(record).caveats if "empty" in caveat] == [f"repeat_prompt: {empty}"]
    verdict = record.scalars["judgement"]["verdicts"][0]
    assert (verdict["verdict"], verdict["withheld"]) == (WITHHELD, f"with it, {empty}")


CUT = Response("The value that belongs to the", "length")


def test_no_verdict_rests_on_answers_that_a_method_cuts_off_more_often():
    """Less than a tenth, and yet what shows as harm."""
    cut = Spoilt((0.8, 0.8), CUT, every=12)
    (verdict,) = trial_record(TASK, cut, options("repeat_prompt", by="accuracy")).scalars["judgement"]["verdicts"]
    assert verdict["verdict"] == WITHHELD
    assert verdict["withheld"].startswith("0% of the answers were cut off without it, ")


def test_no_verdict_rests_on_answers_that_were_cut_off():
    """A first trial: with 8 tokens .17 to .50, 'Apply', with 32 tokens nothing."""

    def tried(**how):
        given = options("repeat_prompt", documents=0, short=False, **how)
        return trial_record(TASK, Spoilt((0.6, 0.6), CUT, twice=False, every=2), given)

    cut = tried()
    judgement = cut.scalars["judgement"]
    assert judgement["measure"] == "logprob"
    assert "answers cannot be judged" in cut.scalars["choice"]["undecided"]
    assert any(caveat.startswith("No verdict by answers: ") for caveat in report_of(cut).caveats)
    assert judgement["verdicts"][0]["verdict"] == NOTHING
    unchanged, whole = (arm["reading"] for arm in cut.scalars["arms"])
    assert unchanged["unjudged"]["cut_off"] == unchanged["answers"] / 2
    assert whole["unjudged"] == {}
    by_answers = tried(by="accuracy")
    (verdict,) = by_answers.scalars["judgement"]["verdicts"]
    assert verdict["verdict"] == WITHHELD
    assert verdict["gains"] == {}
    assert by_answers.scalars["judgement"]["recommended"] is None
    page = report_of(by_answers)
    assert page.verdict[0] == "No verdict by answers for any method (repeat_prompt)."
    assert page.verdict[1].startswith("Without it, ")
    assert "cut off too early" in page.verdict[1]
    assert WITHHELD in html_of(page)
    even = tried(by="accuracy", require=Requirement.parse("spread<=1")).scalars["requirement"]
    assert (even["met"], even["low"], even["high"]) == (False, None, None), "by the answers it would be met"
    assert "cut off" in even["withheld"]
    with pytest.raises(pb.UsageError, match=r"by must be .*accuracy.*logprob.*, got 'starts'"):
        options(by="starts")
