"""Evaluations compared: paired over the same samples, corrected over all, and refused if they are not the same."""

from dataclasses import replace

import numpy as np
import pytest

import posbias as pb
from conftest import refused
from evaluation.replies import Says, place_of
from posbias import EvaluateOptions, evaluate
from posbias.evaluation.comparison import compare_evaluations
from posbias.evaluation.curve import contrast_of, paired_difference
from posbias.evaluation.evaluation import OUTPUTS_FILE
from posbias.results.page import html_of
from posbias.results.records import ARRAYS_FILE, RECORD_FILE
from posbias.results.result import report_of
from posbias.runs.running import LOCK_FILE

TASK = "key_value(pairs=3)"


def evaluated(name, curve, *, count=60, positions="all", seed=0):
    """Right at every position with its probability, in samples that a seed draws."""
    generator = np.random.default_rng(seed)
    chance = Says(lambda each: each.answer if generator.random() < curve[place_of(each)] else "unknown", name)
    return evaluate(chance, TASK, options=EvaluateOptions(count=count, positions=positions, seed=seed))


@pytest.fixture(scope="module")
def runs():
    return evaluated("base", (0.9, 0.3, 0.9)), evaluated("better", (0.9, 0.8, 0.9)), evaluated("same", (0.9, 0.3, 0.9))


def test_what_differs_is_paired_and_corrected_over_all(runs, tmp_path):
    result = compare_evaluations(runs)
    base, better, same = result.compared
    assert [entry.name for entry in result.compared] == ["base", "better", "same"]
    assert base.changes == {}
    assert max(better.p["mean"], better.p["worst position"]) < 0.05
    assert min(same.p.values()) > 0.05
    tables = [run.tables["correct"] for run in runs]
    middle = paired_difference(tables[1][:, 1], tables[0][:, 1])
    assert better.differences[1] == middle
    assert better.difference_p[1] == pytest.approx(6 * middle.p), "of three positions and two evaluations"
    first, second = result.verdict
    assert first.startswith("better compared with base, accuracy: better on average (+0.")
    assert "better at worst" in first
    assert second.startswith("No difference between same and base is established: mean accuracy ")
    again = pb.load_record(result.save(tmp_path / "run"))
    assert again.verdict == result.verdict
    assert again.compared == result.compared
    assert "evaluations compared" in html_of(report_of(result))


def losing(name, better):
    """Right in every third sample at the first position, and nowhere else; or nowhere at all."""
    samples = {}

    def say(request):
        number = samples.setdefault(request.group, len(samples))
        return request.answer if better and place_of(request) == 0 and number % 3 == 0 else "unknown"

    return Says(say, name)


@pytest.mark.parametrize(("count", "differs"), [(16, False), (60, True)])
def test_a_difference_that_rare_losses_could_undo_is_none(count, differs):
    """Of losses in one sample of ten, 16 samples lack all in 18 % of runs."""
    asked = EvaluateOptions(count=count)
    base, better = (evaluate(losing(name, name == "b"), TASK, options=asked) for name in "ab")
    (_, found) = pb.compare(base, better).compared
    assert contrast_of(better.tables["correct"] - base.tables["correct"] + 0.0, np.ones(3) / 3).p < 0.05 / 3
    assert (found.p["mean"] < 0.05) is differs
    assert found.changes["mean"].value.excludes(0.0) is differs


def test_finished_runs_are_compared_from_python_and_the_shell(runs, tmp_path, posbias):
    directories = [run.save(tmp_path / name) for name, run in zip(("one", "two"), runs[:2], strict=True)]
    result = pb.compare(*directories)
    assert result.compared == pb.compare(*runs[:2]).compared
    done = posbias("compare", *directories)
    assert done.returncode == 0, done.stderr
    assert result.verdict[0] in " ".join(done.stdout.split())


def test_the_samples_and_positions_that_all_have_are_compared(runs):
    fewer = evaluated("fewer", (0.9, 0.3, 0.9), count=20, positions=(0, 2))
    result = compare_evaluations([runs[0], fewer])
    assert (result.n_samples, result.positions) == (20, (0, 2))
    few = compare_evaluations([runs[0], evaluated("few", (0.9, 0.3, 0.9), count=4)])
    assert few.compared[1].changes == {}
    assert few.verdict == ("few and base are not compared: 4 samples are complete in all evaluations, 6 are needed.",)


def test_other_samples_and_single_runs_are_refused(runs, tmp_path):
    with refused("evaluations with another seed cannot be paired: 0 and 1"):
        compare_evaluations([runs[0], evaluated("other", (1, 1, 1), seed=1)])
    other = evaluate(Says(lambda _: "unknown"), "key_value(pairs=2)", options=EvaluateOptions(count=6))
    with refused("evaluations with another task cannot be paired"):
        compare_evaluations([runs[0], other])
    with refused("better: ", " has accuracy; base: ", " has none, no answer could"):
        compare_evaluations([runs[1], replace(runs[0], curves={})])
    with refused("needs at least 2 evaluations, got 1"):
        compare_evaluations(runs[:1])
    with refused("a run of evaluate is compared to another one, without theory"):
        pb.compare(runs[0], runs[1], options=pb.CompareOptions(kind="jacobian"))


def test_a_list_is_compared_with_its_first_and_keeps_every_evaluation(long_llama, tmp_path):
    model = pb.load_model(long_llama)
    options = EvaluateOptions(count=7, max_tokens=2, directory=tmp_path)
    result = evaluate([model, pb.LocalResponder(model)], "key_value(pairs=4)", options=options)
    assert len(result.compared) == len(result.evaluations) == 2
    plain, again = result.evaluations.values()
    assert (plain.tables["logprob"] == again.tables["logprob"]).all()
    alone = evaluate(model, "key_value(pairs=4)", options=EvaluateOptions(count=7, max_tokens=2))
    assert (plain.tables["logprob"] == alone.tables["logprob"]).all()
    own = {LOCK_FILE, ARRAYS_FILE, RECORD_FILE}
    assert {path.name for path in tmp_path.iterdir()} == {*result.evaluations} | own
    for name in result.evaluations:
        assert {path.name for path in (tmp_path / name).iterdir()} == {ARRAYS_FILE, RECORD_FILE, OUTPUTS_FILE}


@pytest.mark.parametrize(
    ("subject", "options", "complaint"),
    [
        (["nowhere"], {}, "give at least 2 subjects"),
        ([], {}, "give at least 2 subjects"),
        (["nowhere", "there"], {"lengths": [64]}, "lengths and orders take one subject, got nowhere, there"),
    ],
)
def test_wrong_lists_are_refused_before_a_model_is_loaded(subject, options, complaint: str):
    with refused(complaint):
        evaluate(subject, "key_value(pairs=3)", options=EvaluateOptions(**options))
