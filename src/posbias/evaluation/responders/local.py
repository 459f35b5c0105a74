"""`LocalResponder`: a model in this process, asked with as few tokens as its prompts have distinct beginnings.

Prompts are run in lexicographic order of their tokens through one live cache (`running.py`), so that of prompts that
differ in the place of one item only what follows the first difference is run: the floor of `prefixes.py`, reached
exactly. The answer to score runs in the same pass as the end of its prompt; generation goes on from the same keys and
values. Memory: the cache of one prompt, and those of the prompts that are decoded together (`LocalOptions`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.evaluation.responders.base import AnswerScore, Reply, Request, Responder, Response
from posbias.evaluation.responders.decoding import Ending, Started, decode_alone, decode_together
from posbias.evaluation.responders.encoding import EncodedRequest, encode_requests
from posbias.evaluation.responders.prefixes import TokenCount, count_tokens, visiting_order
from posbias.evaluation.responders.running import LiveCache, Runner, trusted_runner
from posbias.models.model import Model
from posbias.progress import track


@dataclass(frozen=True)
class LocalOptions:
    """How a local model is asked."""

    reuse: bool = True
    """Whether beginnings that prompts share are run once; False: every prompt from its first token, the plain way."""
    batch: int = 8
    """Prompts of one length decoded together at most (>= 1)."""
    cache_bytes: int = 1 << 30
    """Memory that their keys and values may take together, both as kept and as one batch (bytes, >= 1)."""

    def __post_init__(self) -> None:
        check_whole("local responder: batch", self.batch, least=1)
        check_whole("local responder: cache_bytes", self.cache_bytes, least=1)


@checked
class LocalResponder(Responder):
    """A loaded model.

    Args:
        model: With a tokenizer; with a chat template where requests are conversations.
        options: Reuse of beginnings, and memory.

    Raises:
        UsageError: the model has no tokenizer.
    """

    def __init__(self, model: Model, options: LocalOptions | None = None) -> None:
        if model.tokenizer is None:
            raise UsageError("the model has no tokenizer, so it cannot read a prompt; allowed: models with one")
        self.model = model
        self.options = options or LocalOptions()
        self.tokenizer = model.tokenizer
        self.max_positions = model.max_positions
        self._runner: Runner | None = None
        self._plain = 0
        self._ending = Ending(model.tokenizer, _end_tokens(model))

    @property
    def reuses(self) -> bool | None:
        """Whether beginnings are reused; None before the first request, on which the model's cache is tried."""
        return None if self._runner is None else self.options.reuse and isinstance(self._runner, LiveCache)

    @property
    def processed(self) -> int:
        """Tokens run through the network so far, of prompts, answers and continuations."""
        return 0 if self._runner is None else self._runner.processed

    def respond(self, requests: Sequence[Request], *, generate: bool = True, score: bool = False) -> list[Reply]:
        """Generated texts and scores; a request that does not fit into the context is skipped, never truncated.

        Raises:
            UsageError: a conversation for a model without a chat template, or a prompt without tokens.
            RunError: the network fails, or its logits are not finite.
        """
        encoded = encode_requests(self.tokenizer, requests)
        excess = [self._excess(request, tokens, generate) for request, tokens in zip(requests, encoded, strict=True)]
        responses = {i: _skipped(reason, encoded[i]) for i, reason in enumerate(excess) if reason}
        scores: dict[int, AnswerScore] = {}
        waiting: list[Started] = []
        prompts = [tokens.prompt for tokens in encoded]
        order = [index for index in visiting_order(prompts) if index not in responses]
        for index in track(order, "answers"):
            answer = encoded[index].answer if score else encoded[index].answer[:0]
            runner = self._runner_for(prompts[index])
            if not self.options.reuse:
                runner.forget()
            logits = runner.run(np.concatenate([prompts[index], answer[:-1]]), rows=max(1, len(answer)))
            self._plain += len(prompts[index]) + max(0, len(answer) - 1)
            if len(answer):
                scores[index] = score_answer(logits, answer)
            if generate:
                kept = runner.keep(len(prompts[index]))
                waiting.append(Started(index, requests[index], prompts[index], logits[0], kept))
                if len(waiting) >= self._room(waiting[0]):
                    responses.update(self._continue(waiting))
                    waiting.clear()
        responses.update(self._continue(waiting))
        return [Reply(responses.get(i), scores.get(i)) for i in range(len(requests))]

    def count_tokens(self, requests: Sequence[Request]) -> TokenCount:
        """Tokens of the prompts, run plainly and as few as can be; nothing is run."""
        return count_tokens([tokens.prompt for tokens in encode_requests(self.tokenizer, requests)])

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "kind": "local",
            "model": self.model.describe(),
            "batch": self.options.batch,
            **self.learnt(),
            **self.counts(),
        }

    def learnt(self) -> dict[str, Any]:
        """Whether beginnings are reused."""
        return {"reuse": self.reuses}

    def counts(self) -> dict[str, float]:
        """Tokens run through the network, and how many a plain run would have taken."""
        return {"tokens_processed": self.processed, "tokens_plain": self._plain}

    def _runner_for(self, prompt: Int64[np.ndarray, "_"]) -> Runner:
        if self._runner is None:
            self._runner = trusted_runner(self.model, prompt)
        return self._runner

    def _excess(self, request: Request, tokens: EncodedRequest, generate: bool) -> str | None:
        """Why a request does not fit into the context; None where it does."""
        following = max(request.max_tokens if generate else 0, len(tokens.answer))
        if self.max_positions is None or len(tokens.prompt) + following <= self.max_positions:
            return None
        return f"{len(tokens.prompt)} tokens and {following} of the answer; the model takes {self.max_positions}"

    def _room(self, started: Started) -> int:
        """How many prompts are kept for decoding together."""
        if started.kept is None or not started.kept.bytes:
            return 1
        # Twice: as kept, and joined to one batch.
        return max(1, min(self.options.batch, self.options.cache_bytes // (2 * started.kept.bytes)))

    def _continue(self, waiting: Sequence[Started]) -> dict[int, Response]:
        """The responses to prompts that have been run, those of one length together."""
        by_length: dict[int, list[Started]] = {}
        for started in waiting:
            by_length.setdefault(len(started.prompt), []).append(started)
        responses = {}
        for batch in by_length.values():
            for started, generated in zip(batch, self._decode(batch), strict=True):
                responses[started.index] = self._ending.response(generated, started.request, len(started.prompt))
        return responses

    def _decode(self, batch: Sequence[Started]) -> list[list[int]]:
        runner = self._runner_for(batch[0].prompt)
        if isinstance(runner, LiveCache) and len(batch) > 1:
            return decode_together(runner, batch, self._ending)
        return [decode_alone(runner, started, self._ending) for started in batch]


def score_answer(logits: Float[Tensor, "token vocabulary"], answer: Int64[np.ndarray, "token"]) -> AnswerScore:
    """Log-probability and rank of each answer token, from the logits of the position before it.

    log p(a_t) = logit(a_t) - log sum exp(logits), in float32 at least; rank = 1 + tokens with a larger logit.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = torch.as_tensor(answer, device=logits.device)[:, None]
    own = logits.gather(1, chosen)
    logprobs = (own[:, 0] - logits.logsumexp(dim=-1)).tolist()
    ranks = (1 + (logits > own).sum(dim=-1)).tolist()
    return AnswerScore(tuple(min(0.0, value) for value in logprobs), tuple(int(rank) for rank in ranks))


def _skipped(reason: str, tokens: EncodedRequest) -> Response:
    return Response(text="", finish="skipped", prompt_tokens=len(tokens.prompt), tokens=0, skipped=reason)


def _end_tokens(model: Model) -> frozenset[int]:
    """The tokens that end an answer, by the model's generation settings and its tokenizer."""
    settings = getattr(model.network, "generation_config", None)
    return frozenset([*_as_ids(getattr(settings, "eos_token_id", None)), *_as_ids(model.tokenizer.eos_token_id)])


def _as_ids(value: Any) -> list[int]:
    """Token ids as a configuration of generation gives them; whoever wrote the file, nothing else has checked it.

    Raises:
        UsageError: neither a whole number nor a list of them.
    """
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for token in ids:
        check_whole("eos_token_id of the model", token, least=0, below=2**63)
    return list(ids)
