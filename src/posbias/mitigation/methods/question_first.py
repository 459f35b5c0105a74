"""The question before the passages, too; for servers, too."""

from dataclasses import dataclass

from posbias.errors import UsageError
from posbias.evaluation.responders import Request
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation
from posbias.mitigation.methods.repeat_prompt import BETWEEN, before_cue

CLOSING = " \n\t]})>"
"""Characters that may close a list of passages before the question begins."""


@MITIGATIONS.register("question_first")
@dataclass(frozen=True, repr=False)
class QuestionFirst(PromptMitigation):
    """The question at the beginning of the prompt, too, so that passages are read with it in mind.

    The question is what stands behind the last passage, less closing brackets and the cue of the answer (`before_cue`).
    Source: query-aware contextualization of Liu et al. 2024, arXiv 2307.03172, section 4.2; there it stands behind
    the instruction, as in the tasks `documents` and `key_value` with `query="both"`, here before it, since any prompt
    has a beginning.
    """

    def rewritten(self, request: Request) -> list[Request]:
        """The request with its question before it."""
        text = request.text
        question = before_cue(text[request.passages[-1][1] :].lstrip(CLOSING).rstrip())
        if not question:
            raise UsageError(f"{self.name} repeats the question behind the last passage, and here none is")
        shift = len(question) + len(BETWEEN)
        passages = tuple((begin + shift, end + shift) for begin, end in request.passages)
        return [request.reworded(f"{question}{BETWEEN}{text}", passages)]
