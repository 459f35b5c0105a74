"""What is timed: each work beside its floor or peer, with what it must equal.

Equality is asserted on a small shape of the same family, in float32, on the same device; then the two sides of a pair
are timed in turn on the shape itself.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gradients
import numpy as np
import torch
from jacobians import floor as exact_jacobian
from subject import random_prompts

import attention
import posbias as pb
from posbias.evaluation.options import LocalOptions
from posbias.evaluation.responders import LocalResponder, Request
from posbias.measurement.outputs import checkpointed
from posbias.mitigation.options import FitOptions
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.weights import converted
from posbias.prompts import Prompts
from posbias.runs.engines import Local
from posbias.tasks.language import Example, KeyValue

PROBES = 4
STEPS = 4
"""Of a fit that is timed."""
METHOD = "key_bias(biases='gamma_key(alpha=1.5)')"
ROUND_OFF = 2e-3
"""Relative, of float32 sums in another order."""
LOGPROB_OFF = 1e-4
"""Of a text's log-probability per token, in nats."""
AttentionMethod = Callable[[HuggingFaceModel, Prompts], attention.Method]


@dataclass(frozen=True)
class Load:
    """How much there is to do."""

    positions: int = 0
    """Tokens of a prompt; of prompts of different lengths, of the longest."""
    prompts: int = 1
    answer: int = 8
    """Tokens of an answer."""
    pairs: int = 4
    """Of a retrieval prompt."""
    checkpointing: bool = False
    """Keep no activations inside blocks, on both sides."""


@dataclass(frozen=True)
class Pair:
    """Two ways to one result."""

    ours: Callable[[], Any]
    peer: Callable[[], Any]
    passes: float = 1.0
    """Times that the peer's work is counted."""


@dataclass(frozen=True)
class Work:
    """One thing that users do."""

    peer: str
    """What it is timed beside."""
    target: float | None
    """Largest allowed ratio on a GPU; None: none is set."""
    on_cpu: float | None
    """The same on a CPU."""
    pair: Callable[[HuggingFaceModel, Load], Pair]
    check: Callable[[HuggingFaceModel, Load], None]
    """Raises an AssertionError unless the results are right."""
    load: Load = field(default_factory=lambda: Load(24))
    """Of the check."""
    package: str | None = None
    """What the peer needs installed."""


def passes(model: HuggingFaceModel, prompts: Prompts, *, backward: int = 0) -> Callable[[], None]:
    """A forward pass of all prompts in one batch, and backward passes to their embeddings."""

    def run() -> None:
        with torch.set_grad_enabled(backward > 0):
            inputs = model.embed(model.token_tensor(prompts.token_ids.tolist())).detach()
            inputs.requires_grad_(backward > 0)
            logits = model.network(inputs_embeds=inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            best = logits.topk(max(backward, 1)).values.sum(0)
            for left in reversed(range(backward)):
                torch.autograd.grad(best[left], inputs, retain_graph=left > 0)

    return run


def measured(kinds: str) -> Callable[[HuggingFaceModel, Load], Pair]:
    """`pb.measure` without mixing, beside the passes that it takes at least, both in batches."""

    def pair(model: HuggingFaceModel, load: Load) -> Pair:
        prompts = random_prompts(load.prompts, load.positions)
        bare = model.described_by(model.family, misfit="mixing is not timed")
        backward = PROBES if kinds.startswith("jacobian") else 1
        together = load.prompts if model.device.type == "cpu" else None
        options = pb.MeasureOptions(together=together, checkpointing=load.checkpointing)
        floor = passes(model, prompts, backward=backward)

        def peer() -> None:
            with checkpointed(model.network, enabled=load.checkpointing):
                floor()

        return Pair(lambda: pb.measure(bare, prompts, kinds=kinds, options=options), peer)

    return pair


def probability_is_the_floors(model: HuggingFaceModel, load: Load) -> None:
    """Norms of the gradient, in batches of two prompts, are those of each alone."""
    prompts, options = random_prompts(3, load.positions), pb.MeasureOptions(together=2)
    norms = pb.measure(model, prompts, kinds="probability", options=options).per_prompt["probability"]
    for index, found in enumerate(norms):
        single = Prompts(prompts.token_ids[index : index + 1])
        np.testing.assert_allclose(found, gradients.floor(model, single)(), rtol=ROUND_OFF)


def jacobian_is_exact(model: HuggingFaceModel, load: Load) -> None:
    """One covector for every feature, as the floor has them one after another."""
    prompts = random_prompts(1, load.positions)
    found = pb.measure(model, prompts, kinds="jacobian(exact=True)").per_prompt["jacobian"][0]
    np.testing.assert_allclose(found, exact_jacobian(model, prompts)(), rtol=ROUND_OFF)


def peer_gradient(name: str) -> Callable[[HuggingFaceModel, Load], Pair]:
    """`pb.measure` beside another tool's saliency."""

    def pair(model: HuggingFaceModel, load: Load) -> Pair:
        prompts = random_prompts(1, load.positions)
        return Pair(gradients.ours(model, prompts), gradients.METHODS[name](model, prompts))

    return pair


def equal_sides(pair: Callable[[HuggingFaceModel, Load], Pair]) -> Callable[[HuggingFaceModel, Load], None]:
    """Both sides give the same numbers."""

    def check(model: HuggingFaceModel, load: Load) -> None:
        sides = pair(model, load)
        np.testing.assert_allclose(sides.ours(), sides.peer(), rtol=ROUND_OFF)

    return check


def statistics(model: HuggingFaceModel, load: Load) -> Pair:
    """All statistics of attention, beside a forward pass."""
    prompts = random_prompts(load.prompts, load.positions)
    return Pair(attention.streamed(model, prompts), passes(model, prompts))


def attention_rollout(model: HuggingFaceModel, load: Load) -> Pair:
    """The rollout of the model's own attention, beside a forward pass."""
    prompts = random_prompts(load.prompts, load.positions)
    return Pair(attention.pulled(model, prompts), passes(model, prompts))


def as_from_matrices(streamed: AttentionMethod, dense: AttentionMethod) -> Callable[[HuggingFaceModel, Load], None]:
    """The numbers are those from every attention matrix of transformers."""

    def check(model: HuggingFaceModel, load: Load) -> None:
        prompts = random_prompts(1, load.positions)
        found = streamed(model, prompts)()
        before = model.network.config._attn_implementation
        model.network.set_attn_implementation("eager")
        expected = dense(model, prompts)()
        model.network.set_attn_implementation(before)
        np.testing.assert_allclose(found, expected, rtol=ROUND_OFF)

    return check


def theory(name: str) -> Callable[[HuggingFaceModel, Load], Pair]:
    """A theory's prediction, beside a forward pass of its prompts."""

    def pair(model: HuggingFaceModel, load: Load) -> Pair:
        prompts = random_prompts(load.prompts, load.positions)
        return Pair(lambda: predicted(model, name, prompts), passes(model, prompts))

    return pair


def predicted(model: HuggingFaceModel, name: str, prompts: Prompts) -> np.ndarray:
    """The profile; theories of initialisation take the weights as drawn, which they are."""
    model = copy.copy(model)
    model.origin = Origin(model.origin.source, init_seed=0)
    return np.asarray(pb.predict(model, theory=name, prompts=prompts).profile.influence)


def as_in_float64(name: str) -> Callable[[HuggingFaceModel, Load], None]:
    """The prediction is that of the same weights in float64."""

    def check(model: HuggingFaceModel, load: Load) -> None:
        prompts = random_prompts(2, load.positions)
        precise = predicted(converted(model, torch.float64), name, prompts)
        np.testing.assert_allclose(predicted(model, name, prompts), precise, rtol=ROUND_OFF, atol=1e-6)

    return check


def requests_of(model: HuggingFaceModel, load: Load, *, answer: bool = False) -> list[Request]:
    """Texts of random bytes, their lengths evenly spread from a quarter of the longest."""
    generator = np.random.default_rng(1)
    lengths = np.linspace(load.positions // 4, load.positions, load.prompts).astype(int)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz "))
    texts = ["".join(generator.choice(letters, length)) for length in lengths]
    following = ["".join(generator.choice(letters, load.answer)) if answer else None for _ in texts]
    return [Request(*each, max_tokens=load.answer) for each in zip(texts, following, strict=True)]


def shared_requests(model: HuggingFaceModel, load: Load, *, answer: bool = False) -> list[Request]:
    """Retrieval at several places: prompts of one sample share their beginnings."""
    places = sorted({round(place) for place in np.linspace(0, load.pairs - 1, load.prompts)})
    examples = list(KeyValue(pairs=load.pairs).examples(model.tokenizer, count=1, positions=places, seed=0))
    return [
        Request(e.prompt, answer=e.target if answer else None, max_tokens=load.answer, group=e.sample) for e in examples
    ]


Requests = Callable[..., list[Request]]


def answers(requests: Requests) -> Callable[[HuggingFaceModel, Load], Pair]:
    """Answers of all prompts, beside `generate` on one left-padded batch."""

    def pair(model: HuggingFaceModel, load: Load) -> Pair:
        asked = requests(model, load)
        responder = LocalResponder(model, LocalOptions(batch=len(asked)))
        return Pair(
            lambda: responder.respond(asked),
            lambda: generated(model, asked, load.answer),
        )

    return pair


@torch.no_grad()
def generated(model: HuggingFaceModel, asked: Sequence[Request], tokens: int) -> list[str]:
    """The texts of transformers' own batch."""
    batch = model.tokenizer([request.text for request in asked], padding=True, return_tensors="pt").to(model.device)
    output = model.network.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=model.tokenizer.pad_token_id,
    )
    return list(model.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True))


def texts_are_equal(requests: Requests) -> Callable[[HuggingFaceModel, Load], None]:
    """Those of one prompt at a time, by transformers."""

    def check(model: HuggingFaceModel, load: Load) -> None:
        asked = requests(model, load)
        replies = LocalResponder(model, LocalOptions(batch=len(asked))).respond(asked)
        for request, reply in zip(asked, replies, strict=True):
            (expected,) = generated(model, [request], load.answer)
            assert reply.response is not None
            assert reply.response.text.strip() == expected.strip(), (reply.response.text, expected)

    return check


def scores(requests: Requests) -> Callable[[HuggingFaceModel, Load], Pair]:
    """Log-probabilities of the answers, beside one padded forward pass that keeps the answers' logits alone."""

    def pair(model: HuggingFaceModel, load: Load) -> Pair:
        asked = requests(model, load, answer=True)
        responder = LocalResponder(model, LocalOptions(batch=len(asked)))
        return Pair(
            lambda: responder.respond(asked, generate=False, score=True),
            lambda: padded_scores(model, asked),
        )

    return pair


@torch.no_grad()
def padded_scores(model: HuggingFaceModel, asked: Sequence[Request]) -> list[float]:
    """Log-probability of every answer, which end a left-padded batch."""
    texts = [request.text + str(request.answer) for request in asked]
    batch = model.tokenizer(texts, padding=True, return_tensors="pt").to(model.device)
    lengths = [len(model.tokenizer(str(request.answer))["input_ids"]) for request in asked]
    mask = batch["attention_mask"]
    places = {} if "bloom" in model.model_type else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    kept = max(lengths) + 1
    output = model.network(**batch, **places, use_cache=False, logits_to_keep=kept)
    logits = output.logits
    by_token = logits[:, :-1].float().log_softmax(-1).gather(-1, batch["input_ids"][:, 1 - kept :, None])[..., 0]
    return [float(row[-length:].sum()) for row, length in zip(by_token, lengths, strict=True)]


def scores_are_equal(requests: Requests) -> Callable[[HuggingFaceModel, Load], None]:
    """Those of one prompt at a time."""

    def check(model: HuggingFaceModel, load: Load) -> None:
        asked = requests(model, load, answer=True)
        replies = LocalResponder(model, LocalOptions(batch=len(asked))).respond(asked, generate=False, score=True)
        for request, reply in zip(asked, replies, strict=True):
            assert reply.score is not None
            (expected,) = padded_scores(model, [request])
            assert abs(reply.score.logprob - expected) <= LOGPROB_OFF * len(reply.score.logprobs)

    return check


def calibration(model: HuggingFaceModel, load: Load) -> list[Example]:
    """Four retrieval samples, the gold pair first and last."""
    task, places = KeyValue(pairs=load.pairs), [0, load.pairs - 1]
    return list(task.examples(model.tokenizer, count=4, positions=places, seed=0))


def fitted(model: HuggingFaceModel, load: Load) -> Pair:
    """Steps of a key bias's fit, a batch of prompts each, beside the bare passes of as many batches."""
    examples = calibration(model, load)
    n_positions = len(model.tokenizer(examples[0].prompt + examples[0].target)["input_ids"])
    options = FitOptions(steps=STEPS, batch=load.prompts, penalty=0.0)
    prompts = random_prompts(load.prompts, n_positions)
    return Pair(
        lambda: pb.fit("key_bias", model, examples, options=options),
        passes(model, prompts, backward=1),
        passes=STEPS,
    )


def fit_descends(model: HuggingFaceModel, load: Load) -> None:
    """The right answers become more probable."""
    examples = calibration(model, load)
    method = pb.fit("key_bias", model, examples, options=FitOptions(steps=12, batch=2, penalty=0.0)).method
    asked = [Request(example.prompt, answer=example.target) for example in examples]

    def mean() -> float:
        replies = LocalResponder(model).respond(asked, generate=False, score=True)
        return float(np.mean([reply.score.logprob for reply in replies if reply.score is not None]))

    before = mean()
    with pb.mitigated(model, method):
        assert mean() > before


def inside(model: HuggingFaceModel, load: Load) -> Pair:
    """A batch under a method, beside the plain model."""
    plain = passes(model, random_prompts(load.prompts, load.positions))

    def run() -> None:
        with pb.mitigated(model, METHOD):
            plain()

    return Pair(run, plain)


def inside_mixed(model: HuggingFaceModel, load: Load) -> Pair:
    """A left-padded batch of mixed lengths under a method, beside the plain model."""
    batch = padded(model, load)

    @torch.no_grad()
    def plain() -> None:
        model.network(**batch, use_cache=False, logits_to_keep=1)

    def run() -> None:
        with pb.mitigated(model, METHOD):
            plain()

    return Pair(run, plain)


def padded(model: HuggingFaceModel, load: Load) -> dict[str, torch.Tensor]:
    """Prompts of mixed lengths as a left-padded batch, positions included where the network takes them."""
    texts = [request.text for request in requests_of(model, load)]
    batch = dict(model.tokenizer(texts, padding=True, return_tensors="pt").to(model.device))
    if "bloom" not in model.model_type:
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return batch


@torch.no_grad()
def methods_hold_in_mixed_batches(model: HuggingFaceModel, load: Load) -> None:
    """The last logits of every row of a left-padded batch are those of its prompt alone, and not the plain model's."""
    batch = padded(model, load)
    mask = batch["attention_mask"]
    with pb.mitigated(model, METHOD):
        together = model.network(**batch, use_cache=False).logits[:, -1]
        alone = [model.network(row[kept.bool()][None], use_cache=False).logits[0, -1]
                 for row, kept in zip(batch["input_ids"], mask, strict=True)]  # fmt: skip
    torch.testing.assert_close(together, torch.stack(alone), rtol=ROUND_OFF, atol=1e-4)
    plain = model.network(**batch, use_cache=False).logits[:, -1]
    assert not torch.allclose(plain, together, rtol=ROUND_OFF, atol=1e-4)


def audited(model: HuggingFaceModel, load: Load) -> Pair:
    """A whole audit, beside the passes of its prompts and initialisations."""
    covectors = PROBES + 1
    options = pb.AuditOptions(initialisations=max(load.prompts // 2, 2), engine=Local())
    return Pair(
        lambda: pb.audit(model, n_positions=load.positions, prompts=load.prompts, options=options),
        passes(model, random_prompts(1, load.positions), backward=covectors),
        passes=load.prompts + max(load.prompts // 2, 2),
    )


def audit_measures(model: HuggingFaceModel, load: Load) -> None:
    """The audit's profile is that of `pb.measure`."""
    prompts = random_prompts(3, load.positions)
    found = pb.audit(model, prompts=prompts, options=pb.AuditOptions(initialisations=2)).record.arrays
    expected = pb.measure(model, prompts, kinds="probability").profiles["probability"].influence
    np.testing.assert_allclose(found["trained/measured/probability/influence"], expected, rtol=ROUND_OFF)


RETRIEVAL = Load(96, prompts=3, answer=6, pairs=3)
MIXED = Load(40, prompts=5, answer=6)
WORKS = {
    "probability gradients": Work("bare passes", 1.1, 1.1, measured("probability"), probability_is_the_floors),
    "probability beside captum": Work(
        "captum", 1.0, 1.0, peer_gradient("captum, one logit row"), equal_sides(peer_gradient("captum, one logit row")),
        package="captum",
    ),
    "probability beside inseq": Work(
        "inseq", 1.0, 1.0, peer_gradient("inseq"), equal_sides(peer_gradient("inseq")), package="inseq"
    ),
    "Jacobian, 4 probes": Work("bare passes", 1.1, 1.1, measured(f"jacobian(probes={PROBES})"), jacobian_is_exact),
    "attention statistics": Work(
        "forward", 5.0, 4.0, statistics,
        as_from_matrices(attention.streamed, attention.dense_distance),
    ),
    "attention rollout": Work(
        "forward", 3.0, 3.0, attention_rollout, as_from_matrices(attention.pulled, attention.dense_rollout)
    ),
    "power rollout": Work("forward", 5.0, 5.0, theory("power_rollout"), as_in_float64("power_rollout")),
    "mean field": Work("forward", 3.0, 3.0, theory("mean_field"), as_in_float64("mean_field")),
    "answers, mixed lengths": Work("generate", 1.3, 1.3, answers(requests_of), texts_are_equal(requests_of), MIXED),
    "answers, shared beginnings": Work(
        "generate", 1.0, 1.0, answers(shared_requests), texts_are_equal(shared_requests), RETRIEVAL
    ),
    "scoring, mixed lengths": Work(
        "padded forward", 1.3, 1.3, scores(requests_of), scores_are_equal(requests_of), MIXED
    ),
    "scoring, shared beginnings": Work(
        "padded forward", 1.0, 1.0, scores(shared_requests), scores_are_equal(shared_requests), RETRIEVAL
    ),
    "fitting a key bias": Work("bare passes", 1.2, 1.2, fitted, fit_descends, RETRIEVAL),
    "method inside the model": Work("plain forward", 1.15, 1.15, inside, methods_hold_in_mixed_batches, MIXED),
    "method, mixed lengths": Work("plain forward", 1.15, 1.15, inside_mixed, methods_hold_in_mixed_batches, MIXED),
    "audit": Work("bare passes", 3.0, 3.0, audited, audit_measures),
}  # fmt: skip
