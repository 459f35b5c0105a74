"""Limits of a configuration, checked on its numbers alone before transformers builds anything from it.

Transformers makes lists and modules as long as these numbers say, so that one of them can take all memory or never end.
What is left is counted in bytes, with none taken, by `network_size`. The configuration of a GGUF file is its metadata.
"""

import base64
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from posbias.errors import UsageError, one_line

LAYERS, COUNT, SIZE = 1_000, 100_000, 10**12
"""The most layers; heads, experts and other things of which there are many in a layer; anything else."""
LIMITS = (
    (re.compile(r"(size|dim|width|length|position|ctx|embd|inner|param)"), SIZE),
    (re.compile(r"(layers?|depth|blocks?|block_count|stacks?|cycles|types|pattern|replace)$"), LAYERS),
    (re.compile(r"^(num|n|number)_|(heads?|head_count(_kv)?|experts?|expert_count|groups)$"), COUNT),
)
"""By what the last part of an entry's name holds, the first that fits: the largest number it may have."""
POSITIVE = re.compile(
    r"(^|(?<!jitter)_)(eps|epsilon)$|(^|_)((?<!layer_rope_)theta|base_freq|freq_base(_swa)?)$|^rotary_emb\w*_base$"
)
"""Names of the epsilons of norms and the bases of rotary positions: finite and positive, or outputs are not numbers.
Bases by layer may be 0, which turns nothing."""
FOREIGN_FILES = {
    "transformers_weights": "a file of weights of its own choice",
    "configuration_files": "other configuration files",
}
"""Entries that send transformers to files that no one has checked."""

MOST_GROWTH = 256
"""Characters that a tokenizer's normalizer, or its decoder, may make of one; those of T5 make 72, NFKC alone 18."""


def check_numbers(plain: Mapping[str, Any], name: str) -> None:
    """Refuse a configuration whose numbers are beyond every model, or that points to files elsewhere.

    It is a `config.json` or the metadata of a GGUF file; the message names the entry, its value and what is allowed.
    """
    for key, value in _entries(plain):
        if key in FOREIGN_FILES and value is not None:
            raise UsageError(f"model {name!r}: configuration names {FOREIGN_FILES[key]} ({key}), which is not allowed")
        if isinstance(value, str) and key.endswith("pattern"):
            value = len(value)  # a letter for each layer
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if POSITIVE.search(key) and not 0 < value < math.inf:
            entry = one_line(f"configuration has {key} {value}")
            raise UsageError(f"model {name!r}: {entry}; finite and positive ones are allowed")
        if isinstance(value, float):
            continue
        most = next((limit for pattern, limit in LIMITS if pattern.search(key)), SIZE)
        if abs(value) > most:
            entry = one_line(f"configuration has {key} {value:,}")
            raise UsageError(f"model {name!r}: {entry}; at most {most:,} are allowed")


def _entries(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every entry at every depth (which `read_json` bounds), with the last part of its name."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _entries(item, str(name).rpartition(".")[2])
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item, key)
    else:
        yield key, value


def check_text_growth(tokenizer: Any) -> None:
    """Refuse a `tokenizer.json` that lengthens text without bound: 26 times "aa" for "a" is 64 MB of a letter.

    A ValueError says which part does. Other JSON files of a tokenizer have no such parts.
    """
    if not isinstance(tokenizer, Mapping):
        return
    for part in ("normalizer", "decoder"):
        growth = _growth(tokenizer.get(part))
        if growth > MOST_GROWTH:
            raise ValueError(
                f"has a {part} that can make {growth:,} characters of one; at most {MOST_GROWTH} are allowed"
            )


def _growth(step: Any) -> int:
    """The most characters that a step of a normalizer or decoder, nested steps included, makes of one."""
    if not isinstance(step, Mapping):
        return 1
    growth = math.prod(_growth(nested) for name in ("normalizers", "decoders") for nested in step.get(name) or ())
    pattern, content = step.get("pattern"), str(step.get("content", ""))
    if isinstance(pattern, Mapping) and pattern.get("String"):
        growth *= max(-(-len(content) // len(str(pattern["String"]))), 1)
    elif pattern is not None:
        growth *= len(content) + 1  # a regular expression may match between any two characters
    if isinstance(step.get("prepend"), str):
        growth *= len(step["prepend"]) + 1
    if isinstance(step.get("precompiled_charsmap"), str):
        table = base64.b64decode(step["precompiled_charsmap"])
        strings = table[4 + int.from_bytes(table[:4], "little") :].decode(errors="replace").split("\0")
        growth *= max(*map(len, strings), 1)  # they follow the trie, whose size stands first
    return growth
