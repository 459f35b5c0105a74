"""`VllmResponder`: a model that vLLM runs in this process, if that is installed.

Prompts go to it as the tokens that `LocalResponder` reads, and answers come back as tokens and are read by the same
rules, so that texts and log-probabilities differ by rounding alone. vLLM chooses device and batches by itself.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from posbias.checks import check_choice, checked
from posbias.display.showing import Presented, Shown
from posbias.errors import RunError, UsageError, one_line
from posbias.evaluation.responders.base import STOPPED, AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.batching import Ending, Started
from posbias.evaluation.responders.local import (
    WITHIN_THOUGHTS,
    EncodedRequest,
    encode_requests,
    end_tokens_of,
    too_long,
)
from posbias.evaluation.responders.pass_plan import TokenIds
from posbias.evaluation.responders.server import vocabulary_sha256
from posbias.files import read_json
from posbias.models.devices import AUTO
from posbias.models.loading import load_tokenizer, source_of
from posbias.models.sources import CONFIG, CONFIG_BYTES

DTYPES = {AUTO: AUTO, "own": AUTO, "float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
"""vLLM's words for the precisions that it knows."""
GENERATION = "generation_config.json"
"""File that names the tokens that end an answer; those of CONFIG count without it."""


@checked
class VllmResponder(Presented, Responder):
    """A model in vLLM, with a tokenizer, and with a chat template if requests are conversations.

    Args:
        model: A hub id, a directory, or "demo".
        dtype: Precision of the weights, one of DTYPES.
        engine_options: Further arguments of `vllm.LLM`, such as `{"tensor_parallel_size": 2}`.
        template_options: Options of the chat template, as of `load_model`.

    Raises:
        UsageError: vLLM is not installed, or cannot run the model.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = AUTO,
        engine_options: Mapping[str, Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_choice("vllm: dtype", dtype, tuple(DTYPES))
        if find_spec("vllm") is None:
            raise UsageError("answers by vLLM need the vllm package: pip install vllm")
        self._source = source_of(model)
        if self._source.gguf is not None or self._source.config_only:
            raise UsageError(f"vllm: allowed: a hub id, a directory or 'demo', got {str(model)!r}")
        self.tokenizer = load_tokenizer(model, template_options=template_options)
        self._vllm = import_module("vllm")
        settings = {"seed": 0, **(engine_options or {}), "model": self._source.location, "dtype": DTYPES[dtype]}
        named = next((path for path in map(self._source.file, (GENERATION, CONFIG)) if path is not None), None)
        try:
            ends = {} if named is None else read_json(named, most_bytes=CONFIG_BYTES)
            self._ending = Ending(self.tokenizer, end_tokens_of(ends.get("eos_token_id"), self.tokenizer.eos_token_id))
            self._engine = self._vllm.LLM(**settings)
        except UsageError:
            raise
        except Exception as error:  # whatever a driver, a kernel or a configuration raises
            raise UsageError(f"vllm cannot run {self._source.name!r}: {one_line(error)}") from error
        config = self._engine.llm_engine.model_config
        self.max_positions = int(config.max_model_len)
        self._precision = str(config.dtype).removeprefix("torch.")
        self._unscored, self._processed, self._plain, self._apart = False, 0, 0, 0

    def shown(self) -> Shown:
        """The model and what runs it."""
        return Shown(f"{self._source.name} in vllm {self._vllm.__version__}")

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Answer requests (`Responder.respond`); one that does not fit into the context is skipped, never truncated.

        vLLM repeats a prompt's log-probabilities only if it generates a token behind it, which needs room, too.
        """
        encoded = encode_requests(self.tokenizer, requests)
        responses = too_long(requests, encoded, self.max_positions, generate=generate, behind=int(score))
        asked = [index for index in range(len(requests)) if index not in responses]
        answered = [index for index in asked if score and len(encoded[index].answer)]
        scored = [index for index in answered if not encoded[index].thinks]
        self._unscored |= len(scored) < len(answered)
        scores = dict(zip(scored, self._scores([encoded[index] for index in scored]), strict=True))
        if generate:
            responses |= self._responses(asked, encoded, requests)
        return [Reply(responses.get(index), scores.get(index)) for index in range(len(requests))]

    def _scores(self, encoded: Sequence[EncodedRequest]) -> list[AnswerScore]:
        """The scores of answers, each from the log-probabilities of its prompt with the answer behind it."""
        settings = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        wholes = [np.concatenate([tokens.prompt, tokens.answer]) for tokens in encoded]
        self._apart += sum(tokens.apart for tokens in encoded)
        scores = []
        for tokens, output in zip(encoded, self._outputs(wholes, [settings] * len(wholes)), strict=True):
            of_answer = output.prompt_logprobs[len(tokens.prompt) :]
            told = [listed[int(token)] for listed, token in zip(of_answer, tokens.answer, strict=True)]
            logprobs = tuple(min(0.0, float(entry.logprob)) for entry in told)
            scores.append(AnswerScore(logprobs, tuple(entry.rank for entry in told)))
        return scores

    def _responses(
        self, asked: Sequence[int], encoded: Sequence[EncodedRequest], requests: Sequence[Request]
    ) -> dict[int, Response]:
        """Greedy continuations by the number of their request.

        vLLM ends at a stop text wherever it stands; one in thoughts, or in blank lines before the answer, means
        nothing, and such a prompt is continued once more without stop texts.
        """
        responses: dict[int, Response] = {}
        for stops in (True, False):
            waiting = [index for index in asked if index not in responses]
            settings = [
                self._vllm.SamplingParams(
                    temperature=0.0,
                    max_tokens=requests[index].max_tokens,
                    stop=list(requests[index].stop) if stops else None,
                    stop_token_ids=sorted(self._ending.end_tokens),
                )
                for index in waiting
            ]
            outputs = self._outputs([encoded[index].prompt for index in waiting], settings)
            for index, output in zip(waiting, outputs, strict=True):
                (continued,) = output.outputs
                tokens = [int(token) for token in continued.token_ids]
                started = Started(index, requests[index], encoded[index].prompt, tokens[0], None, encoded[index].thinks)
                # Behind the token that ends an answer by our rules nothing counts.
                end = next((n for n in range(1, len(tokens) + 1) if self._ending.reached(tokens[:n], started)), None)
                if end is None and stops and continued.finish_reason == STOPPED:
                    continue
                responses[index] = self._ending.response(tokens[:end], started)
        return responses

    def _outputs(self, prompts: Sequence[TokenIds], settings: list[Any]) -> list[Any]:
        """What vLLM gives for each prompt, all of which it runs together."""
        if not prompts:
            return []
        try:
            inputs = [{"prompt_token_ids": tokens.tolist()} for tokens in prompts]
            outputs: list[Any] = self._engine.generate(inputs, settings, use_tqdm=False)
        except Exception as error:  # of its own kinds, from any of its processes
            raise RunError(f"vllm fails: {one_line(error)}") from error
        generated = sum(len(continued.token_ids) for output in outputs for continued in output.outputs)
        self._plain += sum(map(len, prompts))
        cached = sum(getattr(output, "num_cached_tokens", None) or 0 for output in outputs)
        self._processed += sum(map(len, prompts)) + generated - cached
        return outputs

    def describe(self) -> dict[str, Any]:
        """Plain values for a record; vLLM does not give the weights, so they have no hash."""
        model = {"source": self._source.name, "dtype": self._precision, "tokenizer": vocabulary_sha256(self.tokenizer)}
        return {"kind": "local", "vllm": self._vllm.__version__, "model": model, **self.learnt(), **self.counts()}

    def learnt(self) -> dict[str, Any]:
        """The reason if answers were not scored."""
        return {"no_scores_because": WITHIN_THOUGHTS} if self._unscored else {}

    def counts(self) -> dict[str, float]:
        """Tokens run through the model, tokens of prompts in all, and answers scored apart from their prompts."""
        return {"tokens_processed": self._processed, "tokens_plain": self._plain, "answers_apart": self._apart}
