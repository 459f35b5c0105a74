"""The default corpus: balanced, clean, documented."""

import re

import pytest

from posbias.prompts.sources import default_corpus

CORPUS = {group.name: group.segments[0] for group in default_corpus()}


def test_five_sources_about_400_kilobytes_each_described():
    from importlib import resources

    described = (resources.files("posbias.prompts") / "corpus" / "SOURCES.md").read_text(encoding="utf-8")
    sizes = {name: sum(len(text.encode()) for text in documents) for name, documents in CORPUS.items()}
    assert len(sizes) == 5
    assert 380_000 < sum(sizes.values()) < 420_000
    assert all(50_000 < size < 95_000 for size in sizes.values())
    assert all(f"### {name}" in described for name in sizes)


@pytest.mark.parametrize("name", sorted(CORPUS))
def test_text_is_clean(name):
    for text in CORPUS[name]:
        assert len(text) > 5_000
        assert text == text.strip()
        assert not re.search(r"gutenberg|\t|\r|\f|�|\n{3,}|[ ]\n|<[ibp/]+>", text, re.IGNORECASE)
        assert not re.search(r"^\W*\d+\W*$", text, re.MULTILINE), "a page or line number"
        assert not re.search(r"[a-z]-\n[a-z]", text), "a word broken across lines"
        assert not re.search(r"\S {3,}\d+$", text, re.MULTILINE), "a line number at the margin"


def test_italics_marks_are_gone():
    assert all("_" not in text for text in CORPUS["austen.txt"])


def test_every_source_has_a_document_for_long_windows():
    assert all(max(map(len, documents)) > 35_000 for documents in CORPUS.values())
