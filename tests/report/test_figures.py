"""Figures keep their numbers: on the page, in the picture, and in the ends of their scales."""

import io
import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from matplotlib.figure import Figure as Canvas

from posbias import Profile, UsageError
from posbias.display.figures import (
    FAINT,
    FEWEST_POINTS,
    GRID,
    INK,
    LONG_CONTEXT,
    MEASURED,
    MOST_POINTS,
    PAGE_NUMBERS,
    Curve,
    Figure,
    HeatMap,
    Panel,
    Stroke,
    points_that_fit,
    profiles_figure,
)
from posbias.display.static import TOLD_PLACES, draw_curves, fragment_of, image_of


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
    """Cells of a small map are told, those of a large one are colours alone."""
    small = _map(np.array([[0.125, np.nan]]), np.ones((1, 2)))
    fragment = fragment_of(small, anchor="here")
    assert fragment == fragment_of(small, anchor="here")
    assert fragment.startswith('<figure class="chart" id="here"><figcaption>Costs $5 &amp; &lt;more&gt;</figcaption>')
    assert not re.search(r"<0>|<more>", fragment)
    assert ">&lt;0&gt;</text>" in fragment
    assert titles_of(fragment)[:2] == ["x: 0\ny: 0\nvalue: 0.125", "x: 1\ny: 0\nvalue: nan"]
    assert titles_of(fragment_of(_map(np.ones((21, 20))), anchor="here")) == []
    worded = replace(_map(np.ones((1, 2))), words=("<one>", "two"))
    assert titles_of(fragment_of(worded, anchor="here")) == ["<one>", "two"]


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


def titles_of(fragment: str) -> list[str]:
    """What a pointer is told, from left to right."""
    return [unescape(found) for found in re.findall("<title>(.*?)</title>", fragment, flags=re.DOTALL)]


def test_a_profile_tells_every_place_with_its_interval() -> None:
    values = np.full(8, 1 / 8)
    figure = profiles_figure("slug", "title", {}, measured={"measured": Profile(values, values / 2, values * 2)})
    fragment = fragment_of(figure, anchor="here")
    assert "fill-opacity: 0.16" in fragment, "a band lets what is below it be seen"
    told = titles_of(fragment)
    assert told == [f"position in the context: {j}\nmeasured: 1 [0.5, 2]\nflat line: 1" for j in range(8)]


def test_rows_tell_every_value_and_keep_their_names() -> None:
    x, y = np.array([1.0, 2.0]), np.array([0.5, -0.5])
    curves = (Curve("a < b", x, y, MEASURED, y - 1, y + 1), Curve("c", x[:1], y[:1], MEASURED))
    fragment = fragment_of(Figure("f", "t", "x", "y", curves, rows=("one", "two " * 20)), anchor="here")
    assert titles_of(fragment) == ["one\na < b: 0.5 [-0.5, 1.5]\nc: 0.5", f"{'two ' * 20}\na < b: -0.5 [-1.5, 0.5]"]
    assert ">a &lt; b</text>" in fragment
    assert fragment.count("stroke-width: 0.9") >= 2, "an interval is a line"


def test_texts_stay_texts_and_colours_are_the_pages() -> None:
    figure = profiles_figure("s", "t", {"rollout": (Profile.normalised(np.ones(9)), Stroke("#123456", "solid"))})
    fragment = fragment_of(figure, anchor="here")
    assert ">rollout</text>" in fragment
    assert "--c0: color-mix(in srgb, #123456 var(--keep, 100%), white)" in fragment
    assert "stroke: var(--c0)" in fragment
    assert {INK, FAINT, GRID, "#000000", "#ffffff"}.isdisjoint(
        re.findall(
            "[:(] *(#[0-9a-f]{6})", fragment.replace("var(--soft, #8a8a8a)", "").replace("var(--line, #e6e6e6)", "")
        )
    )
    assert not re.search("<style|<metadata|20[0-9]{2}-", fragment)


def test_long_contexts_are_shown_by_distance_from_the_end() -> None:
    long, short = (
        profiles_figure("slug", "title", {"theory": (Profile.normalised(np.linspace(1.0, 3.0, n)), MEASURED)})
        for n in (LONG_CONTEXT, LONG_CONTEXT - 1)
    )
    fragments = [fragment_of(figure, anchor="here") for figure in (long, short)]
    assert ["distance from the end" in fragment for fragment in fragments] == [True, False]
    assert titles_of(fragments[0])[0].startswith("distance from the end (1 is the last): ")
    assert len(titles_of(fragments[0])) <= TOLD_PLACES
    assert image_of(long) != image_of(short)


def test_many_curves_have_fewer_points_each_and_short_ones_keep_theirs() -> None:
    """Both ends of every curve stay, whatever is left out between them."""
    long, short = (Profile.normalised(np.linspace(1.0, 2.0, n)) for n in (100_000, 90))
    figures = [profiles_figure("slug", "title", {"a": (long, MEASURED), "b": (short, MEASURED)})]
    assert points_that_fit(figures) == MOST_POINTS
    most = points_that_fit(figures * 200)
    assert FEWEST_POINTS <= most < MOST_POINTS / 4
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
    fragment = fragment_of(figure, anchor="here")
    assert ">distance from the end (1 is the last); shaded: tenths</text>" in fragment
    assert ">12 %</text>" in fragment
    assert image_of(figure) != image_of(replace(figure, stretches=()))
    canvas = Canvas()
    draw_curves(canvas, figure)
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
    draw_curves(canvas, figure)
    low, high = canvas.axes[0].get_ylim()
    assert 0.05 < low < 0.1
    assert 20 < high < 40
