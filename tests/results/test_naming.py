"""Curves are told apart by the settings that differ, and by numbers where none does."""

from posbias.results.naming import curve_names, differing, setting_text

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
