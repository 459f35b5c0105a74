"""What a fit puts to a model: calibration prompts in tokens, with right answers or a teacher's, from the question on.

A teacher is the unchanged model where answering is easiest: with the gold passage alone, or at its best place. Where a
sample has no question, the model writes one to its gold passage. All of it greedily, before the first step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from posbias.errors import UsageError
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.encoding import WITHIN_THOUGHTS, EncodedRequest, encode_requests
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.tokens import locate
from posbias.tasks.language import Example, Span
from posbias.tasks.language.base import UNASKED

TAUGHT = 32
"""Most tokens of a teacher's answer, or of a question that a model writes, which end with their first line."""
QUESTIONING = "{}\n\nWrite one short question that this text answers.\nQuestion:"
"""The prompt of a question to a passage."""
Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of a prompt's beginning, layer by layer."""


def encoded_answers(
    model: HuggingFaceModel, examples: Sequence[Example], teachers: Sequence[EncodedRequest] = ()
) -> list[EncodedRequest]:
    """Prompts and right answers, or those of teachers, in tokens; every prompt must fit into the context."""
    lacking = [example.origin or f"sample {example.sample}" for example in examples if not example.target]
    if lacking and not teachers:
        raise UsageError(f"fit: {lacking[0]} has no right answer; teacher='gold_alone' or 'best_place' needs none")
    requests = [Request(prompt=e.prompt, answer=e.target or None, own_control=e.own_control) for e in examples]
    encoded = encode_requests(model.tokenizer, requests)
    if teachers:
        encoded = [replace(one, answer=teacher.answer) for one, teacher in zip(encoded, teachers, strict=True)]
    if any(request.thinks for request in encoded):
        raise UsageError(f"fit: {WITHIN_THOUGHTS}")
    longest = max(len(request.prompt) + len(request.answer) for request in encoded)
    if model.max_positions is not None and longest > model.max_positions:
        raise UsageError(f"fit: a calibration prompt has {longest} tokens; the model takes {model.max_positions}")
    return encoded


def question_opening(model: HuggingFaceModel, example: Example) -> tuple[int, int]:
    """The token behind the last passage of a prompt; and that of the question's own words behind it, or its end."""
    passages, question = [*example.passages], example.question
    found = example.text.find(question, passages[-1][1]) if passages and question else -1
    asked = [(found, found + len(question))] if found >= 0 else []
    spans, n_tokens = locate(example.prompt, passages + asked, model.tokenizer, own_control=example.own_control)
    if not spans or n_tokens is None:
        raise UsageError("fit: from_question needs prompts with passages, and a tokenizer with character offsets")
    begin, end = spans[len(passages) - 1][1], spans[-1][0] if asked else n_tokens
    if begin >= n_tokens:
        raise UsageError("fit: from_question needs prompts that go on after their last passage; one ends there")
    return begin, end


def opening_tokens(model: HuggingFaceModel, examples: Sequence[Example]) -> tuple[int, ...]:
    """The tokens, as many as possible, by which all prompts go on from their last passage to the question's own words.

    In some prompts the first of them may be joined to the passage's end, as a full stop and a line's end are.
    """
    encoded = encode_requests(model.tokenizer, [Request(prompt=e.prompt, own_control=e.own_control) for e in examples])
    openings = [slice(*question_opening(model, example)) for example in examples]
    behind = [one.prompt[opening].tolist() for one, opening in zip(encoded, openings, strict=True)]
    parts = [behind[0][begin:end] for begin in (0, 1) for end in range(begin, len(behind[0]) + 1)]
    shared = [part for part in parts if all(part in (of[: len(part)], of[1 : len(part) + 1]) for of in behind)]
    tokens: list[int] = max(shared, key=len)  # none of them at least
    if not any(letter.isalpha() for letter in model.tokenizer.decode(tokens)):
        raise UsageError("fit: from_question needs words that open the question in every prompt, such as 'Question:'")
    return tuple(tokens)


def with_questions(
    model: HuggingFaceModel, examples: Sequence[Example]
) -> tuple[Sequence[Example], dict[str, dict[str, str]]]:
    """Examples, and questions of the model's own to the gold passage of every sample without any, put into them."""
    texts = {one.sample: one.text[slice(*one.gold)] for one in examples if one.question == UNASKED and one.gold}
    if not texts:
        return examples, {}
    chat = not isinstance(examples[0].prompt, str)
    told = [QUESTIONING.format(text) for text in texts.values()]
    prompts = [({"role": "user", "content": text},) if chat else text for text in told]
    asked = [Request(prompt=prompt, max_tokens=TAUGHT, stop=("\n",)) for prompt in prompts]
    replies = LocalResponder(model).respond(asked)
    answers = ["" if reply.response is None else reply.response.text.strip() for reply in replies]
    written = dict(zip(texts, answers, strict=True))
    return [_asking(one, written.get(one.sample, UNASKED)) for one in examples], {"questions": written}


def _asking(example: Example, question: str) -> Example:
    """An example with a question in the place that was left for one."""

    def moved(span: Span) -> Span:
        by = example.text.count(UNASKED, 0, span[0]) * (len(question) - len(UNASKED))
        return span[0] + by, span[1] + by

    passages, gold = tuple(map(moved, example.passages)), example.gold and moved(example.gold)
    asked: Any = Request(prompt=example.prompt).reworded(example.text.replace(UNASKED, question), passages)
    return replace(example, prompt=asked.prompt, text=asked.text, passages=passages, gold=gold, question=question)


def teachers_of(
    model: HuggingFaceModel, examples: Sequence[Example], teacher: str
) -> tuple[list[EncodedRequest], dict[str, Any]]:
    """For every example the prompt on which the unchanged model teaches, with its own answer; and facts for a record.

    `gold_alone`: the prompt without all other passages. `best_place`: the sample's prompt with the gold passage where
    the model's own answers are most probable, per token and averaged over the samples.
    """
    alone = teacher == "gold_alone"
    asked = {(one.sample, 0 if alone else one.gold_position): teaching_request(one, teacher) for one in examples}
    requests, taught, told = list(asked.values()), dict[Any, EncodedRequest](), dict[Any, str]()
    replies = LocalResponder(model).respond(requests)
    for key, request, reply in zip(asked, encode_requests(model.tokenizer, requests), replies, strict=True):
        response = reply.response
        if response is None or not response.token_ids:
            raise UsageError(f"fit: the teacher cannot answer sample {key[0]}: {response and response.skipped}")
        taught[key], told[key] = replace(request, answer=np.array(response.token_ids)), response.text

    @torch.no_grad()
    def loss(request: EncodedRequest) -> float:
        logits = answer_logits(model, request)
        return float(nn.functional.cross_entropy(logits, torch.as_tensor(request.answer, device=logits.device)))

    places, samples = dict.fromkeys(place for _, place in asked), dict.fromkeys(sample for sample, _ in asked)
    if len(asked) < len(places) * len(samples):
        raise UsageError("fit: teacher='best_place' needs every sample with its gold passage at the same places")
    losses = {place: float(np.mean([loss(taught[sample, place]) for sample in samples])) for place in places}
    best = min(losses, key=losses.__getitem__)
    facts = {"teacher_loss": losses, "teacher_answers": {sample: told[sample, best] for sample in samples}}
    return [taught[example.sample, best] for example in examples], facts


def teaching_request(example: Example, teacher: str) -> Request:
    """The request whose answer teaches: an example's own, or with the gold passage alone, in the first slot."""
    passages, text = example.passages, example.text
    gold = [slice(*span) for span in passages if example.gold is not None and span[1] == example.gold[1]]
    if not gold:
        raise UsageError(
            f"fit: teacher={teacher!r} needs prompts that list passages, as of documents, key_value and items; sample "
            f"{example.sample} lists none"
        )
    asked = Request(prompt=example.prompt, max_tokens=TAUGHT, stop=("\n",), own_control=example.own_control)
    if teacher == "gold_alone":
        asked = asked.reworded(text[: passages[0][0]] + text[gold[0]] + text[passages[-1][1] :], ())
    return asked


def answer_logits(
    model: HuggingFaceModel, request: EncodedRequest, first: int = 0, beginning: Kept | None = None
) -> Float[Tensor, "token vocabulary"]:
    """Logits of the place before each token of an answer; `beginning` holds what stands before token `first`."""
    tokens, start = np.concatenate([request.prompt, request.answer])[first:-1], len(request.prompt) - 1 - first
    embeddings = model.embed(model.token_tensor([tokens.tolist()]))
    cache = None if beginning is None else DynamicCache(beginning)
    return model.outputs(embeddings, list(range(start, len(tokens))), cache=cache).logits[0].float()
