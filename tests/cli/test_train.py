"""`posbias train` end to end: a study in, a record and one model per member out."""

import json

import numpy as np
import pytest

from posbias import train
from posbias.results.records import read_record
from posbias.training.study import load_study

STUDY = """
task: position_copy(target=0, context=6, vocabulary=5)
model: {depth: 1, width: 8, residual: none}
optimiser: adam(learning_rate=1e-2)
train: {steps: 20, batch: 8, window: 5, evaluate_every: 10, examples: 10}
grid: {task.target: [0, 5]}
seeds: 2
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def test_a_study_leaves_a_record_and_models_that_can_be_measured(posbias, study, tmp_path):
    out = tmp_path / "run"
    result = posbias("train", study, "--out", out)
    assert result.returncode == 0, result.stderr
    record = read_record(out)
    assert record.scalars["counts"] == {"done": 4}
    done = train(load_study(study))
    np.testing.assert_array_equal(record.arrays["losses"], [each.losses for each in done.trained.members])
    assert record.arrays["evaluation_steps"].tolist() == [[0, 10, 20]] * 4
    assert record.arrays["evaluations/loss"].shape == (4, 3)
    entry = record.scalars["members"][3]
    assert (entry["name"], entry["model"]) == ("target=5 seed=1", "models/0003")
    flags = ["--prompts", "synthetic", "--length", "6", "--count", "2", "--kinds", "jacobian", "--json"]
    measured = posbias("measure", out / entry["model"], *flags)
    assert measured.returncode == 0, measured.stderr
    described = json.loads(measured.stdout)["resolved"]["model"]
    assert described["provenance"]["name"] == "target=5 seed=1"


def test_the_table_has_a_row_per_point_with_an_interval_over_seeds(posbias, study):
    result = posbias("train", study)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "4 members in 1 stack: 4 done."
    assert lines[1].startswith("Loss at the end: from ")
    header = next(number for number, line in enumerate(lines) if line.split() == ["task.target", "seeds", "loss"])
    assert lines[header + 1].split()[:4] == ["0", "2", "of", "2"]


def test_a_study_of_which_nothing_came_fails_with_a_record(posbias, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("adam(learning_rate=1e-2)", "adam(learning_rate=1e30)"))
    result = posbias("train", path, "--out", tmp_path / "run")
    assert result.returncode == 1
    assert "none of 4 members ended well; the first diverged: the mean loss over steps 0 ... 4 was" in result.stderr
    record = read_record(tmp_path / "run")
    assert record.status == "failed"
    assert record.scalars["counts"] == {"diverged": 4}
    assert [entry["model"] for entry in record.scalars["members"]] == [None] * 4
    assert not (tmp_path / "run" / "models").exists()
