"""The app of `posbias explore`: all that is registered can be chosen, and its numbers are the library's."""

import pytest

import posbias as pb
from posbias.architecture import ENCODINGS, MASKS
from posbias.cli.predict import explore
from posbias.designing.result import TARGETS
from posbias.explorer import app, parameters, predicted, spelled


def test_everything_registered_can_be_chosen_and_what_the_library_predicts_is_shown():
    shown, defined = app.run()
    for name, stack in defined["stacks"].elements.items():
        assert ([*stack["mask"].options], [*stack["encoding"].options]) == ([*MASKS], [*ENCODINGS])
        values = stack.value
        built = pb.Architecture(values["depth"], values["heads"], encoding=values["encoding"])
        distance = pb.compare(pb.predict(built, 512).profile, pb.Profile.uniform(512)).wasserstein
        assert f"{distance:.4f}" in shown[-1].text, name
    assert [*defined["asked"]["target"].options] == ["none", *TARGETS]
    for registry in (MASKS, ENCODINGS, TARGETS):
        for name in registry:  # its parameters are on the page, each under its own name
            assert [*parameters(registry[name]).elements] == [*registry[name].__dataclass_fields__]


def test_a_target_is_designed_for():
    stacks = {name: pb.Architecture(depth=4, encoding=name) for name in ("none", "alibi")}
    page = predicted(stacks, "u_shape(middle=0.5)", "key_bias", 64).text
    assert "target, u_shape(middle=0.5)" in page
    designed = pb.design("u_shape(middle=0.5)", "key_bias", options=pb.DesignOptions(4, n_positions=64))
    assert f"{designed.profiles[64].influence[0]:.4g}" in page


def test_a_variant_is_spelled_as_on_the_command_line():
    assert spelled("alibi", {}) == "alibi"
    assert spelled("decay", parameters(ENCODINGS["decay"]).value) == "decay(rate=0.9)"


def test_without_marimo_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pb.UsageError, match=r"pip install 'posbias\[explore\]'$"):
        explore()
