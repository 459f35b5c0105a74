"""Every verb's page, opened in a real browser at the width of a desk and of a phone: nothing is cut or overlaps."""

from pathlib import Path

import pytest

from browser import BROWSER, looked_at

SMALL = ["--length", "24", "--count", "2"]
KEYS = ["--task", "key_value(pairs=3)"]
RUNS: dict[str, list[str]] = {
    "predict": ["predict", "--depth", "6", "--heads", "4", "--encoding", "none,alibi", "--mixing", "0.1", *SMALL[:2]],
    "measure": ["measure", "MODEL", *SMALL, "--kinds", "jacobian"],
    "audit": ["audit", "MODEL", *SMALL, "--initialisations", "2"],
    "attention": ["attention", "MODEL", *SMALL],
    "decompose": ["decompose", "MODEL", *SMALL],
    "design": ["design", "u_shape(middle=4.0)", "--over", "key_bias", "--length", "64"],
    "verify": ["verify", "birth-2603.10123"],
    "reproduce": ["reproduce", "rollout-2602.16837"],
    "evaluate": ["evaluate", "MODEL", *KEYS, "--count", "6", "--max-tokens", "2"],
    "mitigate": [
        *["mitigate", "MODEL", *KEYS, "--methods", "temperature(scale=0.3)", "--count", "6", "--calibration", "0"],
        *["--no-generate", "--no-short", "--documents", "6"],
    ],
}

LAYOUT = """
const check = frame => {
  const page = frame.contentDocument, view = frame.contentWindow, shown = name => shownIn(page, name);
  const found = { wide: page.documentElement.scrollWidth - view.innerWidth, verdict: shown(".verdict").length };
  page.querySelectorAll("details").forEach(each => { each.open = true; });
  return new Promise(resolve => view.setTimeout(() => {
    found.wideUnfolded = page.documentElement.scrollWidth - view.innerWidth;
    found.charts = shown("figure.chart").length;
    found.overlapping = shown("figure.chart").filter(each => !apart(each)).map(each => each.textContent.slice(0, 60));
    found.cut = shown(".plot text").filter(each => !inside(each)).map(each => each.textContent);
    resolve(found);
  }, 300));
};
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
def test_no_page_cuts_anything_at_either_width(posbias, long_llama: Path, tmp_path: Path) -> None:
    for name, command in RUNS.items():
        given = [str(long_llama) if each == "MODEL" else each for each in command]
        ran = posbias(*given, "--out", tmp_path / name)
        assert ran.returncode == 0, ran.stderr
        if not (tmp_path / name / "report.html").exists():
            assert posbias("report", tmp_path / name).returncode == 0
    frames = [(1400, 900, "light"), (390, 844, "dark")]
    pages = [(tmp_path / name / "report.html", *frame) for name in RUNS for frame in frames]
    for (page, *frame), look in zip(pages, looked_at(pages, LAYOUT, tmp_path), strict=True):
        assert look["wide"] <= 0, (page.parent.name, frame, look)
        assert look["wideUnfolded"] <= 0, (page.parent.name, frame, look)
        assert (look["overlapping"], look["cut"]) == ([], []), (page.parent.name, frame)
        assert look["verdict"], page.parent.name
        assert look["charts"], page.parent.name
