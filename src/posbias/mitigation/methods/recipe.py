"""A recipe: a fitted method, with the model that it was fitted to and how, as a small JSON file.

Numbers that are too many for a spelling lie beside it, in a file of the same name that ends in .safetensors.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from posbias.errors import UsageError
from posbias.files import parsed_json, read_whole, write_atomically
from posbias.mitigation.methods.base import MITIGATIONS, Method, difference, identity
from posbias.models.hugging_face import HuggingFaceModel

VERSION = 1
"""Version of the format."""
RECIPE_SUFFIX = ".json"
"""The ending that tells a recipe's path from a method's spelling."""
TENSORS_SUFFIX = ".safetensors"
"""The ending of the file beside it."""
NUMBERS_BYTES = 1 << 32
"""Most bytes of that file; an adapter of rank 64 to all projections of a model of 70 billion takes 3.3 GB."""
SNIPPET = """\
import posbias as pb
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(NAME)
tokenizer = AutoTokenizer.from_pretrained(NAME)
pb.mitigated(model, {recipe!r}{addition}).install()  # until it is removed; no weight is touched
tokens = tokenizer(PROMPT, return_tensors="pt")
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))
"""
"""For users of transformers; `addition`: what else the method has to know."""
QUESTION_ADDITION = ", question={question!r}, tokenizer=tokenizer"
"""The addition for a method that acts from the question on."""
PASSAGES_SNIPPET = """\
import posbias as pb
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(NAME)
tokenizer = AutoTokenizer.from_pretrained(NAME)
tokens = tokenizer(PROMPT, return_tensors="pt")  # the texts PASSAGES stand in it, in this order
with pb.mitigated(model, {recipe!r}, passages=PASSAGES, prompt=PROMPT, tokenizer=tokenizer):  # no weight is touched
    print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))
"""
"""For methods that are told where the passages of each prompt stand."""


def write_recipe(path: str | Path, method: Method, model: HuggingFaceModel, fitted: Mapping[str, Any]) -> None:
    """Write a method down for the model that it was fitted to; `fitted` says how, in plain values."""
    if method.leaves_out_tensors:
        whole = {name: np.ascontiguousarray(tensor) for name, tensor in method.tensors.items()}
        write_atomically(Path(path).with_suffix(TENSORS_SUFFIX), save(whole))
    recipe = {"recipe": VERSION, "method": str(method), "model": identity(model), "fitted": dict(fitted)}
    write_atomically(Path(path), json.dumps(recipe, indent=1).encode())


def read_recipe(path: str | Path, model: HuggingFaceModel | None) -> Method:
    """The method of a recipe; with a model, one that was fitted to it.

    Raises:
        UsageError: no such file, no recipe, or a recipe of another model: the first difference is named. The weights of
            a model of higher precision are compared as rounded to the recipe's; those of lower cannot be.
    """
    recipe = _content(path)
    if model is not None:
        required = recipe.get("model")
        if not isinstance(required, dict):
            raise UsageError(f"{str(path)!r} does not say which model it belongs to")
        if other := difference(required, model):
            raise UsageError(f"{str(path)!r} is a recipe of another model, {other}")
    try:
        method = MITIGATIONS.parse(recipe["method"])
        if not method.leaves_out_tensors:
            return method
        beside = Path(path).with_suffix(TENSORS_SUFFIX)
        return method.with_tensors(load(read_whole(beside, "file of numbers", NUMBERS_BYTES)))
    except SafetensorError:
        raise UsageError(f"{str(path)!r}: the file of numbers beside it, {beside.name!r}, is damaged") from None
    except UsageError as error:
        raise UsageError(f"{str(path)!r}: {error}") from None


def how_fitted(path: str | Path) -> dict[str, Any]:
    """How the method of a recipe was fitted; empty if it does not say."""
    fitted = _content(path).get("fitted", {})
    if not isinstance(fitted, dict):
        raise UsageError(f"{str(path)!r}: its field 'fitted' must be an object, got {fitted!r:.80}")
    return fitted


def source_of_recipe(path: str | Path) -> str:
    """The name of the model that a recipe was fitted to."""
    model = _content(path).get("model")
    source = model.get("source") if isinstance(model, dict) else None
    if not isinstance(source, str):
        raise UsageError(f"{str(path)!r} does not say which model it belongs to")
    return source


def samples_of_recipe(path: str | Path) -> set[str]:
    """`contents` of the samples that a recipe was fitted to; empty if it does not say."""
    samples = how_fitted(path).get("samples", [])
    if not isinstance(samples, list) or not all(isinstance(sample, str) for sample in samples):
        raise UsageError(f"{str(path)!r}: its samples must be a list of texts, got {samples!r:.80}")
    return set(samples)


def _content(path: str | Path) -> dict[str, Any]:
    """The content of a recipe's file, checked."""
    recipe = parsed_json(read_whole(path, "recipe"), repr(str(path)))
    wrong = ""
    if not isinstance(recipe, dict):
        wrong = f"it holds a {type(recipe).__name__}, not an object"
    elif "recipe" not in recipe:
        wrong = "it has no field 'recipe', which gives the version of the format"
    elif recipe["recipe"] != VERSION:
        wrong = f"its format is {recipe['recipe']!r:.80}, and this posbias reads {VERSION}"
    elif not isinstance(recipe.get("method"), str):
        wrong = f"its field 'method' must be the spelling of a method, got {recipe.get('method')!r:.80}"
    if wrong:
        raise UsageError(f"{str(path)!r} is not a recipe of posbias: {wrong}")
    return dict(recipe)
