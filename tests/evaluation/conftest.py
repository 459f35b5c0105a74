"""A tiny random model that reads prompts of tasks."""

import pytest
import torch

import posbias as pb


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """A server in a test need not be given time to recover."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


@pytest.fixture(scope="session")
def long_model(long_llama):
    """Two layers, 300 tokens, one per byte, 2048 positions."""
    torch.set_num_threads(1)
    return pb.load_model(long_llama)
