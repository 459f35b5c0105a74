"""The files behind the names that a run is given: that they are there, what they are called, and what they hold.

A recipe, the text that is judged, the run that `ordered` follows: a name stays where the file behind it changes, so a
run that is resumed compares hashes of contents.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation.evaluation import BEHAVIOUR
from posbias.files import file_exists, open_file
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import RECIPE_SUFFIX
from posbias.mitigation.methods.rewriting import Ordered
from posbias.prompts.chat import CHAT_SCHEME
from posbias.prompts.datasets_hub import SCHEME, parse_dataset

OF_A_RUN = ("record.json", "arrays.safetensors")
"""What of a run's directory is read by who follows it."""


def is_recipe(entry: Any) -> bool:
    """Whether a method is given as the path of a recipe."""
    return isinstance(entry, str) and entry.endswith(RECIPE_SUFFIX)


def check_files(methods: Sequence[Any], begin: str) -> None:
    """Refuse recipes, and a recipe to begin a fit at, that are not there, and a recipe that is given twice."""
    recipes = list(filter(is_recipe, methods))
    for path in recipes:
        if not file_exists(path):
            raise UsageError(
                f"methods: there is no file {path!r}; allowed: all, names or spellings of methods (posbias list "
                "mitigations), and paths of recipes, such as DIRECTORY/arms/*/recipe.json of a run that fitted one"
            )
        if [os.path.realpath(other) for other in recipes].count(os.path.realpath(path)) > 1:
            raise UsageError(f"mitigate: {path} is given twice; give each method once")
    if begin and not file_exists(begin):
        raise UsageError(f"fit: there is no file begin={begin!r}; allowed: the path of a recipe")


def recipe_names(paths: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """What recipes are called, by path: the file's name without its ending, with as many of its directories as tell it
    from the other recipes and from the names that are taken."""
    parts = {path: Path(os.path.abspath(path)).with_suffix("").parts for path in paths}
    found = {}
    for path, own in parts.items():
        others = [other for each, other in parts.items() if each != path]
        for count in range(1, len(own)):
            found[path] = "/".join(own[-count:])
            if found[path] not in taken and all(other[-count:] != own[-count:] for other in others):
                break
    return found


def contents_sha256(methods: Sequence[Any], *, begin: str, text: str) -> Mapping[str, str]:
    """Hashes of all files that methods, the begin of a fit and the source of ordinary text name, by name.

    What is no file, such as a data set of the hub or the corpus of the package, is not among them.
    """
    named = {str(entry): [Path(entry)] for entry in methods if is_recipe(entry)}
    named |= {str(entry): _of_run(run) for entry in methods if (run := run_of(entry))}
    named |= {begin: [Path(begin)]} if begin else {}
    named |= {text: _of_text(text)}
    return {name: digest for name, paths in named.items() if (digest := _sha256(paths))}


def run_of(method: Any) -> str:
    """The directory of the run that a method follows; empty where it follows none."""
    if isinstance(method, str) and method.strip().startswith(f"{Ordered.name}("):
        method = MITIGATIONS.parse(method)
    return method.run if isinstance(method, Ordered) else ""


def run_sha256(method: Any) -> str:
    """Hash of the run that a method follows; empty where it follows none."""
    return _sha256(_of_run(run_of(method))) if run_of(method) else ""


def _of_run(run: str) -> list[Path]:
    below = Path(run) / BEHAVIOUR
    return [(below if below.is_dir() else Path(run)) / name for name in OF_A_RUN]


def _of_text(source: str) -> list[Path]:
    """The file, or all files of the local directory, that a source of prompts names."""
    if source.startswith(SCHEME):
        directory = Path(parse_dataset(source).id)
        return sorted(path for path in directory.rglob("*") if path.is_file()) if file_exists(directory) else []
    path = source.removeprefix(CHAT_SCHEME)
    return [Path(path if file_exists(path) else path.rpartition("#")[0])]


def _sha256(paths: Sequence[Path]) -> str:
    """Over names and contents of the files that are there; empty without any."""
    digest, any_there = hashlib.sha256(), False
    for path in paths:
        if file_exists(path) and path.is_file():
            any_there = True
            with open_file(path) as file:
                digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest() if any_there else ""
