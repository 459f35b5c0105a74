"""GGUF files that are not what they say: one line, before memory is taken; whole ones are read as they were written."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
import transformers

from gguf_inputs import save_gguf, stored_tensors
from model_inputs import refused
from posbias.models.gguf_format import read_gguf
from posbias.models.networks import random_network


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(*entries: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries) if count is None else count) + b"".join(entries)


LLAMA = entry("general.architecture", 8, text("llama"))
GGUF_FILES = {
    "no magic": (b"GGML", "does not begin with GGUF"),
    "no version": (b"GGUF", "ends in the middle"),
    "version 99": (gguf(version=99), "version 99"),
    "tensors without end": (gguf(tensors=2**63), "at most 100,000"),
    "entries without end": (gguf(count=2**63), "at most 100,000"),
    "a key without end": (gguf(struct.pack("<Q", 2**60)), "a text of 1,152,921,504,606,846,976 bytes"),
    "a list without end": (gguf(entry("a", 9, struct.pack("<IQ", 0, 2**60))), "at most 5,000,000"),
    "texts without end": (gguf(entry("a", 9, struct.pack("<IQ", 8, 2**60))), "at most 5,000,000"),
    "a list of lists": (gguf(entry("a", 9, struct.pack("<IQ", 9, 1))), "a list of type 9"),
    "an unknown type": (gguf(entry("a", 77, b"")), "a value of type 77"),
    "half a character": (gguf(entry("a", 8, struct.pack("<Q", 3) + b"\xed\xa0\x80")), "not UTF-8"),
    "a key twice": (gguf(LLAMA, LLAMA), "holds the key 'general.architecture' twice"),
    "layers without end": (
        gguf(LLAMA, entry("llama.block_count", 4, struct.pack("<I", 2**32 - 1))),
        "block_count 4,294,967,295; at most 1,000",
    ),
    "more layers than tensors": (
        gguf(LLAMA, entry("llama.block_count", 4, struct.pack("<I", 900)), tensors=1),
        "configuration refused|900 layers; at most 1 are allowed",
    ),
    "no architecture": (gguf(), "configuration refused"),
    "nothing but an architecture": (gguf(LLAMA), ""),
}


@pytest.mark.parametrize("case", GGUF_FILES)
def test_damaged_gguf_files(tmp_path: Path, case: str) -> None:
    content, words = GGUF_FILES[case]
    (tmp_path / "w.gguf").write_bytes(content)
    message = refused(tmp_path / "w.gguf", max_memory=10**8)
    assert any(word in message for word in words.split("|")), message


SIZES = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
FACTORS = "rope_freqs.weight"


@pytest.fixture
def network() -> Any:
    return random_network(transformers.LlamaConfig(**SIZES), seed=0)


@pytest.fixture
def whole(tmp_path: Path, network: Any) -> Path:
    """A Llama of one layer, whose tensors follow each other without a hole; the last are factors of its RoPE."""
    return save_gguf(tmp_path / "w.gguf", network, tensors={FACTORS: [1.0] * 4})


def test_a_file_as_the_library_writes_it(whole: Path, network: Any) -> None:
    file = read_gguf(whole)
    told = {"general.architecture": "llama", "llama.block_count": 1, "llama.attention.layer_norm_rms_epsilon": 1e-6}
    assert {key: file.entries[key] for key in told} == pytest.approx(told)
    assert file.entries["tokenizer.ggml.tokens"] == range(40)
    assert file.entries["tokenizer.ggml.token_type"] == [1] * 40
    written = stored_tensors(network)
    assert {name: tensor.shape for name, tensor in file.tensors.items() if name != FACTORS} == {
        name: value.shape for name, value in written.items()
    }
    for name, value in written.items():
        start, n_bytes = file.tensors[name].start, file.tensors[name].n_bytes
        assert whole.read_bytes()[start : start + n_bytes] == value.astype("<f4").tobytes()
    assert file.numbers(FACTORS) == [1.0] * 4


def edit_table(path: Path, tensor: str, field: str, value: int) -> None:
    """Another offset, type or number of dimensions of one tensor; offsets count from the first tensor."""
    content = bytearray(path.read_bytes())
    place = content.index(struct.pack("<Q", len(tensor)) + tensor.encode()) + 8 + len(tensor)
    (n_dimensions,) = struct.unpack_from("<I", content, place)
    places = {"dimensions": (place, "<I"), "first": (place + 4, "<Q")}
    places |= {"type": (place + 4 + 8 * n_dimensions, "<I"), "offset": (place + 8 + 8 * n_dimensions, "<Q")}
    struct.pack_into(places[field][1], content, places[field][0], value)
    path.write_bytes(content)


TABLES = {
    "an offset that wraps around": (
        FACTORS,
        "offset",
        2**64 - 32,
        r"in bytes 18,446,744,073,709,5\d\d,\d+ to .* it ends at",
    ),
    "an offset beyond the end": (FACTORS, "offset", 1 << 20, "it ends at"),
    "an offset between alignments": (FACTORS, "offset", 4, "at offset 4, no multiple of 32"),
    "the bytes of another": (FACTORS, "offset", 0, "in the same bytes"),
    "longer than the file": ("output.weight", "first", 1 << 40, "it ends at"),
    "more than 64 bits": ("output.weight", "first", 2**63, "it ends at"),
    "into the next": ("output_norm.weight", "first", 17, "in the same bytes"),
    "no number": ("output_norm.weight", "first", 0, r"of shape \[0\]"),
    "an unknown type": (FACTORS, "type", 99, "of type 99, unknown to the gguf package"),
    "blocks that are not filled": (FACTORS, "type", 8, "which blocks of 32 do not fill"),
    "no dimensions": (FACTORS, "dimensions", 0, "in 0 dimensions; allowed: 1 to 4"),
    "many dimensions": (FACTORS, "dimensions", 2**31, "in 2147483648 dimensions"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tensors_that_lie_wrongly(whole: Path, case: str) -> None:
    tensor, field, value, words = TABLES[case]
    edit_table(whole, tensor, field, value)
    message = refused(whole)
    assert message.startswith("model 'w.gguf': configuration refused: has tensor")
    assert re.search(words, message), message


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31 + 1, 1.5, "x"])
def test_alignments_that_are_none(tmp_path: Path, alignment: int | float | str) -> None:
    kind, value = (8, text(alignment)) if isinstance(alignment, str) else (6, struct.pack("<f", alignment))
    if isinstance(alignment, int):
        kind, value = 4, struct.pack("<I", alignment)
    (tmp_path / "w.gguf").write_bytes(gguf(LLAMA, entry("general.alignment", kind, value)))
    assert "a power of two is allowed" in refused(tmp_path / "w.gguf")


def test_a_tensor_twice(whole: Path) -> None:
    content = whole.read_bytes()
    whole.write_bytes(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"))
    assert "holds the tensor 'blk.0.attn_q.weight' twice" in refused(whole)


def test_a_file_that_ends_early(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:-64])
    assert "it ends at" in refused(whole)
