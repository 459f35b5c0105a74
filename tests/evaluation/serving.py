"""A stand-in server on loopback whose every answer a test decides, and the real one of transformers."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and the JSON or the bytes of the body."""


class StandIn:
    """Counts what it is asked; `answer(index, path, body)` decides each reply."""

    def __init__(self, answer: Callable[[int, str, dict[str, Any]], Reply]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.together = 0
        self.most_together = 0
        self.lock = threading.Lock()
        self.address = ""


@contextmanager
def stand_in(answer: Callable[[int, str, dict[str, Any]], Reply]) -> Iterator[StandIn]:
    state = StandIn(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                index = len(state.asked)
                state.asked.append(body)
                state.authorizations.append(self.headers["Authorization"])
                state.headers.append(dict(self.headers))
                state.together += 1
                state.most_together = max(state.most_together, state.together)
            status, headers, content = state.answer(index, self.path, body)
            with state.lock:
                state.together -= 1
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(raw)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat(text: str | None, *, prompt_tokens: int = 10, tokens: int = 2) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


class TransformersServer:
    """`transformers serve` with one local model on a port of its own; a process that can be killed and begun again."""

    def __init__(self, directory: Path) -> None:
        self.model = str(directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/v1"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin; it answers once its model is loaded."""
        command = [str(Path(sys.executable).with_name("transformers")), "serve", self.model, "--device", "cpu"]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(self.port)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=environment, **quiet)  # type: ignore[call-overload]

    def wait(self, seconds: float = 120.0) -> None:
        """Until it answers."""
        begin = time.monotonic()
        while time.monotonic() < begin + seconds:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError(f"transformers serve did not answer within {seconds:g} s")

    def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
