"""Tokenizers with one token per byte, so that tokens are characters of ASCII prompts."""

import pytest
from transformers import AutoTokenizer

from conftest import save_byte_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """Makes one with a chat template, or without."""
    directory = tmp_path_factory.mktemp("bytes")
    save_byte_tokenizer(directory)

    def made(chat_template=None):
        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = chat_template
        return tokenizer

    return made


@pytest.fixture(scope="session")
def tokenizer(byte_tokenizer):
    return byte_tokenizer()
