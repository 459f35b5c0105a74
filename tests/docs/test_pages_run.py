"""Every block of every page runs as it stands, in order, in an empty directory, on the real demo model."""

import pytest

from page_blocks import BESIDE, LANGUAGES, PAGES, ROOT, Block, blocks_of, run_block

NOT_RUN = {
    "README.md": ["installs", "takes two minutes", "take minutes, and half an hour"],
    "docs/evaluate.md": ["needs a server", "needs a server"],
    "benchmarks/README.md": 9 * ["a benchmark"],
    "docs/mitigate.md": ["half an hour on two cores", "NAME, PROMPT and the recipe are the reader's"],
    "docs/export.md": ["reads what takes half an hour"],
    "docs/place.md": ["reads evaluate's run"],
    "docs/explore.md": ["opens a browser"],
    "docs/reproduce.md": ["takes an hour"],
    "docs/tutorials/served_fix.md": ["fits for ten minutes", "reads what fits for ten minutes", "needs a server"],
    "studies/birth/README.md": ["twenty minutes"],
    "studies/design_training/README.md": ["trains for half an hour"],
    "studies/trained_models/README.md": ["needs the texts of two packages of Debian, and hours"],
}
"""Why blocks of a page are not run, in their order."""
README = ROOT / "README.md"


def has_slow_blocks(page):
    return any(block.mark == "slow" for block in blocks_of(page))


def run_page(page, directory, monkeypatch, *, slow):
    """Every block that can be run; of a page with slow blocks these only where `slow`."""
    for name in BESIDE:
        (directory / name).symlink_to(ROOT / name)
    monkeypatch.chdir(directory)
    names = {}
    for block in blocks_of(page):
        if block.not_run is None and (slow or block.mark != "slow"):
            run_block(block, names)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if page == README or not has_slow_blocks(page)], ids=name_of)
def test_the_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if has_slow_blocks(page)], ids=name_of)
def test_all_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=True)


def test_what_is_not_run_is_known_and_why():
    reasons = {name_of(page): [block.not_run for block in blocks_of(page) if block.not_run] for page in PAGES}
    known = {page: why for page, why in NOT_RUN.items() if (ROOT / page).exists()}  # studies are not in every copy
    assert {page: why for page, why in reasons.items() if why} == known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_known_language_and_parses(page):
    for block in blocks_of(page):
        assert block.language in LANGUAGES, block.name
        assert block.mark in (None, "slow") or block.not_run, block.name
        if block.language == "python":
            compile(block.text, block.name, "exec")


def a_block(language, text):
    return Block(README, 1, language, None, None, text)


def test_a_block_that_fails_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for language, text in (
        ("python", "undefined\n"),
        ("bash", "posbias compare runs/none runs/nothing\n"),
        ("bash", "ls nowhere | cat\n"),
        ("console", "$ posbias list masks\nno such line\n"),
        ("console", "$ posbias list mask\nmasks\n"),
        ("pycon", ">>> 1 + 'a'\nValueError: other\n"),
    ):
        with pytest.raises((AssertionError, NameError)):
            run_block(a_block(language, text), {})
