"""Calibration samples and text: their contents, the probability of answers, the candidate that suits them."""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64

from posbias.errors import RunError, UsageError
from posbias.evaluation.responders import LocalResponder
from posbias.evaluation.responders.base import Request
from posbias.evaluation.responders.endings import EncodedRequest
from posbias.evaluation.responders.local import encode_requests
from posbias.mitigation.methods.applying import answering_under
from posbias.mitigation.methods.base import Mitigation
from posbias.models.hugging_face import HuggingFaceModel
from posbias.progress import track
from posbias.prompts.loading import load_prompts
from posbias.prompts.sources import default_corpus
from posbias.runs.caveats import caveat_text, refusal
from posbias.tasks.language import Example

DISTINCT = 32
"""Characters from which on a passage is taken to belong to one sample alone."""
KEPT, SHUFFLED, EXCHANGED = "kept", "shuffled", "exchanged"
DISTRACTORS = (KEPT, SHUFFLED, EXCHANGED)
"""What is done with the passages around the one that holds the answer, anew in every round through the prompts."""
WORD = re.compile(r"\w+")
LEAST_SAMPLES = 4
"""Calibration samples below which a fit is refused: it would learn them by heart."""
FIT_WINDOWS = 32
"""Windows of ordinary text that a fit may read; of another source than those that are judged."""
DEFAULT = "default"
JUDGED_FILES = "jargon_file,us_founding_documents"
"""Files of the default corpus that judge, unless another text is asked for; fits read the other files."""


def check_samples(calibration: Sequence[Example]) -> int:
    """The number of samples; too few are refused."""
    samples = len({example.sample for example in calibration})
    if samples < LEAST_SAMPLES:
        raise UsageError(f"fit: {samples} calibration samples given; at least {LEAST_SAMPLES} are needed")
    return samples


def text_beside(judging: str, model: HuggingFaceModel, *, length: int, seed: int) -> list[Int64[np.ndarray, "token"]]:
    """Windows of ordinary text for fits, from the files of the default corpus that are not in the text that judges."""
    source, _, files = judging.partition("#")
    judged = {group.name for group in default_corpus(files)} if source == DEFAULT else set()
    read = [Path(group.name).stem for group in default_corpus() if group.name not in judged]
    if not read:
        raise UsageError(f"--text {judging}: fits need files of the default corpus that are not judged; name fewer")
    prompts = load_prompts(f"{DEFAULT}#{','.join(read)}", model=model, n_positions=length, seed=seed, count=FIT_WINDOWS)
    return list(prompts.token_ids)


def conversations_beside(model: HuggingFaceModel, examples: Sequence[Example]) -> list[Int64[np.ndarray, "_"]]:
    """Everyday conversations for fits, if the examples are conversations; none of them judges."""
    if not holds_conversations(examples):
        return []
    return [np.concatenate([request.prompt, request.answer]) for request in everyday_conversations(model, judged=False)]


def holds_conversations(examples: Iterable[Example]) -> bool:
    """True if a prompt is a conversation: everyday ones are then kept, and measured, beside ordinary text."""
    return not all(isinstance(example.prompt, str) for example in examples)


def everyday_conversations(model: HuggingFaceModel, *, judged: bool) -> list[EncodedRequest]:
    """A request and its reply each, in tokens, if they fit into the context: those that judge, or those for fits."""
    file = resources.files("posbias.prompts") / "corpus" / "conversations.jsonl"
    exchanges = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][int(judged) :: 2]
    requests = [Request(prompt=messages[:-1], answer=messages[-1]["content"]) for messages in exchanges]
    encoded = encode_requests(model.tokenizer, requests)
    most = model.max_positions or math.inf
    return [request for request in encoded if len(request.prompt) + len(request.answer) <= most]


def with_passages(example: Example, passages: Sequence[int]) -> Example:
    """An example with some of its passages, ascending, that with the answer among them; they take the first slots."""
    gold = passages.index(example.gold_position) if example.gold_position is not None else None
    return with_texts(example, [_passage(example, passage) for passage in passages], gold)


def with_texts(example: Example, texts: Sequence[str], gold: int | None) -> Example:
    """An example with these texts in its first slots, that with the answer at `gold`; further slots are left out."""
    text, places, copied = "", [], 0
    for slot, passage in enumerate(texts):
        begin, end = example.passages[slot]
        text += example.text[copied:begin]
        places.append((len(text), len(text) + len(passage)))
        text, copied = text + passage, end
    text += example.text[example.passages[-1][1] :]
    prompt = (
        text if isinstance(example.prompt, str) else (*example.prompt[:-1], {**example.prompt[-1], "content": text})
    )
    return replace(
        example,
        prompt=prompt,
        gold_position=gold,
        n_items=len(texts),
        passages=tuple(places),
        gold_token=None,
        gold_end=None,
        n_tokens=None,
    )


def check_varied(examples: Iterable[Example], *, fewest: int | None, distractors: str) -> None:
    """Refuse prompts without passages around the right one, with too few, or whose order is part of the question."""
    for example in examples:
        n_passages = len(example.passages)
        if example.gold_position is None or not n_passages:
            name = "fewest" if distractors == KEPT else f"distractors={distractors!r}"
            raise refusal("fit_without_passages", option=name)
        if distractors != KEPT and example.fixed_order:
            raise refusal("distractors_of_order", kept=KEPT, got=distractors)
        if fewest is not None and fewest > n_passages:
            raise refusal("fewest_passages", n_passages=n_passages, fewest=fewest)


def varied(
    example: Example,
    generator: np.random.Generator,
    *,
    fewest: int | None = None,
    distractors: str = KEPT,
    others: Sequence[str] = (),
) -> Example:
    """An example whose distractors are dropped, shuffled or exchanged as `FitOptions` say; the answer keeps its place.

    If distractors are dropped, it keeps its place among those that are left. `others` are the passages of other
    samples that may stand in their place (`other_passages`).
    """
    gold, n_passages = example.gold_position, len(example.passages)
    assert gold is not None, "see check_varied"
    stay = [passage for passage in range(n_passages) if passage != gold]
    if fewest is not None:
        count = int(generator.integers(fewest, n_passages + 1)) - 1
        stay = sorted(map(int, generator.choice(stay, count, replace=False)))
    place, texts = sum(passage < gold for passage in stay), [_passage(example, passage) for passage in stay]
    if distractors != KEPT:
        pool = [*texts, *others] if distractors == EXCHANGED else texts
        texts = [pool[index] for index in generator.choice(len(pool), len(texts), replace=False)]
    return with_texts(example, [*texts[:place], _passage(example, gold), *texts[place:]], place)


def other_passages(example: Example, samples: Iterable[Example]) -> list[str]:
    """Passages of other samples that may stand in this prompt, each once, as far as they cannot answer its question.

    A passage is left out if it holds an accepted answer, or a word of the question that, of the prompt's own passages,
    only the right one holds; without such a word, if it holds all words that the question and the right one share.
    """
    assert example.gold_position is not None, "see check_varied"
    passages = [_passage(example, passage) for passage in range(len(example.passages))]
    gold = _words(passages[example.gold_position])
    around = example.text[: example.passages[0][0]] + " " + example.text[example.passages[-1][1] :]
    shared = _words(around) & gold
    beside = [_words(passage) for number, passage in enumerate(passages) if number != example.gold_position]
    telling = shared - set().union(*beside)
    answers = [_spaced(answer) for answer in (*example.answers, *example.companions)]
    allowed: dict[str, None] = {}
    for sample in samples:
        for number in range(len(sample.passages) if sample.sample != example.sample else 0):
            passage = _passage(sample, number)
            words = _words(passage)
            asked_for = bool(words & telling) if telling else bool(shared) and shared <= words
            says_answer = any(answer in _spaced(passage) for answer in answers)
            if passage not in passages and not asked_for and not says_answer:
                allowed[passage] = None
    return list(allowed)


def _passage(example: Example, number: int) -> str:
    return example.text[slice(*example.passages[number])]


def _words(text: str) -> set[str]:
    return set(_spaced(text).split())


def _spaced(text: str) -> str:
    """The words of a text without case and punctuation, between spaces, so that whole words are found in it."""
    return f" {' '.join(WORD.findall(text.casefold()))} "


def places_of(examples: Sequence[Example], given: Sequence[Example]) -> list[int]:
    """The place of every answer, as the nearest of the relative places, numbered from the front, of those given."""
    relative = [[(e.gold_position or 0) / max(1, e.n_items - 1) for e in listed] for listed in (examples, given)]
    known = np.unique(np.round(relative[1], 6))
    return [int(np.abs(known - place).argmin()) for place in relative[0]]


def contents(examples: Sequence[Example]) -> set[str]:
    """Hashes by which samples are known again in other prompts, as text or as a conversation.

    An answer is hashed beside all passages, in whatever order and wherever the question stands, and beside its own
    passage if that is long enough to be nobody else's.
    """
    hashes = set()
    for example in examples:
        passages = [example.text[begin:end].strip() for begin, end in example.passages] or [example.text]
        gold = "" if example.gold_position is None or not example.passages else passages[example.gold_position]
        for texts in (sorted(passages), [gold] if len(gold) >= DISTINCT else []):
            if texts:
                hashes.add(hashlib.sha256("\0".join([f" {example.target.strip()}", *texts]).encode()).hexdigest()[:16])
    return hashes


def answer_logprob(model: HuggingFaceModel, method: Mitigation | None, calibration: Sequence[Example]) -> float:
    """Log-probability of the answers, per token, mean over examples that fit into the model.

    Raises:
        RunError: no example fits.
    """
    responder: Any = LocalResponder(model)
    if method is not None:
        responder = answering_under(method, responder)
    requests = [
        Request(
            prompt=example.prompt, answer=example.target, passages=example.passages, own_control=example.own_control
        )
        for example in calibration
    ]
    replies = responder.respond(requests, generate=False, score=True)
    scores = [reply.score.logprob / reply.score.n_tokens for reply in replies if reply.score is not None]
    if not scores:
        why = responder.learnt().get("no_scores_because") or "no calibration prompt fits into the model"
        raise RunError(f"fit: {caveat_text(why)}")
    return float(np.mean(scores))


def best_of(
    candidates: Sequence[Mitigation], model: HuggingFaceModel, calibration: Sequence[Example]
) -> tuple[Mitigation, dict[str, float]]:
    """The candidate under which the answers are most probable, the first of equals, and all log-probabilities."""
    scores = [answer_logprob(model, candidate, calibration) for candidate in track(candidates, "candidates")]
    return candidates[int(np.argmax(scores))], dict(zip(map(str, candidates), scores, strict=True))
