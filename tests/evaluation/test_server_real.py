"""The demo model behind `transformers serve`: the same answers as in this process, through a kill and a restart."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.replies import generated, scored
from evaluation.serving import TransformersServer
from posbias import LocalResponder, RunError, ServerResponder, load_model
from posbias.evaluation.responders import Request, ServerOptions
from posbias.models.loading import fetch_demo
from posbias.tasks.language import KeyValue

OPTIONS = ServerOptions(concurrency=2, retries=60, kind="text")


@pytest.fixture
def server() -> Iterator[TransformersServer]:
    process = TransformersServer(fetch_demo())
    process.start()
    process.wait()
    yield process
    process.kill()


def requests(*, chat: bool) -> list[Request]:
    tokenizer = load_model("demo").tokenizer
    examples = KeyValue(pairs=2, chat=chat).examples(tokenizer, count=4, seed=3)
    return [Request(example.prompt, answer=example.target, max_tokens=12) for example in examples]


@pytest.mark.slow
def test_a_server_that_is_killed_and_begun_again_loses_nothing(server: TransformersServer, tmp_path: Path) -> None:
    text = requests(chat=False)
    responder = ServerResponder(server.address, server.model, replace(OPTIONS, cache=tmp_path))
    served: list[str] = []
    worker = threading.Thread(target=lambda: served.extend(answer.text for answer in generated(responder, text)))
    worker.start()
    while responder.counts()["requests"] < 2:
        time.sleep(0.02)
    server.kill()
    finished = responder.counts()["requests"]
    server.start()
    worker.join(timeout=240)
    assert finished < len(text)
    assert responder.counts()["requests"] == len(text)
    assert responder.describe()["retried"] > 0
    local = generated(LocalResponder(load_model("demo")), text)
    assert served == [response.text for response in local]
    counts = sum(response.prompt_tokens or 0 for response in local), sum(response.tokens or 0 for response in local)
    assert (responder.counts()["prompt_tokens"], responder.counts()["generated_tokens"]) == counts

    assert scored(responder, text[:2]) == [None, None]
    assert responder.describe()["no_scores_because"] == "the server repeats no log-probabilities"

    talk = requests(chat=True)[:2]
    chatting = ServerResponder(server.address, server.model, replace(OPTIONS, kind="chat"))
    spoken = [response.text for response in generated(chatting, talk)]
    assert spoken == [response.text for response in generated(LocalResponder(load_model("demo")), talk)]

    server.kill()  # what is finished needs no server; what is not ends in one line
    gone = ServerResponder(server.address, server.model, replace(OPTIONS, cache=tmp_path, retries=1))
    assert [response.text for response in generated(gone, text)] == served
    with pytest.raises(RunError, match="cannot be reached"):
        generated(gone, [Request("Something new")])
    assert server.model not in str(gone.describe())
