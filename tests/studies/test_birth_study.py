"""The study of untrained models: its page shows its files, and one drawn layer stands for all of a model."""

import csv
import importlib.util
from pathlib import Path

import pytest

from posbias.comparison.metrics import wasserstein
from posbias.theory.mean_field import mean_field

STUDY = Path(__file__).parents[2] / "studies" / "birth"
SHOWN = ("first_tenth", "middle_tenth", "last_tenth", "last_token")


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("birth_run", STUDY / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(name: str) -> list[dict[str, str]]:
    with (STUDY / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def thousandths(text: str) -> str:
    return f"{float(text):.3f}".removeprefix("0")


def test_the_page_has_every_model_and_measurement_of_the_files(study):
    page = (STUDY / "README.md").read_text()
    models = rows("mean_field")
    assert [row["model"] for row in models] == [name for family in study.MODELS.values() for name in family]
    for family in study.MODELS:
        pairs = [row for row in models if row["family"] == family]
        cells = ["/".join(thousandths(row[share]) for row in pairs) for share in SHOWN]
        assert f" | {' | '.join(cells)} |" in page
    assert {row["model"] for row in rows("measured")} == set(study.MEASURED)
    for row in rows("measured"):
        first, last = (
            "{} [{}, {}]".format(*(thousandths(row[f"{share}{end}"]) for end in ("", "_low", "_high")))
            for share in ("first_tenth", "last_token")
        )
        between = "/".join(thousandths(row[share]) for share in SHOWN[1:3])
        assert f"| {row['model']} | {first} | {between} | {last} |" in page


@pytest.mark.parametrize("position_table", [True, False])
def test_one_drawn_layer_stands_for_all(study, position_table):
    def config():
        return study._gpt2(32, 3, 2) if position_table else study._qwen2(32, 3, 2, 64)

    born = study.Born.of(study.describe(config()), 40)
    whole = mean_field(study.drawn(config(), 1), 40).profile.influence
    assert wasserstein(born.influence, whole) < 0.01
    row = born.row()
    assert row["layers"] == 3
    assert row["last_token"] == pytest.approx(whole[-1], abs=0.02)


def test_drawn_networks_are_as_mean_field_says_in_small(study):
    (row,) = study.measured({"tiny": lambda: study._qwen2(64, 2, 2, 128)}, 40, 6)
    assert row["w1_mean_field"] < row["w1_flat"] / 4
    assert row["last_token_low"] <= row["last_token"] <= row["last_token_high"]
