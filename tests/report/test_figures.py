"""Figures keep their numbers: on the page, in the picture, and in the ends of their scales."""

import base64
import io
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from posbias import Profile, UsageError
from posbias.display.figures import (
    DRAWN_POSITIONS,
    FEWEST_POINTS,
    LONG_CONTEXT,
    MEASURED,
    PAGE_NUMBERS,
    Curve,
    Figure,
    HeatMap,
    Panel,
    points_that_fit,
    profiles_figure,
)
from posbias.display.interactive import MISSING, interactive
from posbias.display.static import _draw_curves, image_of


def _map(*matrices: np.ndarray, **settings: object) -> HeatMap:
    panels = tuple(Panel(f"<{index}>", matrix) for index, matrix in enumerate(matrices))
    shape = matrices[0].shape
    return HeatMap(
        "slug",
        "Costs $5 & <more>",
        "x",
        "y",
        "value",
        panels,
        x=(0.0, shape[1] - 1.0),
        y=(0.0, shape[0] - 1.0),
        **settings,  # type: ignore[arg-type]
    )


def test_scales_end_where_the_values_do() -> None:
    values = np.array([[0.0, 0.5], [np.nan, -2.0]])
    assert _map(values).limits == (-2.0, 0.5)
    assert _map(values, scale="diverging").limits == (-2.0, 2.0)
    assert _map(values, scale="logarithmic", floor=0.01).limits == pytest.approx((-2.0, np.log10(0.5)))
    assert _map(np.zeros((2, 2))).limits == (-0.5, 0.5)
    assert _map(np.full((2, 2), np.nan)).limits == (0.0, 1.0)


def test_the_page_carries_values_and_escapes_texts() -> None:
    fragment = interactive(_map(np.array([[0.125, np.nan]]), np.ones((1, 2))), anchor="here")
    assert 'id="here"' in fragment
    assert not re.search(r"NaN|<0>|<more>", fragment)
    assert numbers_of(fragment)["title"] == "Costs $5 & <more>"


@pytest.mark.parametrize("scale", ["linear", "diverging", "logarithmic"])
def test_the_picture_has_a_colour_for_every_value(scale: str) -> None:
    from PIL import Image

    random = np.random.default_rng(0).random((4, 7))
    picture = Image.open(io.BytesIO(image_of(_map(random, random, random, random, scale=scale, floor=1e-3))))
    assert picture.size[0] > 1500
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    assert image_of(_map(np.zeros((1, 1)), scale=scale, floor=1e-3))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 panel"):
        HeatMap("slug", "title", "x", "y", "value", (), x=(0.0, 1.0), y=(0.0, 1.0))
    with pytest.raises(UsageError, match="floor > 0, got 0"):
        _map(np.ones((2, 2)), scale="logarithmic")


def numbers_of(fragment: str) -> dict[str, Any]:
    """What a chart's script reads."""
    found = re.search(r'<script type="application/json">(.*?)</script>', fragment)
    assert found is not None
    return dict(json.loads(found[1]))


def test_heat_maps_travel_as_levels_between_the_ends_of_their_scale() -> None:
    sent = numbers_of(interactive(_map(np.array([[0.0, 0.25], [np.nan, 1.0]])), anchor="here"))
    (panel,) = sent["panels"]
    levels = np.frombuffer(base64.b64decode(panel["values"]), "<u2").reshape(panel["rows"], panel["columns"])
    assert levels.tolist() == [[0, round((MISSING - 1) / 4)], [MISSING, MISSING - 1]]
    assert sent["limits"] == [0, 1]


def test_a_profile_travels_with_its_band_and_without_what_its_length_tells() -> None:
    values = np.full(8, 1 / 8)
    figure = profiles_figure("slug", "title", {}, measured={"measured": Profile(values, values / 2, values * 2)})
    sent = numbers_of(interactive(figure, anchor="here"))
    curve, flat = sent["curves"]
    assert (curve["y"], curve["low"], curve["high"]) == ([1] * 8, [0.5] * 8, [2] * 8)
    assert not {"x", "end"} & set(curve), "8 positions, 0 to 7"
    assert sent["places"][flat["place"]] == {"x": [0, 7], "end": [8, 1]}
    assert sent["farthest"] == 8


def test_long_contexts_are_shown_by_distance_from_the_end_first() -> None:
    long, short = (
        profiles_figure("slug", "title", {"theory": (Profile.normalised(np.linspace(1.0, 3.0, n)), MEASURED)})
        for n in (LONG_CONTEXT, LONG_CONTEXT - 1)
    )
    sent = [numbers_of(interactive(figure, anchor="here")) for figure in (long, short)]
    assert [each["by_distance"] for each in sent] == [True, False]
    assert [each["farthest"] for each in sent] == [LONG_CONTEXT, LONG_CONTEXT - 1], "either can be chosen"
    assert image_of(long) != image_of(short)


def test_a_long_profile_keeps_the_distances_of_the_positions_drawn() -> None:
    n_positions = 50_000
    figure = profiles_figure("slug", "title", {"theory": (Profile.normalised(np.ones(n_positions)), MEASURED)})
    sent = numbers_of(interactive(figure, anchor="here"))
    places = sent["places"][sent["curves"][0]["place"]]
    assert len(places["x"]) == len(sent["curves"][0]["y"]) < n_positions / 10
    np.testing.assert_array_equal(np.add(places["x"], places["end"]), n_positions)


def test_curves_at_the_same_places_send_them_once() -> None:
    profile = Profile.normalised(np.linspace(1.0, 2.0, 50_000))
    figure = profiles_figure("slug", "title", dict.fromkeys("abc", (profile, MEASURED)))
    sent = numbers_of(interactive(figure, anchor="here"))
    assert len(sent["places"]) == 2, "of the profiles, and of the flat line"
    assert [curve["place"] for curve in sent["curves"]] == [0, 0, 0, 1]


def test_many_curves_have_fewer_points_each_and_short_ones_keep_theirs() -> None:
    """Both ends of every curve stay, whatever is left out between them."""
    long, short = (Profile.normalised(np.linspace(1.0, 2.0, n)) for n in (100_000, 90))
    figures = [profiles_figure("slug", "title", {"a": (long, MEASURED), "b": (short, MEASURED)})]
    assert points_that_fit(figures) == DRAWN_POSITIONS
    most = points_that_fit(figures * 200)
    assert FEWEST_POINTS <= most < DRAWN_POSITIONS / 4
    assert 200 * sum(curve.numbers(most) for curve in figures[0].curves) <= PAGE_NUMBERS
    drawn, kept, _ = (curve.thinned(most) for curve in figures[0].curves)
    assert drawn.y.size <= most
    assert (drawn.x[0], drawn.x[-1], drawn.x[1], drawn.x[-2]) == (0, 99_999, 1, 99_998)
    assert drawn.from_end is not None
    np.testing.assert_array_equal(drawn.x + drawn.from_end, 100_000)
    assert kept is figures[0].curves[1]
    assert points_that_fit(figures * 10_000) == FEWEST_POINTS


def test_what_is_shaded_is_named_by_either_axis() -> None:
    figure = replace(
        profiles_figure("slug", "title", {"theory": (Profile.normalised(np.ones(LONG_CONTEXT)), MEASURED)}),
        stretches=((0.0, 200.0, "10 %"), (920.0, 1120.0, "11 %"), (1840.0, 2047.0, "12 %")),
        stretches_are="tenths",
    )
    sent = numbers_of(interactive(figure, anchor="here"))
    assert sent["x_label"].endswith("; shaded: tenths")
    assert sent["from_end"] == "distance from the end (1 is the last); shaded: tenths"
    assert image_of(figure) != image_of(replace(figure, stretches=()))
    canvas = Canvas()
    _draw_curves(canvas, figure)
    by_distance, by_position = canvas.axes
    places = {text.get_text(): text.get_position()[0] for text in by_position.texts}
    assert set(places) == {"10 %", "11 %", "12 %"}
    assert places["10 %"] < 0.1 < places["11 %"] == pytest.approx(0.5, abs=0.01)
    assert 0.9 < places["12 %"] < 1
    assert {text.get_text() for text in by_distance.texts} >= {"11 %", "12 %"}
    assert all(0 < text.get_position()[0] < 1 for text in by_distance.texts), "none across an axis"


def test_a_solid_curve_that_covers_another_is_dashed() -> None:
    x, y = np.arange(5.0), np.arange(5.0)
    below, covering, apart = (Curve(name, x, y + up, MEASURED) for name, up in (("a", 0.0), ("b", 1e-3), ("c", 1.0)))
    figure = Figure("f", "", "x", "y", (below, covering, apart))
    assert [curve.stroke.dash for curve in figure.curves] == ["solid", "dash", "solid"]


def test_an_interval_that_reaches_zero_ends_at_the_foot_of_a_logarithmic_axis() -> None:
    x, y = np.array([1.0, 2.0, 3.0]), np.array([0.1, 1.0, 10.0])
    figure = Figure("f", "", "x", "y", (Curve("a", x, y, MEASURED, np.array([0.0, 0.5, 5.0]), 2 * y),), log_axes="y")
    canvas = Canvas()
    _draw_curves(canvas, figure)
    low, high = canvas.axes[0].get_ylim()
    assert 0.05 < low < 0.1
    assert 20 < high < 40
