"""`evaluate`: every sample at every position, judged by the task's rule; what is finished is never asked again."""

import json

import numpy as np
import pytest

import posbias as pb
from evaluation.replies import Says, place_of
from posbias import EvaluateOptions, LocalResponder, RunError, UsageError, evaluate
from posbias.evaluation.evaluation import write_outputs
from posbias.evaluation.page import statements_of, tables_of
from posbias.evaluation.responders import AnswerScore, Reply, Response
from posbias.results.page import html_of
from posbias.results.result import report_of
from posbias.tasks.language import LANGUAGE_TASKS, KeyValue


class Oracle(Says):
    """Knows every answer whose place lies in `known`, and gives up after `patience` requests."""

    def __init__(self, known=(), patience=None, scores=True):
        super().__init__(self.told, "oracle")
        self.known, self.patience, self.scores = set(known), patience, scores
        self.asked = []

    def told(self, request):
        if self.patience is not None and len(self.asked) >= self.patience:
            raise RunError("the server went away")
        self.asked.append(request)
        place = place_of(request)
        text = f"It is {request.answer} ." if place in self.known else "unknown"
        told = AnswerScore((-0.5 - place, -1.0), (1 + place, 1)) if self.scores else None
        return Reply(Response(text, "stop", prompt_tokens=100 + place), told)

    def counts(self):
        return {"tokens_processed": len(self.asked), "cost": len(self.asked) / 4}

    def describe(self):
        return {**super().describe(), **self.counts()}


TASK = "key_value(pairs=5)"


def test_the_table_is_right_where_the_model_knows_and_wrong_elsewhere():
    found = evaluate(Oracle(known=(0, 4)), TASK, options=EvaluateOptions(count=8))
    assert found.positions == (0, 1, 2, 3, 4)
    np.testing.assert_array_equal(found.tables["correct"], np.tile([1.0, 0, 0, 0, 1], (8, 1)))
    np.testing.assert_array_equal(found.tables["logprob"], np.tile(-1.5 - np.arange(5.0), (8, 1)))
    np.testing.assert_array_equal(found.tables["first_rank"], np.tile(1 + np.arange(5.0), (8, 1)))
    np.testing.assert_array_equal(found.measures["logprob"], found.tables["logprob"] / 2)
    np.testing.assert_array_equal(found.tables["prompt_tokens"][0], 100 + np.arange(5.0))
    assert found.curves["accuracy"].shape.label == "u"
    assert found.curves["accuracy"].middle_loss.value.value == 1
    assert len(found.outputs) == 40
    assert not found.skipped


def test_the_subject_is_a_responder_a_loaded_model_or_the_name_of_one(long_model, long_llama):
    options = EvaluateOptions(count=1, max_tokens=1)
    tables = [
        evaluate(subject, "key_value(pairs=4)", options=options).tables["logprob"]
        for subject in (LocalResponder(long_model), long_model, long_llama, str(long_llama))
    ]
    assert not np.isnan(tables[0]).any()
    for table in tables[1:]:
        np.testing.assert_array_equal(table, tables[0])
    with pytest.raises(UsageError, match="no tokenizer"):
        evaluate(long_model.network, TASK)
    with pytest.raises(UsageError, match="'nowhere/at-all'"):
        evaluate("nowhere/at-all", TASK)
    with pytest.raises(UsageError, match=r"task must be .*, got Oracle"):
        evaluate(TASK, Oracle())


@pytest.mark.parametrize(
    ("spelled", "positions"),
    [
        ("all", tuple(range(20))),
        ("spread", (0, 2, 5, 7, 10, 12, 14, 17, 19)),
        ((3, 1), (1, 3)),
        ("spread(3)", (0, 10, 19)),
        ("spread(2)", (0, 19)),
        ("spread(1)", (0,)),
        (" 7,0 ", (0, 7)),
    ],
)
def test_positions_are_spelled_as_in_the_shell(spelled, positions):
    assert EvaluateOptions(positions=spelled).positions_of(KeyValue(pairs=20)) == positions


@pytest.mark.parametrize("spelled", ["some", "0,x", "spread(x)", "spread(0)", "spread(1,2)", "20", "0,0", "", "1.0"])
def test_positions_that_are_none_are_refused(spelled):
    with pytest.raises(UsageError, match="position"):
        EvaluateOptions(positions=spelled).positions_of(KeyValue(pairs=20))


def test_a_run_whose_server_goes_away_keeps_what_is_finished_and_goes_on(tmp_path):
    options = EvaluateOptions(count=6, together=2, directory=tmp_path)
    with pytest.raises(RunError, match="went away"):
        evaluate(Oracle(known=(1,), patience=17), TASK, options=options)
    again = Oracle(known=(1,))
    resumed = evaluate(again, TASK, options=EvaluateOptions(count=6, together=2, directory=tmp_path, resume=True))
    assert resumed.reused == 2
    assert len(again.asked) == 4 * 5
    whole = evaluate(Oracle(known=(1,)), TASK, options=EvaluateOptions(count=6))
    for name, table in whole.tables.items():
        np.testing.assert_array_equal(resumed.tables[name], table)
    assert resumed.outputs == whole.outputs
    assert resumed.responder == whole.responder  # both sittings' work; of what was given up nothing came


@pytest.mark.parametrize(
    "changed", [{"seed": 1}, {"max_tokens": 9}, {"positions": (0, 1, 2, 3)}, {"score": False}], ids=str
)
def test_other_settings_never_take_over_finished_samples(changed, tmp_path):
    evaluate(Oracle(), TASK, options=EvaluateOptions(count=3, directory=tmp_path))
    options = EvaluateOptions(**{"count": 3, "directory": tmp_path, "resume": True, **changed})
    again = Oracle(scores=options.score)
    if options.score:
        assert evaluate(again, TASK, options=options).reused == 0


def test_without_scores_or_without_texts_the_other_measures_stand_alone():
    spoken = evaluate(Oracle(known=(0,), scores=False), TASK, options=EvaluateOptions(count=6))
    assert list(spoken.curves) == ["accuracy"]
    forced = evaluate(Oracle(), TASK, options=EvaluateOptions(count=6, generate=False))
    assert list(forced.curves) == ["logprob", "reciprocal_rank"]
    assert np.isnan(forced.tables["correct"]).all()
    with pytest.raises(UsageError, match="nothing to do"):
        EvaluateOptions(generate=False, score=False)
    with pytest.raises(RunError, match="no answer could be scored"):
        evaluate(Oracle(scores=False), TASK, options=EvaluateOptions(count=2, generate=False))


def test_the_record_holds_the_tables_and_places_passages(tmp_path):
    found = evaluate(Oracle(known=(0, 4)), TASK, options=EvaluateOptions(count=14))
    write_outputs(found.outputs, tmp_path)
    found.save(tmp_path)
    loaded = pb.load_record(tmp_path)
    for name, table in found.tables.items():
        np.testing.assert_array_equal(loaded.tables[name], table)
    unlike = {"record", "tables", "outputs"}
    assert {name: vars(loaded)[name] for name in vars(loaded).keys() - unlike} == {
        name: vars(found)[name] for name in vars(loaded).keys() - unlike
    }
    assert loaded.verdict == found.verdict
    assert loaded.title == f"oracle: {TASK}"
    rows = [json.loads(line) for line in (tmp_path / "outputs.jsonl").read_text().splitlines()]
    assert [row["position"] for row in rows[:5]] == [0, 1, 2, 3, 4]
    assert rows[0]["answers"][0] in rows[0]["text"]
    assert "file" not in rows[0], "it was drawn"
    relevance = [0.5, 0.3, 0.1, 0.06, 0.04]
    placed = pb.place(relevance, tmp_path)
    assert (placed.measure, placed.interpolated) == ("accuracy", False)
    assert set(placed.estimated[:1] + placed.estimated[-1:]) == {0, 1}
    probable = pb.place(relevance, loaded, options=pb.PlaceOptions(by="logprob"))
    assert probable.curve[0] == pytest.approx(np.exp(loaded.tables["logprob"]).mean(axis=0)[0])
    with pytest.raises(UsageError, match="has no 'beauty'; it has: accuracy, logprob, reciprocal_rank"):
        pb.place(relevance, loaded, options=pb.PlaceOptions(by="beauty"))


def test_the_report_says_what_the_curves_say():
    found = evaluate(Oracle(known=(0, 4)), TASK, options=EvaluateOptions(count=8))
    record = found.record
    assert any("accuracy: a U: both ends are above the middle" in text for text in statements_of(found))
    titles = [table.title for table in tables_of(found)]
    assert titles[0] == f"{TASK}: by position of the answer (0 ... 4)"
    assert "accuracy: against the best position" in titles
    page = html_of(report_of(record))
    assert "1.000 [0.676, 1.000]" in page


def test_closed_book_has_one_position():
    task = "documents(documents=4, setting='closed_book')"
    found = evaluate(Oracle(known=(0,)), task, options=EvaluateOptions(count=3))
    assert found.positions == (0,)
    assert found.outputs[0]["position"] is None
    assert found.outputs[0]["condition"] == "closed_book"
    assert found.tables["correct"].tolist() == [[1], [1], [1]]


def test_what_is_too_long_is_counted_and_skipped_and_never_cut(long_model):
    responder = LocalResponder(long_model)
    whole = evaluate(responder, "key_value(pairs=3)", options=EvaluateOptions(count=2, max_tokens=2))
    lengths = whole.tables["prompt_tokens"]
    assert not whole.skipped
    responder.max_positions = int(lengths.max()) + 1
    reason = r"No example was answered: all 6 are too long for the model \(the first: \d+ tokens and "
    with pytest.raises(RunError, match=reason):
        evaluate(responder, "key_value(pairs=3)", options=EvaluateOptions(count=2, max_tokens=2))
    with pytest.raises(RunError, match=reason):  # room for the prompts, not for the answers that are scored
        evaluate(responder, "key_value(pairs=3)", options=EvaluateOptions(count=2, generate=False))


def test_of_samples_that_are_partly_too_long_the_answered_ones_are_counted(long_model):
    responder, task = LocalResponder(long_model), "documents(documents=2)"
    whole = evaluate(responder, task, options=EvaluateOptions(count=3, max_tokens=2))
    lengths = whole.tables["prompt_tokens"].max(axis=1)
    responder.max_positions = int(lengths.max()) + 40
    longest = 40 + int(lengths.max() - lengths.min())
    found = evaluate(responder, task, options=EvaluateOptions(count=3, max_tokens=longest, score=False))
    lost = int((lengths > lengths.min()).sum())
    assert 0 < lost < 3
    assert found.skipped == {0: lost, 1: lost}
    record = found.record
    assert record.scalars["skipped"] == {"0": lost, "1": lost}
    assert np.isnan(found.tables["correct"]).sum() == 2 * lost
    assert sum(row["finish"] == "skipped" and row["text"] is None for row in found.outputs) == 2 * lost
    assert "What was left out" in html_of(report_of(record))
    said = [text for text in report_of(record).caveats if "--max-tokens" in text]
    assert [text.split(" generated")[0] for text in said] == [f"{record.scalars['cut_off']} of {6 - 2 * lost}"]


def test_a_rank_that_is_sometimes_unknown_makes_no_curve():
    class Listing(Oracle):
        """Knows no rank beyond the third, as servers that list the most probable tokens."""

        def told(self, request):
            reply = super().told(request)
            ranks = tuple(rank if rank <= 3 else None for rank in reply.score.ranks)
            return Reply(reply.response, AnswerScore(reply.score.logprobs, ranks))

    found = evaluate(Listing(), TASK, options=EvaluateOptions(count=6))
    assert list(found.curves) == ["accuracy", "logprob"]
    with pytest.raises(UsageError, match="it has: accuracy, logprob"):
        pb.place([1.0, 0.5], found, options=pb.PlaceOptions(by="reciprocal_rank"))


def test_a_local_models_scores_are_its_own_log_probabilities(long_model):
    import torch

    found = evaluate(long_model, "key_value(pairs=4)", options=EvaluateOptions(count=3))
    task = LANGUAGE_TASKS.parse("key_value(pairs=4)")
    example = list(task.examples(long_model.tokenizer, count=3))[6]
    prompt, answer = (
        long_model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (example.prompt, example.target)
    )
    with torch.no_grad():
        logits = long_model.network(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
    expected = sum(float(logits[len(prompt) + step - 1, token]) for step, token in enumerate(answer))
    assert found.tables["logprob"][1, 2] == pytest.approx(expected, abs=1e-4)
    assert found.tables["gold_token"][1, 2] == example.gold_token
    assert example.gold_position == 2
