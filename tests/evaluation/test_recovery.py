"""Recovery: what is planted is found where all answers are wrong; no bound is met by luck; the rest is refused."""

import re

import numpy as np
import pytest

import posbias as pb
from conftest import refused
from evaluation.replies import Says
from evaluation.serving import chat, echo, evaluated, stand_in
from posbias import EvaluateOptions, RunError, evaluate
from posbias.evaluation.levels import Requirement
from posbias.evaluation.recovery import ALONE, BARE, gains_of, recovery_less, recovery_of
from posbias.evaluation.responders import AnswerScore, Reply, Response, ServerOptions
from posbias.results.page import html_of
from posbias.results.result import report_of
from posbias.tasks.language import LANGUAGE_TASKS

TASK = "key_value(pairs=4)"
ASKED = EvaluateOptions(count=40, positions="all", recovery=True)


def planted(name, *shares, alone=8.0):
    """Always wrong; the asked pair alone gains 8 nats or so, and among others the planted share of that."""

    def say(request):
        size = alone + int(request.group.split("-")[1]) % 5 - 2
        values = re.findall(r'": "(.*?)"', request.prompt)
        share = shares[values.index(request.answer.strip())] if len(values) > 1 else float(len(values))
        return Reply(Response("unknown", "stop"), AnswerScore((-20.0 + size * share,), (9,)))

    return Says(say, name)


def test_planted_shares_are_found_and_a_bound_holds_at_the_worst_position(tmp_path):
    found = evaluate(planted("model", 1.0, 0.3, 0.6, 0.9), TASK, options=ASKED)
    assert [each.value for each in found.recovery.by_position] == pytest.approx([1.0, 0.3, 0.6, 0.9])
    assert found.recovery.gain.value == pytest.approx(8)
    assert found.recovery.worst.low < 0.3 < found.recovery.worst.high + 1e-9
    worst = found.recovery.worst.text(".2f")
    told = f"Recovery: of what the item gains alone {worst} is left at position 1, 1.00 at position 0."
    assert found.verdict[-1] == told
    assert found.check(Requirement.parse("recovery>=0.2")).met
    assert not found.check(Requirement.parse("recovery>=0.3")).met
    again = pb.load_record(found.save(tmp_path / "run"))
    assert (again.recovery, again.verdict) == (found.recovery, found.verdict)
    assert again.record.seeds == {"samples": 0, "bootstrap": 0}
    np.testing.assert_allclose(again.tables[ALONE] - again.tables[BARE], again.tables[ALONE] + 20)
    assert "8.00 [7.54, 8.46] nats, that is left among the others" in html_of(report_of(again))


def test_two_subjects_that_are_always_wrong_are_told_apart(tmp_path):
    options = EvaluateOptions(count=40, positions="all", recovery=True, directory=tmp_path)
    found = evaluate([planted("base", 1, 0.9, 0.9, 1), planted("four bits", 1, 0.5, 0.7, 1)], TASK, options=options)
    same, less = found.verdict[0], found.verdict[-1]
    assert same.startswith("No difference between four bits and base is established: mean accuracy +0.000")
    assert less.startswith("Recovery, mean over positions: four bits keeps less of it than base (-0.150 [-0.")
    (_, entry) = found.compared
    assert [each.value for each in entry.recovery] == pytest.approx([-0.15, 0, -0.4, -0.2, 0])
    assert pb.load_record(tmp_path).compared == found.compared
    alike = [planted("a", 1, 1, 1, 1), planted("b", 1, 1, 0.7, 1)]
    few = evaluate(alike, TASK, options=EvaluateOptions(count=12, recovery=True))
    none = "Recovery, mean over positions: no difference is established to a (-0.075 [-0.075, +0."
    assert few.verdict[-1].startswith(none)


def test_neither_a_bound_nor_a_difference_is_passed_by_luck():
    """In a tenth of the samples the passage is lost; two models are alike, and lose others."""
    generator, passed, differs, runs = np.random.default_rng(0), 0, 0, 200
    for seed in range(runs):
        alone = generator.normal(6, 1.5, (24, 1))
        tables = [
            {ALONE: alone, BARE: 0 * alone, "logprob": np.where(generator.random((24, 1)) < 0.1, 0.0, alone)}
            for _ in range(2)
        ]
        passed += recovery_of(tables[0], seed=seed).worst.low > 0.9
        mean, *_ = recovery_less(*map(gains_of, tables), seed=seed, tests=1)
        differs += mean.excludes(0.0)
    assert max(passed, differs) <= 0.05 * runs


def test_each_length_has_its_recovery_and_the_lowest_must_meet_a_bound(long_model):
    reader = planted("model", *np.linspace(1, 0.2, 40))
    reader.tokenizer = long_model.tokenizer
    asked = {"lengths": (500, 1000), "positions": "spread(3)", "require": "recovery>=0.8"}
    options = EvaluateOptions(count=40, recovery=True, **asked)
    found = evaluate(reader, "key_value", options=options)
    short, long = (level.recovery.worst.value for level in found.levels)
    assert short > long
    assert (found.requirement.met, found.requirement.value) == (False, long)
    assert "recovery at worst" in html_of(report_of(found))


def test_the_passage_stands_alone_or_is_missing_in_the_same_words(long_model, tmp_path):
    own = tmp_path / "own.jsonl"
    own.write_text('{"units": ["A van.", "A boat."], "moved": 1, "question": "What?", "answer": "boat"}')
    items = [f"items(file={str(own)!r}, {how})" for how in ("depths=2", "order='reversed'")]
    prompts = {
        task: [each.text for each in next(LANGUAGE_TASKS.parse(task).stripped_examples(long_model.tokenizer, count=1))]
        for task in ("documents", "needle(tokens=900)", *items)
    }
    assert prompts["needle(tokens=900)"][1].endswith(
        "follows it.\n\n\n\nQuestion: What is the number of Zagreb?\nAnswer:"
    )
    for alone, bare in prompts.values():
        begin = next(index for index, (one, other) in enumerate(zip(alone, bare, strict=False)) if one != other)
        assert alone == bare[:begin] + alone[begin : len(alone) - len(bare) + begin] + bare[begin:]
    assert prompts["documents"][0].count("Document [") == 1


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("pairwise", {}, "pairwise: recovery needs the moved item alone with the same answer, which it lacks"),
        ("mrcr", {}, "mrcr: recovery needs the moved item alone"),
        ("rules", {}, "rules: recovery needs the moved item alone"),
        (TASK, {"score": False}, "recovery is of the right answer's log-probability, and score=False takes none"),
        (TASK, {"require": "recovery<=0.8"}, "require recovery<=0.8: allowed: recovery>="),
        (TASK, {"require": "recovery>=0.8", "recovery": False}, "recovery is measured by evaluate, with recovery=True"),
    ],
)
def test_what_has_no_recovery_is_refused(task, options, message):
    with refused(message):
        evaluate(
            planted("model", 1, 1, 1, 1), task, options=EvaluateOptions(**{"count": 6, "recovery": True, **options})
        )


def test_where_the_passage_alone_does_not_help_nothing_is_concluded():
    options = EvaluateOptions(count=20, recovery=True, require="recovery>=0")
    found = evaluate(planted("model", 1, 1, 1, 1, alone=0.1), TASK, options=options)
    undefined = "Recovery is not defined: the passage alone does not help this model (0.10 [-0.58, 0.78] nats)."
    assert found.verdict[-1] == undefined
    assert not found.requirement.met
    assert found.requirement.withheld.startswith("the passage alone does not help this model")


def test_a_text_server_that_repeats_log_probabilities_has_recovery_and_others_are_told_so():
    def echoed(index, path, body):
        values = re.findall(r'": "(.*?)"', body["prompt"])
        if "echo" not in body:
            return 200, {}, {"choices": [{"text": "unknown", "finish_reason": "stop"}]}
        prompt, _, answer = body["prompt"].rpartition(" ")
        logprob = -20.0 + 10 * (len(values) == 1) + 5 * (len(values) > 1)
        return echo([prompt, f" {answer}", "."], [None, logprob, -1.0])

    asked = {"count": 6, "positions": (0, 3), "recovery": True}
    found = evaluated(echoed, TASK, ServerOptions(kind="text"), **asked)
    assert [each.value for each in found.recovery.by_position] == [0.5, 0.5]
    with stand_in(chat("unknown")) as server:
        with pytest.raises(
            RunError, match=r"recovery needs log-probabilities .*: a chat server does not repeat prompts"
        ):
            evaluate(pb.ServerResponder(server.address, "m"), TASK, options=EvaluateOptions(**asked))
        assert server.asked == []
