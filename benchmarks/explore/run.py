"""The explorer's arithmetic in headless Chromium: `python benchmarks/explore/run.py`.

Milliseconds of a profile, or of a key bias with its profile: the best of five calls after one, at 10,000 and a million
positions.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROLLOUT = Path(__file__).parents[2] / "src" / "posbias" / "report" / "templates" / "rollout.js"
LENGTHS = (10_000, 1_000_000)
CASES = {
    "no encoding": "{ slopes: [0] }",
    "gamma keys": "{ alphas: telescopingAlphas(1, mixing) }",
    "window 512": "{ slopes: [0], reach: 512 }",
    "ALiBi, 32 heads": "{ slopes: alibiSlopes(32) }",
    "ALiBi, 32 heads, window 512": "{ slopes: alibiSlopes(32), reach: 512 }",
    "ALiBi, 112 heads in 70 layers (BLOOM)": "{ mixing: Array(70).fill(0.1), slopes: alibiSlopes(112) }",
    "ALiBi, 128 heads in 128 layers": "{ ...most }",
    "the same without mask, first view": "{ ...most, prefix: n, rough: true }",
    "the same, window 512, first view": "{ ...most, reach: 512, rough: true }",
    "key bias of a drawn target, 128 layers": "{ mixing: most.mixing, target: drawn }",
    "key bias of a drawn target": "{ target: drawn }",
}
SCRIPT = """
const mixing = Array(32).fill(0.1);
const most = { mixing: Array(128).fill(0.1), slopes: alibiSlopes(128) };
const drawn = { values: [0, 1, 0], axis: "position", last: null };
const found = {};
for (const [name, n, given] of CASES) {
  const { target = null, ...spec } = given(n);
  const times = [];
  for (let call = 0; call < 6; call++) {
    const start = performance.now();
    answer({ spec: { n, mixing, sink: null, ...spec }, target, measured: [] });
    times.push(performance.now() - start);
  }
  found[`${name} ${n}`] = Math.min(...times.slice(1));
}
document.getElementById("found").textContent = JSON.stringify(found);
"""


def main() -> None:
    cases = ", ".join(f'["{name}", {n}, (n) => ({spec})]' for name, spec in CASES.items() for n in LENGTHS)
    script = ROLLOUT.read_text() + SCRIPT.replace("CASES", f"[{cases}]")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "page.html"
        page.write_text(f'<!DOCTYPE html><pre id="found"></pre><script type="module">{script}</script>')
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory}/profile"]
        done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True)
    found = json.loads(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)[0])
    print(f"{'32 layers, milliseconds':<38}" + "".join(f"{f'N = {n:,}':>16}" for n in LENGTHS))
    for name in CASES:
        print(f"{name:<38}" + "".join(f"{found[f'{name} {n}']:>16,.1f}" for n in LENGTHS))


if __name__ == "__main__":
    main()
