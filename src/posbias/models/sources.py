"""Sources of models: what a user names is resolved, and checked to be a decoder that may run, before weights are read.

Every refusal is one line that says what is allowed. Nothing local is looked up on the network.
"""

import io
import json
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from posbias.errors import UsageError, one_line
from posbias.models.gguf import gguf_configuration

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
    config_only: bool = False

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
    config_only = target != text
    prefix = "config:" if config_only else ""
    path = named_path(target)
    if target and path.is_dir():
        return Source(prefix + path.resolve().name, str(path), local=True, config_only=config_only)
    if path.is_file() and path.suffix == ".gguf":
        return Source(prefix + path.name, str(path.parent), local=True, gguf=path.name, config_only=config_only)
    if config_only and path.is_file() and path.suffix == ".json":
        return Source(prefix + path.name, str(path), local=True, config_only=True)
    if target and path.exists():
        raise UsageError(f"model {text[:120]!r} is a file that is not a model; allowed: {ALLOWED}")
    if not re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w-][\w.-]{0,95})?", target) or path.suffix in {".gguf", ".json"}:
        raise UsageError(f"model {text[:120]!r} does not exist; allowed: {ALLOWED}")
    return Source(text, target, local=False, config_only=config_only)


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

    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError:
        return False
    return True


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
            _check_file(path, source.name)
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


def _check_file(path: Path, name: str) -> None:
    """Refuse what transformers would ask a user about (code of the model's own), or look for in other files."""
    from transformers import CONFIG_MAPPING

    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {name!r}: configuration refused: {path.name} is not JSON: {one_line(error)}") from None
    if not isinstance(plain, dict):
        raise UsageError(f"model {name!r}: configuration refused: {path.name} is no object")
    for entry in ELSEWHERE:
        if f'"{entry}":' in json.dumps(plain):
            raise UsageError(f"model {name!r}: configuration names other files ({entry}), which is not allowed")
    model_type = plain.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return
    if plain.get("auto_map"):
        raise UsageError(
            f"model {name!r} needs its own code (auto_map), which is not run; allowed: model types that transformers "
            "supports natively"
        )
    spelled = repr(model_type)[:80]
    raise UsageError(f"model {name!r} has model_type {spelled}, unknown to transformers; allowed: its decoders")


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
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    watched = sys.stderr.isatty()
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    if local or not watched:
        logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), ExitStack() as redirected:
            warnings.simplefilter("ignore")
            if not watched:
                # The GGUF reader's bar asks no setting.
                redirected.enter_context(redirect_stderr(io.StringIO()))
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
