"""`--template-options` goes with tasks that are rendered as conversations."""

import pytest


@pytest.mark.parametrize("verb", ["measure", "attention", "decompose", "predict", "audit"])
def test_where_no_conversation_is_rendered_it_is_refused(posbias, tiny_llama, verb):
    model = ["--model", tiny_llama] if verb == "predict" else [tiny_llama]
    result = posbias(verb, *model, "--template-options", "loud=True")
    assert result.returncode == 2
    left = "left posbias after 0.1.0: evaluate, mitigate and audit --behaviour have it"
    assert ("ask for them by chat=True in the task" if verb == "audit" else left) in result.stderr
