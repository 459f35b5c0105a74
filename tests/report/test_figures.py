"""Figures keep their numbers: on the page, in the picture, and in the ends of their scales."""

import io
import json
import re

import numpy as np
import pytest

from posbias.errors import UsageError
from posbias.profiles import Profile
from posbias.report.figures import MEASURED, HeatMap, Panel, profiles_figure
from posbias.report.interactive import interactive
from posbias.report.static import png


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
    picture = Image.open(io.BytesIO(png(_map(random, random, random, random, scale=scale, floor=1e-3))))
    assert picture.size[0] > 1500
    assert len(picture.convert("RGB").getcolors(1 << 24)) > 20
    assert png(_map(np.zeros((1, 1)), scale=scale, floor=1e-3))


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
