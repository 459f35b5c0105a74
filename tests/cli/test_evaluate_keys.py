"""`posbias evaluate` against a server that repeats the key: no file that is written, and nothing printed, holds it."""

from pathlib import Path
from typing import Any

from evaluation.hostile import spoken
from evaluation.serving import Reply, stand_in

KEY = "sk-very/secret+key_1234567890"


def test_a_run_against_an_echoing_server_keeps_no_key(posbias: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Of a run that ends and of one that fails."""
    monkeypatch.setenv("TEST_KEY", KEY)

    def echo(_index: int, _path: str, _body: dict[str, Any]) -> Reply:
        headers = {"X-Echo": KEY, "Set-Cookie": f"a={KEY}", "Location": KEY}
        body = spoken(f'"it is {KEY}"', extra=f', "{KEY}": "{KEY}"').replace(b'"stop"', b'"%b"' % KEY.encode())
        return 200, headers, body

    def refuse(index: int, path: str, body: dict[str, Any]) -> Reply:
        return echo(index, path, body) if index < 2 else (403, {"X-Echo": KEY}, {"error": KEY})

    flags = ["--task", "key_value(pairs=4)", "--count", 5, "--max-tokens", 2, "--json"]
    asked = ["--served-model", "m", "--server-options", "key_variable='TEST_KEY', retries=0, concurrency=2"]
    for index, behaviour in enumerate((echo, refuse)):
        run = tmp_path / str(index)
        with stand_in(behaviour) as server:
            result = posbias("evaluate", "--server", server.address, *asked, *flags, "--out", run)
        assert result.returncode == (0, 1)[index], result.stderr
        assert server.authorizations[0] == f"Bearer {KEY}"
        files = [path for path in run.rglob("*") if path.is_file()]
        assert {"record.json"} <= {path.name for path in files}
        for text in (result.stdout, result.stderr, *(path.read_text("utf-8", errors="replace") for path in files)):
            assert KEY not in text
