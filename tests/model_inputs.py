"""Damaged models, drawn from a seed: valid files of several formats with one or two places made hostile.

`damaged(base, target, random)` writes one and says what was done; `outcome(path)` loads and measures it.
"""

import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuzz_files import bytes_changed, node_changed

ALLOWED_CHARACTERS, ALLOWED_SECONDS, ALLOWED_BYTES = 500, 5.0, 2 * 10**9
"""Seconds are those of the processor: a busy machine is no finding."""
FAMILIES = ("llama", "gpt2", "gemma2", "bloom", "mixtral", "phi", "falcon-alibi", "opt", "qwen2-window")
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 1.5, -0.5, 0.0, 1000, 1e-300, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "é", "\ud800", "\x00", "../..", "/dev/zero", "a" * 5000),
    *([], [0], [None], ["x"], [-1, 9], [[]], {}, {"a": 1}, {"": None}, "w.bin", "float8_e4m3fn", "auto", "sdpa"),
    *("cuda", "2", "None", "llama", "full_attention"),
)
"""Whole numbers no larger: a network of a billion layers is not refused, and building it never ends."""
WORDS = [0, 1, 3, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


def save_bases(directory: Path, families: Sequence[str] = FAMILIES) -> None:
    """Valid models of every format: families of transformers, one in shards, a GGUF file, a reference model."""
    import torch
    import transformers

    from conftest import save_byte_tokenizer
    from gguf_inputs import save_gguf
    from posbias import Architecture
    from posbias.models.reference.config import draw_parameters
    from posbias.models.reference.network import save_reference
    from published_networks import copy_network
    from tiny_families import CONFIGS, MIXTURES

    torch.manual_seed(0)
    for name in families:
        config = (CONFIGS | MIXTURES)[name]()
        config.vocab_size = 300
        network = transformers.AutoModelForCausalLM.from_config(config)
        network.save_pretrained(directory / name)
        save_byte_tokenizer(directory / name)
    network = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    network.save_pretrained(directory / "shards", max_shard_size="20KB")
    (directory / "gguf").mkdir()
    save_gguf(directory / "gguf" / "w.gguf", network)
    reference = copy_network(Architecture(2, 2, mask=["causal", "prefix(length=2)"]), residual=True, mlp=True)
    save_reference(directory / "reference", reference, parameters=draw_parameters(reference, torch.Generator()))


def damaged(base: Path, target: Path, draw: random.Random) -> tuple[Path, str]:
    """A copy of a model with one file damaged once or twice; what to load, and which file it is."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    names = [path.name for path in sorted(target.iterdir()) if path.suffix in DAMAGE]
    # Half of all damage goes to the file that says most.
    first = next((name for name in names if name in ("config.json", "reference.json", "w.gguf")), names[0])
    path = target / (first if draw.random() < 0.5 else draw.choice(names))
    for _ in range(draw.choice((1, 1, 2))):
        draw.choice(DAMAGE[path.suffix])(path, draw)
    whole = target / "w.gguf"
    return (whole if whole.exists() else target), f"{base.name}/{path.name}"


def outcome(source: str | Path) -> str:
    """ "ran" or "refused"; otherwise what was found, which is a finding."""
    from posbias import RunError, UsageError

    before, began = held("VmRSS"), time.process_time()
    reset_peak()
    try:
        _use(source)
    except (UsageError, RunError) as error:
        message = str(error)
        if "\n" in message or len(message) > ALLOWED_CHARACTERS:
            return f"a message of {len(message)} characters: {message[:200]!r}"
        if "weights_only" in message or not message.isprintable():
            return f"a message that says {message[:200]!r}"
        found = "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    else:
        found = "ran"
    taken, seconds = held("VmHWM") - before, time.process_time() - began
    if taken > ALLOWED_BYTES or seconds > ALLOWED_SECONDS:
        return f"{found}, but took {taken / 1e9:.2g} GB and {seconds:.2g} s"
    return found


def _use(source: str | Path) -> None:
    """Load, describe, and measure the last position on one prompt."""
    from posbias import load_model, load_prompts, measure

    model = load_model(source)
    json.dumps(model.describe())
    if getattr(model, "tokenizer", None) is not None:
        load_prompts("default", model, n_positions=6, count=1)
    measure(model, load_prompts("synthetic", model, n_positions=6, count=1))


def _other_bytes(path: Path, draw: random.Random) -> None:
    """Anywhere."""
    if path.stat().st_size:
        path.write_bytes(bytes_changed(path, draw))


def _another_word(path: Path, draw: random.Random) -> None:
    """Four or eight bytes near the beginning replaced by a number that is too large somewhere."""
    content = bytearray(path.read_bytes())
    size = draw.choice((4, 8))
    place, word = draw.randrange(max(min(len(content), 2000) - size, 1)), draw.choice(WORDS) % 256**size
    content[place : place + size] = word.to_bytes(size, "little")
    path.write_bytes(content)


def _another_value(path: Path, draw: random.Random) -> None:
    """At any depth of a JSON file, or of the header of a safetensors file."""
    content = path.read_bytes()
    begin = 8 if path.suffix == ".safetensors" else 0
    end = begin + int.from_bytes(content[:8], "little") if begin else len(content)
    try:
        changed = json.dumps(node_changed(json.loads(content[begin:end]), draw, HOSTILE)).encode()
    except (ValueError, RecursionError):
        _other_bytes(path, draw)  # damaged before
        return
    path.write_bytes((struct.pack("<Q", len(changed)) if begin else b"") + changed + content[end:])


def _deep(path: Path, draw: random.Random) -> None:
    levels = draw.choice((50, 500, 50_000))
    path.write_text('{"a":' * levels + "1" + "}" * levels)


Damage = Callable[[Path, random.Random], None]
DAMAGE: dict[str, list[Damage]] = {
    ".json": [_another_value] * 12 + [_other_bytes, _deep],
    ".safetensors": [_another_value] * 3 + [_other_bytes, _another_word],
    ".gguf": [_other_bytes, _another_word, _another_word],
}


def held(field: str) -> int:
    """Bytes that this process holds (VmRSS), or held at most (VmHWM); 0 if the system does not say."""
    lines = Path("/proc/self/status").read_text().splitlines() if Path("/proc/self/status").exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def reset_peak() -> bool:
    """Begin VmHWM anew; whether the system allowed it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True
