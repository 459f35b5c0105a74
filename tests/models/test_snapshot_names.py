"""A model in the hub's cache goes by its hub id, not by the commit that its directory is named after."""

import shutil

import pytest
from transformers import AutoModelForCausalLM

import posbias as pb

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(params=["org/some-model", "model"])
def cached(request, tiny_llama, tmp_path):
    """A hub id, and the directory of its snapshot."""
    place = tmp_path / f"models--{request.param.replace('/', '--')}" / "snapshots" / COMMIT
    shutil.copytree(tiny_llama, place)
    return request.param, place


def test_it_is_named_by_its_hub_id_however_it_was_loaded(cached, monkeypatch):
    name, place = cached
    assert pb.load_model(place).origin.source == name
    assert pb.load_model(f"config:{place}").origin.source == f"config:{name}"
    assert pb.load_model(AutoModelForCausalLM.from_pretrained(place)).origin.source == name
    monkeypatch.chdir(place)
    assert pb.load_model(".").origin.source == name


def test_other_directories_keep_their_own_names(tiny_llama, tmp_path):
    for place in (tmp_path / "snapshots" / "mine", tmp_path / "models--org--name"):
        shutil.copytree(tiny_llama, place)
        assert pb.load_model(place).origin.source == place.name
