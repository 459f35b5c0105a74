"""What a run will take, said before it begins: seconds and memory of a local model, requests and tokens of a server.

Seconds are those of the answers, of which `preflight_answers` makes short runs; passes over other prompts take as much
less as these are shorter. Requests of a server are counted as the methods rewrite them, each different one once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation import EvaluateOptions
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.responders import Request, Responder, ServerResponder
from posbias.evaluation.responders.base import Messages
from posbias.evaluation.samples import Sample, requests_of, samples_of
from posbias.measurement.cost_estimate import show_seconds
from posbias.mitigation.fitting.fit import passes_of_fit
from posbias.mitigation.methods.base import PromptMitigation
from posbias.mitigation.methods.rewriting import Rewriting
from posbias.mitigation.trial.arms import UNCHANGED, Arm, MitigateOptions
from posbias.mitigation.trial.ordinary_text import length_of, why_not_judged
from posbias.progress import report
from posbias.tasks.language import LanguageTask

GENERATE, SCORE = "generate", "score"
"""Sorts of requests: a text to go on with, and an answer to repeat with its log-probabilities."""


def announce_arms(
    task: LanguageTask, test: Sequence[Sample], options: MitigateOptions, arms: Sequence[Arm]
) -> tuple[dict[str, Any], list[Arm], list[str]]:
    """Say what all arms will take; refuse what cannot fit into memory, or leave it out where it was not named.

    Returns:
        What one arm costs where every prompt is run once; the arms that fit, and why others do not.
    """
    responder, asked = arms[0].responder, requests_of(test[:1], task, options.test)
    if isinstance(responder, ServerResponder):
        report(served_requests(task, test, options, arms).line(options, responder))
        return {}, list(arms), []
    workers = options.engine.processes_here
    cost, kept, left_out, seconds = preflight_answers(test, task, options.test, responder, workers=workers), [], [], 0.0
    for arm in arms:
        each, copies = cost, _copies(arm)
        try:
            if cost and copies > 1:
                report(f"{arm.name} asks with prompts {copies} times as long:")
                each = preflight_answers(test, task, options.test, responder, copies=copies, workers=workers)
        except UsageError as error:
            if not options.unnamed:
                raise
            left_out.append(f"{arm.name} was not tried: {error}")
            continue
        kept.append(arm)
        seconds += _passes(arm, len(asked[0].passages)) * each.get("seconds", 0.0)
    if cost:
        fitted = [arm.name for arm in kept[1:] if arm.method is None]
        runs = sum(passes_of_fit(name, options.calibration, len(asked), options.fitting) for name in fitted)
        beside = {f"{len(fitted)} fits": runs * cost["seconds_per_pass"]} if fitted else {}
        beside |= _beside(task, test, options, kept, cost)
        parts = [f"{name}: {show_seconds(each)}" for name, each in beside.items()]
        report(
            f"estimate: {show_seconds(seconds + sum(beside.values()))} in all; answers without and with each method "
            f"({len(kept) - 1}), extra requests included: {'; '.join([show_seconds(seconds), *parts])}"
        )
    return cost, kept, left_out


def _copies(arm: Arm) -> int:
    return arm.method.copies if isinstance(arm.method, PromptMitigation) else 1


def _passes(arm: Arm, n_passages: int) -> int:
    """How often an arm runs a prompt of so many passages."""
    return 1 if arm.method is None else arm.method.passes(n_passages)


def _beside(
    task: LanguageTask, test: Sequence[Sample], options: MitigateOptions, arms: Sequence[Arm], cost: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds that ordinary text and the task's short forms take of a local model, by name."""
    responder: Any = arms[0].responder
    longest, each = max(map(_tokens, test)), cost["seconds_per_pass"]
    found = {}
    if options.documents:
        judged = sum(_passes(arm, 1) for arm in arms if not why_not_judged(arm, asked=True))
        share = length_of(responder.model, options) / longest
        found["ordinary text"] = judged * options.documents * share * each
    seconds, short = 0.0, short_samples(task, responder, options)
    for form, samples in short:
        requests = requests_of(samples, form, short_options(options))
        # What is generated does not depend on the prompt's length.
        share, decoding = max(map(_tokens, samples)) / longest, max(0.0, cost["seconds_per_prompt"] - each)
        runs = sum(_passes(arm, len(requests[0].passages)) * (_copies(arm) * share * each + decoding) for arm in arms)
        seconds += len(requests) * runs
    return found | ({"short forms of the task": seconds} if short else {})


def _tokens(sample: Sample) -> int:
    """Of its longest prompt; of a model without a tokenizer, roughly."""
    return max(example.n_tokens or len(str(example.prompt)) // 4 or 1 for example in sample.examples)


def short_options(options: MitigateOptions) -> EvaluateOptions:
    """The test's, at the positions that a short form has."""
    return replace(options.test, positions="spread")


def short_samples(
    task: LanguageTask, responder: Responder, options: MitigateOptions
) -> list[tuple[LanguageTask, list[Sample]]]:
    """The short forms that will be requested, with their samples."""
    forms = task.short_forms if options.short else ()
    return [(form, list(samples_of(form, responder.tokenizer, short_options(options)))) for form in forms]


@dataclass(frozen=True)
class ServedRequests:
    """What a server will be asked, each different request once."""

    by_arm: Mapping[str, int]
    """Of the task itself and its short forms, new ones of each arm."""
    fitting: int
    """For fits."""
    characters: int
    """Of all prompts."""
    tokens: int | None
    """Of all prompts, roughly; None without the model's tokenizer."""
    generated: int
    """Tokens that are generated at most."""

    def line(self, options: MitigateOptions, responder: ServerResponder) -> str:
        """What to expect, for a reader."""
        arms = ", ".join(f"{name} {count}" for name, count in self.by_arm.items())
        fits = f" and {self.fitting} for fits" if self.fitting else ""
        prompts = f"about {self.tokens:,} tokens" if self.tokens is not None else f"{self.characters:,} characters"
        unknown = "" if self.tokens is not None else " (their tokens are known with the model's tokenizer)"
        price_in, price_out = responder.options.price_in, responder.options.price_out
        price = ""
        if self.tokens is not None and (price_in is not None or price_out is not None):
            most = (self.tokens * (price_in or 0.0) + self.generated * (price_out or 0.0)) / 1e6
            price = f", which cost at most about {most:.2g}"
        again = "; answers that are kept are not asked for again" if options.evaluation.resume else ""
        total = sum(self.by_arm.values()) + self.fitting
        return (
            f"estimate: at most {total} requests ({arms}{fits}), {prompts} of prompts{unknown} and at most "
            f"{self.generated:,} tokens of answers{price}{again}"
        )


@dataclass
class _Counted:
    """Different requests so far, and what they hold."""

    seen: set[tuple[str, str]] = field(default_factory=set)
    characters: int = 0
    generated: int = 0

    def add(self, request: Request, sorts: Sequence[str]) -> int:
        """How many of the sorts of one request were not made before."""
        new = 0
        for sort in sorts:
            said = f"{request.prompt}{request.answer}" if sort == SCORE else str(request.prompt)
            if (sort, said) not in self.seen:
                self.seen.add((sort, said))
                new, self.characters = new + 1, self.characters + _characters(request.prompt)
                self.generated += 1 if sort == SCORE else request.max_tokens
        return new


def served_requests(
    task: LanguageTask, test: Sequence[Sample], options: MitigateOptions, arms: Sequence[Arm]
) -> ServedRequests:
    """What a server will be asked in every arm, as its method rewrites requests."""
    responder: Any = arms[0].responder
    scored = options.test.score and responder.scores is not False
    sorts = [sort for sort, asked in ((GENERATE, options.test.generate), (SCORE, scored)) if asked]
    put = [(task, list(test), options.test)]
    put += [(form, samples, short_options(options)) for form, samples in short_samples(task, responder, options)]
    requests = [request for form, samples, asked in put for request in requests_of(samples, form, asked)]
    counted = _Counted()
    by_arm = {
        arm.name: sum(counted.add(each, sorts) for request in requests for each in _rewritten(arm, request))
        for arm in arms
    }
    # An order that is still to be measured is taken to change every request.
    unfitted = [arm.name for arm in arms[1:] if arm.method is None]
    fitting = len(sorts) * options.calibration * len(test[0].examples) if unfitted else 0
    by_arm |= dict.fromkeys(unfitted, by_arm[UNCHANGED])
    share = (sum(by_arm.values()) + fitting) / max(1, len(counted.seen))
    characters, generated = round(share * counted.characters), round(share * counted.generated)
    known = [example for _, samples, _ in put for sample in samples for example in sample.examples if example.n_tokens]
    spelled = sum(_characters(example.prompt) for example in known)
    tokens = round(characters * sum(example.n_tokens or 0 for example in known) / spelled) if spelled else None
    return ServedRequests(by_arm, fitting, characters, tokens, generated)


def _rewritten(arm: Arm, request: Request) -> Iterator[Request]:
    """What is asked in place of a request; nothing where a method cannot take it, which the run will say."""
    if not isinstance(arm.method, Rewriting):
        yield request
        return
    with suppress(UsageError):
        yield from arm.method.asked(request, arm.responder)


def _characters(prompt: str | Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
