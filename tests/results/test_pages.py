"""Every verb's page, opened in a real browser at the width of a desk and of a phone: nothing is cut or overlaps."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from behaviour_runs import saved
from posbias import write_report
from posbias.results.records import read_record
from posbias_papers import Reproduction

HERE = Path(__file__).parent
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
    "reproduce": ["report", "OUT/rollout"],
    "evaluate": ["evaluate", "MODEL", *KEYS, "--count", "6", "--max-tokens", "2"],
    "mitigate": [
        *["mitigate", "MODEL", *KEYS, "--methods", "temperature(scale=0.3)", "--count", "6", "--calibration", "0"],
        *["--no-generate", "--no-short", "--documents", "6"],
    ],
    "train": ["train", str(HERE.parent / "golden" / "study.yaml")],
    "compare": ["compare", "OUT/predict", "OUT/measure"],
    "place": ["place", "--run", "OUT/evaluate", "--scores", "0.5,0.3,0.2", "--by", "reciprocal_rank"],
    "correlate": ["correlate", "OUT/one", "OUT/other"],
}
SIDE_BY_SIDE = {"theory-and-measurement": ["predict", "measure"], "audits": ["audit", "measure"]}
"""Pages of several of these runs."""

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LAYOUT = """
const frames = [...document.querySelectorAll("iframe")];
const shownIn = (page, name) => [...page.querySelectorAll(name)].filter(each => each.getClientRects().length);
const box = each => each.getBoundingClientRect();
const apart = figure => {
  const parts = ["figcaption", "svg"].map(name => box(figure.querySelector(name)));
  return parts.every((part, index) => !index || part.top >= parts[index - 1].bottom - 0.5);
};
const inside = text => {
  const own = box(text), all = box(text.ownerSVGElement);
  return own.left >= all.left - 1 && own.right <= all.right + 1 && own.bottom <= all.bottom + 1;
};
const check = async frame => {
  const page = frame.contentDocument, view = frame.contentWindow, shown = name => shownIn(page, name);
  const settled = () => new Promise(resolve => view.setTimeout(resolve, 200));
  const found = { wide: page.documentElement.scrollWidth - view.innerWidth, verdict: shown(".verdict").length };
  found.answered = Math.max(...[...shown(".verdict"), ...shown("#picture")].map(each => box(each).bottom));
  found.pictures = shown("#picture svg").length;
  page.querySelectorAll("details").forEach(each => { each.open = true; });
  await settled();
  found.wideUnfolded = page.documentElement.scrollWidth - view.innerWidth;
  found.charts = shown("figure.chart").length;
  found.overlapping = shown("figure.chart").filter(each => !apart(each)).map(each => each.textContent.slice(0, 60));
  found.cut = crowded(page);
  found.cut.push(...shown("figure.chart text").filter(each => !inside(each)).map(each => each.textContent));
  return found;
};
addEventListener("load", () => setTimeout(async () => {
  document.title = JSON.stringify(await Promise.all(frames.map(check)));
}, 300));
"""


def looked_at(pages: Sequence[tuple[Path, int, int, str]], directory: Path) -> list[Any]:
    """What `check` finds in a real browser, for every page below the directory, width, height and colour scheme."""
    assert BROWSER is not None
    frame = '<iframe src="{}" width={} height={} style="border: 0; color-scheme: {}"></iframe>'
    frames = "".join(frame.format(page.relative_to(directory), *each) for page, *each in pages)
    script, harness = (HERE / "crowded.js").read_text() + LAYOUT, directory / "frames.html"
    harness.write_text(f"<!DOCTYPE html><title></title>{frames}<script>{script}</script>")
    command = [BROWSER, *QUIET, f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=10000"]
    command += ["--allow-file-access-from-files", "--dump-dom", harness.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-500:]
    title = re.search(r"<title>(.+?)</title>", finished.stdout)
    assert title is not None, finished.stderr[-500:]
    found: list[Any] = json.loads(html.unescape(title[1]))
    return found


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on this machine")
def test_no_page_cuts_anything_at_either_width(
    posbias: Callable, long_llama: Path, rollout: Reproduction, tmp_path: Path
) -> None:
    rollout.save(tmp_path / "rollout")
    saved().save(tmp_path / "one")
    saved(model="another-model-of-a-rather-long-name").save(tmp_path / "other")
    for name, command in RUNS.items():
        given = [str(long_llama) if each == "MODEL" else each.replace("OUT", str(tmp_path)) for each in command]
        ran = posbias(*given, "--out", tmp_path / name)
        assert ran.returncode == 0, ran.stderr
        if not (tmp_path / name / "report.html").exists():
            assert posbias("report", tmp_path / name).returncode == 0
    for name, runs in SIDE_BY_SIDE.items():
        write_report([read_record(tmp_path / run) for run in runs], tmp_path / name)
    frames = [(1400, 900, "light"), (390, 844, "dark")]
    pages = [(tmp_path / name / "report.html", *frame) for name in [*RUNS, *SIDE_BY_SIDE] for frame in frames]
    for (page, *frame), look in zip(pages, looked_at(pages, tmp_path), strict=True):
        name = page.parent.name
        assert look["wide"] <= 0, (name, frame, look)
        assert look["wideUnfolded"] <= 0, (name, frame, look)
        assert (look["overlapping"], look["cut"]) == ([], []), (name, frame)
        assert look["verdict"], name
        if name not in ("verify", "correlate"):  # claims and correlations have numbers
            assert look["charts"], name
            assert look["pictures"], (name, "the answer is seen, not read alone")
        if frame[0] == 1400:
            assert look["answered"] <= 900, (name, "verdict and picture need no scrolling", look["answered"])
