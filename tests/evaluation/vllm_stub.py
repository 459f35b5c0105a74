"""vLLM's offline interface over a small model of transformers: the arguments and results that are public there.

As in vLLM, `prompts` are tokens, `stop` ends an answer wherever it stands and is cut from its text but not from its
tokens, log-probabilities of a prompt come as one dictionary by token and place with None for the first, and a prompt
without room for a token behind it is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__version__ = "0.0.stub"
WORDS = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
calls: list[int] = []
"""Prompts of every call of `generate`."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class LLM:
    def __init__(self, model: str, *, dtype: str = "auto", seed: int = 0, max_model_len: int | None = None) -> None:
        if not Path(model).is_dir():
            raise OSError(f"no directory {model}\nand more lines")
        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=WORDS[dtype]).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        length = max_model_len or self.network.config.max_position_embeddings
        config = SimpleNamespace(max_model_len=length, dtype=WORDS[dtype])
        self.llm_engine = SimpleNamespace(model_config=config)

    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Any]:
        assert sampling_params is not None
        calls.append(len(prompts))
        return [self._output(*each) for each in zip(prompts, sampling_params, strict=True)]

    @torch.no_grad()
    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self.network(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    def _output(self, prompt: Mapping[str, list[int]], settings: SamplingParams) -> Any:
        assert settings.temperature == 0
        tokens, ends = prompt["prompt_token_ids"], {*(settings.stop_token_ids or ()), 0}
        if len(tokens) >= self.llm_engine.model_config.max_model_len:
            raise ValueError("The decoder prompt is longer than the maximum model length.")
        listed = None
        if settings.prompt_logprobs is not None:
            rows = self._logprobs(tokens)
            pairs = [(row[token], row, token) for row, token in zip(rows, tokens[1:], strict=False)]
            listed = [None, *({token: Logprob(float(v), int((row >= v).sum()))} for v, row, token in pairs)]
        found: list[int] = []
        reason = stopped = None
        while reason is None:
            found.append(int(self._logprobs(tokens + found)[-1].argmax()))
            text = self.tokenizer.decode(found, skip_special_tokens=True)
            stopped = next((stop for stop in settings.stop or () if stop in text), None)
            if found[-1] in ends or stopped:
                reason = "stop"
            elif len(found) == settings.max_tokens:
                reason = "length"
        text = text[: text.find(stopped)] if stopped else text
        completion = SimpleNamespace(index=0, text=text, token_ids=found, finish_reason=reason, stop_reason=stopped)
        return SimpleNamespace(outputs=[completion], prompt_logprobs=listed, num_cached_tokens=0)
