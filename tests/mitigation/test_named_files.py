"""Files behind names: recipes are told apart by name, and a run whose files have changed is not taken over."""

import numpy as np
import pytest

from planted import trial_record
from posbias import EvaluateOptions, LocalResponder, MitigateOptions, UsageError, load_model
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import write_recipe
from posbias.results.result import report_of

PAIRS = "key_value(pairs=2)"


@pytest.fixture(scope="module")
def responder(long_llama):
    return LocalResponder(load_model(str(long_llama)))


def options(*methods, resume=False, **further):
    evaluation = EvaluateOptions(count=2, positions=(0, 1), generate=False, resume=resume)
    return MitigateOptions(
        methods=list(methods), evaluation=evaluation, **{"calibration": 0, "documents": 0, "short": False, **further}
    )


def test_recipes_of_one_run_are_tried_together_and_the_same_file_only_once(responder, tmp_path):
    for name, scale in (("a", 0.3), ("b", 5.0)):
        (tmp_path / name).mkdir()
        write_recipe(
            tmp_path / name / "recipe.json", MITIGATIONS.parse(f"temperature(scale={scale})"), responder.model, {}
        )
    paths = [str(tmp_path / name / "recipe.json") for name in "ab"]
    record = trial_record(PAIRS, responder, options(*paths))
    arms = {arm["name"]: arm["method"] for arm in record.scalars["arms"]}
    assert arms == {
        "unchanged": "",
        "a-recipe.json": "temperature(scale=0.3)",
        "b-recipe.json": "temperature(scale=5.0)",
    }
    assert [row[0] for row in report_of(record).summary[1].cells] == list(arms)
    record.scalars["judgement"]["recommended"] = "b-recipe.json"
    (table,) = report_of(record).folded["Use it"]
    assert any(repr(paths[1]) in line for (line,) in table.cells), "the file that was given"
    with pytest.raises(UsageError, match=r"recipe\.json is given twice"):
        trial_record(PAIRS, responder, options(paths[0], str(tmp_path / "b" / ".." / "a" / "recipe.json")))


def splined(value):
    spline = f"log_spline(values=[{value}, 0.0, 0.0, 0.0, 0.0], knots=[0, 1, 8, 64, 512])"
    return MITIGATIONS.build("key_bias", biases=spline)


@pytest.mark.parametrize("named", ["a recipe", "ordinary text"])
def test_a_run_is_taken_over_only_while_its_files_are_the_same(responder, tmp_path, named):
    recipe, text = tmp_path / "recipe.json", tmp_path / "own.txt"
    further = {
        "a recipe": {},
        "ordinary text": {"text": str(text), "documents": 2, "length": 32},
    }[named]

    def write(version):
        other = version if named != "ordinary text" else 0
        write_recipe(recipe, splined(float(other)), responder.model, {})
        words = "word" if named != "ordinary text" or not version else "Satz"
        text.write_text(" ".join(f"{words} {number} of a text of my own" for number in range(200)))

    def run():
        given = options(str(recipe), resume=True, **further)
        record = trial_record(PAIRS, responder, given, directory=tmp_path / "run")
        record.save(tmp_path / "run", overwrite=True)
        return record

    write(0)
    first, again = run(), run()
    assert first.run_id == again.run_id
    write(2)
    changed = run()
    assert changed.run_id != first.run_id
    name = "text/1" if named == "ordinary text" else "scores/logprob/1"
    assert not np.array_equal(changed.arrays[name], first.arrays[name]), "of what the files hold now"
    np.testing.assert_array_equal(changed.arrays["scores/logprob/0"], first.arrays["scores/logprob/0"])
