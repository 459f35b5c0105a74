"""Figures keep their numbers, on the page and in the picture; what tells curves apart."""

import re
from html import unescape

import numpy as np

from posbias import Profile
from posbias.results.drawing import TOLD_PLACES, fragment_of, image_of
from posbias.results.figures import (
    DRAWN_POINTS,
    LONG_CONTEXT,
    MEASURED,
    Curve,
    Figure,
    HeatMap,
    profile_figure,
)
from posbias.results.naming import curve_names, differing, setting_text


def test_a_heat_map_escapes_texts() -> None:
    panels = {"<0>": np.array([[0.125, np.nan]]), "<1>": np.ones((1, 2))}
    small = HeatMap("slug", "Costs $5 & <more>", "x", "y", "value", panels, (0.0, 1.0), (0.0, 0.0), (0.0, 1.0))
    fragment = fragment_of(small, switched=True)
    assert fragment == fragment_of(small, switched=True)
    assert fragment.startswith(
        '<figure class="chart" id="figure-slug"><figcaption>Costs $5 &amp; &lt;more&gt;</figcaption>'
    )
    assert not re.search(r"<0>|<more>", fragment)
    assert ">&lt;0&gt;</text>" in fragment


def test_what_steers_a_terminal_is_spelled_out_in_a_picture() -> None:
    curve = Curve("a\x1b", np.arange(3.0), np.ones(3), MEASURED)
    fragment = fragment_of(Figure("f", "t\u202e", "x", "y", (curve,)), switched=True)
    assert "\x1b" not in fragment
    assert "\u202e" not in fragment
    assert r"a\x1b: 1" in titles_of(fragment)[0]
    assert r"<figcaption>t\u202e<" in fragment


def titles_of(fragment: str) -> list[str]:
    """What a pointer is told, from left to right."""
    return [unescape(found) for found in re.findall("<title>(.*?)</title>", fragment, flags=re.DOTALL)]


def test_a_profile_tells_every_place_with_its_interval() -> None:
    values = np.full(8, 1 / 8)
    figure = profile_figure("slug", "title", [Profile(values, values / 2, values * 2).curve("measured")])
    fragment = fragment_of(figure, switched=True)
    assert "fill-opacity:0.16" in fragment, "a band lets what is below it be seen"
    told = titles_of(fragment)
    assert told == 2 * [f"position: {j}\nmeasured: 1 [0.5, 2]" for j in range(8)], "on both scales"


def test_intervals_of_several_curves_at_few_places_do_not_hide_one_another() -> None:
    x, y = np.array([1.0, 5.0, 20.0]), np.full(3, 0.5)
    curves = tuple(Curve(name, x, y, low=y - 0.1, high=y + 0.1) for name in "abc")
    two, three = (fragment_of(Figure("f", "", "turn", "y", curves[:n]), switched=True) for n in (2, 3))
    assert ["fill-opacity:0.16" in fragment for fragment in (two, three)] == [True, False]
    assert titles_of(three)[0] == "turn: 1\n" + "\n".join(f"{name}: 0.5 [0.4, 0.6]" for name in "abc"), "at its turn"


def test_rows_keep_their_names_and_intervals() -> None:
    x, y = np.array([1.0, 2.0]), np.array([0.5, -0.5])
    curves = (Curve("a < b", x, y, MEASURED, y - 1, y + 1), Curve("c", x[:1], y[:1], MEASURED))
    fragment = fragment_of(Figure("f", "t", "x", "y", curves, rows=("one", "two " * 20)), switched=True)
    assert ">a &lt; b</text>" in fragment
    assert fragment.count("stroke-width:0.9") >= 2, "an interval is a line"


def test_long_contexts_are_shown_by_distance_from_the_end() -> None:
    long, short = (
        profile_figure("slug", "title", [Profile.normalised(np.linspace(1.0, 3.0, n)).curve("theory")])
        for n in (LONG_CONTEXT, LONG_CONTEXT - 1)
    )
    fragments = [fragment_of(figure, switched=True) for figure in (long, short)]
    assert ["distance from the end" in fragment for fragment in fragments] == [True, False]
    assert titles_of(fragments[0])[0].startswith("distance: ")
    assert len(titles_of(fragments[0])) <= 2 * TOLD_PLACES
    assert image_of(long) != image_of(short)


def test_a_long_curve_keeps_both_ends_whatever_is_left_out_between_them() -> None:
    long, short = (Profile.normalised(np.linspace(1, 2, n)).curve("a") for n in (100_000, 90))
    drawn = long.thinned()
    assert drawn.y.size <= DRAWN_POINTS
    assert (drawn.x[0], drawn.x[-1], drawn.x[1], drawn.x[-2]) == (0, 99_999, 1, 99_998)
    assert short.thinned() is short


def test_a_solid_curve_that_covers_another_is_dashed() -> None:
    x, y = np.arange(5.0), np.arange(5.0)
    below, covering, apart = (Curve(name, x, y + up, MEASURED) for name, up in (("a", 0.0), ("b", 1e-3), ("c", 1.0)))
    figure = Figure("f", "", "x", "y", (below, covering, apart))
    assert [curve.stroke.dash for curve in figure.curves] == ["solid", "dash", "solid"]


ROLLOUT = {"theory": "rollout", "mask": "causal", "encoding": "none", "mixing": [0.1, 0.1], "positions": 8}


def test_only_what_differs_is_named():
    curves = [ROLLOUT, {**ROLLOUT, "encoding": "alibi"}, {**ROLLOUT, "mixing": [0.05, 0.05]}]
    assert differing(curves) == ["encoding", "mixing"]
    assert curve_names(curves) == ["none, mixing 0.1", "alibi, mixing 0.1", "none, mixing 0.05"]
    assert curve_names([ROLLOUT, {**ROLLOUT, "positions": 16}]) == ["8 positions", "16 positions"]


def test_what_some_curves_lack_tells_nothing_apart():
    assert curve_names([ROLLOUT, {"theory": "mean_field", "model": "demo"}]) == ["rollout", "mean_field"]
    assert curve_names([ROLLOUT, ROLLOUT]) == ["rollout (1)", "rollout (2)"]
    assert curve_names([ROLLOUT]) == ["rollout"]


def test_equal_values_per_layer_are_one_and_long_lists_show_their_ends():
    assert setting_text([[0.5, 0.5], [0.5, 0.5]]) == "0.5"
    assert setting_text([0.1, 0.2]) == "[0.1, 0.2]"
    assert setting_text([0.1, 0.2, 0.3, 0.4, 0.5]) == "[0.1, 0.2, 0.3, ..., 0.5]"
    assert curve_names([{"mixing": [0.1] * 2}, {"mixing": [0.1] * 3}]) == ["mixing 0.1 (1)", "mixing 0.1 (2)"]
