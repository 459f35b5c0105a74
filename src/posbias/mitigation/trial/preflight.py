"""The phase *preflight*: what a run will take is said before it begins, and what cannot be done is refused.

Seconds and memory of a local model, requests and tokens of a server. Seconds are those of the answers, of which
`preflight_answers` makes short runs; passes over other prompts take as much less as these are shorter. Requests of a
server are counted as the methods rewrite them, each different one once.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from posbias.errors import UsageError
from posbias.evaluation.cost import preflight_answers
from posbias.evaluation.responders import LocalResponder, Request, ServerResponder
from posbias.evaluation.responders.base import Messages
from posbias.evaluation.samples import Sample
from posbias.measurement.cost_estimate import show_seconds
from posbias.mitigation.fitting.calibration import holds_conversations
from posbias.mitigation.trial.arms import METHOD, UNCHANGED, Arm, LeftOut
from posbias.mitigation.trial.influence import preflight_influence
from posbias.mitigation.trial.ordinary_text import judged_windows, text_reason, window_length
from posbias.mitigation.trial.plan import TrialPlan
from posbias.progress import report
from posbias.runs.caveats import fact_of

GENERATE, SCORE = "generate", "score"
"""Sorts of requests: a text to go on with, and an answer to repeat with its log-probabilities."""


def preflight(plan: TrialPlan) -> TrialPlan:
    """The plan with its cost and ordinary text, without methods that do not fit into memory or answer no request.

    Such a method is refused if it was named, and left out otherwise. A server is asked for nothing that is not kept.
    """
    plan = _try_arms(announce(plan))
    preflight_influence(plan)
    return replace(plan, text=judged_windows(plan))


def announce(plan: TrialPlan) -> TrialPlan:
    """Say what all arms will take; the plan with the cost of one arm, without methods that do not fit into memory."""
    responder, test = plan.responder, plan.test
    if isinstance(responder, ServerResponder):
        report(served_requests(plan).line(responder, resumed=plan.options.evaluation.resume))
        return plan
    workers = plan.options.engine.processes_here

    def estimate(copies: int) -> dict[str, Any]:
        return preflight_answers(test.samples, test.task, test.options, responder, copies=copies, workers=workers)

    cost, n_passages = estimate(1), len(test.requests[0].passages)
    arms, left_out, seconds = [], [], 0.0
    for arm in plan.arms:
        arm_cost = cost
        try:
            if cost and arm.copies > 1:
                report(f"{arm.name} asks with prompts {arm.copies} times as long:")
                arm_cost = estimate(arm.copies)
        except UsageError as error:
            if not plan.options.unnamed:
                raise
            left_out.append(LeftOut(METHOD, fact_of(error), arm=arm.name))
            continue
        arms.append(arm)
        seconds += arm.passes(n_passages) * arm_cost.get("seconds", 0.0)
    plan = replace(plan.with_arms(arms, left_out), cost=cost)
    if cost:
        besides = _seconds_besides(plan)
        parts = [f"{name}: {show_seconds(extra)}" for name, extra in besides.items()]
        report(
            f"estimate: {show_seconds(seconds + sum(besides.values()))} in all; answers without and with each method "
            f"({len(plan.arms) - 1}), extra requests included: {'; '.join([show_seconds(seconds), *parts])}"
        )
    return plan


def _try_arms(plan: TrialPlan) -> TrialPlan:
    """The plan without methods that do not answer one request, as far as they need no fit."""
    request, options = replace(plan.test.requests[0], max_tokens=1), plan.test.options
    arms, left_out = [], []
    for arm in plan.arms:
        try:
            if arm.method is not None and isinstance(arm.plain, LocalResponder):
                arm.answering.respond([request], generate=options.generate, score=options.score)
            arms.append(arm)
        except UsageError as error:
            if not plan.options.unnamed:
                raise
            left_out.append(LeftOut(METHOD, fact_of(error), arm=arm.name))
    return plan.with_arms(arms, left_out)


def _seconds_besides(plan: TrialPlan) -> dict[str, float]:
    """Seconds that fits, ordinary text and the task's short forms take of a local model, by name."""
    options, arms, cost = plan.options, plan.arms, plan.cost
    longest, per_pass = max(map(_tokens, plan.test.samples)), cost["seconds_per_pass"]
    seconds = {}
    fits = [arm.to_fit for arm in arms if arm.to_fit is not None]
    if fits:
        n_positions = len(plan.test.samples[0].examples)
        texts = 1 + holds_conversations(plan.test.examples)
        passes = sum(fit.passes(options.calibration, n_positions, options.fitting, texts=texts) for fit in fits)
        seconds[f"{len(fits)} fits"] = passes * per_pass
    if options.documents and plan.model is not None:
        judged = sum(arm.passes(1) for arm in arms if not text_reason(plan, arm))
        seconds["ordinary text"] = judged * options.documents * window_length(plan.model, plan) / longest * per_pass
    for form in plan.short_forms:
        # What is generated does not depend on the prompt's length.
        share, decoding = max(map(_tokens, form.samples)) / longest, max(0.0, cost["seconds_per_prompt"] - per_pass)
        n_passages = len(form.requests[0].passages)
        per_request = sum(arm.passes(n_passages) * (arm.copies * share * per_pass + decoding) for arm in arms)
        name = "short forms of the task"
        seconds[name] = seconds.get(name, 0.0) + len(form.requests) * per_request
    return seconds


def _tokens(sample: Sample) -> int:
    """Tokens of a sample's longest prompt; of a model without a tokenizer, roughly."""
    return max(example.n_tokens or len(str(example.prompt)) // 4 or 1 for example in sample.examples)


@dataclass(frozen=True)
class ServedRequests:
    """The requests that a server will be asked, each different one once."""

    by_arm: Mapping[str, int]
    """New requests of each arm, for the task itself and its short forms."""
    fitting: int
    """Requests for fits."""
    characters: int
    """Characters of all prompts."""
    tokens: int | None
    """Tokens of all prompts, roughly; None without the model's tokenizer."""
    generated: int
    """Tokens that are generated at most."""

    def line(self, responder: ServerResponder, *, resumed: bool) -> str:
        """An announcement for a reader."""
        arms = ", ".join(f"{name} {count}" for name, count in self.by_arm.items())
        fits = f" and {self.fitting} for fits" if self.fitting else ""
        prompts = f"about {self.tokens:,} tokens" if self.tokens is not None else f"{self.characters:,} characters"
        unknown = "" if self.tokens is not None else " (their tokens are known with the model's tokenizer)"
        price_in, price_out = responder.options.price_in, responder.options.price_out
        price = ""
        if self.tokens is not None and (price_in is not None or price_out is not None):
            most = (self.tokens * (price_in or 0.0) + self.generated * (price_out or 0.0)) / 1e6
            price = f", which cost at most about {most:.2g}"
        again = "; answers that are kept are not asked for again" if resumed else ""
        total = sum(self.by_arm.values()) + self.fitting
        return (
            f"estimate: at most {total} requests ({arms}{fits}), {prompts} of prompts{unknown} and at most "
            f"{self.generated:,} tokens of answers{price}{again}"
        )


@dataclass
class _Counted:
    """Different requests so far, and their characters and tokens."""

    texts: set[tuple[str, str]] = field(default_factory=set)
    characters: int = 0
    generated: int = 0

    def add(self, request: Request, sorts: Sequence[str]) -> int:
        """The number of sorts of one request that were not made before."""
        new = 0
        for sort in sorts:
            text = f"{request.prompt}{request.answer}" if sort == SCORE else str(request.prompt)
            if (sort, text) not in self.texts:
                self.texts.add((sort, text))
                new, self.characters = new + 1, self.characters + _characters(request.prompt)
                self.generated += 1 if sort == SCORE else request.max_tokens
        return new


def served_requests(plan: TrialPlan) -> ServedRequests:
    """The requests that a server will be asked in every arm, as its method rewrites them."""
    responder: Any = plan.responder
    options = plan.test.options
    scored = options.score and responder.scores is not False
    sorts = [sort for sort, switched_on in ((GENERATE, options.generate), (SCORE, scored)) if switched_on]
    questions = (plan.test, *plan.short_forms)
    requests = [request for form in questions for request in form.requests]
    counted = _Counted()
    by_arm = {
        arm.name: sum(counted.add(variant, sorts) for request in requests for variant in _variants(arm, request))
        for arm in plan.arms
    }
    # An order that is still to be measured is taken to change every request.
    unfitted = [arm.name for arm in plan.arms if arm.to_fit is not None]
    fitting = len(sorts) * len(plan.calibration.examples) if unfitted else 0
    by_arm |= dict.fromkeys(unfitted, by_arm[UNCHANGED])
    share = (sum(by_arm.values()) + fitting) / max(1, len(counted.texts))
    characters, generated = round(share * counted.characters), round(share * counted.generated)
    examples = [example for form in questions for example in form.examples if example.n_tokens]
    spelled = sum(_characters(example.prompt) for example in examples)
    tokens = round(characters * sum(example.n_tokens or 0 for example in examples) / spelled) if spelled else None
    return ServedRequests(by_arm, fitting, characters, tokens, generated)


def _variants(arm: Arm, request: Request) -> list[Request]:
    """The requests in place of one; none if a method cannot take it, which the run will say."""
    if arm.method is None:
        return [request]
    with suppress(UsageError):
        return arm.method.asked(request, arm.plain)
    return []


def _characters(prompt: str | Messages) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(len(message["content"] or "") for message in prompt)
