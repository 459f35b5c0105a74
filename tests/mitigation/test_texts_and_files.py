"""What a run reads: ordinary text, judged wherever a method may change it, and files behind names."""

import numpy as np
import pytest

import posbias as pb
from planted import PlantedMethod, PlantedResponder, trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, UsageError
from posbias.mitigation.fitting import JUDGED_TEXT
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import write_recipe
from posbias.mitigation.run import ELSEWHERE, SERVER, UNASKED
from posbias.results.result import report_of

PAIRS = "key_value(pairs=2)"
METHODS = {
    "temperature(scale=5.0)": "",
    "ms_poe(first_layer=0)": "",
    "positional_channel(channel=3)": "",
    "repeat_prompt": ELSEWHERE,
    "attention_calibration": ELSEWHERE,
    "key_bias(biases='gamma_key(alpha=1.5)', from_question=True)": ELSEWHERE,
    "context_bias(values=[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])": ELSEWHERE,
}
"""Why their change of ordinary text is not judged, if so."""


@pytest.fixture(scope="module")
def responder(long_llama):
    return LocalResponder(pb.load_model(str(long_llama)))


def options(*methods, resume=False, **further):
    evaluation = EvaluateOptions(count=2, positions=(0, 1), generate=False, resume=resume)
    given = {"calibration": 0, "documents": 0, "length": 32, "short": False, **further}
    return MitigateOptions(methods=list(methods), evaluation=evaluation, **given)


def reasons_of(record):
    return {arm["name"]: arm["text_reason"] for arm in record.scalars["arms"]}


def test_text_is_judged_or_the_page_says_why_not(responder):
    record = trial_record(PAIRS, responder, options(*METHODS, documents=16))
    assert reasons_of(record) == {"unchanged": "", **METHODS}
    before = record.arrays["text/0"]
    shown = [row[5] for row in report_of(record).summary[1].cells][1:]
    for number, (why, cell) in enumerate(zip(METHODS.values(), shown, strict=True), start=1):
        assert (f"text/{number}" in record.arrays) is (not why)
        assert cell == why if why else cell.endswith("]")
        assert why or not np.array_equal(record.arrays[f"text/{number}"], before), "it acts on text"


def test_without_windows_or_behind_a_server_the_page_says_so(responder):
    server = PlantedResponder((0.5, 0.5)), options(PlantedMethod(), documents=16)
    for tried, given, why in ((responder, options("temperature(scale=5.0)"), UNASKED), (*server, SERVER)):
        assert {*reasons_of(trial_record(PAIRS, tried, given)).values()} == {why}


def test_ms_poe_is_given_a_whole_window_as_one_passage(responder):
    model, method = responder.model, "ms_poe(first_layer=0)"
    found = trial_record(PAIRS, responder, options(method, documents=2)).arrays["text/1"]
    text = pb.load_prompts(JUDGED_TEXT, model, n_positions=32, count=2, seed=0)
    for window, nats in zip(text.token_ids, found, strict=True):
        with pb.mitigated(model, method, passages=[(0, len(window))]) as changed:
            logits = changed.outputs(changed.embed(changed.token_tensor([window.tolist()])), list(range(31))).logits[0]
        logprobs = logits.log_softmax(-1).numpy()[np.arange(31), window[1:]]
        assert nats == pytest.approx(-logprobs.mean(), rel=1e-5)


def test_recipes_of_one_run_are_tried_together_and_the_same_file_only_once(responder, tmp_path):
    paths = [tmp_path / name / "recipe.json" for name in "ab"]
    for path, scale in zip(paths, (0.3, 5.0), strict=True):
        path.parent.mkdir()
        write_recipe(path, MITIGATIONS.parse(f"temperature(scale={scale})"), responder.model, {})
    record = trial_record(PAIRS, responder, options(*map(str, paths)))
    arms = {arm["name"]: arm["method"] for arm in record.scalars["arms"]}
    assert arms == {
        "unchanged": "",
        "a-recipe.json": "temperature(scale=0.3)",
        "b-recipe.json": "temperature(scale=5.0)",
    }
    assert [row[0] for row in report_of(record).summary[1].cells] == list(arms)
    record.scalars["judgement"]["recommended"] = "b-recipe.json"
    (table,) = report_of(record).folded["Use it"]
    assert any(repr(str(paths[1])) in line for (line,) in table.cells), "the file that was given"
    with pytest.raises(UsageError, match=r"recipe\.json is given twice"):
        trial_record(PAIRS, responder, options(str(paths[0]), str(tmp_path / "b" / ".." / "a" / "recipe.json")))


@pytest.mark.parametrize(("array", "changed"), [("scores/logprob/1", (2.0, "word")), ("text/1", (0.0, "Satz"))])
def test_a_run_is_taken_over_only_while_its_files_are_the_same(responder, tmp_path, array, changed):
    recipe, text = tmp_path / "recipe.json", tmp_path / "own.txt"
    further = {"text": str(text), "documents": 2} if array == "text/1" else {}

    def run(value, word):
        spline = f"log_spline(values=[{value}, 0.0, 0.0, 0.0, 0.0], knots=[0, 1, 8, 64, 512])"
        write_recipe(recipe, MITIGATIONS.build("key_bias", biases=spline), responder.model, {})
        text.write_text(" ".join(f"{word} {number} of a text of my own" for number in range(200)))
        given = options(str(recipe), resume=True, **further)
        record = trial_record(PAIRS, responder, given, directory=tmp_path / "run")
        record.save(tmp_path / "run", overwrite=True)
        return record

    first, again, other = run(0.0, "word"), run(0.0, "word"), run(*changed)
    assert first.run_id == again.run_id != other.run_id
    assert not np.array_equal(other.arrays[array], first.arrays[array]), "of what the files hold now"
    np.testing.assert_array_equal(other.arrays["scores/logprob/0"], first.arrays["scores/logprob/0"])
