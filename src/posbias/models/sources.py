"""What a user may name as a model, and whether it is a decoder we may run: resolved before any weight is read.

Every refusal is one line that says what is allowed. Nothing local is looked up on the network.
"""

import re
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from posbias.errors import UsageError, one_line
from posbias.files import read_json
from posbias.models.config_limits import check_numbers
from posbias.models.demo import fetch_demo
from posbias.models.gguf_header import TENSORS, gguf_metadata

ALLOWED = 'a hub id, a directory, a .gguf file, "demo" or "config:PATH_OR_ID"'
CONFIG = "config.json"
CONFIG_BYTES = 10_000_000
"""The largest configuration read; those of real models have a few thousand bytes."""
GGUF_LAYERS = 256
"""The most layers of a GGUF file: transformers takes time in their square to name the tensors (32 layers: seconds)."""
TOKENIZER_BYTES = 100_000_000
"""The largest file of a tokenizer read; those of 262,144 tokens have 40 MB."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "chat_template*")
"""What the files of tokenizers are called."""


@dataclass(frozen=True)
class Source:
    """What was asked for, resolved."""

    name: str
    """For messages and records; base name only where it is a local path."""
    location: str
    """What transformers is given: a directory, a JSON file or a hub id."""
    local: bool
    gguf: str | None = None
    """Name of the GGUF file inside `location`."""
    config_only: bool = False

    @cached_property
    def offline(self) -> bool:
        """Whether only this machine is asked: always for local sources, and where the hub cannot be found at all."""
        return self.local or not hub_in_sight()

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments every `from_pretrained` call gets."""
        extra = {} if self.gguf is None else {"gguf_file": self.gguf}
        return {"local_files_only": self.offline, "trust_remote_code": False, **extra}

    @cached_property
    def revision(self) -> str | None:
        """The commit on the hub that all files are taken from; None for what is local.

        Raises:
            OSError: the hub does not provide it.
        """
        path = None if self.local else self._from_hub(CONFIG, None)
        return None if path is None else path.parent.name

    def file(self, name: str, revision: str | None = None) -> Path | None:
        """Where a file of the model lies on this machine, fetched if it comes from the hub; None if there is none.

        Raises:
            OSError: the hub does not provide it.
        """
        if self.local:
            path = Path(self.location)
            path = path if path.is_file() else path / name
            return path if path.is_file() else None
        return self._from_hub(name, revision or self.revision)

    def _from_hub(self, name: str, revision: str | None) -> Path | None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(self.location, name, revision=revision, local_files_only=self.offline))
        except EntryNotFoundError:
            return None


def resolve_source(source: str | Path) -> Source:
    """Decide what a source is.

    Raises:
        UsageError: neither a known word nor an existing path nor the form of a hub id.
    """
    if not isinstance(source, str | Path):
        raise UsageError(f"a model is named by text or a path, got {type(source).__name__}; allowed: {ALLOWED}")
    text = str(source)
    config_only = text.startswith("config:")
    wanted = text.removeprefix("config:")
    prefix = "config:" if config_only else ""
    if wanted == "demo":
        return Source(f"{prefix}demo", str(fetch_demo()), local=True, config_only=config_only)
    path = named_path(wanted)
    if wanted and path.is_dir():
        return Source(prefix + path.resolve().name, str(path), local=True, config_only=config_only)
    if path.is_file() and path.suffix == ".gguf":
        return Source(prefix + path.name, str(path.parent), local=True, gguf=path.name, config_only=config_only)
    if config_only and path.is_file() and path.suffix == ".json":
        return Source(prefix + path.name, str(path), local=True, config_only=True)
    if wanted and path.exists():
        raise UsageError(f"model {text[:120]!r} is a file that is not a model; allowed: {ALLOWED}")
    if not re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", wanted) or path.suffix in {".gguf", ".json"}:
        raise UsageError(f"model {text[:120]!r} does not exist; allowed: {ALLOWED}")
    return Source(text, wanted, local=False, config_only=config_only)


def named_path(text: str) -> Path:
    """The path that a text means; whether anything lies there is another question.

    Raises:
        UsageError: nothing can, by the rules of this machine.
    """
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null in it
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UsageError(f"model {text[:120]!r} does not exist ({reason}); allowed: {ALLOWED}") from None
    return path


def hub_in_sight() -> bool:
    """Whether the hub's name resolves (or a proxy would do it); otherwise the client retries for half a minute."""
    from huggingface_hub import constants

    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError:
        return False
    return True


def read_config(source: Source) -> Any:
    """The configuration of a decoder that transformers itself supports; no file but `config.json` is read.

    Raises:
        UsageError: not found, unreadable, beyond every model, not a decoder, unknown to transformers, or in need of its
            own code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    try:
        if source.gguf is None:
            path = source.file(CONFIG)
            if path is None:
                raise FileNotFoundError
            plain = _object(path)
            check_numbers(plain, source.name)
            _check_model_type(plain, source.name, CONFIG_MAPPING)
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        else:
            metadata = gguf_metadata(Path(source.location) / source.gguf)
            check_numbers(metadata, source.name)
            config = AutoConfig.from_pretrained(source.location, **source.arguments)
            layers, most = config.get_text_config().num_hidden_layers, min(metadata[TENSORS], GGUF_LAYERS)
            if layers > most:  # also where the file does not say how many, and transformers supplies its own number
                raise UsageError(
                    f"model {source.name!r} has {layers} layers; at most {most} are allowed for its tensors"
                )
    except UsageError:
        raise
    except OSError:
        if source.local:
            raise UsageError(f"model {source.name!r} has no readable {CONFIG}; allowed: {ALLOWED}") from None
        raise UsageError(
            f"model {source.name!r} is no existing path, and the hub did not provide it (unknown id, private, or no "
            f"connection); allowed: {ALLOWED}"
        ) from None
    except Exception as error:
        raise UsageError(f"model {source.name!r}: configuration refused: {one_line(error)}") from None
    _check_decoder(config, source.name)
    return config


def _object(path: Path) -> dict[str, Any]:
    """What a configuration file holds.

    Raises:
        ValueError: it is no JSON object, or goes beyond a limit.
    """
    try:
        found = read_json(path, most_bytes=CONFIG_BYTES)
    except ValueError as error:
        raise ValueError(f"{path.name} {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no object")
    return found


def _check_model_type(plain: dict[str, Any], name: str, known: Any) -> None:
    """Refuse remote code and model types this transformers does not know."""
    model_type = plain.get("model_type")
    if isinstance(model_type, str) and model_type in known:
        return
    if plain.get("auto_map"):
        raise UsageError(
            f"model {name!r} needs its own code (auto_map), which is not run; allowed: model types that transformers "
            "supports natively"
        )
    shown = repr(model_type)[:80]
    raise UsageError(f"model {name!r} has model_type {shown}, unknown to transformers; allowed: its decoders")


def _check_decoder(config: Any, name: str) -> None:
    """Refuse encoders and encoder-decoders."""
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


def check_tokenizer_files(source: Source) -> None:
    """Refuse files of a tokenizer that are larger than any, or not the JSON they are called.

    Raises:
        UsageError: the first of them.
    """
    directory = Path(source.location)
    files = sorted({path for pattern in TOKENIZER_FILES for path in directory.glob(pattern) if path.is_file()})
    for path in files if source.gguf is None else ():
        if path.stat().st_size > TOKENIZER_BYTES:
            raise UsageError(f"model {source.name!r}: {path.name} is larger than {TOKENIZER_BYTES:,} bytes")
        if path.suffix == ".json":
            try:
                read_json(path, most_bytes=TOKENIZER_BYTES)
            except (OSError, ValueError) as error:
                raise UsageError(f"model {source.name!r}: {path.name} {one_line(error)}") from None
