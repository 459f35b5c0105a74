"""The prompt twice, so that every passage is read after every other; for servers, too."""

import re
from dataclasses import dataclass
from typing import ClassVar

from posbias.evaluation.responders import Request
from posbias.mitigation.methods.base import MITIGATIONS, PromptMitigation

BETWEEN = "\n\n"
"""Text between a prompt and its repetition."""
CUE = re.compile(r"(?:\A|(?<=[.!?])|\s*\n)[^\S\n]*[^\n.:;!?]{1,40}:\s*\Z")
"""Up to 40 characters and a colon, on the last line or behind its last sentence."""


def before_cue(text: str) -> str:
    """A prompt without the words at its end that an answer is to follow, such as "Answer:"; without such, all of it.

    Repeated as well, they stand before an empty line, and models that complete text copy that: with "Answer:" in both
    copies Gemma-3-270M leaves all of 120 answers empty (studies/mitigation).
    """
    return CUE.sub("", text)


@MITIGATIONS.register("repeat_prompt")
@dataclass(frozen=True, repr=False)
class RepeatPrompt(PromptMitigation):
    """The prompt twice, so that the second time every passage is read after all others; twice the tokens.

    Of a conversation the last message is repeated. Its passages are those of the second copy. The source
    (arXiv 2512.14982) repeats whole questions to assistants; here the first copy ends before the cue of the answer
    (`before_cue`).
    """

    needs_passages: ClassVar[bool] = False

    def rewritten(self, request: Request) -> list[Request]:
        """The request with its text repeated."""
        before = f"{before_cue(request.text)}{BETWEEN}"
        passages = tuple((begin + len(before), end + len(before)) for begin, end in request.passages)
        return [request.reworded(before + request.text, passages)]
