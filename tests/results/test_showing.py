"""Every result shows the same numbers in its picture, its table, CSV and HTML; what it shows is its own."""

import base64
import csv
import re

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import posbias as pb
from conftest import record_schema
from posbias import DecomposeOptions, DesignOptions, Profile, Record, TrainOptions, decompose, train
from posbias.cli.output import record_document
from posbias.evaluation.curve import position_curve
from posbias.results.records import plain, read_record
from posbias.results.result import result_of, verdict
from posbias.results.showing import FILES, Showing
from posbias.training.study import study_of

LENGTH, COUNT = 12, 6
STUDY = {
    "task": "position_copy(target=0, context=3)",
    "model": {"depth": 1, "width": 8},
    "train": {"steps": 4, "window": 1, "batch": 8, "examples": 0},
    "grid": {"task.target": [0, 2]},
    "seeds": 2,
}


@pytest.fixture(scope="module")
def model(tiny_llama):
    return pb.load_model(tiny_llama)


@pytest.fixture(scope="module")
def measurement(model):
    prompts = pb.load_prompts("default", model, n_positions=LENGTH, count=COUNT)
    return pb.measure(model, prompts, kinds=["jacobian(probes=2)", "logit"])


@pytest.fixture(scope="module")
def results(model, measurement, long_llama, tmp_path_factory):
    prediction = pb.predict(pb.Architecture(depth=2, mixing=0.1), LENGTH)
    scores = np.random.default_rng(0).random((8, 5))
    options = pb.EvaluateOptions(count=2, max_tokens=2)
    evaluated = pb.evaluate(long_llama, "key_value(pairs=4)", options=options)
    audit = pb.audit(model, n_positions=LENGTH, prompts=2, options=pb.AuditOptions(kinds=("logit",)))
    return {
        "profile": prediction.profile,
        "prediction": prediction,
        "measurement": measurement,
        "attention": pb.attention(model, measurement.prompts),
        "comparison": pb.compare(prediction, measurement),
        "curve": position_curve(scores, positions=(0, 2, 4, 6, 9)),
        "evaluation": evaluated,
        "design": pb.design("flat", options=DesignOptions(depth=2, n_positions=LENGTH)),
        "training": train(study_of(STUDY, name="copies")),
        "decomposition": decompose(
            model, measurement.prompts, options=DecomposeOptions(interventions="no_residual", kinds=("logit",))
        ),
        "loaded": result_of(measurement.as_run()),
        "audit": audit,
        "audited": pb.load_record(audit.save(tmp_path_factory.mktemp("run"))),
    }  # fmt: skip


NAMES = ("profile", "prediction", "measurement", "attention", "comparison", "curve", "evaluation",
         "design", "training", "decomposition", "loaded", "audit", "audited")  # fmt: skip
RUNS = tuple(name for name in NAMES if name not in ("profile", "curve"))
each = pytest.mark.parametrize("name", NAMES)
FIRST_BYTES = {".csv": b"", ".html": b"<!DOCTYPE html>", ".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@each
def test_the_picture_is_drawn_on_the_axes_given_with_every_drawn_curve(name, results):
    result, axes = results[name], Figure().subplots()
    assert result.plot(axes) is axes
    shown = result.shown()
    drawn = [curve for curve in shown.curves if curve.drawn]
    assert drawn
    for curve in drawn:
        line = next(line for line in axes.get_lines() if line.get_label() == curve.name)
        np.testing.assert_allclose(line.get_ydata(), curve.y * shown.scale)
    labels = [line.get_label() for line in axes.get_lines()]
    assert ("flat line" in labels) == (shown.quantity == "influence")


@each
def test_table_and_csv_hold_every_curve_with_its_interval(name, results, tmp_path):
    result = results[name]
    shown, table = result.shown(), result.to_pandas()
    many = len(shown.curves) > 1
    assert list(table.columns) == [*(["curve"] if many else []), shown.axis, shown.quantity, "low", "high"]
    assert shown.axis == {"attention": "layer", "training": "step"}.get(name, "position")
    for curve in shown.curves:
        rows = table[table["curve"] == curve.name] if many else table
        np.testing.assert_array_equal(rows[shown.quantity], curve.y)
        np.testing.assert_array_equal(rows[shown.axis], shown.x)
        np.testing.assert_array_equal(rows["low"], curve.ends[0])
    with result.to_csv(tmp_path / "table.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    values = [float(row[shown.quantity] or "nan") for row in written]
    np.testing.assert_array_equal(values, table[shown.quantity])


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_its_tables_in_latex(name, results):
    tables = results[name].to_latex()
    assert tables.count(r"\begin{tabular}") == tables.count(r"\end{tabular}") >= 1


@each
def test_a_notebook_shows_its_title_a_table_and_a_picture(name, results):
    html = results[name]._repr_html_()
    assert results[name].shown().title.split(";")[0].split("=")[0] in html
    assert html.count("<tr>") >= 2
    picture = base64.b64decode(re.search(r"base64,([^\"]+)\"", html)[1])
    assert picture.startswith(b"\x89PNG")
    assert len(html) < 100_000


@each
def test_repr_is_one_short_line(name, results):
    text = repr(results[name])
    assert "\n" not in text
    assert text.startswith(type(results[name]).__name__ + "(")
    assert "array(" not in text
    assert len(text) < 500


def test_without_pandas_the_extra_that_brings_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(pb.UsageError, match=r"^pandas is not installed; pip install 'posbias\[notebook\]'$"):
        pb.Profile.uniform(3).to_pandas()


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        (name, ending)
        for place, name in enumerate(NAMES)
        for ending in (FILES if place == 0 else FILES[place % 5 :][:1])
    ],
)
def test_a_result_is_saved_as_the_file_that_its_ending_says(name, ending, results, tmp_path):
    path = results[name].save(tmp_path / "new" / f"a{ending}")
    assert path.is_file()
    assert path.read_bytes().startswith(FIRST_BYTES[ending])
    assert [each.name for each in path.parent.iterdir()] == [f"a{ending}"]


@each
def test_without_such_an_ending_a_run_becomes_a_directory_and_all_else_is_refused(name, results, tmp_path):
    result = results[name]
    for ending in (".xls", ".jpeg", ".parquet", ".PNGS"):
        with pytest.raises(
            pb.UsageError, match=rf"cannot save to 'a{ending}'; the ending must be one of .csv, .html, .png"
        ):
            result.save(tmp_path / f"a{ending}")
        assert not (tmp_path / f"a{ending}").exists()
    if name not in RUNS:
        return
    assert read_record(result.save(f"{tmp_path}/model.gguf/")).verb
    assert read_record(result.save(tmp_path / f"{name}-llama-3.1")).verb
    record_schema().validate(result.as_run().as_json())
    record_schema().validate(plain(record_document(result.as_run())))
    loaded = read_record(result.save(tmp_path / f"{name}-0.5"))
    assert loaded.as_json()["arrays"] == result.as_run().as_json()["arrays"]
    again = result_of(loaded)
    assert result.verdict == again.verdict != ()
    assert [curve.name for curve in again.shown().curves] == [curve.name for curve in result.shown().curves]


def test_a_measurement_saved_from_a_notebook_is_the_record_that_the_shell_writes(
    model, measurement, tiny_llama, posbias, tmp_path
):
    """Hashes of the weights, dtype, device, mixing, intervals."""
    flags = ["--length", LENGTH, "--count", COUNT, "--kinds", "jacobian(probes=2),logit", "--out", tmp_path / "shell"]
    assert posbias("measure", tiny_llama, *flags).returncode == 0
    saved, shell = read_record(measurement.save(tmp_path / "notebook")), read_record(tmp_path / "shell")
    assert saved.resolved["model"] == shell.resolved["model"] == model.describe()
    assert {"weights_sha256", "dtype", "device"} <= set(saved.resolved["model"])
    assert set(saved.arrays) == set(shell.arrays)
    for name, array in shell.arrays.items():
        np.testing.assert_array_equal(saved.arrays[name], array)
    assert set(shell.resolved) - set(saved.resolved) == {"fingerprint"}
    assert set(shell.scalars) == set(saved.scalars)


def test_where_a_directory_stands_a_run_is_written_into_it_whatever_its_name(results, tmp_path):
    (tmp_path / "run.png").mkdir()
    assert read_record(results["loaded"].save(tmp_path / "run.png")).run_id == results["loaded"].record.run_id
    with pytest.raises(pb.UsageError, match=r"^cannot save to 'run.png', a directory$"):
        results["profile"].save(tmp_path / "run.png")


@pytest.mark.parametrize("name", ["audit", "audited"])
def test_an_audit_answers_first_and_shows_the_model_as_trained_before_it_at_initialisation(name, results):
    html, record = results[name]._repr_html_(), results["audited"]
    assert results[name].verdict == record.verdict == verdict(record)
    places = [html.index(text) for text in (record.verdict[0][:20], "logit gradient, as", "logit gradient, at", "<img")]
    assert places == sorted(places)
    names = [curve.name for curve in results[name].shown().curves]
    assert names[0] == "logit gradient, as trained"
    assert names == sorted(names, key=lambda each: ("at initialisation" in each, "logit" not in each))


def test_a_failed_run_shows_why_and_has_no_verdict():
    run = result_of(Record("audit", {}, status="failed", error="no memory left"))
    assert "no memory left" in run._repr_html_()
    with pytest.raises(pb.UsageError, match="holds no curves over positions"):
        run.plot()
    with pytest.raises(pb.UsageError, match="did not finish"):
        _ = run.verdict


def test_a_trained_study_shows_the_mean_loss_of_the_seeds_by_point_and_is_saved_beside_its_models(tmp_path):
    study = study_of(STUDY, name="copies")
    run = train(study, options=TrainOptions(directory=tmp_path / "run"))
    first, second = run.shown().curves
    assert (first.name, second.name) == ("target=0", "target=2")
    losses = [outcome.losses for outcome in run.trained.members]
    np.testing.assert_allclose(second.y, np.mean(losses[2:], axis=0))
    assert repr(run) == "StudyRun(copies, 4 members: 4 done)"
    record = read_record(run.save(tmp_path / "run"))
    assert (record.verb, record.scalars["members"][3]["model"]) == ("train", "models/0003")


def test_a_profile_written_as_csv_is_a_target_of_a_design(results, tmp_path):
    profile = pb.predict(pb.Architecture(depth=2, mixing=0.3), LENGTH).profile
    found = pb.design(
        str(profile.to_csv(tmp_path / "target.csv")),
        over="key_bias",
        options=DesignOptions(depth=2, mixing=0.3, n_positions=LENGTH),
    )
    np.testing.assert_allclose(found.profiles[LENGTH].influence, profile.influence, rtol=1e-9)


def test_of_several_results_each_goes_by_the_name_that_it_has_alone(measurement):
    axes = Figure().subplots()
    for result in (measurement, pb.predict(pb.Architecture(depth=2), LENGTH)):
        result.plot(axes)
    names = [line.get_label() for line in axes.get_lines()]
    assert names == ["Jacobian", "logit gradient", "flat line", "published residual rollout"]
    stored = result_of(measurement.as_run())
    assert list(stored.to_pandas()["curve"].unique()) == list(measurement.to_pandas()["curve"].unique())


def test_a_new_picture_has_a_size_of_its_own():
    figure = pb.Profile.uniform(3).plot().figure
    assert tuple(figure.get_size_inches()) == (6.4, 2.8)
    pyplot.close(figure)


def test_unknown_ends_of_intervals_are_left_out(results):
    values, infinite = np.full(4, 0.25), np.full(4, np.inf)
    axes = Profile(values, -infinite, infinite).plot(Figure().subplots())
    assert not axes.collections
    assert Profile(values, -infinite, infinite).to_pandas()[["low", "high"]].isna().all(axis=None)
    assert results["measurement"].plot(Figure().subplots()).collections


def test_html_is_escaped():
    class Named(Showing):
        def shown(self):
            return pb.Profile.uniform(3).shown().__class__("<b>&", facts={"<i>": "<script>"})

    assert "<script>" not in Named()._repr_html_()
    assert "&lt;b&gt;&amp;" in Named()._repr_html_()
