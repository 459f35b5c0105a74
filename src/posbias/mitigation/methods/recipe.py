"""A recipe: a fitted method, with the model that it was fitted to and how, as a small JSON file.

Numbers that are too many for a spelling lie beside it, in a file of the same name that ends in .safetensors.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, StrictStr, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save

from posbias.errors import UsageError
from posbias.files import file_exists, parsed_json, read_whole, write_atomically
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import MITIGATIONS, Method
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.networks import DTYPES, OWN
from posbias.models.weights import weights_sha256

RECIPE_SUFFIX = ".json"
"""The ending that tells a recipe's path from a method's spelling."""
TENSORS_SUFFIX = ".safetensors"
"""The ending of the file beside it."""
NUMBERS_BYTES = 1 << 32
"""Most bytes of that file; an adapter of rank 64 to all projections of a model of 70 billion takes 3.3 GB."""


class ModelFacts(BaseModel, extra="allow"):
    """The model that a recipe belongs to: what `identity` says of it."""

    source: StrictStr


class HowFitted(BaseModel, extra="allow"):
    """How a method was fitted, in plain values."""

    samples: list[StrictStr] = Field(default_factory=list)
    """`contents` of the samples that it was fitted to; empty if it does not say."""


class Recipe(BaseModel):
    """The content of a recipe's file."""

    recipe: Literal[1]
    """Version of the format."""
    method: StrictStr
    """Its spelling."""
    model: ModelFacts
    fitted: HowFitted = Field(default_factory=HowFitted)

    @classmethod
    def read(cls, path: str | Path) -> "Recipe":
        """The content of a file.

        Raises:
            UsageError: no such file, or no recipe; the first wrong field is named.
        """
        try:
            return cls.model_validate(parsed_json(read_whole(path, "recipe"), repr(str(path))))
        except ValidationError as error:
            first = error.errors()[0]
            wrong = ".".join(map(str, first["loc"])) or "content"
            raise UsageError(
                f"{str(path)!r} is not a recipe that this posbias reads: {wrong}: {first['msg']}"
            ) from None


def identity(model: HuggingFaceModel, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Facts that tell a model from others, its weights as they are or rounded."""
    return {
        "source": model.origin.source,
        "model_type": model.model_type,
        "depth": model.sizes.get("layers", 0),
        "heads": model.sizes.get("heads", 0),
        "width": model.width,
        "vocabulary_size": model.vocabulary_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights_sha256": weights_sha256(model.network, dtype),
    }


def difference(required: Mapping[str, Any], model: HuggingFaceModel) -> str:
    """The first difference of a model from an `identity`, in words; empty if there is none.

    Weights of higher precision are compared as rounded to the required one; those of lower, only if they were never
    rounded, as far as is known.
    """
    dtype = DTYPES.get(str(required.get("dtype"))) or model.dtype
    rounded = model.dtype.itemsize <= dtype.itemsize and model.dtype != dtype
    whole = model.request is not None and model.request.dtype == OWN
    for name, value in identity(model, dtype).items():
        compared = name not in ("source", "dtype") and (name != "weights_sha256" or whole or not rounded)
        if compared and required.get(name) != value:
            return f"{required.get('source')!r}: its {name} is {required.get(name)!r}, this model's {value!r}"
    return ""


def write_recipe(path: str | Path, method: Method, model: HuggingFaceModel, fitted: Mapping[str, Any]) -> None:
    """Write a method down for the model that it was fitted to; `fitted` says how, in plain values."""
    if isinstance(method, Adapter):
        whole = {name: np.ascontiguousarray(tensor) for name, tensor in method.updates.items()}
        write_atomically(Path(path).with_suffix(TENSORS_SUFFIX), save(whole))
    recipe = {"recipe": 1, "method": str(method), "model": identity(model), "fitted": dict(fitted)}
    write_atomically(Path(path), json.dumps(recipe, indent=1).encode())


def read_recipe(path: str | Path, model: HuggingFaceModel | None) -> Method:
    """The method of a recipe; with a model, one that was fitted to it.

    Raises:
        UsageError: no such file, no recipe, or a recipe of another model: the first difference is named. The weights of
            a model of higher precision are compared as rounded to the recipe's; those of lower cannot be.
    """
    recipe = Recipe.read(path)
    if model is not None and (other := difference(recipe.model.model_dump(), model)):
        raise UsageError(f"{str(path)!r} is a recipe of another model, {other}")
    beside = Path(path).with_suffix(TENSORS_SUFFIX)
    try:
        method = MITIGATIONS.parse(recipe.method)
        if isinstance(method, Adapter) and method.weights:
            return replace(method, updates=load(read_whole(beside, "file of numbers", NUMBERS_BYTES)))
        return method
    except SafetensorError:
        raise UsageError(f"{str(path)!r}: the file of numbers beside it, {beside.name!r}, is damaged") from None
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from None


def is_recipe(entry: Any) -> bool:
    """True if a method is given as the path of a recipe."""
    return isinstance(entry, str) and entry.endswith(RECIPE_SUFFIX)


def check_files(methods: Sequence[Any]) -> None:
    """Refuse recipes that are not there, and one that is given twice."""
    recipes = list(filter(is_recipe, methods))
    for path in recipes:
        if not file_exists(path):
            raise UsageError(
                f"methods: there is no file {path!r}; allowed: all, names or spellings of methods (posbias list "
                "mitigations), and paths of recipes, such as DIRECTORY/arms/*/recipe.json of a run that fitted one"
            )
        if [os.path.realpath(recipe) for recipe in recipes].count(os.path.realpath(path)) > 1:
            raise UsageError(f"mitigate: {path} is given twice; give each method once")
