"""The pages hold together: links lead somewhere, commands parse, pictures are there, and no page names a machine."""

import ast
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer
from mypy import api as mypy

import posbias
from page_blocks import PAGES, ROOT, blocks_of
from posbias.cli.app import VERBS, app, command_of
from posbias.theory import THEORIES, parse_theory

DOCS = ROOT / "docs"
IMAGES = sorted((DOCS / "images").glob("*.png"))
LONGEST_GUIDE, LONGEST_CHANGELOG = 12_000, 600
"""Words of all pages of `docs`, tutorials included: what was found, and by which run, belongs to `studies`."""
LONGEST_STUDIES, LONGEST_STUDY, LONGEST_BENCHMARKS = 18_000, 900, 2_500
"""Words of all pages of `studies`, of one study's page (what else a reader needs to judge it stands in an appendix, and
every cell in a file beside it), and of all pages of `benchmarks`."""
LONGEST_README, LONGEST_CONTRIBUTING = 650, 1_000
LARGEST_PICTURE = 120 * 1024
"""Bytes: a page of pictures must open at once."""
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"\b(?:docs|studies|benchmarks|examples)/[a-z][\w./-]*\w")
"""A page, script or folder of the repository that code names; pages of `docs` also without their ending."""
SECTIONS = re.compile(r"docs/theory(?:\.md)?,\s+(?:sections?\s+)?((?:\d|, | and | \(item \d\))+)")
MACHINE_PATH = re.compile(r"(?<![\w.~/:])/(?:work|tmp|home|root|Users|mnt|opt|var|usr)/|[A-Z]:\\")

MARKDOWN = sorted({*PAGES, *ROOT.glob("*.md"), *(ROOT / "src").rglob("*.md")})
CODE = [
    path
    for folder in ("src", "benchmarks", "examples", "studies", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".yaml")
]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


def links(page: Path) -> list[str]:
    """Relative links outside code, pictures included."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
    return [link for link in LINK.findall(prose) if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """What a page's headings can be linked by, as GitHub spells it."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Every command line of posbias that a page shows, in fences and in the text."""
    text = page.read_text()
    fenced = [line for block in blocks_of(page) for line in block.commands if line.startswith("posbias ")]
    inline = re.findall(r"`(posbias [^`]+)`", FENCE.sub("", text))
    return [*fenced, *inline]


def parse(line: str) -> dict[str, object]:
    """The parameters of a command line, parsed by the very commands that run; nothing is run."""
    words = shlex.split(line, comments=True)[1:]
    command, name = typer.main.get_command(app), "posbias"
    if words and words[0] in VERBS:
        name = words.pop(0)
        command = command_of(name)
    while words and words[0] in getattr(command, "commands", {}):
        name = words.pop(0)
        command = command.commands[name]
    if name == "posbias" and words and words[0] in {option for known in command.params for option in known.opts}:
        return command.make_context(name, words, resilient_parsing=True).params
    assert not hasattr(command, "commands"), f"no verb: {line}"
    return command.make_context(name, words).params


HEADINGS = ["Command", "Output", "Options that matter", "Pitfalls"]


@pytest.mark.parametrize("verb", sorted(set(VERBS) - {"demo", "list", "models", "plan", "report", "show"}))
def test_a_verb_has_a_page_with_the_same_headings(verb):
    """The question as its title, when to use the verb, then these."""
    page = (DOCS / f"{verb}.md").read_text()
    assert re.match(r"# .+\?\n\nUse `", page)
    assert re.findall(r"^## (.+)$", FENCE.sub("", page), re.M) == HEADINGS


@pages
def test_a_page_opens_with_its_question(page):
    title, *opening = [line for line in page.read_text().splitlines() if line][:4]
    if page.parent == DOCS and page.name != "README.md":
        assert title.endswith("?"), title
    elif page.is_relative_to(ROOT / "studies"):
        assert any(line.startswith("**Question:**") for line in opening), opening


def words_of(pages: Iterable[Path]) -> int:
    return sum(len(page.read_text().split()) for page in pages)


def test_the_guide_stays_short():
    assert words_of(DOCS.rglob("*.md")) <= LONGEST_GUIDE
    assert words_of([ROOT / "CHANGELOG.md"]) <= LONGEST_CHANGELOG
    assert words_of([ROOT / "README.md"]) <= LONGEST_README
    assert words_of([ROOT / "CONTRIBUTING.md"]) <= LONGEST_CONTRIBUTING


@pytest.mark.skipif(not (ROOT / "studies").exists(), reason="a source distribution: the studies are not in it")
def test_studies_and_benchmarks_stay_short():
    assert words_of((ROOT / "studies").rglob("*.md")) <= LONGEST_STUDIES
    for page in (ROOT / "studies").glob("*/README.md"):
        assert words_of([page]) <= LONGEST_STUDY, name_of(page)
    assert words_of((ROOT / "benchmarks").rglob("*.md")) <= LONGEST_BENCHMARKS


def left_out(target: Path) -> bool:
    """Whether the source distribution leaves it out."""
    return target.is_relative_to(ROOT / "studies") and not (ROOT / "studies").exists()


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if left_out(target):
            continue
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_what_scripts_import_of_posbias_is_there():
    """Those that no test runs: what makes the site and its pictures, studies, benchmarks."""
    for path in (path for path in CODE if path.suffix == ".py" and not path.is_relative_to(ROOT / "src")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("posbias", "posbias_papers"):
                for name in node.names:
                    assert resolve_name(f"{node.module}:{name.name}"), (path, name.name)


def test_what_code_names_of_the_repository_is_there():
    sections = set(re.findall(r"^## (\d)\.", (DOCS / "theory.md").read_text(), re.M))
    for path in CODE:
        text = path.read_text()
        for mention in MENTION.findall(text):
            target = ROOT / mention
            assert left_out(target) or target.exists() or target.with_suffix(".md").exists(), (path, mention)
        for named in SECTIONS.findall(text):
            assert set(re.findall(r"\d", re.sub(r"\(item \d\)", "", named))) <= sections, (path, named)


@pages
def test_every_command_line_parses_and_names_a_known_theory(page):
    for line in commands(page):
        parameters = parse(line)
        if line.startswith("posbias predict"):
            parse_theory(str(parameters["theory"]))


@pages
def test_no_page_names_a_path_of_one_machine(page):
    assert not MACHINE_PATH.findall(page.read_text())


def test_the_reference_has_every_public_name():
    page = (DOCS / "reference.md").read_text()
    described = " ".join(re.findall(r"^```\{names\}\n(.*?)^```", page, re.M | re.S)).split()
    assert all(resolve_name(f"posbias.{name}") for name in described)
    described = [*(name for name in described if "." not in name), *re.findall(r"^`posbias\.(\w+)`", page, re.M)]
    assert sorted(described) == sorted(dir(posbias))


def test_every_theory_has_its_section_its_picture_and_says_when_to_trust_it():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", (DOCS / "predict.md").read_text(), re.M | re.S))
    assert set(sections) == {*THEORIES, "attention_rollout"}
    for name, section in sections.items():
        assert f"(images/{name}.png)" in section
        for heading in ("**Trust it**", "**Do not trust it**"):
            assert section.count(heading) == 1, (name, heading)


def test_the_tutorials_call_what_there_is(tmp_path):
    """`make docs` runs their cells, which takes minutes; their types show at once most of what would fail there."""
    scripts = []
    for tutorial in sorted((DOCS / "tutorials").glob("*.md")):
        cells = re.findall(r"^```\{code-cell\}[^\n]*\n(.*?)^```", tutorial.read_text(), re.M | re.S)
        if not cells:  # in shell commands, which the tests of pages run
            continue
        scripts.append(tmp_path / f"{tutorial.stem}.py")
        code = re.sub(r"^(:|%).*$", "", "\n".join(cells), flags=re.M)
        # `load_model` gives one of two classes, told apart by its argument: which of them a call takes is not asked.
        scripts[-1].write_text(f"# mypy: disable-error-code=arg-type\n{code}")
    flags = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    found, problems, _ = mypy.run([*flags, *map(str, scripts)])
    assert "Success" in found, found + problems


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_every_picture_is_small_shown_and_made_by_the_script(image):
    assert image.read_bytes().startswith(b"\x89PNG")
    assert image.stat().st_size <= LARGEST_PICTURE
    assert any(f"images/{image.name}" in page.read_text() for page in PAGES)
    script = (DOCS / "make_pictures.py").read_text()
    assert f'"{image.stem}":' in script or f"`{image.name}`, a screenshot" in script
