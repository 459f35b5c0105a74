"""What the pages say of lost middles is what the shipped records show of the models without a method."""

from pathlib import Path

from posbias.evaluation.curve import complete_samples, shape_of
from posbias.results.records import read_record

STUDIES = Path(__file__).parents[2] / "studies"


def _task(record) -> str:
    return record.arguments["task"].partition("(")[0]


def _forms(measure: str) -> dict[tuple[str, str], set[str]]:
    """By task and model the forms of the curves of unchanged models, of at least 40 samples of one measure."""
    found: dict[tuple[str, str], set[str]] = {}
    for directory in (STUDIES / "mitigation" / "records").iterdir():
        record = read_record(directory)
        scores = record.arrays.get(f"scores/{measure}/0")
        if scores is not None and len(complete := complete_samples(scores)) >= 40:
            model = Path(record.arguments["model"]).name.partition("-")[0].partition("2")[0]
            found.setdefault((_task(record), model), set()).add(shape_of(complete).label)
    return found


def test_a_u_is_established_on_documents_alone_and_the_pages_say_so():
    answers, scored = _forms("accuracy"), _forms("logprob")
    assert {place for place, forms in answers.items() if "u" in forms} == {
        ("documents", "demo"),
        ("documents", "gemma"),
    }
    assert {place for place, forms in scored.items() if "u" in forms} == {("documents", "demo"), ("documents", "gemma")}
    (row,) = [
        line for line in (STUDIES / "README.md").read_text().splitlines() if "lost in the middle? | Among" in line
    ]
    assert "Among four documents, yes" in row
    assert "a U is **established** on documents (40 samples, two models)" in row
    assert "on key-value pairs no U: **null**" in row
    assert not any("inverted_u" in forms for (task, _), forms in scored.items() if task == "key_value")
