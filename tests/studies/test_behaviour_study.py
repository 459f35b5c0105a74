"""What the pages say of lost middles is what the shipped records show of the models without a method."""

from pathlib import Path

import numpy as np
import pytest

from posbias.evaluation.curve import complete_samples, shape_of
from posbias.runs.records import read_record

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


@pytest.mark.parametrize(
    ("name", "told", "means", "numbers"),
    [
        ("demo_documents_accuracy", "SmolLM2 gives .48, .00, .45", [0.475, 0.0, 0.45], ("2e-09", "8e-07")),
        ("gemma_documents_accuracy", "Gemma .83, .20, .98", [0.825, 0.2, 0.975], ("5e-08", "1e-05")),
    ],
)
def test_the_u_on_documents_is_that_of_the_record(name: str, told: str, means: list[float], numbers: tuple[str, str]):
    record = read_record(STUDIES / "mitigation" / "records" / name)
    scores = record.arrays["scores/accuracy/0"]
    shape = shape_of(scores, positions=record.arrays["positions"].astype(np.float64))
    assert shape.label == "u"
    assert (f"{shape.p_flat:.0e}", f"{shape.p_u:.0e}") == numbers
    assert scores.mean(axis=0).round(3).tolist() == means
    assert told in (STUDIES / "README.md").read_text()


def test_the_forms_on_pairs_and_demonstrations_are_those_of_the_records():
    page = " ".join((STUDIES / "behaviour" / "README.md").read_text().split())
    forms = {
        path.name: read_record(path).scalars["curves"]["accuracy"]["shape"]["label"]
        for path in (STUDIES / "behaviour").iterdir()
        if (path / "record.json").exists() and path.name != "tied"
    }
    assert "u" not in forms.values(), "with 8 to 40 samples of these runs"
    assert [name for name, label in forms.items() if label == "inverted_u"] == ["demo-order"]
    assert "The demo model shows an *inverted* U" in page
    assert {name for name, label in forms.items() if "pairs" in name and label != "flat"} == {
        "demo-pairs-10",
        "tied-gemma-pairs-5",
    }
    assert "Gemma's falls from .92 to 0 in the middle and .08 at the end (p .001)" in page
    assert forms["gemma-order"] == "rising"
    assert forms["demo-documents"] == "flat"
    assert "**With 40 samples it is a U**" in page
