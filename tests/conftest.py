"""Every jaxtyping annotation is checked by beartype while tests run, and every record of a command by its schema."""

import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

import pytest
import typer
from hypothesis import settings

import shape_checks  # before anything of posbias
from posbias import UsageError
from posbias.cli import main


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Calls are counted anew."""
    shape_checks.RUNNING[0] = item.nodeid


# Modules and tests stay to the end: looking through their 650,000 objects for garbage was 4 % of the suite's time.
gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is looked for among what tests make."""
    gc.enable()
    gc.freeze()


# The parser of the command line takes 13 milliseconds to make, and is the same for each of thousands of commands.
typer.main.get_command = cache(typer.main.get_command)

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


@pytest.fixture(scope="session")
def rollout() -> Any:
    """The rollouts of a paper, which take seconds, reproduced once."""
    from posbias_papers import reproduce

    return reproduce("rollout-2602.16837")


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


@pytest.fixture(scope="session", autouse=True)
def _texts_tokenised_once() -> Iterator[None]:
    """Texts and small tokenizers are the same in hundreds of runs, where tokenising took a fifth of the time."""
    from posbias.prompts import loading

    tokenised = loading.tokenised
    known: dict[tuple[str, str], Any] = {}

    def tokenised_once(text: str, tokenizer: Any) -> Any:
        inner = getattr(tokenizer, "backend_tokenizer", None)
        if inner is None or inner.get_vocab_size() > LARGEST_VOCABULARY:
            return tokenised(text, tokenizer)
        key = inner.to_str(), text
        if key not in known:
            known[key] = tokenised(text, tokenizer)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "tokenised", tokenised_once)
        yield


LARGEST_VOCABULARY = 1000
"""Of tokenizers whose whole description is quicker to compare than texts are to tokenise."""


def json_lines(path: Path, *records: Any) -> str:
    """The path of a file that now holds one record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@contextmanager
def refused(*words: str, error: type[Exception] = UsageError) -> Iterator[None]:
    """What is tried is refused in one line that holds these words."""
    with pytest.raises(error) as caught:
        yield
    assert "\n" not in str(caught.value)
    for each in words:
        assert each in str(caught.value)


Run = Callable[..., subprocess.CompletedProcess[str]]


@cache
def record_schema() -> Any:
    """What `record.json` promises."""
    import jsonschema

    schema = json.loads(files("posbias").joinpath("record.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema)


def without_notes(stderr: str) -> list[str]:
    """Lines of stderr that are neither about the model that was loaded or is trained nor an estimate of the cost."""
    return [line for line in stderr.splitlines() if not re.match(r"estimate: |model |\d+ members?: ", line)]


def check_record(path: Path) -> None:
    """Hold a record, where there is one, to its schema."""
    if path.is_file():
        record_schema().validate(json.loads(path.read_text()))


@pytest.fixture
def posbias(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `posbias ARGUMENTS` in this process and return what it printed."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = ["posbias", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        output = capsys.readouterr()
        if code == 0 and "--out" in command:
            check_record(Path(command[command.index("--out") + 1]) / "record.json")
        return subprocess.CompletedProcess(command, code, output.out, output.err)

    return run
