"""The package of published work, `posbias_papers`: it stands beside this one in the same wheel and is found by name.

It imports every room, so that no room may import it; import-linter sees to that.
"""

from importlib import import_module
from types import ModuleType

PACKAGE = "posbias_papers"


def published_work(part: str) -> ModuleType:
    """Import a part of the package: its `commands`, or `published`, which registers claims, experiments and pages."""
    return import_module(f"{PACKAGE}.{part}")
