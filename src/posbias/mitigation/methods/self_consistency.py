"""Several shuffles of the passages, and a vote; for servers, too."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

from posbias.checks import Natural
from posbias.evaluation.responders import AnswerScore, Reply, Request
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation
from posbias.tasks.language.rules import normalise_answer


@MITIGATIONS.register("self_consistency")
@dataclass(frozen=True, repr=False)
class SelfConsistency(PromptMitigation):
    """Several shuffles of the passages, and the answer that most of them give; as many prompts as draws.

    Shuffles depend on the passages and the seed, not on the order given, so that the answer cannot depend on it either.
    Answers count as the same if their first lines do, without case, punctuation and articles; of equally frequent
    ones that of the earliest draw is given. The score of an answer is its mean probability over the draws; its rank is
    then not known. Source: permutation self-consistency, arXiv 2310.07712.
    """

    draws: Annotated[int, Interval(ge=2, le=1000)] = 5
    """Shuffles, 2 ... 1,000."""
    seed: Natural = 0
    """Seed of the shuffles, >= 0."""

    def rewritten(self, request: Request) -> list[Request]:
        """The request with its passages in every shuffle."""
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
