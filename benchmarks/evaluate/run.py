"""Key-value retrieval at every place: shared beginnings, beside the plain loop and lm-eval's Hugging Face backend.

Run `python benchmarks/evaluate/run.py` in an environment with the `bench` extra. Every method scores the answer by
teacher forcing and generates greedily; results are asserted equal first, then the methods are timed in turn. The floor
is in tokens: every distinct beginning run once.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from posbias.evaluation.responders import LocalOptions, LocalResponder, Reply, Request
from posbias.evaluation.responders.local import encode_requests
from posbias.evaluation.responders.running import count_tokens
from posbias.models.loading import load_model
from posbias.tasks.language import KeyValue

ROW = "{:<28} {:>10} {:>10} {:>10}"
TOLERANCE = 1e-3
"""Of an answer's log-probability: float32 sums in another order, over some 25 tokens of 30 layers."""
Outcome = list[tuple[float | None, str | None]]
"""Log-probability and generated text of every request."""


def requests_of(model: Any, pairs: int, samples: int, positions: int, tokens: int) -> list[Request]:
    """All positions of several samples."""
    spread = sorted({round(index * (pairs - 1) / max(1, positions - 1)) for index in range(positions)})
    examples = KeyValue(pairs=pairs).examples(model.tokenizer, count=samples, positions=spread, seed=0)
    return [Request(item.prompt, answer=item.target, max_tokens=tokens, group=item.sample) for item in examples]


def ours(model: Any, requests: Sequence[Request], options: LocalOptions, *, generate: bool) -> Outcome:
    replies = LocalResponder(model, options).respond(requests, generate=generate, score=True)
    return [outcome(reply) for reply in replies]


def outcome(reply: Reply) -> tuple[float | None, str | None]:
    assert reply.score is not None
    return reply.score.logprob, None if reply.response is None else reply.response.text


def lm_eval_backend(model: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model.network, tokenizer=model.tokenizer, device="cpu", batch_size=1)


def peer(backend: Any, requests: Sequence[Request], *, generate: bool) -> Outcome:
    """lm-eval's own two calls; its generation has no part in its scoring."""
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, (item.prompt, item.answer), index) for index, item in enumerate(requests)]
    scores = [float(score) for score, _ in backend.loglikelihood(asked, disable_tqdm=True)]
    if not generate:
        return [(score, None) for score in scores]
    settings = {"until": [], "max_gen_toks": requests[0].max_tokens, "do_sample": False}
    asked = [Instance("generate_until", {}, (item.prompt, settings), index) for index, item in enumerate(requests)]
    return list(zip(scores, backend.generate_until(asked, disable_tqdm=True), strict=True))


def check_equal(results: dict[str, Outcome]) -> None:
    """Every method's scores and texts are the first one's."""
    first, *others = results.values()
    for other in others:
        for (score, text), (expected, words) in zip(other, first, strict=True):
            assert score is not None
            assert expected is not None
            assert abs(score - expected) < TOLERANCE, (score, expected)
            assert (text or "").strip() == (words or "").strip(), (text, words)


def timed(methods: dict[str, Callable[[], Outcome]], repeats: int) -> tuple[dict[str, Outcome], dict[str, float]]:
    """Results, and the median of processor seconds; one of each method per round."""
    results: dict[str, Outcome] = {}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        for name, run in methods.items():
            begin = time.process_time()
            results[name] = run()
            seconds[name].append(time.process_time() - begin)
        check_equal(results)
    return results, {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--positions", type=int, default=10, help="of the gold pair, evenly spaced")
    parser.add_argument("--tokens", type=int, default=0, help="generated per answer; 0: scoring alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="without lm-eval")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = load_model("demo")
    generate = arguments.tokens > 0
    requests = requests_of(model, arguments.pairs, arguments.samples, arguments.positions, max(1, arguments.tokens))
    plain, floor = count_tokens([tokens.prompt for tokens in encode_requests(model.tokenizer, requests)])
    methods: dict[str, Callable[[], Outcome]] = {
        "shared beginnings": lambda: ours(model, requests, LocalOptions(), generate=generate),
        "plain loop": lambda: ours(model, requests, LocalOptions(reuse=False, batch=1), generate=generate),
    }
    versions = ["torch", "transformers"]
    if not arguments.no_peer:
        backend = lm_eval_backend(model)
        methods["lm-eval, HF backend"] = lambda: peer(backend, requests, generate=generate)
        versions.append("lm_eval")
    _, seconds = timed(methods, arguments.repeats)
    print(", ".join(f"{name} {metadata.version(name)}" for name in versions), f"; load {os.getloadavg()[0]:.1f}")
    print(f"{len(requests)} prompts of {arguments.pairs} pairs, {arguments.tokens} tokens generated each")
    print(f"tokens of prompts: {plain} plain, {floor} at least ({floor / plain:.3f})")
    print(ROW.format("method", "seconds", "times", "floor's share"))
    for name, value in seconds.items():
        share = seconds["plain loop"] * floor / plain / value
        print(ROW.format(name, f"{value:.2f}", f"{value / seconds['shared beginnings']:.2f}", f"{share:.2f}"))


if __name__ == "__main__":
    main()
