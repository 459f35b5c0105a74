"""Methods around a model, for servers too: the prompt or the question twice, several orders with a vote.

`repeat_prompt`: the prompt twice, so that every passage is read after every
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
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from posbias.checks import Count, Natural
from posbias.errors import UsageError, check_most
from posbias.evaluation.responders import AnswerScore, Reply, Request, Responder
from posbias.files import READ_BYTES
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation
from posbias.tasks.language.answers import normalise_answer

BETWEEN = "\n\n"
"""Text between a prompt and its repetition."""
CUE = re.compile(r"(?:\A|(?<=[.!?])|\s*\n)[^\S\n]*[^\n.:;!?]{1,40}:\s*\Z")
"""Up to 40 characters and a colon, on the last line or behind its last sentence."""
CLOSING = " \n\t]})>"
"""Characters that may close a list of passages before the question begins."""


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

    times: Annotated[Count, Ge(2)] = 2
    """How often the prompt stands there, >= 2."""
    cue: bool = False
    """Copies keep the cue of the answer: a model that completes text may copy that nothing follows it."""

    needs_passages: ClassVar[bool] = False

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request with its text repeated."""
        copy = request.text if self.cue else before_cue(request.text)
        check_most(f"{self.name}: a prompt {self.times} times", self.times * len(request.text), READ_BYTES, "bytes")
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
            raise UsageError(f"{self.name} repeats the question behind the last passage, and here none is")
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

    draws: Annotated[Count, Ge(2)] = 5
    """Shuffles, >= 2."""
    seed: Natural = 0
    """Seed of the shuffles, >= 0."""

    def rewritten(self, request: Request, responder: Responder) -> list[Request]:
        """The request with its passages in every shuffle."""
        check_most(f"{self.name}: a prompt {self.draws} times", self.draws * len(request.text), READ_BYTES, "bytes")
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
