"""Published work on position bias put to the test, a folder for each paper: its claims, its experiments, its numbers.

`verify` runs a paper's statements as numerical experiments, `verify_model` those that one model can meet on that model,
`reproduce` a paper's own experiment. `posbias` knows nothing of this package, which imports from all of its rooms.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posbias_papers.published import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is: `posbias --help` shows the commands of this package at once."""
    if not name.startswith("_"):
        published = import_module("posbias_papers.published")
        if name in getattr(published, "__all__", ()):
            return getattr(published, name)
    raise AttributeError(f"module 'posbias_papers' has no attribute {name!r}")
