"""What is exported, behind a real server: `transformers serve` answers as the demo model does under the method."""

from pathlib import Path

import pytest

import posbias as pb
from evaluation.replies import generated
from evaluation.serving import TransformersServer
from posbias import LocalResponder, ServerResponder
from posbias.evaluation.responders import Request, ServerOptions
from posbias.mitigation.fitting import Fitted
from posbias.mitigation.methods.applying import answering_under
from posbias.tasks.language import KeyValue
from tiny_families import random_adapter


@pytest.mark.slow
def test_a_merged_checkpoint_answers_as_the_model_does_under_the_method(tmp_path: Path) -> None:
    model = pb.load_model("demo", dtype="float32", device="cpu")
    method = random_adapter(model, "adapter(rank=1, targets='v,o', strength=0.05)")
    examples = KeyValue(pairs=3, chat=True).examples(model.tokenizer, count=2, seed=3)
    asked = [Request(example.prompt, max_tokens=8) for example in examples]
    local = LocalResponder(model)
    expected, unchanged = (
        [reply.text for reply in generated(responder, asked)] for responder in (answering_under(method, local), local)
    )
    assert expected != unchanged, "the adapter changes answers"
    pb.export(Fitted(method, {}), tmp_path / "served", model=model, merged=True)
    server = TransformersServer(tmp_path / "served")
    server.start()
    try:
        server.wait(300)
        responder = ServerResponder(server.address, server.model, ServerOptions(kind="chat"))
        assert [reply.text for reply in generated(responder, asked)] == expected
    finally:
        server.kill()
