"""Methods around a model: passages in another order, the prompt twice, several orders with a vote. Servers take most.

`ordered`: the passages of a prompt, by relevance, into the slots that a measured curve says are used best
(`evaluation/placement.py`). `attention_sorting`: passages ascending by the attention that the prompt's last token pays
them, again and again (arXiv 2310.01427). `repeat_prompt`: the prompt twice, so that every passage is read after every
other (arXiv 2512.14982). `question_first`: the question before the passages, too (arXiv 2307.03172).
`self_consistency`: several shuffles of the passages, and the answer that most of them give (permutation
self-consistency, arXiv 2310.07712, for answers in place of rankings).
"""

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float64

from posbias.checks import check_number, check_size, check_whole
from posbias.errors import UsageError
from posbias.evaluation import MeasuredUse, measured_use, place
from posbias.evaluation.responders import AnswerScore, LocalResponder, Reply, Request, Responder
from posbias.limits import READ_BYTES, REPEATS
from posbias.measurement.attention.streaming import working_precision
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation
from posbias.models.attention import (
    AttentionInput,
    AttentionLayer,
    describe_attention,
    project_attention,
    query_blocks,
    rotated,
    watch_attention,
)
from posbias.models.model import Model
from posbias.runs.caveats import refusal
from posbias.tasks.language.answers import normalise_answer
from posbias.tasks.language.locating import encode, locate

BETWEEN = "\n\n"
"""Text between a prompt and its repetition."""
CUE = re.compile(r"(?:\A|(?<=[.!?])|\s*\n)[^\S\n]*[^\n.:;!?]{1,40}:\s*\Z")
"""Up to 40 characters and a colon, on the last line or behind its last sentence."""
CLOSING = " \n\t]})>"
"""Characters that may close a list of passages before the question begins."""


@MITIGATIONS.register("ordered")
@dataclass(frozen=True)
class Ordered(PromptMitigation):
    """The most relevant passages go where a measured curve is highest.

    The order is `place`'s: if the samples do not show that positions differ, best first.
    """

    run: str = ""
    """Directory of a finished `evaluate` of the same model, with the measured curve."""
    scores: Sequence[float] = ()
    """Relevance of the passages as the prompt gives them, >= 0; empty: 1, 1/2, 1/3 ..., the order of retrieval."""
    order: Sequence[int] = ()
    """The passage that stands in every slot, in place of a run, counted from 0, as `place` says or `mitigate` measures;
    of fewer passages those that there are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.run, str) or bool(self.run) == bool(self.order):
            raise refusal("order_of_nothing", run=str(self.run))
        for name in ("scores", "order"):
            if not isinstance(getattr(self, name), tuple | list | range):
                raise UsageError(f"{self.name}: {name} must be a list of numbers, got {getattr(self, name)!r}")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for passage in self.order:
            check_whole(f"{self.name}: order", passage, least=0, numpy=True)
        for score in self.scores:
            check_number(f"{self.name}: scores", score)

    @cached_property
    def use(self) -> MeasuredUse:
        """The measured curve."""
        return measured_use(self.run)

    @cached_property
    def _orders(self) -> dict[int, tuple[int, ...]]:
        counts = range(1, len(self.order) + 1)
        return {count: tuple(passage for passage in self.order if passage < count) for count in counts}

    @property
    def followed_run(self) -> str:
        """The directory of the evaluation whose curve it follows."""
        return self.run

    def check(self, responder: Responder) -> None:
        """Read the run before the first request."""
        _ = self.run and self.use

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request in the order of `place`."""
        count = len(request.passages)
        if self.scores and len(self.scores) != count:
            raise UsageError(f"{self.name}: {len(self.scores)} scores for {count} passages; one is needed for each")
        if self.order and count not in self._orders:
            raise UsageError(f"{self.name}: an order of {len(self.order)} for {count} passages; one is needed for each")
        if count not in self._orders:
            relevance = self.scores or [1 / rank for rank in range(1, count + 1)]
            self._orders[count] = place(list(relevance), self.use).order
        return [request.rearranged(self._orders[count])]


@MITIGATIONS.register("attention_sorting")
@dataclass(frozen=True)
class AttentionSorting(PromptMitigation):
    """Passages ascending by the attention of the prompt's last token, so that the most attended stands last; repeated.

    Attention is the mean over layers, heads and the tokens of a passage. Local models of a described family only; each
    round is one pass over the prompt.

    Source: Peysakhovich and Lerer 2023, arXiv 2310.01427; the mean over tokens in place of a sum, so that long passages
    are not sorted by their length, is ours.
    """

    rounds: int = 1
    """How often passages are sorted, each time by the attention in the order before, >= 1."""

    needs_model: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: rounds", self.rounds, REPEATS)

    def check(self, responder: Responder) -> None:
        """Only a local model shows its attention."""
        if not isinstance(responder, LocalResponder):
            raise refusal("attention_of_local_models", method=self.name)

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The sorted request; one that does not fit into the context stays as it is, and is skipped."""
        assert isinstance(responder, LocalResponder)  # see `check`
        for _ in range(self.rounds):
            own_control = request.own_control
            token_ids = encode(request.prompt, responder.tokenizer, own_control=own_control).token_ids
            if responder.max_positions is not None and len(token_ids) > responder.max_positions:
                break
            spans, _ = locate(request.prompt, request.passages, responder.tokenizer, own_control=own_control)
            if spans is None:
                raise refusal("no_character_offsets", method=self.name)
            attention = last_attention(responder.model, token_ids)
            means = [attention[begin:end].mean() for begin, end in spans]
            order = np.argsort(means, kind="stable").tolist()
            if order == sorted(order):
                break
            request = request.rearranged(order)
        return [request]


@torch.no_grad()
def last_attention(model: Model, token_ids: Sequence[int]) -> Float64[np.ndarray, "n_positions"]:
    """Attention of the last position to every position, averaged over all heads of all layers; sums to 1 at most.

    Raises:
        UsageError: as `describe_attention`.
    """
    total = np.zeros(len(token_ids))
    layers = describe_attention(model, n_positions=len(token_ids))

    def receive(layer: AttentionLayer, entering: AttentionInput) -> None:
        state = rotated(project_attention(layer.parts, entering.read), entering.cosine, entering.sine)
        last = next(query_blocks(layer.parts, state, mask=layer.mask, block=1))
        total[last.keys] += last.weights.mean((0, 1, 2)).cpu().double().numpy() / len(layers)

    with watch_attention(layers, receive, dtype=working_precision(model)):
        model.last(model.embed(model.token_tensor([list(token_ids)])))
    return total


def before_cue(text: str) -> str:
    """A prompt without the words at its end that an answer is to follow, such as "Answer:"; without such, all of it.

    Repeated as well, they stand before an empty line, and models that complete text copy that: with "Answer:" in both
    copies Gemma-3-270M leaves all of 120 answers empty (studies/mitigation).
    """
    return CUE.sub("", text)


@MITIGATIONS.register("repeat_prompt")
@dataclass(frozen=True)
class RepeatPrompt(PromptMitigation):
    """The prompt twice, so that the second time every passage is read after all others; twice the tokens.

    Of a conversation the last message is repeated. Its passages are those of the last copy. The source
    (arXiv 2512.14982) repeats whole questions to assistants; here copies end before the cue of the answer
    (`before_cue`).
    """

    times: int = 2
    """How often the prompt stands there, >= 2."""
    cue: bool = False
    """Copies keep the cue of the answer: a model that completes text may copy that nothing follows it."""

    needs_passages: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: times", self.times, REPEATS, least=2)

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request with its text repeated."""
        copy = request.text if self.cue else before_cue(request.text)
        READ_BYTES.check(f"{self.name}: a prompt {self.times} times", self.times * len(request.text))
        before = (self.times - 1) * f"{copy}{BETWEEN}"
        passages = tuple((begin + len(before), end + len(before)) for begin, end in request.passages)
        return [request.reworded(before + request.text, passages)]


@MITIGATIONS.register("question_first")
@dataclass(frozen=True)
class QuestionFirst(PromptMitigation):
    """The question at the beginning of the prompt, too, so that passages are read with it in mind.

    The question is what stands behind the last passage, less closing brackets and the cue of the answer (`before_cue`).
    Source: query-aware contextualization of Liu et al. 2024, arXiv 2307.03172, section 4.2; there it stands behind
    the instruction, as in the tasks `documents` and `key_value` with `query="both"`, here before it, since any prompt
    has a beginning.
    """

    rearranges: ClassVar[bool] = False

    cue: bool = False
    """Repeat the cue of the answer, too; see `RepeatPrompt`."""

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request with its question before it."""
        text = request.text
        behind = text[request.passages[-1][1] :].lstrip(CLOSING).rstrip()
        question = behind if self.cue else before_cue(behind)
        if not question:
            raise refusal("no_question_behind", method=self.name)
        shift = len(question) + len(BETWEEN)
        passages = tuple((begin + shift, end + shift) for begin, end in request.passages)
        return [request.reworded(f"{question}{BETWEEN}{text}", passages)]


@MITIGATIONS.register("self_consistency")
@dataclass(frozen=True)
class SelfConsistency(PromptMitigation):
    """Several shuffles of the passages, and the answer that most of them give; as many prompts as draws.

    Shuffles depend on the passages and the seed, not on the order given, so that the answer cannot depend on it either.
    Answers count as the same if their first lines do, without case, punctuation and articles; of equally frequent
    ones that of the earliest draw is given. The score of an answer is its mean probability over the draws; its rank is
    then not known. Source: permutation self-consistency, arXiv 2310.07712.
    """

    draws: int = 5
    """Shuffles, >= 2."""
    seed: int = 0
    """Seed of the shuffles, >= 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(f"{self.name}: draws", self.draws, REPEATS, least=2)
        check_whole(f"{self.name}: seed", self.seed, least=0)

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request with its passages in every shuffle."""
        READ_BYTES.check(f"{self.name}: a prompt {self.draws} times", self.draws * len(request.text))
        texts = [request.text[begin:end] for begin, end in request.passages]
        canonical = sorted(range(len(texts)), key=texts.__getitem__)
        source = random.Random(f"self_consistency {self.seed} {[texts[index] for index in canonical]}")
        return [request.rearranged(source.sample(canonical, len(canonical))) for _ in range(self.draws)]

    def combined(self, replies: Sequence[Reply]) -> Reply:
        """The majority's answer, and the mean probability of the scored one."""
        skipped = [reply for reply in replies if reply.response is not None and reply.response.skipped is not None]
        if skipped:
            return skipped[0]
        responses = [reply.response for reply in replies if reply.response is not None]
        chosen = None
        if responses:
            answers = [normalise_answer(response.text.strip().split("\n")[0]) for response in responses]
            (winner, _), *_ = Counter(answers).most_common(1)
            chosen = responses[answers.index(winner)]
        scores = [reply.score for reply in replies if reply.score is not None]
        return Reply(chosen, mean_score(scores) if len(scores) == len(replies) else None)


def mean_score(scores: Sequence[AnswerScore]) -> AnswerScore:
    """An answer's score under the mean of several models' (or prompts') distributions over whole texts.

    log p(a_t | a_<t) = log sum_k P_k(a_<=t) - log sum_k P_k(a_<t); the sum over tokens is the log of the mean
    probability of the whole answer. Ranks of tokens under the mean are not known.
    """
    paths = np.cumsum([score.logprobs for score in scores], axis=1)
    means = np.logaddexp.reduce(paths, axis=0) - math.log(len(scores))
    steps = np.diff(means, prepend=0.0)
    return AnswerScore(tuple(min(0.0, float(step)) for step in steps), (None,) * len(steps))
