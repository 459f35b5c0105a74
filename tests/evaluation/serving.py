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

from posbias import EvaluateOptions, ServerResponder, evaluate
from posbias.evaluation.evaluation import Evaluation
from posbias.evaluation.responders import Reply as Answered
from posbias.evaluation.responders import Request, ServerOptions

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and the JSON or the bytes of the body."""
Answer = Callable[[int, str, dict[str, Any]], Reply] | Reply
"""What is answered to a request with its number, path and body, or to all."""
ONE_BY_ONE = ServerOptions(retries=1, timeout=5.0, concurrency=1)


class StandIn:
    """Counts what it is asked; `answer` decides each reply."""

    def __init__(self, answer: Answer) -> None:
        self.answer: Any = answer
        self.asked: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.together = 0
        self.most_together = 0
        self.address = ""

    def reply(self, index: int, path: str, body: dict[str, Any]) -> Reply:
        reply: Reply = self.answer(index, path, body) if callable(self.answer) else self.answer
        return reply


@contextmanager
def stand_in(answer: Answer) -> Iterator[StandIn]:
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
        status, own, content = await asyncio.to_thread(state.reply, index, scope["path"], state.asked[index])
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


def chat(content: Any, finish: str | None = "stop", *, prompt_tokens: Any = 10, tokens: Any = 2, **said: Any) -> Reply:
    """An answer in a conversation; `said` are further fields of its message."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **said}, "finish_reason": finish}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


def echo(tokens: list[str], logprobs: list[Any], listed: list[Any] | None = None) -> Reply:
    """A repeated prompt with its log-probabilities, and one more token that was generated."""
    told = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": listed}
    choice = {"text": "".join(tokens), "logprobs": told, "finish_reason": "length"}
    return 200, {}, {"choices": [choice], "usage": {"prompt_tokens": len(tokens) - 1, "completion_tokens": 1}}


def evaluated(answer: Answer, task: Any, asked: ServerOptions = ONE_BY_ONE, **options: Any) -> Evaluation:
    """What is found of a server that answers so."""
    with stand_in(answer) as server:
        return evaluate(ServerResponder(server.address, "m", asked), task, options=EvaluateOptions(**options))


def replied(answer: Answer, *requests: Request, asked: ServerOptions = ONE_BY_ONE, **how: Any) -> list[Answered]:
    """What is read of a server that answers so."""
    with stand_in(answer) as server:
        return ServerResponder(server.address, "m", asked).respond(requests, **how)


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
