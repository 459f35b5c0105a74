"""A stand-in server on loopback whose every answer a test decides, and the real one of transformers."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import uvicorn

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
        self.address = ""


@contextmanager
def stand_in(answer: Callable[[int, str, dict[str, Any]], Reply]) -> Iterator[StandIn]:
    """The stand-in under uvicorn, in a thread of its own."""
    state = StandIn(answer)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        index, headers = len(state.asked), {name.decode(): value.decode() for name, value in scope["headers"]}
        state.asked.append(json.loads(body))
        state.authorizations.append(headers.get("authorization"))
        state.headers.append(headers)
        state.together += 1
        state.most_together = max(state.most_together, state.together)
        status, own, content = await asyncio.to_thread(state.answer, index, scope["path"], state.asked[index])
        state.together -= 1
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        named = {"Content-Length": str(len(raw)), **own}
        pairs = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": raw})

    listening = socket.create_server(("127.0.0.1", 0))
    state.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", http="h11"))
    loop = asyncio.new_event_loop()
    serving = loop.create_task(server.serve(sockets=[listening]))

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield state
    finally:  # at once: its own way out takes tenths of a second
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        for connection in server.server_state.connections:
            connection.transport.abort()  # type: ignore[union-attr]
        listening.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


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
