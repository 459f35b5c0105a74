"""Several subjects of one evaluation from Python: other models and repeats, as the command line has them."""

from typing import Any

import pytest

import posbias as pb
from posbias.evaluation.evaluation import OUTPUTS_FILE
from posbias.results.records import ARRAYS_FILE, RECORD_FILE
from posbias.runs.running import LOCK_FILE

OPTIONS = pb.EvaluateOptions(count=7, max_tokens=2)


def test_a_list_is_compared_with_its_first_and_keeps_every_evaluation(long_llama: Any, tmp_path: Any) -> None:
    model = pb.load_model(long_llama)
    options = pb.EvaluateOptions(count=7, max_tokens=2, directory=tmp_path)
    result = pb.evaluate([model, pb.LocalResponder(model)], "key_value(pairs=4)", options=options)
    assert len(result.compared) == len(result.evaluations) == 2
    plain, again = result.evaluations.values()
    assert (plain.tables["logprob"] == again.tables["logprob"]).all()
    alone = pb.evaluate(model, "key_value(pairs=4)", options=OPTIONS)
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
def test_wrong_lists_are_refused_before_a_model_is_loaded(subject: Any, options: Any, complaint: str) -> None:
    with pytest.raises(pb.UsageError, match=complaint):
        pb.evaluate(subject, "key_value(pairs=3)", options=pb.EvaluateOptions(**options))
