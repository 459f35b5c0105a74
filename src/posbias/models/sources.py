"""Sources of models: what a user names is resolved, and checked to be a decoder that may run, before weights are read.

Every refusal is one line that says what is allowed. Nothing local is looked up on the network.

GGUF files are read by transformers, and refused where it would leave out what changes the network: it skips, without a
word, metadata that it has no entry for and tensors that its network has no place for. So every key of the architecture
must be one that it reads, or one that holds what the network computes by anyway; and every tensor must have its place.
The files of the architectures below give the logits of the network that was written into them
(`tests/models/test_gguf.py`).
"""

import io
import json
import logging
import math
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from torch import nn

from posbias.errors import RunError, UsageError, one_line

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
"""Those whose networks transformers builds right, as the tests hold it to."""
BESIDE = ("general", "tokenizer", "quantize", "mradermacher", "split")
"""First parts of keys that say who made a file, and how, and nothing of the network."""
ALSO = {
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "rope.dimension_count": ("head_dim",),
    "rope.freq_base": ("rope_theta",),
    "rope.scaling.original_context_length": ("original_max_position_embeddings",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
}
"""Keys that transformers may not read, and the entries of a configuration one of which has to hold their value."""
NEUTRAL = {
    "attention.causal": True,
    "expert_count": 0,
    "expert_used_count": 0,
    "pooling_type": 0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,
    "tensor_data_layout": "Meta AI original pth",
    "mm.tokens_per_image": None,
}
"""Keys that transformers does not read, and the value at which they change nothing; None: any."""
TRY = "load the safetensors of this model"


def gguf_configuration(path: Path, name: str) -> Any:
    """The configuration that transformers makes of a file's metadata.

    Raises:
        UsageError: an architecture that is not held to its logits, a part of several files, or a key of the network
            that transformers does not read.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig

    try:  # without its long lists
        given = [field for field in GGUFReader(path).fields.values() if not field.name.startswith("GGUF.")]
        fields: dict[str, Any] = {field.name: field.contents() if len(field.data) < 1000 else "..." for field in given}
    except Exception as error:  # the reader trusts the numbers of a file
        raise UsageError(f"model {name!r}: no readable GGUF file: {one_line(error)[:200]}") from None
    architecture = str(fields.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UsageError(
            f"model {name!r} is a GGUF file of architecture {architecture!r:.80}; allowed: {', '.join(ARCHITECTURES)}, "
            f"or {TRY}"
        )
    if fields.get("general.type", "model") != "model" or fields.get("split.count", 0) > 1:
        raise UsageError(f"model {name!r} is no whole model (general.type, split.count); allowed: one file")
    if "mistral" in str(fields.get("general.name")) and architecture == "llama":
        raise UsageError(f"model {name!r}: transformers would give it a sliding window that the file lacks; {TRY}")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    for key, value in fields.items():
        first, _, rest = key.partition(".")
        if first not in BESIDE and (first != architecture or not _is_read(rest, value, architecture, config)):
            raise UsageError(f"model {name!r}: transformers does not read {key[:80]} = {value!r:.80} of it; {TRY}")
    # The logit scale of the 27B models of Gemma 2 and 3 is in no file, and transformers takes the others'.
    if (config.model_type, config.num_hidden_layers) in (("gemma2", 46), ("gemma3_text", 62)):
        right, taken = config.hidden_size // config.num_attention_heads, config.query_pre_attn_scalar
        raise UsageError(f"model {name!r}: its logit scale is 1 / sqrt({right}), transformers takes {taken}; {TRY}")
    return config


def check_places(path: Path, network: nn.Module, name: str) -> None:
    """Refuse a file with tensors that the network has no place for, such as factors of RoPE or biases."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config: Any = network.config
    processor = TENSOR_PROCESSORS.get(config.model_type.removesuffix("_text"), TensorProcessor)(config=config.to_dict())
    places = get_gguf_hf_weights_map(network, processor)
    unplaced = sorted({tensor.name for tensor in GGUFReader(path).tensors} - set(places))
    if unplaced:
        raise RunError(
            f"model {name!r}: transformers does not read {len(unplaced)} tensors of it, first {unplaced[0][:80]!r}; "
            f"{TRY}"
        )


def _is_read(key: str, value: Any, architecture: str, config: Any) -> bool:
    """Tell whether transformers reads a key of the architecture, or would compute the same anyway."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    if (GGUF_CONFIG_MAPPING[architecture].get(key) or -1) != -1:
        return True
    if key in NEUTRAL and NEUTRAL[key] in (None, value):
        return True
    rope = getattr(config, "rope_parameters", None) or {}
    known = {"head_dim": config.hidden_size // config.num_attention_heads}
    known |= {**rope, **rope.get("full_attention", {}), **vars(config)}
    held = next((known[entry] for entry in ALSO.get(key, (key,)) if known.get(entry) is not None), None)
    if isinstance(held, float) and isinstance(value, float):
        return math.isclose(held, value, rel_tol=1e-6)  # files hold 32 bits
    return held is not None and bool(held == value)


ALLOWED = 'a hub id, a directory, a .gguf file, "demo" or "config:PATH_OR_ID"'
CONFIG = "config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
ELSEWHERE = ("transformers_weights", "configuration_files")
"""Entries of a configuration that send transformers to other files than those that are checked here."""


@dataclass(frozen=True)
class Source:
    """A source as transformers needs it, made from what a user named."""

    name: str
    """Name in messages and records; only the base name of a local path."""
    location: str
    """A directory, a JSON file or a hub id, for transformers."""
    local: bool
    gguf: str | None = None
    """Name of the GGUF file inside `location`."""

    @cached_property
    def offline(self) -> bool:
        """True for local sources, and if the hub cannot be found: its client would retry for a minute."""
        return self.local or not hub_in_sight()

    @property
    def revision(self) -> str | None:
        """The commit on the hub that the files are taken from; None for what is local."""
        path = None if self.local else file_of(self, CONFIG)
        return None if path is None else path.parent.name

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments every `from_pretrained` call gets."""
        extra = {} if self.gguf is None else {"gguf_file": self.gguf}
        return {"local_files_only": self.offline, "trust_remote_code": False, **extra}


def resolve_source(source: str | Path) -> Source:
    """Resolve a source other than "demo": an existing path, or text of the form of a hub id; others are refused."""
    if not isinstance(source, str | Path):
        raise UsageError(f"a model is named by text or a path, got {type(source).__name__}; allowed: {ALLOWED}")
    text = str(source)
    target = text.removeprefix("config:")
    prefix, path = text.removesuffix(target), named_path(target)
    if target and path.is_dir():
        return Source(prefix + path.resolve().name, str(path), local=True)
    if path.is_file() and path.suffix == ".gguf":
        return Source(prefix + path.name, str(path.parent), local=True, gguf=path.name)
    if prefix and path.is_file() and path.suffix == ".json":
        return Source(prefix + path.name, str(path), local=True)
    if target and path.exists():
        raise UsageError(f"model {text[:120]!r} is a file that is not a model; allowed: {ALLOWED}")
    if not re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", target) or path.suffix in {".gguf", ".json"}:
        raise UsageError(f"model {text[:120]!r} does not exist; allowed: {ALLOWED}")
    return Source(text, target, local=False)


def named_path(text: str) -> Path:
    """The path that a text means, whether or not anything lies there; refused if nothing can."""
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null in it
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UsageError(f"model {text[:120]!r} does not exist ({reason}); allowed: {ALLOWED}") from None
    return path


def absolute_source(source: str | Path) -> str:
    """The source as text that means the same in every working directory."""
    text = str(source)
    target = text.removeprefix("config:")
    path = Path(target).expanduser()
    # "demo" is a name, even if a file bears it, as for `load_model`.
    return text if target == "demo" or not path.exists() else f"{text.removesuffix(target)}{path.resolve()}"


def hub_in_sight() -> bool:
    """True if the hub's name resolves, or a proxy would do it."""
    from huggingface_hub import constants

    with suppress(OSError):
        return bool(getproxies() or socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    return False


def file_of(source: Source, name: str) -> Path | None:
    """The path of one of a model's files on this machine, fetched if it is on the hub; None if there is none.

    Raises:
        OSError: the hub does not provide the model.
    """
    from transformers.utils import cached_file

    location = Path(source.location)
    if source.local:
        path = location if location.is_file() else location / name
        return path if path.is_file() else None
    path = cached_file(
        source.location, name, local_files_only=source.offline, _raise_exceptions_for_missing_entries=False
    )
    return None if path is None else Path(path)


def read_config(source: Source) -> Any:
    """The configuration of a decoder that transformers itself supports.

    Raises:
        UsageError: not found, unreadable, not a decoder, unknown to transformers, or in need of its own code.
    """
    from transformers import AutoConfig

    try:
        if source.gguf is not None:
            config = gguf_configuration(Path(source.location) / source.gguf, source.name)
        else:
            path = file_of(source, CONFIG)
            if path is None:
                raise FileNotFoundError(f"it has no {CONFIG}")
            _check_entries(json.loads(path.read_bytes()), source.name)
            config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except UsageError:
        raise
    except OSError as error:
        if source.local:
            raise UsageError(f"model {source.name!r} has no readable {CONFIG}; allowed: {ALLOWED}") from None
        raise UsageError(
            f"model {source.name!r} is no existing path, and the hub did not provide it "
            f"({one_line(error)[:120]}); allowed: {ALLOWED}"
        ) from None
    except Exception as error:
        raise UsageError(f"model {source.name!r}: configuration refused: {one_line(error)[:300]}") from None
    check_decoder(config, source.name)
    return config


def _check_entries(entries: dict[str, Any], name: str) -> None:
    """Refuse what transformers would ask a user about (code of the model's own), or look for in other files."""
    from transformers import CONFIG_MAPPING

    for entry in ELSEWHERE:
        if f'"{entry}":' in json.dumps(entries):
            raise UsageError(f"model {name!r}: configuration names other files ({entry}), which is not allowed")
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        own = entries.get("auto_map") and "needs its own code (auto_map), which is not run"
        unknown = f"has model_type {kind!r:.80}, unknown to transformers"
        raise UsageError(f"model {name!r} {own or unknown}; allowed: decoders that transformers has itself")


def check_decoder(config: Any, name: str) -> None:
    """Refuse the configuration of what is no decoder-only language model of transformers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    kind = None
    if getattr(config, "is_encoder_decoder", False):
        kind = "an encoder-decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = "not a causal language model"
    elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        kind = "an encoder"
    if kind is not None:
        raise UsageError(f"model {name!r} ({config.model_type}) is {kind}; allowed: decoder-only language models")


def check_files(source: Source) -> None:
    """Refuse a model whose weights transformers would read from anything but its own safetensors files.

    `use_safetensors` alone does not: an index may name other files, and an adapter brings its base model.
    """
    if source.gguf is not None:
        return
    if file_of(source, ADAPTER) is not None:
        raise UsageError(f"model {source.name!r} has an adapter ({ADAPTER}); allowed: one merged into the weights")
    if file_of(source, WHOLE) is not None:
        return
    index = file_of(source, INDEX)
    if index is not None:
        try:
            named = list(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"model {source.name!r}: {INDEX} cannot be read: {one_line(error)[:200]}") from None
        for place in named:
            if not isinstance(place, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", place):
                raise UsageError(
                    f"model {source.name!r}: {INDEX} names {str(place)[:80]!r}; allowed: *.safetensors in the same "
                    "directory, as other files can run code"
                )
        return
    files = sorted(Path(source.location).iterdir()) if source.local else []
    for path in files:
        if path.suffix in (".bin", ".pt", ".pth"):
            raise UsageError(
                f"model {source.name!r} has pickled weights ({path.name}), which can run code; allowed: safetensors or "
                "gguf"
            )
    advice = next((f"; name the file itself, e.g. {path.name}" for path in files if path.suffix == ".gguf"), "")
    raise UsageError(f"model {source.name!r} has no weights ({WHOLE} or {INDEX}){advice}")


@contextmanager
def quiet(local: bool) -> Iterator[None]:
    """Silence transformers and the hub client while loading; bars (downloads, GGUF conversion) stay for who watches."""
    from transformers.utils import logging as bars

    watched, shown = sys.stderr.isatty(), bars.is_progress_bar_enabled()
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)
    if local or not watched:
        bars.disable_progress_bar()
    try:
        with warnings.catch_warnings(), ExitStack() as redirected:
            warnings.simplefilter("ignore")
            if not watched:
                # The GGUF reader's bar asks no setting.
                redirected.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.disable(silenced)
        if shown:
            bars.enable_progress_bar()
