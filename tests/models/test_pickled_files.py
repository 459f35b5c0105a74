"""No pickled file is opened, whatever a directory says or holds: what the loader would read decides."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
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

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
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


def configured(model: Path, **entries: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def beside_an_empty_file(model: Path) -> None:
    indexed(model, "w.bin")
    save_file({}, model / "x.safetensors")


def by_an_absolute_path(model: Path) -> None:
    indexed(model, str(model / "w.bin"))


def by_an_absolute_path_with_the_right_ending(model: Path) -> None:
    (model / "w.bin").rename(model.parent / "w.safetensors")
    indexed(model, str(model.parent / "w.safetensors"))


def above_the_directory(model: Path) -> None:
    (model / "w.bin").rename(model.parent / "w.safetensors")
    indexed(model, "../w.safetensors")


def below_the_directory(model: Path) -> None:
    indexed(model, "sub/w.safetensors")


def not_by_a_name(model: Path) -> None:
    indexed(model, ["w.bin"])


def with_a_null_in_its_name(model: Path) -> None:
    indexed(model, "w.bin\0.safetensors")


def linked_by_the_index(model: Path) -> None:
    indexed(model, "x.safetensors")
    (model / "x.safetensors").symlink_to("w.bin")


def renamed_by_the_index(model: Path) -> None:
    indexed(model, "x.safetensors")
    (model / "w.bin").rename(model / "x.safetensors")


def renamed(model: Path) -> None:
    (model / "w.bin").rename(model / "model.safetensors")


def linked(model: Path) -> None:
    (model / "model.safetensors").symlink_to("w.bin")


def in_the_old_format(model: Path) -> None:
    (model / "model.safetensors").write_bytes(pickle.dumps({"lm_head.weight": [1.0]}))


def alone(model: Path) -> None:
    (model / "w.bin").rename(model / "pytorch_model.bin")


def indexed_alone(model: Path) -> None:
    indexed(model, "w.bin")
    (model / INDEX).rename(model / "pytorch_model.bin.index.json")


def of_a_variant(model: Path) -> None:
    (model / "w.bin").rename(model / "pytorch_model.fp16.bin")
    save_file({}, model / "model.fp16.safetensors")


def named_by_the_configuration(model: Path) -> None:
    (model / "w.bin").rename(model / "adapter_model.bin")
    configured(model, transformers_weights="adapter_model.bin")


def named_deep_in_the_configuration(model: Path) -> None:
    configured(model, text_config={"transformers_weights": "adapter_model.bin"})


def as_an_adapter(model: Path) -> None:
    save_file({}, model / "model.safetensors")
    (model / "w.bin").rename(model / "adapter_model.bin")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "else/where"}))


def in_parts_of_a_distributed_run(model: Path) -> None:
    save_file({}, model / "shard-00001-model-00001-of-00001.safetensors")
    (model / "w.bin").rename(model / ".metadata")


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    case.__name__: (case, words)
    for words, cases in {
        r"names .*; allowed: \*\.safetensors in the same directory": (
            beside_an_empty_file,
            by_an_absolute_path,
            by_an_absolute_path_with_the_right_ending,
            above_the_directory,
            below_the_directory,
            not_by_a_name,
            with_a_null_in_its_name,
        ),
        r"cannot be loaded": (
            linked_by_the_index,
            renamed_by_the_index,
            renamed,
            linked,
            in_the_old_format,
        ),
        r"has pickled weights \(.*\), which can run code": (alone, indexed_alone, of_a_variant),
        r"names other files \(transformers_weights\)": (
            named_by_the_configuration,
            named_deep_in_the_configuration,
        ),
        r"has an adapter": (as_an_adapter,),
        r"has no weights": (in_parts_of_a_distributed_run,),
    }.items()
    for case in cases
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "spread"])
def test_pickled_weights_are_refused_before_they_are_opened(model: Path, case: str, device: str) -> None:
    make, words = CASES[case]
    make(model)
    with pytest.raises((UsageError, RunError), match=words) as refusal:
        load_model(model, device=device)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 500
    assert "weights_only" not in str(refusal.value)


def test_pickled_files_beside_the_weights_are_not_opened(model: Path, whole: Path) -> None:
    shutil.copy(whole / "model.safetensors", model)
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "vocab.pkl"):
        shutil.copy(model / "w.bin", model / name)
    assert load_model(model).width == 16


def test_links_to_safetensors_elsewhere_are_what_the_hub_keeps(model: Path, whole: Path) -> None:
    (model / "model.safetensors").symlink_to(whole / "model.safetensors")
    assert load_model(model).width == 16


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


def test_a_tokenizer_with_its_own_code(model: Path) -> None:
    (model / "own.py").write_text("raise SystemExit('this code was run')")
    document = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"no readable tokenizer .*needs its own code, which is not run"):
        load_tokenizer(model)
