"""Every jaxtyping annotation of the package is checked by beartype while tests run."""

import os
import sys
import types
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from beartype import BeartypeConf, beartype
from hypothesis import settings
from jaxtyping import install_import_hook

# Before the hook: typer hands its commands contexts of a class that only it knows, which the checker would refuse.
import posbias.cli.app  # noqa: F401

# Whole numbers are welcome where floats are asked for (PEP 484's numeric tower), as they are without the checker.
typecheck = types.ModuleType("posbias_typecheck")
typecheck.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # type: ignore[attr-defined]
sys.modules[typecheck.__name__] = typecheck
install_import_hook("posbias", "posbias_typecheck.check")

# Nothing is timed in tests, and the examples are the same every time, so that a failure is the fault of a change.
settings.register_profile("posbias", deadline=None, derandomize=True)
settings.load_profile("posbias")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a two-layer Llama with random weights and a byte-level tokenizer, saved as a user would find it."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny_llama(directory)
    save_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with room for 2048 tokens."""
    directory = tmp_path_factory.mktemp("models") / "long-llama"
    save_tiny_llama(directory, max_positions=2048)
    save_byte_tokenizer(directory)
    return directory


def save_tiny_llama(directory: Path, *, max_positions: int = 64) -> None:
    """Weights and configuration, made by transformers itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=None,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        network = LlamaForCausalLM(config)
    network.save_pretrained(directory)


def save_byte_tokenizer(directory: Path) -> None:
    """A tokenizer that knows every byte and nothing else."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
