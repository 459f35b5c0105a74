"""A real byte-pair tokenizer trained on a part of the default corpus, and the model it belongs to."""

from dataclasses import dataclass
from importlib import resources
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 600


@dataclass(frozen=True)
class TextModel:
    """As much of a model as prompts ask for."""

    tokenizer: Any
    vocabulary_size: int = VOCABULARY
    max_positions: int | None = 4096


def train_tokenizer(opens_with_bos: bool) -> PreTrainedTokenizerFast:
    text = (resources.files("posbias.prompts") / "corpus" / "austen.txt").read_text(encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:40_000]], trainer)
    if opens_with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def model() -> TextModel:
    """Its tokenizer adds nothing to a text."""
    return TextModel(train_tokenizer(opens_with_bos=False))


@pytest.fixture(scope="session")
def bos_model() -> TextModel:
    """Its tokenizer puts <s> before a text and </s> after it."""
    return TextModel(train_tokenizer(opens_with_bos=True))
