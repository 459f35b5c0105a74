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

from posbias.errors import UsageError
from posbias.models.demo import fetch_demo

ALLOWED = 'a hub id, a directory, a .gguf file, "demo" or "config:PATH_OR_ID"'


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
    path = Path(wanted).expanduser()
    if wanted and path.is_dir():
        return Source(prefix + path.resolve().name, str(path), local=True, config_only=config_only)
    if path.is_file() and path.suffix == ".gguf":
        return Source(prefix + path.name, str(path.parent), local=True, gguf=path.name, config_only=config_only)
    if config_only and path.is_file() and path.suffix == ".json":
        return Source(prefix + path.name, str(path), local=True, config_only=True)
    if wanted and path.exists():
        raise UsageError(f"model {text!r} is a file that is not a model; allowed: {ALLOWED}")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", wanted) or path.suffix in {".gguf", ".json"}:
        raise UsageError(f"model {text!r} does not exist; allowed: {ALLOWED}")
    return Source(text, wanted, local=False, config_only=config_only)


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
    """The configuration of a decoder that transformers itself supports.

    Raises:
        UsageError: not found, unreadable, not a decoder, unknown to transformers, or in need of its own code.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    try:
        if source.gguf is None:
            plain, _ = PretrainedConfig.get_config_dict(source.location, local_files_only=source.offline)
            if not plain:  # what transformers makes of a directory without a config.json
                raise OSError
            _check_model_type(plain, source.name, CONFIG_MAPPING)
        config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except UsageError:
        raise
    except OSError:
        if source.local:
            raise UsageError(f"model {source.name!r} has no readable config.json; allowed: {ALLOWED}") from None
        raise UsageError(
            f"model {source.name!r} is no existing path, and the hub did not provide it (unknown id, private, or no "
            f"connection); allowed: {ALLOWED}"
        ) from None
    except Exception as error:
        raise UsageError(f"model {source.name!r}: configuration refused: {one_line(error)}") from None
    _check_decoder(config, source.name)
    return config


def _check_model_type(plain: dict[str, Any], name: str, known: Any) -> None:
    """Refuse remote code and model types this transformers does not know."""
    model_type = plain.get("model_type")
    if model_type in known:
        return
    if plain.get("auto_map"):
        raise UsageError(
            f"model {name!r} needs its own code (auto_map), which is not run; allowed: model types that transformers "
            "supports natively"
        )
    raise UsageError(f"model {name!r} has model_type {model_type!r}, unknown to transformers; allowed: its decoders")


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


def one_line(error: Exception) -> str:
    """The first line of an error's message, or its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
