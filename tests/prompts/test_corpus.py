"""The default corpus: balanced, documented, long enough."""

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


def test_every_source_has_a_document_for_long_windows():
    assert all(max(map(len, documents)) > 35_000 for documents in CORPUS.values())
