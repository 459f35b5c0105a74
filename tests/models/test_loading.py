"""Loading: what is accepted, what is refused and how, and what a record is told."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from posbias import LocalResponder, RunError, UsageError, intervened, load_model, load_prompts
from posbias.models import sources as sources_room
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_tokenizer
from tiny_families import CONFIGS


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory with a tiny Llama: configuration and safetensors, no tokenizer."""
    directory = tmp_path / "tiny-llama"
    transformers.LlamaForCausalLM(CONFIGS["llama"]()).save_pretrained(directory)
    return directory


def weights_of(model: HuggingFaceModel) -> torch.Tensor:
    return torch.cat([parameter.flatten() for parameter in model.network.parameters()])


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_directory_loads_its_weights_frozen(llama: Path) -> None:
    model = load_model(llama)
    stored = load_file(llama / "model.safetensors")
    assert torch.equal(model.network.get_parameter("lm_head.weight"), stored["lm_head.weight"])
    assert not any(parameter.requires_grad for parameter in model.network.parameters())
    assert not model.network.training
    assert model.tokenizer is None
    assert (model.width, model.vocabulary_size, model.max_positions) == (32, 50, 64)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3_text"])
def test_a_tokenizer_made_of_special_tokens_alone_is_none(name: str, tmp_path: Path) -> None:
    """Without its files, transformers makes one that knows no word; prompts would hold nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]().to_dict()))
    assert load_model(f"config:{tmp_path}").tokenizer is None


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 499723\n"
OWN_CODE = {
    "tokenizer_class": "QWenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "the model has no tokenizer"),
        ({"tokenizer_config.json": "{}", "special_tokens_map.json": "{}", "chat_template.jinja": "x"},
         "the model has no tokenizer"),
        ({"tokenizer_config.json": json.dumps(OWN_CODE), "qwen.tiktoken": "IQ== 0"},
         "tokenizer needs its own code, which is not run"),
        ({"tokenizer.json": '{"version": "1.0", "model": {"type": "BPX", "vocab": {}}}', "tokenizer_config.json":
          '{"tokenizer_class": "PreTrainedTokenizerFast"}'}, r"tokenizer cannot be read \(.+\)"),
        ({"tokenizer.model": "no protobuf at all", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
         r"tokenizer cannot be read \(.+\)"),
        ({"tokenizer.model": POINTER, "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'},
         r"only a Git LFS pointer is there \(tokenizer.model; git lfs pull\)"),
        ({"tokenizer.json": POINTER}, r"only a Git LFS pointer is there \(tokenizer.json; git lfs pull\)"),
        ({"vocab.json": POINTER, "merges.txt": "a b"}, r"only a Git LFS pointer is there \(vocab.json"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_cannot_be_read_says_why(llama: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (llama / name).write_text(text)
    model = load_model(llama)
    assert model.tokenizer is None
    refusals = [
        lambda: load_prompts("default", model, n_positions=8, count=1),
        lambda: LocalResponder(model),
        lambda: load_tokenizer(llama),
    ]
    for refusal in refusals:
        with pytest.raises(UsageError, match=said) as error:
            refusal()
        assert "\n" not in str(error.value)
        assert str(llama.parent) not in str(error.value)


def test_the_description_names_no_machine_path(llama: Path) -> None:
    description = load_model(llama).describe()
    assert description["source"] == "tiny-llama"
    assert str(llama.parent) not in json.dumps(description)
    assert description["attention"] == "sdpa"
    assert description["dtype"] == "float32"
    assert description["init_seed"] is None
    assert description["weights_sha256"] == load_model(llama).describe()["weights_sha256"]
    assert description["weights_sha256"] != load_model(llama, init_seed=0).describe()["weights_sha256"]


def test_directories_are_loaded_in_silence_and_without_the_network(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: Any, **_named: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_model(llama)
    load_model(llama, init_seed=1)
    assert capfd.readouterr() == ("", "")


def test_a_seed_draws_all_weights_anew(llama: Path) -> None:
    with torch.no_grad():
        network = transformers.LlamaForCausalLM.from_pretrained(llama)
        for parameter in network.parameters():
            parameter.add_(1.0)
        network.save_pretrained(llama)
    state = torch.random.get_rng_state()
    one, same, other = (load_model(llama, init_seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(weights_of(one), weights_of(same))
    assert not torch.equal(weights_of(one), weights_of(other))
    assert torch.all(one.network.get_parameter("model.norm.weight") == 1)
    assert one.describe()["init_seed"] == 3
    assert torch.equal(weights_of(load_model(llama, init_seed=3, dtype="float64")).float(), weights_of(one))


@pytest.mark.parametrize("form", ["directory", "file"])
def test_a_configuration_alone_is_enough(llama: Path, form: str) -> None:
    (llama / "model.safetensors").unlink()
    model = load_model(f"config:{llama if form == 'directory' else llama / 'config.json'}")
    assert torch.equal(weights_of(model), weights_of(load_model(f"config:{llama}", init_seed=0)))
    assert model.describe()["init_seed"] == 0
    assert model.describe()["source"] == ("config:tiny-llama" if form == "directory" else "config:config.json")


@pytest.mark.parametrize(
    "source",
    [
        *("no/such/directory", "./absent", "", "absent.gguf", "config:absent.json", "a b"),
        *("a" * 5000, "config:" + "b" * 300, "a/" + "b" * 3000, "~no-such-user/x", "x\0y"),
    ],
)
def test_sources_that_cannot_be(source: str) -> None:
    with pytest.raises(UsageError, match=r"does not exist.*; allowed: a hub id, a directory, a \.gguf file") as refusal:
        load_model(source)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) <= 500


def test_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_room, "hub_in_sight", lambda: False)
    with pytest.raises(UsageError, match=r"model 'nobody/nothing' is no existing path, .* allowed: a hub id"):
        load_model("nobody/nothing")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UsageError, match="is a file that is not a model"):
        load_model(tmp_path / "notes.txt")
    (tmp_path / "empty.gguf").write_bytes(b"not gguf at all")
    with pytest.raises(UsageError, match=r"'empty\.gguf': no readable GGUF file"):
        load_model(tmp_path / "empty.gguf")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (transformers.BertConfig(hidden_size=16, num_attention_heads=2), r"\(bert\) is an encoder;"),
        (transformers.T5Config(), r"\(t5\) is an encoder-decoder;"),
        (transformers.ViTConfig(), r"\(vit\) is not a causal language model;"),
    ],
)
def test_only_decoders(tmp_path: Path, config: Any, kind: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=rf"{kind} allowed: decoder-only"):
        load_model(tmp_path)


UP = "model.layers.1.mlp.up_proj.weight"


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda llama: (llama / "config.json").unlink(), r"has no readable config\.json"),
    (lambda llama: (llama / "config.json").write_text("{"), "'tiny-llama': configuration refused: Expecting property"),
    (lambda llama: edit_config(llama, model_type="own", auto_map={"AutoConfig": "modeling_own.Config"}),
     r"needs its own code \(auto_map\), which is not run"),
    (lambda llama: edit_config(llama, model_type="own"), "model_type 'own', unknown to transformers"),
    (lambda llama: os.truncate(llama / "model.safetensors", 50_000), "tiny-llama"),
    (lambda llama: edit_weights(llama, lambda weights: weights[UP][3, 4].fill_(torch.nan)), f"'{UP}' holds NaN or inf"),
    (lambda llama: edit_weights(llama, lambda weights: weights[UP][3, 4].fill_(torch.inf)), f"'{UP}' holds NaN or inf"),
    (lambda llama: edit_weights(llama, lambda weights: weights.pop(UP)), f"weights are not in its files, first '{UP}'"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "said"), DAMAGED)
def test_a_damaged_directory_is_refused_in_one_line(llama: Path, damage: Callable[[Path], object], said: str) -> None:
    (llama / "modeling_own.py").write_text("raise SystemExit('this code was run')")
    damage(llama)
    with pytest.raises((RunError, UsageError), match=said) as refusal:
        load_model(llama)
    assert "\n" not in str(refusal.value)


def test_weights_are_finite_though_their_sum_overflows(llama: Path) -> None:
    edit_weights(llama, lambda weights: weights["model.norm.weight"].fill_(3e38))
    load_model(llama)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown; allowed: auto, own, float32, float64, bfloat16, float16"),
        ({"device": "toaster"}, "device 'toaster' cannot be used .* allowed: auto, cpu, spread"),
        ({"init_seed": -1}, r"init_seed must be a whole number >= 0"),
    ],
)
def test_bad_arguments(llama: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        load_model(llama, **arguments)
    assert "\n" not in str(refusal.value)


def test_a_model_shows_itself_in_a_line(llama: Path) -> None:
    model = load_model(llama, init_seed=3)
    line = "tiny-llama: llama, 3 layers, 4 heads, width 32; float32 on cpu; up to 64 positions; drawn from seed 3"
    assert repr(model) == f"HuggingFaceModel({line})"
    with intervened(model, "window(width=4)"):
        assert repr(model).endswith("drawn from seed 3; under window(width=4))")
    config = transformers.BioGptConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    other = load_model(transformers.BioGptForCausalLM(config))
    assert repr(other).startswith("HuggingFaceModel(BioGptForCausalLM: biogpt, 2 layers, 2 heads, width 16; float32")
