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

# Where each name lives: torch and transformers are imported when a name is first used, not with the package.
_HOMES = {
    "HuggingFaceModel": "hugging_face",
    "Model": "model",
    "Origin": "hugging_face",
    "ReferenceConfig": "reference",
    "ReferenceTransformer": "reference",
    "copy_demo": "demo",
    "fetch_demo": "demo",
    "load_model": "loading",
    "load_reference": "reference",
    "load_tokenizer": "loading",
    "reinitialise": "networks",
    "save_reference": "reference",
}

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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
