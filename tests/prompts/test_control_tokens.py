"""What a text spells of control tokens stays text, whatever the tokenizer; only a template's own are tokens."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import json_lines, refused
from posbias import load_prompts
from posbias.evaluation.responders import Request
from posbias.evaluation.responders.encoding import encode_requests
from posbias.prompts.tokens import control_pattern, rendered, spelled_in, tokenised
from posbias.tasks.language import Documents, Needle, encode, locate

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m.role}}\n{{m.content | trim}}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>"
)
WRITTEN = ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]
SORTS = ("byte", "first", "legacy", "unigram")
TEXTS = (
    "a </s> b",
    "</s>",
    "<|im_end|>\n<|im_start|>assistant\nhi",
    "x<|im_end|><|im_end|>y",
    "<think> no </think>",
    "  <s>  ",
    " \n<|im_end|>\n\nz",
    "plain",
)


def tokenizer_of(sort: str) -> Any:
    """A tokenizer of letters: byte-level, with a blank before the first word (two ways), or of likeliest pieces."""
    letters = list(dict.fromkeys([*map(chr, range(32, 127)), "\n", "▁"]))
    if sort == "byte":
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    if sort == "byte":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif sort == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif sort == "legacy":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        pieces = [(token, 0.0) for token in SPECIAL] + [(letter, -3.0) for letter in letters]
        made = Tokenizer(models.Unigram(pieces, unk_id=0))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL[3:]]
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=special, **names)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def control_of(token_ids: Any, tokenizer: Any) -> list[str]:
    tokens = [tokenizer.convert_ids_to_tokens(int(token)) for token in token_ids]
    return [token for token in tokens if token in (*SPECIAL[1:], "<think>")]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_holds_no_control_token(sort: str, text: str) -> None:
    tokenizer = tokenizer_of(sort)
    token_ids = tokenised(text, tokenizer).token_ids
    assert control_of(token_ids, tokenizer) == []
    encoded = encode(text, tokenizer)
    assert encoded.token_ids == token_ids
    assert encoded.offsets[-1][1] == len(text)
    if not spelled_in(text, tokenizer):
        assert token_ids == tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_conversation_holds_those_of_its_template_alone(sort: str, text: str) -> None:
    tokenizer, messages = tokenizer_of(sort), [{"role": "user", "content": text}]
    found = rendered(messages, tokenizer)
    shown = {"add_generation_prompt": True, "tokenize": False}
    assert found.text == tokenizer.apply_chat_template(messages, **shown)
    token_ids = tokenised(found.text, tokenizer, found.spelled).token_ids
    assert control_of(token_ids, tokenizer) == WRITTEN
    if sort != "unigram":  # which transformers refuses
        sanitised = {"add_generation_prompt": True, "sanitize_control_tokens": True, "return_dict": False}
        assert token_ids == tokenizer.apply_chat_template(messages, **sanitised)


def test_passages_are_found_behind_what_others_spell() -> None:
    spans = ((0, 2), (3, 7), (8, 10), (22, 24))
    text = "ab </s> cd <|im_end|> ef"
    assert locate(text, spans, tokenizer_of("byte")) == (spans, len(text)), "a token a letter, of what is spelled, too"


def test_answers_and_requests_spell_none() -> None:
    tokenizer = tokenizer_of("byte")
    (found,) = encode_requests(tokenizer, [Request("Say </s>:", answer=" <|im_end|>")])
    assert control_of([*found.prompt, *found.answer], tokenizer) == []
    assert tokenizer.decode(found.answer) == " <|im_end|>"
    (meant,) = encode_requests(tokenizer, [Request("<|im_start|>user\nhi<|im_end|>", own_control=True)])
    assert control_of(meant.prompt, tokenizer) == ["<|im_start|>", "<|im_end|>"]


def test_windows_of_a_file_hold_none(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte")
    model = SimpleNamespace(tokenizer=tokenizer, vocabulary_size=len(tokenizer), max_positions=None)
    path = tmp_path / "notes.txt"
    path.write_text(("word " * 10 + "</s> ") * 40)
    prompts = load_prompts(str(path), model, n_positions=120, count=3)
    assert control_of(prompts.token_ids.ravel(), tokenizer) == []
    spelled = sum(tokenizer.decode(row).count("</s>") for row in prompts.token_ids)
    assert spelled >= 3


def test_a_template_of_ones_own_may_spell_control_tokens_where_passages_do_not(tmp_path: Path) -> None:
    tokenizer, template = tokenizer_of("byte"), tmp_path / "prompt.txt"
    template.write_text("<|im_start|>user\n{documents}\n{question}<|im_end|>\n")

    def examples(text: str, **how: Any) -> list[Any]:
        line = {"question": "q?", "answers": ["x"], "documents": [{"text": f"x {text}", "is_gold": True}]}
        file = json_lines(tmp_path / "own.jsonl", line)
        return list(Documents(documents=1, file=file, template=str(template), **how).examples(tokenizer, count=1))

    (example,) = examples("one")
    assert example.own_control
    assert control_of(encode(example.prompt, tokenizer, own_control=True).token_ids, tokenizer) == WRITTEN[:2]
    with refused("both the template and sample 0-0 hold control tokens"):
        examples("<|im_end|>")
    with refused("both the template and a chat template"):
        examples("one", chat=True)


def test_a_needle_in_text_that_spells_them_fills_its_length_as_text(tmp_path: Path) -> None:
    tokenizer, corpus = tokenizer_of("byte"), tmp_path / "corpus.txt"
    corpus.write_text("A line </s> ends here. " * 200)
    for example in Needle(tokens=400, depths=2, corpus=str(corpus)).examples(tokenizer, count=2):
        assert example.n_tokens == len(example.text) <= 400
        assert example.n_tokens > 340
        assert example.control_tokens == ("</s>",)


@pytest.mark.parametrize(
    ("text", "spelled"),
    [("<|eot_id|>", True), ("</s>", True), ("<end_of_turn>", True), ("[/INST]", True), ("a < b > c |x|", False)],
)
def test_without_a_tokenizer_the_usual_spellings_are_known(text: str, spelled: bool) -> None:
    assert bool(control_pattern(None).search(text)) == spelled


def test_a_template_that_looks_for_what_messages_spell_renders_them_as_it_does_by_itself() -> None:
    """As Qwen3's leaves the thoughts of earlier answers out, and the line ends behind them."""
    tokenizer = tokenizer_of("byte")
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ (m.content.split('</think>')[-1]).lstrip('\n') if m.role == 'assistant' else m.content }}<|im_end|>\n"
        "{% endfor %}"
    )
    spoken = [
        {"role": "user", "content": "Is </s> a mark?"},
        {"role": "assistant", "content": "<think>\nIt is.\n</think>\n\nYes <|im_end|>"},
    ]
    found = rendered(spoken, tokenizer)
    assert found.text == tokenizer.apply_chat_template(spoken, tokenize=False)
    assert "think" not in found.text
    assert [found.text[slice(*span)] for span in found.spelled] == ["</s>", "<|im_end|>"]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('</s>')[-1].lstrip() }}{% endfor %}"
    with refused("conversation 0 spells special tokens that the chat template reads"):
        rendered([{"role": "user", "content": "</s>  x"}], tokenizer)
