"""The app of `posbias explore`: all that is registered can be chosen, and its numbers are the library's."""

import pytest

import posbias as pb
from posbias.architecture import ENCODINGS, MASKS
from posbias.cli.predict import explore
from posbias.designing.result import TARGETS
from posbias.explorer import app, predicted, spelled


def test_everything_registered_can_be_chosen_and_what_the_library_predicts_is_shown():
    shown, defined = app.run()
    columns = defined["asked"].elements
    for name in ("A", "B"):
        values = columns[name].value
        built = pb.Architecture(values["depth"], values["heads"], encoding=values["encoding"])
        distance = pb.compare(pb.predict(built, 512).profile, pb.Profile.uniform(512)).wasserstein
        assert f"{distance:.4f}" in shown[-1].text, name
    for column, sort, registry in (("A", "mask", MASKS), ("B", "encoding", ENCODINGS), ("both", "target", TARGETS)):
        parts = columns[column].elements
        assert {*parts[sort].options} - {"none"} == {*registry} - {"none"}
        for name in registry:  # its parameters are on the page, each under its own name
            assert [*parts[f"{sort}={name}"].elements] == [*registry[name].__dataclass_fields__]


def test_a_target_is_designed_for():
    stacks = {name: pb.Architecture(depth=4, encoding=name) for name in ("none", "alibi")}
    page = predicted(stacks, "u_shape(middle=0.5)", "key_bias", 64).text
    design = pb.design("u_shape(middle=0.5)", "key_bias", options=pb.DesignOptions(4, n_positions=64))
    assert "designed over key_bias" in page
    assert f"{pb.compare(design.profiles[64], pb.Profile.uniform(64)).wasserstein:.4f}" in page
    assert f"{pb.compare(pb.predict(stacks['alibi'], 64).profile, design.profiles[64]).wasserstein:.4f}" in page


def test_a_variant_is_spelled_as_on_the_command_line():
    column = {"depth": 4, "encoding": "decay", "encoding=decay": {"rate": 0.9}, "encoding=rope": {"base": 2.0}}
    assert spelled(column) == {"depth": 4, "encoding": "decay(rate=0.9)"}
    assert spelled({"encoding": "alibi", "encoding=alibi": {"slopes": ""}}) == {"encoding": "alibi"}


def test_without_marimo_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(pb.UsageError, match=r"pip install 'posbias\[explore\]'$"):
        explore()
