"""Loading language models, their families, and the reference transformer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posbias.models.demo import copy_demo, fetch_demo
    from posbias.models.hugging_face import HuggingFaceModel, Origin
    from posbias.models.loading import load_model, load_tokenizer
    from posbias.models.model import Model
    from posbias.models.networks import reinitialise
    from posbias.models.reference import (
        ReferenceConfig,
        ReferenceTransformer,
        load_reference,
        save_reference,
    )

_HOMES = {
    "demo": ("copy_demo", "fetch_demo"),
    "hugging_face": ("HuggingFaceModel", "Origin"),
    "loading": ("load_model", "load_tokenizer"),
    "model": ("Model",),
    "networks": ("reinitialise",),
    "reference": ("ReferenceConfig", "ReferenceTransformer", "load_reference", "save_reference"),
}
"""Where each name lives: torch and transformers are imported when a name is first used, not with the package."""

__all__ = [
    "HuggingFaceModel",
    "Model",
    "Origin",
    "ReferenceConfig",
    "ReferenceTransformer",
    "copy_demo",
    "fetch_demo",
    "load_model",
    "load_reference",
    "load_tokenizer",
    "reinitialise",
    "save_reference",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
