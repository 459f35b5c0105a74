"""Figures keep their numbers: on the page, in the picture, and in the ends of their scales."""

import io
import json
import re

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.report.figures import LONG_CONTEXT, MEASURED, HeatMap, Panel, profiles_figure
from posbias.report.interactive import drawn, interactive
from posbias.report.static import png_of


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
    assert "0.125" in fragment
    assert "null" in fragment
    assert not re.search(r"NaN|<0>|<more>", fragment)


@pytest.mark.parametrize("scale", ["linear", "diverging", "logarithmic"])
def test_the_picture_has_a_colour_for_every_value(scale: str) -> None:
    from PIL import Image

    random = np.random.default_rng(0).random((4, 7))
    picture = Image.open(io.BytesIO(png_of(_map(random, random, random, random, scale=scale, floor=1e-3))))
    assert picture.size[0] > 1500
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    assert png_of(_map(np.zeros((1, 1)), scale=scale, floor=1e-3))


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 panel"):
        HeatMap("slug", "title", "x", "y", "value", (), x=(0.0, 1.0), y=(0.0, 1.0))
    with pytest.raises(UsageError, match="floor > 0, got 0"):
        _map(np.ones((2, 2)), scale="logarithmic")


def test_a_logarithmic_axis_is_labelled_in_plain_numbers() -> None:
    profile = Profile.normalised(np.linspace(1.0, 3.0, 9))
    fragment = interactive(profiles_figure("slug", "title", {"theory": (profile, MEASURED)}), anchor="here")
    values, texts = (json.loads(re.search(rf'"{name}":(\[.*?\])', fragment)[1]) for name in ("tickvals", "ticktext"))
    assert dict(zip(values, texts, strict=True))[0.5] == "0.5"


def test_long_contexts_are_shown_by_distance_from_the_end_or_by_position() -> None:
    long, short = (
        profiles_figure("slug", "title", {"theory": (Profile.normalised(np.linspace(1.0, 3.0, n)), MEASURED)})
        for n in (LONG_CONTEXT, LONG_CONTEXT - 1)
    )
    assert (long.by_distance, short.by_distance) == (True, False)
    chart = drawn(long)
    curve, flat = chart.data
    np.testing.assert_array_equal(curve.x, LONG_CONTEXT - np.arange(LONG_CONTEXT))
    assert list(flat.x) == [LONG_CONTEXT, 1]
    assert chart.layout.xaxis.type == "log"
    assert chart.layout.xaxis.range[0] > chart.layout.xaxis.range[1], "the last position is on the right"
    distance, position = chart.layout.updatemenus[0].buttons
    assert distance.args[0]["x"][0] == list(curve.x)
    assert position.args[0]["x"] == [list(range(LONG_CONTEXT)), [0, LONG_CONTEXT - 1]]
    assert position.args[1]["xaxis.range"] == [0, LONG_CONTEXT - 1]
    assert [len(drawn(figure).layout.updatemenus) for figure in (long, short)] == [2, 1]
    assert png_of(long) != png_of(short)


def test_bands_move_with_their_curves() -> None:
    values = np.full(LONG_CONTEXT, 1 / LONG_CONTEXT)
    banded = profiles_figure("slug", "title", {}, measured={"measured": Profile(values, values / 2, values * 2)})
    chart = drawn(banded)
    assert [len(trace.x) for trace in chart.data] == [2 * LONG_CONTEXT, LONG_CONTEXT, 2]
    for button in chart.layout.updatemenus[0].buttons:
        assert [len(x) for x in button.args[0]["x"]] == [2 * LONG_CONTEXT, LONG_CONTEXT, 2]
