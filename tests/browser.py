"""The browser in which pages are looked at, if this machine has one."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]

PARTS = """
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
addEventListener("load", () => setTimeout(async () => {
  document.title = JSON.stringify(await Promise.all(frames.map(check)));
}, 300));
"""
"""What scripts that look at pages have in common; each defines `check`, from a frame to what it found there."""


def looked_at(pages: Sequence[tuple[Path, int, int, str]], script: str, directory: Path) -> list[Any]:
    """What a script with `check` finds in a real browser, for every page, width, height and colour scheme.

    Pages lie below the directory, where the page that frames them is written.
    """
    assert BROWSER is not None
    frame = '<iframe src="{}" width={} height={} style="border: 0; color-scheme: {}"></iframe>'
    frames = "".join(frame.format(page.relative_to(directory), *each) for page, *each in pages)
    harness = directory / "frames.html"
    harness.write_text(f"<!DOCTYPE html><title></title>{frames}<script>{PARTS}{script}</script>")
    command = [BROWSER, *QUIET, f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=10000"]
    command += ["--allow-file-access-from-files", "--dump-dom", harness.as_uri()]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr[-500:]
    title = re.search(r"<title>(.+?)</title>", finished.stdout)
    assert title is not None, finished.stderr[-500:]
    found: list[Any] = json.loads(html.unescape(title[1]))
    return found
