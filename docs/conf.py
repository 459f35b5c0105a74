"""The site: pages, tutorials and reference, made by Sphinx with MyST-NB; `make docs` builds it, strictly and offline.

The whole repository is the source, so that every link between pages leads where it leads there. The README is the
front page; the navigation is read from the lists and tables of `docs/README.md` and `studies/README.md`.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import posbias
from posbias.checks import described
from posbias.cli.options import Take, options_of
from posbias.results.showing import Showing

ROOT = Path(__file__).resolve().parents[1]
LISTS = {"README": ROOT / "docs/README.md", "studies/README": ROOT / "studies/README.md"}
"""Page, and the file whose tables and lists say what hangs below it: the first link of every row and item."""
ROW = re.compile(r"^(?:\|[^|\n]*?|- )\[([^]]+)\]\(([\w./-]+)\.md\)", re.M)
COLON = "\ue000"

project, author = "posbias", "The posbias authors"
copyright = f"2026, {author}"
version = release = posbias.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["[A-Z]*.md", *(f"{folder}/**.md" for folder in ("docs", "studies", "benchmarks", "src"))]
exclude_patterns = [".*", "build", "dist", "runs"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
default_role = "literal"

nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_timeout = 600

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = project


def add_navigation(app: Any, page: str, source: list[str]) -> None:
    """Below a page the pages of its list, under the list's headings."""
    trees = [(project, [("All pages", "docs/README")])] if page == root_doc else []
    if page in LISTS:
        folder = LISTS[page].parent
        for section in re.split(r"^#+ ", LISTS[page].read_text(), flags=re.M):
            found = [(title, (folder / path).resolve().relative_to(ROOT)) for title, path in ROW.findall(section)]
            trees.append((section.partition("\n")[0], found))
        listed = {path for _, pages in trees for _, path in pages}
        others = [path.relative_to(ROOT) for path in sorted(folder.glob("*/*.md"))]
        appendices = [path for path in others if not {path, path.with_suffix("")} & listed]
        titles = ((ROOT / path).read_text().partition("\n")[0].removeprefix("# ") for path in appendices)
        trees.append(("Appendices", list(zip(titles, appendices, strict=True))))
    for caption, pages in trees:
        if pages:
            entries = "\n".join(f"{title} </{path}>" for title, path in pages)
            source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def describe_names(app: Any, page: str, source: list[str]) -> None:
    """A fence of names, as the directives that describe each; GitHub shows the names."""

    def directives(fence: re.Match[str]) -> str:
        return "\n".join(["```{eval-rst}", *map(directive, fence[1].split()), "```"])

    def directive(name: str) -> str:
        module, _, attribute = f"posbias.{name}".rpartition(".")
        found = getattr(import_module(module), attribute)
        kind = "exception" if name.endswith("Error") else "class" if isinstance(found, type) else "function"
        base = "\n   :show-inheritance:" if kind == "class" and issubclass(found, Showing) else ""
        return f".. auto{kind}:: posbias.{name}{base}"

    source[0] = re.sub(r"^```\{names\}\n(.*?)^```", directives, source[0], flags=re.M | re.S)


def allowed_values(app: Any, what: str, name: str, _: Any, options: Any, lines: list[str]) -> None:
    """Behind an option's meaning what it may be, as its annotation declares it."""
    owner, option = name.rpartition(".")[::2]
    if what == "attribute" and owner.endswith("Options"):
        kind = getattr(posbias, owner.rpartition(".")[2])
        flag = options_of(kind, Take()).get(option)
        shell = "" if flag is None else f" On the command line `--{flag.name.replace('_', '-')}`."
        lines += ["", f"Allowed: {described(get_type_hints(kind, include_extras=True)[option])}.{shell}"]


def plain_text(app: Any, what: str, name: str, _: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: | and * stand for themselves, and a field's first colon does not end its type."""
    lines[:] = [re.sub(r"([|*])", r"\\\1", line) for line in lines]
    if what in {"attribute", "property"} and lines:
        lines[0] = lines[0].replace(":", COLON)


def restore_colons(app: Any, what: str, name: str, _: Any, options: Any, lines: list[str]) -> None:
    """After napoleon, which takes what stands before the first colon of a field for the field's type."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def write_mathml(page: Any, formula: nodes.Element) -> None:
    """A formula as MathML, which browsers draw by themselves: MathJax would come from the network."""
    block = isinstance(formula, nodes.math_block)
    drawn = tex2mathml(formula.astext(), as_block=block)
    page.body.append(f'<div style="overflow-x: auto; padding: .5em 0">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.connect("source-read", add_navigation)
    app.connect("source-read", describe_names)
    app.connect("autodoc-process-docstring", allowed_values, priority=300)
    app.connect("autodoc-process-docstring", plain_text, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore_colons, priority=600)
