"""What a run is announced to take, held against what its process took: the most that it held (VmHWM)."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from posbias.cli import main
from posbias.memory import parse_bytes, resident_bytes

PROGRAM = """
import sys
from posbias.cli import main
try:
    main()
except SystemExit as end:
    code = end.code
from posbias.memory import peak_bytes
print(peak_bytes(), file=sys.stderr)
sys.exit(code)
"""


def posbias(*arguments: object) -> tuple[int, str, int]:
    """Exit code, stderr and peak of a command in a process of its own."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *lines, peak = done.stderr.strip().splitlines()
    return done.returncode, "\n".join(lines), int(peak)


def test_a_tiny_models_process_takes_no_more_than_announced(long_llama: Path, tmp_path: Path) -> None:
    code, said, peak = posbias("measure", long_llama, "--length", 256, "--count", 1, "--out", tmp_path / "run")
    assert code == 0
    announced = json.loads((tmp_path / "run" / "record.json").read_text())["scalars"]["cost"]["peak_bytes"]
    assert 0.66 * announced < peak <= announced
    assert re.search(
        r"estimate: at most \d+ MB for the process \(weights 1\d\d KB, passes .* and the rest \d+ MB\)", said
    )


@pytest.mark.slow
def test_an_audit_counts_the_reinitialised_network_beside_the_loaded_one(tmp_path: Path) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 16}
    config = {"model_type": "llama", "vocab_size": 40_000, "tie_word_embeddings": True, **wide}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--length", 32, "--count", 1, "--prompts", "synthetic", "--kinds", "probability"]
    code, said, peak = posbias("audit", f"config:{tmp_path}", *flags, "--out", tmp_path / "run")
    assert code == 0, said
    cost = json.loads((tmp_path / "run" / "record.json").read_text())["scalars"]["cost"]
    assert cost["weights_bytes"] > 150e6, "more than what an estimate adds for libraries still to be loaded"
    assert 0.66 * cost["peak_bytes"] < peak <= cost["peak_bytes"]
    assert "re-initialised weights 204 MB" in said
    assert "for 1 prompts, re-initialised networks included" in said


def test_less_than_python_takes_is_refused_with_what_it_takes(
    long_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (resident_bytes() or 1e9) > 100e6
    words = ["posbias", "measure", str(long_llama), "--length", "256", "--count", "1", "--max-memory", "100MB"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert re.search(
        r"Python and libraries [\d.]+ [MG]B\); 100 MB are allowed; try a smaller model", capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize(("length", "allowed"), [(256, "1.2GB"), (1024, "1.3GB"), (1024, "1.6GB")])
def test_what_a_refusal_names_holds_when_followed(length: int, allowed: str) -> None:
    """Every remedy named for the demo model is tried, and stays within what is allowed."""
    flags = ["measure", "demo", "--count", "1", "--kinds", "probability", "--max-memory", allowed]
    code, said, _ = posbias(*flags, "--length", length)
    assert code == 2
    ways = said.split("; try ")[1].split(" or ")
    assert ways[0].startswith("--length ")
    for way in ways:
        shorter = [] if way.startswith("--length") else ["--length", length]
        code, said, peak = posbias(*flags, *shorter, *way.split())
        assert code == 0, said
        assert peak <= parse_bytes(allowed), way
