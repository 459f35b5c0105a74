"""The shipped study of mitigation: its tables are those of its records, and its headline that of its answers."""

import json
from importlib import util
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "studies" / "mitigation"
OTHERS = ("demo_documents", "demo_key_value_8", "demo_question_twice", "demo_shifted_distances", "qwen_key_value_40")
"""Records that the page tells of in other sections."""


def test_the_tables_of_three_models_are_those_of_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    spec = util.spec_from_file_location("models", STUDY / "models.py")
    assert spec is not None
    assert spec.loader is not None
    models = util.module_from_spec(spec)
    spec.loader.exec_module(models)
    page = (STUDY / "README.md").read_text()
    for record in sorted((STUDY / "records").iterdir()):
        if record.name in OTHERS:
            continue
        models.table(str(record))
        rows = [
            line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| `")
        ]
        assert rows
        for name, cell in rows:
            kind = name.strip("`").partition("(")[0]
            shown = [line for line in page.splitlines() if line.startswith(f"| `{kind}")]
            assert any(f" {cell} |" in line for line in shown), (record.name, name, cell)


def test_the_headline_is_that_of_samples_no_fit_has_seen() -> None:
    found = json.loads((STUDY / "question_twice_48.json").read_text())
    exact = {name: np.array(answers) for name, answers in found["exact"].items()}
    assert exact["unchanged"].shape == (48, 5)
    assert [f"{share:.2f}" for share in exact["question_twice_8"].mean(axis=0)] == [
        "0.98",
        "0.90",
        "0.96",
        "0.96",
        "0.98",
    ]
    means = {name: f"{answers.mean():.2f}" for name, answers in exact.items()}
    assert means == {"unchanged": "0.18", "question_twice_8": "0.95"}
    row = "| **question twice, second fit** | **.98** [.89, 1.00] | **.90** [.78, .95] | **.96** [.86, .99] |"
    assert row in (STUDY / "README.md").read_text()
