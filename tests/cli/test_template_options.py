"""`--template-options` reaches the template that renders conversations, in every verb that renders them."""

import json
import shutil

import pytest
from transformers import PreTrainedTokenizerFast

import posbias as pb

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'loudly' if loud else 'gently' }}{% endif %}"
)
VERBS = {
    "measure": "--kinds probability",
    "attention": "",
    "decompose": "--kinds probability --interventions no_rope",
    "audit": "--kinds probability --initialisations 0",
    "predict": "--theory power_rollout",
}


@pytest.fixture(scope="module")
def chatting(tiny_llama, tmp_path_factory):
    """A model whose template knows one option, and a conversation."""
    directory = tmp_path_factory.mktemp("chatting")
    shutil.copytree(tiny_llama, directory / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    (directory / "talk.jsonl").write_text(json.dumps([{"role": "user", "content": "Good day to you. "}]))
    return directory


@pytest.mark.parametrize("verb", VERBS)
def test_the_option_changes_what_is_read_and_stands_in_the_record(posbias, chatting, tmp_path, verb):
    model = ["--model", chatting / "model"] if verb == "predict" else [chatting / "model"]
    words = [verb, *model, "--prompts", f"chat:{chatting / 'talk.jsonl'}", "--length", 23, "--count", 1]
    words += [*VERBS[verb].split(), "--template-options", "loud=True", "--out", tmp_path / "run"]
    result = posbias(*words)
    assert result.returncode == 0, result.stderr
    record = pb.load_record(tmp_path / "run").as_run()
    assert record.resolved["model"]["template_options"] == {"loud": True}


def test_where_no_conversation_is_rendered_it_is_refused(posbias, chatting):
    for verb in ("measure", "attention", "decompose", "audit"):
        result = posbias(verb, chatting / "model", "--template-options", "loud=True")
        assert result.returncode == 2
        assert "conversations; ask for them by --prompts chat:FILE.jsonl" in result.stderr
