"""Every result shows the same numbers in its picture, its table, xarray, CSV and HTML; what it shows is its own."""

import base64
import csv
import re
from importlib.util import find_spec

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import posbias as pb
from conftest import record_schema
from posbias.auditing.measuring import measured_subject
from posbias.comparison import compare_subject
from posbias.decomposition import DecompositionOptions, counterfactuals
from posbias.evaluation.curve import position_curve
from posbias.profiles import Profile
from posbias.records import Record, load_record
from posbias.report.layout import store_subjects
from posbias.showing import Showing

LENGTH, COUNT = 12, 6


@pytest.fixture(scope="module")
def model(tiny_llama):
    return pb.load_model(tiny_llama)


@pytest.fixture(scope="module")
def measurement(model):
    prompts = pb.load_prompts("default", model, n_positions=LENGTH, count=COUNT)
    return pb.measure(model, prompts, kinds=["jacobian(probes=2)", "logit"])


@pytest.fixture(scope="module")
def results(model, measurement, long_llama):
    prediction = pb.predict(pb.Architecture(depth=2, mixing=0.1), LENGTH)
    scores = np.random.default_rng(0).random((8, 5))
    options = pb.EvaluateOptions(count=2, max_tokens=2)
    responder = pb.LocalResponder(pb.load_model(long_llama))
    evaluated = pb.evaluate("example_order(shots=4)", responder, options=options)
    return {
        "profile": prediction.profile,
        "prediction": prediction,
        "measurement": measurement,
        "tokens": measurement.tokens(1, theory=prediction),
        "comparison": pb.compare(prediction, measurement),
        "curve": position_curve(scores, positions=(0, 2, 4, 6, 9)),
        "evaluation": evaluated,
        "evaluated": evaluated.as_run(),
        "design": pb.design("flat", depth=2, n_positions=LENGTH),
        "decomposition": counterfactuals(
            model, measurement.prompts, interventions="no_residual", options=DecompositionOptions(kinds=("logit",))
        ),
        "record": measurement.as_run(),
        "audit": pb.audit(model, n_positions=LENGTH, prompts=2, options=pb.AuditOptions(kinds=("logit",))),
    }  # fmt: skip


NAMES = ("profile", "prediction", "measurement", "tokens", "comparison", "curve", "evaluation", "evaluated", "design",
         "decomposition", "record", "audit")  # fmt: skip
each = pytest.mark.parametrize("name", NAMES)


@each
def test_the_picture_is_drawn_on_the_axes_given_with_every_drawn_curve(name, results):
    result, axes = results[name], Figure().subplots()
    assert result.plot(axes) is axes
    shown = result.shown()
    drawn = [series for series in shown.series if series.drawn]
    assert drawn
    for series in drawn:
        line = next(line for line in axes.get_lines() if line.get_label() == series.name)
        np.testing.assert_allclose(line.get_ydata(), series.values * shown.scale)
    labels = [line.get_label() for line in axes.get_lines()]
    assert ("flat line" in labels) == (shown.quantity == "influence")


@each
def test_table_and_csv_hold_every_curve_with_its_interval(name, results, tmp_path):
    result = results[name]
    shown, table = result.shown(), result.to_pandas()
    many = len(shown.series) > 1
    assert list(table.columns) == [*(["curve"] if many else []), "position", shown.quantity, "low", "high"]
    for series in shown.series:
        rows = table[table["curve"] == series.name] if many else table
        np.testing.assert_array_equal(rows[shown.quantity], series.values)
        np.testing.assert_array_equal(rows["position"], shown.x)
        np.testing.assert_array_equal(rows["low"], series.ends[0])
    with result.to_csv(tmp_path / "table.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    values = [float(row[shown.quantity] or "nan") for row in written]
    np.testing.assert_array_equal(values, table[shown.quantity])


@each
def test_a_notebook_shows_its_title_a_table_and_a_picture(name, results):
    html = results[name]._repr_html_()
    assert results[name].shown().title.split(";")[0].split("=")[0] in html
    if name == "tokens":
        return
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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("xarray") is None, reason="xarray is not installed")
@each
def test_xarray_holds_every_curve_with_its_interval(name, results):
    shown, dataset = results[name].shown(), results[name].to_xarray()
    assert dataset[shown.quantity].dims == ("curve", shown.axis)
    for number, series in enumerate(shown.series):
        one = dataset.isel(curve=number)
        assert str(one["curve"].values) == series.name
        np.testing.assert_array_equal(one[shown.quantity], series.values)
        np.testing.assert_array_equal(one["high"], series.ends[1])


@pytest.mark.parametrize("package", ["pandas", "xarray"])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(pb.UsageError, match=rf"^{package} is not installed; pip install 'posbias\[notebook\]'$"):
        getattr(pb.uniform_profile(3), f"to_{package}")()


def test_saving_goes_by_the_ending_and_runs_become_directories(results, tmp_path):
    profile = results["profile"]
    assert imread(profile.save(tmp_path / "new" / "a.png")).ndim == 3
    assert profile.save(tmp_path / "a.svg").read_text().startswith("<?xml")
    assert profile.save(tmp_path / "a.html").read_text() == profile._repr_html_()
    assert profile.save(tmp_path / "a.csv").read_text() == profile.to_csv(tmp_path / "b.csv").read_text()
    with pytest.raises(pb.UsageError, match=r"cannot save to 'a.xls'; allowed are the endings .csv, .html, .png"):
        profile.save(tmp_path / "a.xls")
    (tmp_path / "file").write_text("")
    with pytest.raises(pb.RunError, match="cannot write"):
        profile.save(tmp_path / "file" / "a.csv")
    for name in ("prediction", "measurement", "evaluation", "decomposition", "audit"):
        record_schema().validate(results[name].as_run().as_json())
        loaded = load_record(results[name].save(tmp_path / f"{name}-0.5"))
        assert loaded.as_json()["arrays"] == results[name].as_run().as_json()["arrays"]


def test_a_profile_written_as_csv_is_a_target_of_a_design(results, tmp_path):
    profile = pb.predict(pb.Architecture(depth=2, mixing=0.3), LENGTH).profile
    found = pb.design(
        str(profile.to_csv(tmp_path / "target.csv")), over="key_bias", depth=2, mixing=0.3, n_positions=LENGTH
    )
    np.testing.assert_allclose(found.profiles[LENGTH].influence, profile.influence, rtol=1e-9)


def test_a_measurement_that_was_saved_is_reported_as_the_whole_record_would_be(measurement, tmp_path):
    loaded = load_record(measurement.save(tmp_path / "run"))
    for kind, profile in measurement.profiles.items():
        np.testing.assert_array_equal(loaded.arrays[f"measured/{kind}/influence"], profile.influence)
    assert loaded.resolved["prompts"]["sha256"] == measurement.prompts.sha256
    assert pb.write_report([loaded], tmp_path / "run").is_file()


def test_of_a_record_with_two_states_each_states_first_kind_is_drawn(measurement):
    record = Record("audit", {})
    subjects = [measured_subject(state, measurement) for state in ("trained", "initialised")]
    store_subjects(record, [compare_subject(each, generator=np.random.default_rng(0)) for each in subjects])
    shown = record.shown()
    assert [series.name for series in shown.series if series.drawn] == ["trained jacobian", "initialised jacobian"]
    assert len(shown.series) == 4


def test_what_holds_no_curves_says_so_and_still_shows_itself():
    record = Record("train", {"study": "a.yaml"})
    with pytest.raises(pb.UsageError, match="holds no curves over positions"):
        record.plot()
    assert "train, done" in record._repr_html_()


def test_unknown_ends_of_intervals_are_left_out(results):
    values, infinite = np.full(4, 0.25), np.full(4, np.inf)
    axes = Profile(values, -infinite, infinite).plot(Figure().subplots())
    assert not axes.collections
    assert Profile(values, -infinite, infinite).to_pandas()[["low", "high"]].isna().all(axis=None)
    assert results["measurement"].plot(Figure().subplots()).collections


def test_html_is_escaped():
    class Named(Showing):
        def shown(self):
            return pb.uniform_profile(3).shown().__class__("<b>&", facts={"<i>": "<script>"})

    assert "<script>" not in Named()._repr_html_()
    assert "&lt;b&gt;&amp;" in Named()._repr_html_()
