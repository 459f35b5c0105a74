"""No pickled file is opened, whatever a directory says or holds: what the loader would read decides."""

import json
import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posbias import Architecture, RunError, UsageError, load_model
from posbias.models import sources as sources_room
from posbias.models.loading import load_tokenizer
from posbias.models.reference.config import draw_parameters
from posbias.models.reference.network import save_reference
from published_networks import copy_network
from tiny_families import CONFIGS

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(CONFIGS["llama"]()).save_pretrained(directory)
    return directory


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A directory with its weights pickled as `w.bin`, and none in safetensors."""
    shutil.copytree(whole, tmp_path / "model")
    torch.save(load_file(whole / "model.safetensors"), tmp_path / "model" / "w.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def closed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way to a pickled file, once the files are made; and no word of torch's how to open one."""

    def opened(*_arguments: Any, **_named: Any) -> Any:
        raise AssertionError("a pickled file was opened")

    for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(owner, name, opened)
    for name in ("_load", "_legacy_load"):
        monkeypatch.setattr(torch.serialization, name, opened)


def indexed(model: Path, place: Any) -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, place)}))


def made(
    model: Path,
    *,
    index: Any = None,
    move: str = "",
    link: str = "",
    empty: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
) -> None:
    """Let the directory name `w.bin` as weights: by an index, another name, a link, or its configuration."""
    if index is not None:
        indexed(model, str(model.parent / "w.safetensors") if index == "absolute" else index)
    for name in empty:
        save_file({}, model / name)
    if move:
        (model / "w.bin").rename(model / move)
    if link:
        (model / link).symlink_to("w.bin")
    if config is not None:
        path = model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


NAMES, LOADED = r"names .*; allowed: \*\.safetensors in the same directory", "cannot be loaded"
PICKLED, ELSEWHERE = r"has pickled weights \(.*\), which can run code", r"names other files \(transformers_weights\)"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "beside an empty file": (NAMES, {"index": "w.bin", "empty": ("x.safetensors",)}),
    "by an absolute path": (NAMES, {"index": "absolute", "move": "../w.safetensors"}),
    "above the directory": (NAMES, {"index": "../w.safetensors", "move": "../w.safetensors"}),
    "below the directory": (NAMES, {"index": "sub/w.safetensors"}),
    "not by a name": (NAMES, {"index": ["w.bin"]}),
    "with a null in its name": (NAMES, {"index": "w.bin\0.safetensors"}),
    "linked by the index": (LOADED, {"index": "x.safetensors", "link": "x.safetensors"}),
    "renamed by the index": (LOADED, {"index": "x.safetensors", "move": "x.safetensors"}),
    "renamed": (LOADED, {"move": "model.safetensors"}),
    "linked": (LOADED, {"link": "model.safetensors"}),
    "alone": (PICKLED, {"move": "pytorch_model.bin"}),
    "of a variant": (PICKLED, {"move": "pytorch_model.fp16.bin", "empty": ("model.fp16.safetensors",)}),
    "by the configuration": (ELSEWHERE, {"config": {"transformers_weights": "w.bin"}}),
    "deep in the configuration": (ELSEWHERE, {"config": {"text_config": {"transformers_weights": "w.bin"}}}),
    "as an adapter": ("has an adapter", {"empty": ("model.safetensors", "adapter_config.json")}),
    "in parts": ("has no weights", {"move": ".metadata", "empty": ("shard-00001-model-00001-of-00001.safetensors",)}),
}


@pytest.mark.parametrize("case", CASES)
def test_pickled_weights_are_refused_before_they_are_opened(model: Path, case: str) -> None:
    words, settings = CASES[case]
    made(model, **settings)
    with pytest.raises((UsageError, RunError), match=words) as refusal:
        load_model(model)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 500
    assert "weights_only" not in str(refusal.value)


def test_pickled_files_beside_the_weights_are_not_opened(model: Path, whole: Path) -> None:
    shutil.copy(whole / "model.safetensors", model)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl"):
        shutil.copy(model / "w.bin", model / name)
    assert load_model(model).width == 32


def test_links_to_safetensors_elsewhere_are_what_the_hub_keeps(model: Path, whole: Path) -> None:
    (model / "model.safetensors").symlink_to(whole / "model.safetensors")
    assert load_model(model).width == 32


@pytest.mark.parametrize("place", ["w.bin", "../../../w.safetensors", "x.safetensors"])
def test_what_the_hub_keeps_is_held_to_the_same(
    model: Path, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_with(model, tmp_path, monkeypatch)
    shutil.copy(snapshot / "w.bin", snapshot / "x.safetensors")
    indexed(snapshot, place)
    with pytest.raises((UsageError, RunError), match=r"'some/model'.*(can run code|cannot be loaded)"):
        load_model("some/model")


def test_a_model_of_the_hub_is_loaded_from_its_commit(
    model: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = hub_with(model, tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=r"'some/model' has no weights \(model\.safetensors"):
        load_model("some/model")
    shutil.copy(whole / "model.safetensors", snapshot)
    assert load_model("some/model").describe()["revision"] == snapshot.name


def hub_with(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub's client that holds the model, and no network."""
    from huggingface_hub import constants

    kept = tmp_path / "hub" / "models--some--model"
    snapshot = kept / "snapshots" / ("0123456789" * 4)
    shutil.copytree(model, snapshot)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(kept.parent))
    monkeypatch.setattr(sources_room, "hub_in_sight", lambda: False)
    return snapshot


def test_a_pickled_file_called_gguf(model: Path) -> None:
    os.rename(model / "w.bin", model / "w.gguf")
    with pytest.raises(UsageError, match=r"'w\.gguf': no readable GGUF file"):
        load_model(model / "w.gguf")


def test_a_pickled_reference_model(model: Path, tmp_path: Path) -> None:
    config = copy_network(Architecture(1))
    saved = save_reference(tmp_path / "saved", config, parameters=draw_parameters(config, torch.Generator()))
    shutil.copy(model / "w.bin", saved / "weights.safetensors")
    with pytest.raises((UsageError, RunError), match=r"weights\.safetensors is missing or damaged"):
        load_model(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"])
def test_pickled_tokenizers(model: Path, name: str) -> None:
    (model / name).write_bytes(pickle.dumps({"a": 0}))
    with pytest.raises(UsageError, match=r"is not UTF-8|no readable tokenizer"):
        load_tokenizer(model)


def test_code_beside_the_weights_is_not_run(model: Path, whole: Path) -> None:
    (model / "own.py").write_text("raise SystemExit('this code was run')")
    document = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"no readable tokenizer .*needs its own code, which is not run"):
        load_tokenizer(model)
    shutil.copy(whole / "model.safetensors", model)
    made(model, config={"auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}})
    assert type(load_model(model).network).__module__.startswith("transformers.")
