"""Sources of models: what a user names is resolved, and checked to be a decoder that may run, before weights are read.

Every refusal is one line that says what is allowed. Nothing local is looked up on the network.
"""

import io
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbias.errors import UsageError, one_line

ALLOWED = 'a hub id, a directory, a .gguf file, "demo" or "config:PATH_OR_ID"'
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
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

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments every `from_pretrained` call gets."""
        extra = {} if self.gguf is None else {"gguf_file": self.gguf}
        return {"local_files_only": self.local, "trust_remote_code": False, **extra}


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


def read_config(source: Source) -> Any:
    """The configuration of a decoder that transformers itself supports.

    Raises:
        UsageError: not found, unreadable, not a decoder, unknown to transformers, or in need of its own code.
    """
    from transformers import AutoConfig

    try:
        if source.gguf is not None:
            from posbias.models.gguf import gguf_configuration

            config = gguf_configuration(Path(source.location) / source.gguf, source.name)
        else:
            if source.local:
                _check_file(Path(source.location), source.name)
            config = AutoConfig.from_pretrained(source.location, **source.arguments)
    except UsageError:
        raise
    except OSError as error:
        if source.local:
            raise UsageError(f"model {source.name!r} has no readable {CONFIG}; allowed: {ALLOWED}") from None
        raise UsageError(
            f"model {source.name!r} is no existing path, and the hub did not provide it ({one_line(error)[:120]}); "
            f"allowed: {ALLOWED}"
        ) from None
    except Exception as error:
        raise UsageError(f"model {source.name!r}: configuration refused: {one_line(error)[:300]}") from None
    check_decoder(config, source.name)
    return config


def _check_file(location: Path, name: str) -> None:
    """Refuse what transformers would ask a user about (code of the model's own), or look for in other files."""
    path = location if location.is_file() else location / CONFIG
    try:
        plain = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {name!r}: configuration refused: {path.name} is not JSON: {one_line(error)}") from None
    if not isinstance(plain, dict):
        raise UsageError(f"model {name!r}: configuration refused: {path.name} is no object")
    for entry in ELSEWHERE:
        if f'"{entry}":' in json.dumps(plain):
            raise UsageError(f"model {name!r}: configuration names other files ({entry}), which is not allowed")
    from transformers import CONFIG_MAPPING

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
    """Refuse a directory whose weights transformers would read from anything but safetensors files that lie there.

    `use_safetensors` alone does not: an index may name other files, and an adapter brings its base model.
    """
    directory = Path(source.location)
    if not source.local or source.gguf is not None or not directory.is_dir():
        return
    if (directory / ADAPTER).exists():
        raise UsageError(f"model {source.name!r} has an adapter ({ADAPTER}); allowed: one merged into the weights")
    if (directory / "model.safetensors").exists():
        return
    if (directory / INDEX).exists():
        try:
            named = set(json.loads((directory / INDEX).read_bytes())["weight_map"].values())
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"model {source.name!r}: {INDEX} cannot be read: {one_line(error)[:200]}") from None
        for place in named:
            if not isinstance(place, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", place):
                raise UsageError(
                    f"model {source.name!r}: {INDEX} names {str(place)[:80]!r}; allowed: *.safetensors in the same "
                    "directory, as other files can run code"
                )
        return
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if others:
        raise UsageError(
            f"model {source.name!r} has pickled weights ({others[0]}), which can run code; allowed: safetensors or gguf"
        )
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    advice = f"; name the file itself, e.g. {gguf[0]}" if gguf else ""
    raise UsageError(f"model {source.name!r} has no weights (model.safetensors or {INDEX}){advice}")


@contextmanager
def quiet(local: bool) -> Iterator[None]:
    """Silence transformers and the hub client while loading; bars (downloads, GGUF conversion) stay for who watches."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    watched = sys.stderr.isatty()
    verbosity, bars, hub_verbosity = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        hub_logging.get_verbosity(),
    )
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
