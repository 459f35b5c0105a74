"""The app of `posbias explore`: all that is registered can be chosen, and its numbers are the library's."""

from typing import Any

import pytest

import posbias as pb
from posbias.architecture import ENCODINGS, MASKS
from posbias.cli.explore import explore
from posbias.designing.result import TARGETS
from posbias.explorer.app import app, predicted, spelled

N = 512


@pytest.fixture(scope="module")
def opened() -> tuple[Any, Any]:
    """What the app shows last, and what its cells define."""
    shown, defined = app.run()
    return shown[-1], defined


def test_everything_registered_can_be_chosen(opened):
    _, defined = opened
    for stack in defined["stacks"].elements.values():
        for sort, registry in (("mask", MASKS), ("encoding", ENCODINGS)):
            assert [*stack[sort].options] == [*registry]
            for name in registry:  # its parameters are on the page, each under its own name
                assert [*stack[f"{sort} {name}"].elements] == [*registry[name].__dataclass_fields__]
    assert [*defined["asked"]["target"].options] == ["none", *TARGETS]


def test_it_shows_what_the_library_predicts(opened):
    page, defined = opened
    flat = pb.Profile.uniform(N)
    for name, values in defined["stacks"].value.items():
        stack = pb.Architecture(values["depth"], values["heads"], encoding=spelled(values, "encoding"))
        profile = pb.predict(stack, N).profile
        assert f"{pb.compare(profile, flat).wasserstein:.4f}" in page.text, name


def test_a_target_is_designed_for(opened):
    stacks = {name: {**values, "depth": 4, "heads": 1} for name, values in opened[1]["stacks"].value.items()}
    page = predicted(stacks, "u_shape(middle=0.5)", "key_bias", 64).text
    assert "target, u_shape(middle=0.5)" in page
    designed = pb.design("u_shape(middle=0.5)", "key_bias", options=pb.DesignOptions(4, n_positions=64))
    assert f"{designed.profiles[64].influence[0]:.4g}" in page


def test_a_value_out_of_range_is_refused_in_one_line(opened):
    stacks = opened[1]["stacks"].value
    stacks["A"] = {**stacks["A"], "encoding": "decay", "encoding decay": {"rate": 2}}
    with pytest.raises(pb.UsageError, match="decay: rate must be a number >= 1e-300 and <= 1, got 2"):
        predicted(stacks, None, "none", 64)


def test_without_marimo_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pb.UsageError, match=r"pip install 'posbias\[explore\]'$"):
        explore()
