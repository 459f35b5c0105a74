"""The shipped study of distilled adapters: its page shows its fits."""

from importlib import util
from pathlib import Path

STUDY = Path(__file__).parents[2] / "studies" / "distilled"


def test_the_page_shows_the_fits() -> None:
    spec = util.spec_from_file_location("distilled_summary", STUDY / "summary.py")
    assert spec is not None
    assert spec.loader is not None
    summary = util.module_from_spec(spec)
    spec.loader.exec_module(summary)
    cells, page = summary.read(STUDY / "fits"), (STUDY / "README.md").read_text()
    assert all(row in page.splitlines() for row in summary.rows(cells))
    for row in summary.contrasts(cells)[2:]:
        assert row.split(" | ")[-1].removesuffix(" |") in page
