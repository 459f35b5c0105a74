"""Configurations beyond every model, and files that are not what they say: one line, before memory is taken."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from model_inputs import outcome, refused
from posbias import Architecture, UsageError
from posbias.models.config_limits import check_numbers, check_text_growth
from posbias.models.reference.network import load_reference, save_reference
from posbias.models.reference.parameters import draw_parameters
from published_networks import copy_network

TINY = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
BEYOND = 10**9
CHARACTERS_OF_500 = base64.b64encode(bytes(4) + b"\0" + b"c" * 500).decode()
"""A table of SentencePiece's: the size of its trie, which is empty, and the strings that it maps to."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(directory)
    return directory


def configured(directory: Path, whole: Path, **entries: Any) -> Path:
    """A copy of the model whose configuration has other entries."""
    directory.mkdir(exist_ok=True)
    for path in whole.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    plain = json.loads((whole / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**plain, **entries}))
    return directory


@pytest.mark.parametrize(
    ("model_type", "entry", "most"),
    [
        ("llama", "num_hidden_layers", "1,000"),
        ("gpt2", "n_layer", "1,000"),
        ("mpt", "n_layers", "1,000"),
        ("llama", "num_attention_heads", "100,000"),
        ("mixtral", "num_local_experts", "100,000"),
        ("llama", "num_labels", "100,000"),
        ("xlstm", "num_blocks", "1,000"),
        ("gpt_neo", "attention_types", "1,000"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "config:"])
def test_numbers_beyond_every_model(
    tmp_path: Path, whole: Path, model_type: str, entry: str, most: str, prefix: str
) -> None:
    value: Any = [[["global"], BEYOND]] if entry == "attention_types" else BEYOND
    path = configured(tmp_path, whole, model_type=model_type, **{entry: value})
    message = refused(f"{prefix}{path}")
    assert f"configuration has {entry} 1,000,000,000; at most {most} are allowed" in message


def test_numbers_of_the_decoder_inside_a_larger_model() -> None:
    with pytest.raises(UsageError, match="configuration has num_hidden_layers"):
        check_numbers({"model_type": "gemma3", "text_config": {"num_hidden_layers": BEYOND}}, "large")
    with pytest.raises(UsageError, match="configuration has block_count"):
        check_numbers({"general.architecture": "llama", "llama.block_count": 2**32 - 1}, "large")
    published = {"max_position_embeddings": 10_485_760, "rope_theta": 10**11, "vocab_size": 262_400, "seed": 2**32}
    check_numbers({**published, "num_experts": 16_384, "num_hidden_layers": 200, "sliding_window": 10**9}, "large")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_size": 2**24}, "its files hold"),
        ({"vocab_size": BEYOND}, "its files hold"),
        ({"intermediate_size": 10**12}, "its files hold"),
        ({"hidden_size": 10**12}, "its files hold"),
        ({"hidden_size": 10**12, "head_dim": 10**12}, "no network can be built from it"),
        ({"model_type": "gptj", "max_position_embeddings": BEYOND * 9, "rotary_dim": 8, "n_layer": 1}, "are free"),
    ],
    ids=str,
)
def test_a_network_too_large_is_counted_and_not_made(
    tmp_path: Path, whole: Path, entries: dict[str, Any], words: str
) -> None:
    path = configured(tmp_path, whole, **entries)
    drawn = refused(path, init_seed=0, max_memory=10**9)
    assert any(word in drawn for word in ("to load in", "describes tables of", "no network can be built from it")), (
        drawn
    )
    for device in ("cpu", "auto", "spread"):
        message = refused(path, device=device, max_memory=10**9)
        assert any(word in message for word in words.split("|")), message


@pytest.mark.parametrize(
    "entries",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"num_key_value_heads": 5},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 1.5},
        {"num_hidden_layers": "two"},
        {"hidden_size": -16},
        {"hidden_size": None},
        {"head_dim": 7},
        {"vocab_size": 0},
        {"hidden_act": "sorcery"},
        {"rope_parameters": {"rope_type": "sorcery", "rope_theta": 1e4}},
        {"rope_parameters": [1]},
        {"layer_types": ["sorcery"]},
        {"quantization_config": {"quant_method": "sorcery"}},
        {"quantization_config": 7},
        {"architectures": 7},
        {"dtype": "sorcery"},
        {"model_type": ["llama"]},
        {"model_type": {}},
        {"auto_map": "own.py"},
        {"configuration_files": ["config.9.json"]},
        {"torch_dtype": {"a": 1}},
        {"attention_bias": 10**400},
    ],
    ids=str,
)
def test_impossible_configurations_run_or_are_one_line(tmp_path: Path, whole: Path, entries: dict[str, Any]) -> None:
    path = configured(tmp_path, whole, **entries)
    assert outcome(path) in ("ran", "refused")
    assert outcome(f"config:{path}") in ("ran", "refused")


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"rms_norm_eps": 0}, "rms_norm_eps 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps -1e-06"),
        ({"model_type": "gpt2", "layer_norm_epsilon": -1.0}, "layer_norm_epsilon -1.0"),
        ({"model_type": "starcoder2", "norm_epsilon": 0.0}, "norm_epsilon 0.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}}, "rope_theta -10000.0"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 0.0}, "rope_local_base_freq 0.0"),
        ({"model_type": "gpt_neox", "rotary_emb_base": 0}, "rotary_emb_base 0"),
    ],
    ids=str,
)
def test_epsilons_and_bases_are_positive(tmp_path: Path, whole: Path, entries: dict[str, Any], words: str) -> None:
    path = configured(tmp_path, whole, **entries)
    assert f"configuration has {words}; finite and positive ones are allowed" in refused(path)
    assert f"configuration has {words}; finite" in refused(f"config:{path}")


def test_numbers_that_may_be_0() -> None:
    check_numbers({"moe_jitter_eps": 0.0, "num_steps": 0, "rope_theta": None, "dim_model_base": 0}, "large")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "is nested deeper than 64"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "is nested deeper than 64"),
        (b'{"a": 1' + b"0" * 400 + b"}", "a whole number of 401 digits"),
        (b'{"a": 1e400}', "beyond floating point"),
        (b'{"a": "\\ud800"}', "half a character"),
        (b'{"\\udfff": 1}', "half a character"),
        (b'{"a": 1, "a": 2}', "holds the key 'a' twice"),
    ],
)
def test_documents_that_are_no_documents(tmp_path: Path, whole: Path, text: bytes, words: str) -> None:
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        path = configured(tmp_path / name, whole)
        (path / name).write_bytes(text)
        message = refused(path)
        assert name in message
        assert words in message


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 26, 2**26),
        ([{"type": "Replace", "pattern": {"Regex": "b*"}, "content": "b" * 999}], 1000),
        ([{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581" * 99}] * 2}], 10_000),
        (
            [{"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"\0" + b"c" * 500).decode()}],
            500,
        ),
    ],
)
def test_a_tokenizer_that_lengthens_text_without_bound(
    tmp_path: Path, whole: Path, part: str, steps: list[Any], growth: int
) -> None:
    path = configured(tmp_path, whole)
    nested = {"type": "Sequence", "normalizers" if part == "normalizer" else "decoders": steps}
    (path / "tokenizer.json").write_text(json.dumps({part: nested}))
    assert f"tokenizer.json has a {part} that can make {growth:,} characters of one; at most 256" in refused(path)


def test_normalizers_of_real_tokenizers_are_allowed() -> None:
    llama = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    t5 = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), "\u2581"), normalizers.NFKC()]
    bert = [normalizers.BertNormalizer()]
    for steps in (llama, t5, bert):
        check_text_growth({"normalizer": json.loads(normalizers.Sequence(steps).__getstate__())})
    check_text_growth({"normalizer": None, "decoder": json.loads(decoders.Replace("\u2581", " ").__getstate__())})


def test_a_tokenizer_that_leaves_nothing_of_a_text(tmp_path: Path, whole: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.normalizer = normalizers.Replace(Regex("(?m).*"), "")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    assert "its tokenizer turns the text 'A trial.' into no tokens" in refused(configured(tmp_path, whole))


def test_a_document_that_is_too_large_or_never_ends(tmp_path: Path, whole: Path) -> None:
    path = configured(tmp_path, whole)
    with open(path / "tokenizer.json", "wb") as file:
        file.truncate(1 << 32)
    assert "tokenizer.json is larger than 100,000,000 bytes" in refused(path)
    with open(path / "config.json", "wb") as file:
        file.truncate(1 << 32)
    assert "config.json is larger than 10,000,000 bytes" in refused(path)
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("/dev/zero")
    assert "has no readable config.json" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 10**9}, "has shape|at most 50,000,000 cells"),
        (
            {"mlp_width": 10**9, "mlp": True},
            "not part of this model|is missing|has shape|at most 50,000,000 cells",
        ),
        ({"architecture": {"depth": BEYOND}}, "configuration has depth 1,000,000,000; at most 1,000"),
        ({"architecture": {"depth": 1, "heads": BEYOND}}, "configuration has heads"),
        ({"architecture": [1]}, "reference configuration is refused"),
        ({"architecture": {"depth": 1, "mask": f"causal({'x' * 5000})"}}, ""),
        ({"residual_scale": "x"}, "reference configuration is refused"),
        ({"readout": "mlp", "readout_layers": BEYOND}, "configuration has readout_layers"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_reference_models_are_held_to_the_same(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = copy_network(Architecture(1))
    path = save_reference(tmp_path / "saved", config, parameters=draw_parameters(config, torch.Generator()))
    document = json.loads((path / "reference.json").read_text())
    document["config"] |= changes
    (path / "reference.json").write_text(json.dumps(document))
    message = refused(path)
    assert any(word in message for word in words.split("|")), message


def test_shapes_are_known_without_drawing() -> None:
    config = copy_network(Architecture(2, 2), residual=True, mlp=True)
    drawn, shapes = draw_parameters(config, torch.Generator()), draw_parameters(config, None)
    assert {name: value.shape for name, value in drawn.items()} == {name: value.shape for name, value in shapes.items()}
    assert all(value.is_meta for value in shapes.values())
    with pytest.raises(UsageError, match="holds no reference model"):
        load_reference("nowhere")
