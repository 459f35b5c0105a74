"""The files behind the names that a run is given: their existence, their names in a report, and hashes of contents.

A recipe, the text that is judged: a name stays the same when the file behind it changes, so a run that is resumed
compares hashes of contents.
"""

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from posbias.errors import UsageError
from posbias.files import file_exists, open_file
from posbias.mitigation.methods.recipe import RECIPE_SUFFIX
from posbias.prompts.chat import CHAT_SCHEME
from posbias.prompts.sources import SCHEME, parse_dataset


def is_recipe(entry: Any) -> bool:
    """True if a method is given as the path of a recipe."""
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
        if [os.path.realpath(recipe) for recipe in recipes].count(os.path.realpath(path)) > 1:
            raise UsageError(f"mitigate: {path} is given twice; give each method once")
    if begin and not file_exists(begin):
        raise UsageError(f"fit: there is no file begin={begin!r}; allowed: the path of a recipe")


def recipe_names(paths: Sequence[str], taken: Collection[str] = ()) -> dict[str, str]:
    """A name for each recipe, by path: the file's without its ending, with as many of its directories as it takes to
    tell it from the other recipes and from the names that are taken."""
    parts_of = {path: Path(os.path.abspath(path)).with_suffix("").parts for path in paths}
    names = {}
    for path, parts in parts_of.items():
        different = [theirs for name, theirs in parts_of.items() if name != path]
        for count in range(1, len(parts)):
            names[path] = "/".join(parts[-count:])
            if names[path] not in taken and all(theirs[-count:] != parts[-count:] for theirs in different):
                break
    return names


def contents_sha256(methods: Sequence[Any], *, begin: str, text: str) -> Mapping[str, str]:
    """Hashes of all files that methods, the begin of a fit and the source of ordinary text name, by name.

    Names of no file, such as a data set of the hub or the corpus of the package, are not among them.
    """
    paths_of = {str(entry): [Path(entry)] for entry in methods if is_recipe(entry)}
    paths_of |= {begin: [Path(begin)]} if begin else {}
    paths_of |= {text: _files_of_text(text)}
    return {name: digest for name, paths in paths_of.items() if (digest := _sha256(paths))}


def _files_of_text(source: str) -> list[Path]:
    """The file, or all files of the local directory, that a source of prompts names."""
    if source.startswith(SCHEME):
        directory = Path(parse_dataset(source).id)
        return sorted(path for path in directory.rglob("*") if path.is_file()) if file_exists(directory) else []
    path = source.removeprefix(CHAT_SCHEME)
    return [Path(path if file_exists(path) else path.rpartition("#")[0])]


def _sha256(paths: Sequence[Path]) -> str:
    """Hash of the names and contents of the files that exist; empty without any."""
    digest, any_there = hashlib.sha256(), False
    for path in paths:
        if file_exists(path) and path.is_file():
            any_there = True
            with open_file(path) as file:
                digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest() if any_there else ""
