"""The explorer, opened in a real browser: its arithmetic against the library's, and what a user does with the page."""

import base64
import json
import shlex
import subprocess
import tempfile
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import BROWSER, QUIET
from posbias import Architecture, Profile, Record
from posbias.architecture import Alibi, GammaKey, published_alibi_slopes
from posbias.architecture.published_models import bloom_influence, published_models
from posbias.cli.explore import presets
from posbias.comparison import MeasuredKind, Subject, TheoryProfile
from posbias.comparison.metrics import first_tenth, wasserstein
from posbias.comparison.stored import store_subjects
from posbias.designing.exact import closed_profile, key_bias_for, telescoping_alphas
from posbias.designing.targets import Recency, UShape
from posbias.report.explore import explorer_page
from posbias.theory import rollout_profile

PRECISION = 1e-10
"""Relative, of every entry above `LEAST`: sums of thousands of terms, uncompensated."""
LEAST = 1e-280
"""Smaller sums count as zero in the browser."""
CHECKS = Path(__file__).with_name("explorer_checks.js")
ROLLOUT = Path(__file__).parents[2] / "src" / "posbias" / "report" / "templates" / "rollout.js"

RANDOM = np.random.default_rng(0)
MIXING = RANDOM.uniform(0, 0.6, 7).tolist()
ALIBI = published_alibi_slopes(6)
MANY = published_alibi_slopes(128)
SQUARES = [((head + 1) / 64) ** 2 for head in range(64)]
NEAR = [0.0, *np.geomspace(0.01, 0.0101, 40).tolist(), 0.5]
ARCHITECTURES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"n": 1, "slopes": [0]}, {}),
    ({"n": 20_000, "slopes": [0], "mixing": [0.1] * 24}, {}),
    ({"n": 300, "slopes": [0], "mixing": [1.0] * 5}, {}),
    ({"n": 20_000, "slopes": ALIBI}, {"encoding": "alibi", "heads": 6}),
    ({"n": 900, "slopes": [-np.log(0.8)]}, {"encoding": "decay(rate=0.8)"}),
    ({"n": 900, "slopes": [-np.log(0.8)], "rough": True}, {"encoding": "decay(rate=0.8)"}),
    ({"n": 900, "slopes": [0], "rough": True}, {}),
    ({"n": 900, "slopes": NEAR}, {"encoding": Alibi(NEAR), "heads": len(NEAR)}),
    ({"n": 300, "slopes": SQUARES}, {"encoding": Alibi(SQUARES), "heads": len(SQUARES)}),
    ({"n": 700, "slopes": [0], "reach": 33}, {"mask": "sliding_window(width=33)"}),
    ({"n": 700, "slopes": ALIBI, "reach": 1}, {"mask": "sliding_window(width=1)", "encoding": "alibi", "heads": 6}),
    ({"n": 5000, "slopes": ALIBI, "reach": 64}, {"mask": "sliding_window(width=64)", "encoding": "alibi", "heads": 6}),
    ({"n": 900, "slopes": ALIBI, "reach": 24}, {"mask": "sliding_window(width=24)", "encoding": "alibi", "heads": 6}),
    ({"n": 30, "slopes": ALIBI, "reach": 24}, {"mask": "sliding_window(width=24)", "encoding": "alibi", "heads": 6}),
    ({"n": 20_000, "slopes": MANY}, {"encoding": "alibi", "heads": 128}),
    ({"n": 900, "slopes": MANY, "reach": 400},
     {"mask": "sliding_window(width=400)", "encoding": "alibi", "heads": 128}),
    ({"n": 900, "slopes": MANY, "reach": 64}, {"mask": "sliding_window(width=64)", "encoding": "alibi", "heads": 128}),
    ({"n": 700, "slopes": MANY, "prefix": 50, "sink": 1.0},
     {"mask": "prefix(length=50)", "encoding": "alibi", "heads": 128, "sinks": 1.0}),
    ({"n": 5000, "slopes": [64 * slope for slope in MANY]},
     {"encoding": Alibi([64 * slope for slope in MANY]), "heads": 128}),
    ({"n": 5000, "slopes": published_alibi_slopes(112)}, {"encoding": "alibi", "heads": 112}),
    ({"n": 20, "slopes": [0], "reach": 64}, {"mask": "sliding_window(width=64)"}),
    (
        {"n": 700, "slopes": [0], "reach": 33, "full": 3},
        {"mask": ["causal" if layer % 3 == 2 else "sliding_window(width=33)" for layer in range(7)]},
    ),
    ({"n": 700, "slopes": [0], "prefix": 100}, {"mask": "prefix(length=100)"}),
    ({"n": 700, "slopes": ALIBI, "prefix": 100}, {"mask": "prefix(length=100)", "encoding": "alibi", "heads": 6}),
    ({"n": 700, "slopes": ALIBI, "prefix": 700}, {"mask": "full", "encoding": "alibi", "heads": 6}),
    ({"n": 700, "slopes": [0], "sink": 2.5}, {"sinks": 2.5}),
    ({"n": 700, "slopes": ALIBI, "reach": 64, "sink": -1.0},
     {"mask": "sliding_window(width=64)", "encoding": "alibi", "heads": 6, "sinks": -1.0}),
    ({"n": 700, "slopes": ALIBI, "prefix": 50, "sink": 1.0},
     {"mask": "prefix(length=50)", "encoding": "alibi", "heads": 6, "sinks": 1.0}),
    ({"n": 3000, "alphas": [0.2, 1, 3, 40, 1, 0.9, 7]},
     {"encoding": [GammaKey(alpha) for alpha in (0.2, 1, 3, 40, 1, 0.9, 7)]}),
]  # fmt: skip
"""The browser's spelling of an architecture, and the library's."""
TARGETS = [
    (UShape(0.1).profile(400, 0.9**24), [0.1] * 24),
    (Recency(-4.0).profile(97, 0.0), [1.0] * 3),
    (UShape(20.0).profile(1500, float(np.prod(1 - np.array(MIXING)))), MIXING),
]
TELESCOPING = [(1.0, MIXING), (0.4, [0.1, 1.0, 0.3])]
PAIR = [RANDOM.dirichlet(np.ones(57)) for _ in range(2)]


def library(changes: dict[str, Any], n_positions: int, mixing: list[float]) -> np.ndarray:
    return rollout_profile(Architecture(len(mixing), mixing=mixing, **changes), n_positions=n_positions)


def spec(given: dict[str, Any]) -> dict[str, Any]:
    return {"mixing": MIXING, "sink": None, **given}


def same(found: Any, expected: np.ndarray) -> None:
    found = np.asarray(found)
    assert found.shape == expected.shape
    large = expected > LEAST
    np.testing.assert_allclose(found[large], expected[large], rtol=PRECISION, atol=0)
    assert np.all(found[~large] <= 2 * LEAST)


@pytest.fixture(scope="module")
def record() -> Record:
    """Two subjects with a measured kind each, and a theory."""
    units = RANDOM.dirichlet(np.ones(80), size=(2, 3))
    kinds = [MeasuredKind(Profile.mean_of(each), each) for each in units]
    theories = {"rollout": TheoryProfile(Profile(np.full(80, 1 / 80)))}
    subjects = Subject("trained", {"logit": kinds[0]}, theories), Subject("initialised", {"logit": kinds[1]})
    return store_subjects(Record("measure", {}, {"model": {"source": "a model"}}), subjects)


def damaged_files(run: Path) -> dict[str, tuple[bytes, str]]:
    """Files by name, with what the page must say of each: none is a run that `read_record` and `Profile` take."""
    document = json.loads((run / "record.json").read_text())
    arrays = (run / "arrays.safetensors").read_bytes()
    name = "trained/measured/logit/influence"
    values = document["profiles"][name]
    need, damaged = "a profile needs finite numbers >= 0.", "is damaged or no run of posbias"
    profiles: dict[str, tuple[Any, str]] = {
        "strings.json": ([str(value) for value in values], f'has "{values[0]}" at position 0 of {name}; {need}'),
        "nulls.json": ([values[0], None, *values[2:]], f"has null at position 1 of {name}; {need}"),
        "truth.json": ([*values[:-1], True], f"has true at position 79 of {name}; {need}"),
        "negative.json": ([-0.25, *values[1:]], f"has -0.25 at position 0 of {name}; {need}"),
        "nested.json": ([[0.5], [0.5]], f"has [0.5] at position 0 of {name}; {need}"),
        "huge.json": ([1e308] * 80, f"has values of {name} that sum to Infinity; those of a profile sum to 1."),
        "half.json": ([1 / 160] * 80, f"has values of {name} that sum to 0.5; those of a profile sum to 1."),
        "empty.json": ([], f"has 0 values of {name}; 2 are needed."),
        "single.json": ([1.0], f"has 1 values of {name}; 2 are needed."),
        "object.json": ({"0": 1.0}, f"has no values of {name}; 2 are needed."),
        "long.json": ([0] * 1_000_001, f"has 1,000,001 positions of {name}; at most 1,000,000 are drawn."),
    }
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "version.json": ({"format_version": 99}, "has record format 99; this page reads format 1."),
        "unversioned.json": ({"format_version": None}, "has record format null; this page reads format 1."),
        "failed.json": (
            {"status": "failed", "error": "a full disk"},
            "did not finish (a full disk); only finished runs can be drawn.",
        ),
        "verb.json": ({"verb": 3}, f"{damaged}: its verb is 3."),
        "unnamed.json": ({"run_id": None}, f"{damaged}: its run_id is null."),
        "resolved.json": ({"resolved": []}, f"{damaged}: its resolved are []."),
        "bare.json": ({"profiles": {}, "arrays": {}}, "holds no measured profile."),
        "older.json": (
            {"profiles": {}},
            f"has no numbers of {name}: take arrays.safetensors, which lies beside it.",
        ),
        **{file: ({"profiles": {**document["profiles"], name: held}}, said) for file, (held, said) in profiles.items()},
    }
    files = {file: (json.dumps({**document, **change}), said) for file, (change, said) in changes.items()}
    files |= {"list.json": ("[1, 2]", "is no run of posbias."), "text.json": ("profile", "is no run of posbias.")}
    found = {file: (text.encode(), f"{file} {said}") for file, (text, said) in files.items()}
    changed = arrays[:-1] + bytes([arrays[-1] ^ 1])
    for file, held, said in (
        ("changed.safetensors", changed, f"{damaged}: its content is not what posbias wrote."),
        ("cut.safetensors", arrays[:-9], f"{damaged}: "),
        ("header.safetensors", (1 << 40).to_bytes(8, "little") + arrays[8:], f"{damaged}."),
        ("short.safetensors", b"posbias", f"{damaged}."),
        ("foreign.safetensors", (2).to_bytes(8, "little") + b"{}", "is no run of posbias."),
    ):
        found[file] = held, f"{file} {said}"
    header = json.loads(arrays[8 : 8 + int.from_bytes(arrays[:8], "little")])
    del header["__metadata__"]
    last = max(header, key=lambda each: header[each]["data_offsets"][1])
    found["cut.safetensors"] = arrays[:-9], f"cut.safetensors {damaged}: {last} has no place in it."
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, record: Record) -> Any:
    """What the browser sends back, started once."""
    if BROWSER is None:
        pytest.skip("no chromium, chromium-browser or google-chrome on this machine")
    run = record.save(tmp_path_factory.mktemp("run"))
    older = {name: value for name, value in record.as_json().items() if name != "profiles"}
    (run / "older.json").write_text(json.dumps(older))
    files = [run / "record.json", run / "older.json", run / "arrays.safetensors"]
    damaged = damaged_files(run)
    given = {
        "profiles": [spec(browser) for browser, _ in ARCHITECTURES],
        "targets": [{"profile": profile.tolist(), "mixing": mixing} for profile, mixing in TARGETS],
        "heads": [1, 2, 6, 8, 112],
        "telescoping": TELESCOPING,
        "pair": [each.tolist() for each in PAIR],
        "presets": list(presets()),
        "files": [{"name": path.name, "bytes": base64.b64encode(path.read_bytes()).decode()} for path in files],
        "damaged": [{"name": name, "bytes": base64.b64encode(held).decode()} for name, (held, _) in damaged.items()],
    }
    pages = {
        "/": ("text/html", f'<!DOCTYPE html><script type="module">{CHECKS.read_text()}</script><body></body>'),
        "/rollout.js": ("text/javascript", ROLLOUT.read_text()),
        "/given": ("application/json", json.dumps(given)),
        "/explorer.html": ("text/html; charset=utf-8", explorer_page(presets())),
        "/measured.html": ("text/html; charset=utf-8", explorer_page(presets(), [record])),
    }
    answer: list[bytes] = []
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sort, text = pages.get(self.path, ("text/plain", ""))
            self.send_response(200)
            self.send_header("Content-Type", sort)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            answer.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()
            done.set()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    profile = tmp_path_factory.mktemp("browser")
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-port=0", "--window-size=1400,900"]
    browser = subprocess.Popen(
        [*command, f"http://127.0.0.1:{server.server_port}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert done.wait(90), "the browser did not answer"
    finally:
        browser.terminate()
        browser.wait(30)
        server.shutdown()
        server.server_close()
    result = json.loads(answer[0])
    assert "error" not in result, result["error"]
    assert result["errors"] == []
    return {**result, "expected": {name: said for name, (_, said) in damaged.items()}}


@pytest.mark.parametrize("index", range(len(ARCHITECTURES)))
def test_profiles_are_those_of_the_library(found: Any, index: int) -> None:
    browser, changes = ARCHITECTURES[index]
    given = spec(browser)
    same(found["profiles"][index], library(changes, given["n"], given["mixing"]))


@pytest.mark.parametrize("index", range(len(TARGETS)))
def test_key_biases_are_those_of_the_library_and_meet_their_target(found: Any, index: int) -> None:
    profile, mixing = TARGETS[index]
    expected, held = key_bias_for(profile, np.array(mixing)), found["biases"][index]
    np.testing.assert_allclose(held["bias"], expected, rtol=PRECISION, atol=PRECISION)
    assert held["range"] == pytest.approx(np.ptp(expected), rel=PRECISION)
    same(held["profile"], profile)
    same(held["profile"], closed_profile(expected, np.array(mixing)))


def test_slopes_exponents_and_distances_are_those_of_the_library(found: Any) -> None:
    assert found["slopes"] == [published_alibi_slopes(heads) for heads in (1, 2, 6, 8, 112)]
    for (alpha, mixing), alphas in zip(TELESCOPING, found["alphas"], strict=True):
        np.testing.assert_allclose(alphas, telescoping_alphas(alpha - 1, np.array(mixing)), rtol=PRECISION)
    assert found["distance"] == pytest.approx(float(wasserstein(*PAIR)), rel=PRECISION)
    assert found["tenth"] == pytest.approx(float(first_tenth(PAIR[0])), rel=PRECISION)


def test_presets_are_the_published_models(found: Any) -> None:
    for model in published_models():
        changes = {"encoding": f"alibi(slopes={list(model.slopes_real)})", "heads": model.heads}
        expected = library(changes, model.n_positions, model.mixing.tolist())
        same(found["presets"][model.name]["profile"], expected)
    measured = bloom_influence().influence
    (distances,) = found["presets"]["bloom-176b"]["distances"]
    assert distances[0] == pytest.approx(float(wasserstein(expected, measured)), abs=1e-6)
    assert distances[1] == pytest.approx(float(wasserstein(np.full(256, 1 / 256), measured)), abs=1e-6)


def test_the_command_that_is_shown_gives_the_profile_that_is_shown(found: Any, posbias: Any) -> None:
    for shown in (found["set"], found["presets"]["flat at every length"]):
        done = posbias(*shlex.split(shown["command"])[1:], "--json")
        assert done.returncode == 0, done.stderr
        expected = np.array(json.loads(done.stdout)["arrays"]["profile/influence"])
        np.testing.assert_allclose(shown["profile"], expected, rtol=PRECISION)
    assert "sinks=1.5" not in found["hash"]
    assert "sink=1.5" in found["hash"]


def test_a_drawn_target_is_met_or_refused(found: Any) -> None:
    drawn = found["drawn"]
    profile, wanted = np.array(drawn["profile"]), np.array(drawn["wanted"])
    np.testing.assert_allclose(profile, wanted, rtol=PRECISION)
    assert wanted.sum() == pytest.approx(1, rel=1e-12)
    assert 100 < wanted[:-1].argmax() < 200, "the stroke is highest in the middle"
    assert drawn["range"] == pytest.approx(np.ptp(key_bias_for(wanted, np.array(drawn["mixing"]))), rel=1e-9)
    assert f"{drawn['range']:.1f} nats" in drawn["told"]
    assert found["refused"]["wrong"] == "wrong"
    assert "the residual stream alone leaves 12\u00a0% there" in found["refused"]["verdict"]


def test_measured_profiles_are_dropped_in(found: Any, record: Record) -> None:
    assert found["dropped"]["n"] == 80
    values = {run["name"]: run["values"] for run in found["dropped"]["runs"]}
    assert len(found["dropped"]["runs"]) == 2, "a record and the arrays beside it are one run"
    assert set(values) == {"a model, trained, logit", "a model, initialised, logit"}
    for state in ("trained", "initialised"):
        assert values[f"a model, {state}, logit"] == record.arrays[f"{state}/measured/logit/influence"].tolist()


def test_what_no_run_holds_is_refused_in_one_sentence_as_the_library_does(found: Any) -> None:
    assert found["damagedRuns"] == 0
    told = {name: text for name, text in found["damaged"].items() if found["expected"][name] != text}
    assert told == {name: found["expected"][name] for name in told}


def test_a_page_with_runs_begins_at_their_length_as_one_that_they_were_dropped_on(found: Any) -> None:
    embedded, dropped = found["embedded"], found["dropped"]
    assert embedded["n"] == embedded["chosen"] == dropped["n"] == dropped["chosen"] == 80
    assert all(len(pair) == 2 for pair in embedded["distances"])
    assert "set N to" not in embedded["reading"]
    assert "n=80" in embedded["hash"], "another page would begin at another length"
    assert embedded["asked"] == 300


def test_nothing_is_cut_and_the_url_holds_what_was_drawn(found: Any) -> None:
    for width in ("wide", "narrow"):
        assert found[width]["overflow"] <= 0, width
        assert min(found[width]["paths"]) > 100, width
    assert found["wide"]["verdict"].startswith("Favours the beginning: ")
    drawn = np.array(found["drawn"]["wanted"])
    np.testing.assert_allclose(found["narrow"]["wanted"], drawn, rtol=0.02)  # two letters for each point


def test_a_worker_computes_what_takes_longer(found: Any) -> None:
    expected = library({"encoding": "alibi(slopes=[0.001])"}, 200_000, [0.2] * 12)
    same(found["worker"], expected)


def test_what_takes_long_is_shown_roughly_then_exactly(found: Any) -> None:
    expected = library({"encoding": "alibi", "heads": 128}, 4000, [0.1] * 128)
    same(found["exact"], expected)
    assert found["rough"]["rough"]
    assert not np.array_equal(found["rough"]["profile"], found["exact"])
    assert np.abs(found["rough"]["profile"] - expected).sum() < 1e-3


def test_the_page_is_small_holds_measured_runs_and_opens(
    posbias: Any, tmp_path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, page = record.save(tmp_path / "run"), tmp_path / "pages" / "explorer.html"
    assert len(explorer_page(presets())) < 100_000
    done = posbias("explore", run, "--out", page, "--json")
    assert json.loads(done.stdout) == {"page": str(page), "runs": [str(run)]}
    assert "a model, initialised, logit" in page.read_text()
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    printed = posbias("explore").stdout
    assert [Path(printed.removeprefix("page: ").strip()).as_uri()] == opened
    assert Path(printed.removeprefix("page: ").strip()).read_text() == explorer_page(presets())
    refused = posbias("explore", "--out", tmp_path / "page.txt")
    assert (refused.returncode, "ends in .html" in refused.stderr) == (2, True)
    Record("predict", {}, arrays={"profile/influence": np.full(3, 1 / 3)}).save(tmp_path / "predicted")
    refused = posbias("explore", tmp_path / "predicted", "--out", tmp_path / "other.html")
    assert (refused.returncode, "no measured profile" in refused.stderr) == (2, True)
    assert not (tmp_path / "other.html").exists()
