"""The theories of a prompt read the very forward pass that measures it, and say what they say of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.outputs import PassOptions
from posbias.measurement.prompt import measure_prompt
from posbias.measurement.theories import prompt_theories
from posbias.models.hugging_face import HuggingFaceModel
from posbias.theory.power_rollout import attention_rollout_prompt, power_rollout_prompt
from tiny_families import VOCABULARY, shaken_model

KINDS = (
    "bloom",
    "gemma3_text",
    "glm",
    "llama-biases",
    "mpt",
    "olmo2",
    "opt",
    "phi",
    "qwen3-window",
)
"""One for each way in which blocks are built."""
IDS = np.random.default_rng(4).integers(3, VOCABULARY, 11)


@contextmanager
def counted(model: HuggingFaceModel) -> Iterator[list[int]]:
    passes: list[int] = []
    handle = model.network.register_forward_pre_hook(lambda *_: passes.append(1))
    yield passes
    handle.remove()


def check(kind: str, options: PassOptions, *, passes: int) -> None:
    model = shaken_model(kind)
    kinds = resolve_kinds("logprob")
    with counted(model) as run:
        with prompt_theories(model, IDS, initialisation=None) as theories:
            measured = measure_prompt(model, IDS, kinds=kinds, key=(0, 0), options=options)
        found, left_out = theories(measured.mixing)
    assert len(run) == passes
    assert left_out == []
    np.testing.assert_allclose(found["power_rollout"], power_rollout_prompt(model, IDS), rtol=1e-5)
    assert measured.mixing is not None
    alone = attention_rollout_prompt(model, IDS, measured.mixing.tolist())
    np.testing.assert_allclose(found["attention_rollout"], alone, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_serves_measurement_and_theories(kind: str) -> None:
    check(kind, PassOptions(), passes=1)


def test_checkpointed_blocks_run_again_unseen() -> None:
    check("llama", PassOptions(checkpointing=True), passes=1)


@pytest.mark.parametrize(
    "options",
    [PassOptions(output="at(position=-3)"), PassOptions(output="target(tokens=[5, 6])")],
    ids=lambda options: options.output,
)
def test_a_pass_that_reads_or_gives_something_else_is_not_taken_for_the_prompts(options: PassOptions) -> None:
    check("llama", options, passes=2)
