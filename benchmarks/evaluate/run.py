"""Key-value retrieval at every place: shared beginnings, beside the plain loop and lm-eval's Hugging Face backend.

Run `python benchmarks/evaluate/run.py` in an environment with the `bench` extra. Every method scores the answer by
teacher forcing and generates greedily; results are asserted equal first, then the methods are timed in turn. The floor
is in tokens, every distinct beginning run once; and in flops (`--flops`): those tokens' matrix products and causal
attention at the rates that this machine reaches with nothing else, by products of the model's own shapes.

`--batches` compares answers with transformers' `generate` on one left-padded batch (target: .55), and scores with bare
forward passes, one for each prompt (target: 1.1): for prompts of mixed lengths that share next to nothing, and for one
sample's items moved.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from posbias.evaluation.responders import LocalResponder, Reply, Request
from posbias.evaluation.responders.encoding import encode_requests
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


def ours(model: Any, requests: Sequence[Request], *, generate: bool) -> Outcome:
    return [outcome(reply) for reply in LocalResponder(model).respond(requests, generate=generate, score=True)]


def one_by_one(model: Any, requests: Sequence[Request], *, generate: bool) -> Outcome:
    responder = LocalResponder(model)
    return [outcome(responder.respond([each], generate=generate, score=True)[0]) for each in requests]


def outcome(reply: Reply) -> tuple[float | None, str | None]:
    assert reply.score is not None
    return reply.score.logprob, None if reply.response is None else reply.response.text


def shared_length(first: Any, second: Any) -> int:
    """Number of tokens that two prompts share before they first differ."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def visiting_order(prompts: Sequence[Any]) -> list[int]:
    """Indices in lexicographic order of the tokens."""
    return sorted(range(len(prompts)), key=lambda index: prompts[index].tolist())


def count_tokens(prompts: Sequence[Any]) -> tuple[int, int]:
    """Tokens of all prompts; and with every distinct beginning run once, but of each prompt at least its last token."""
    ordered = [prompts[index] for index in visiting_order(prompts)]
    shared = [min(shared_length(*pair), len(pair[1]) - 1) for pair in pairwise(ordered)]
    return sum(map(len, prompts)), sum(map(len, prompts)) - sum(shared)


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


def mixed_requests(model: Any, count: int, *, tokens: int) -> list[Request]:
    """Prompts of key-value pairs, each of another sample, from 2 pairs to 10: some 60 to 700 tokens of the demo."""
    requests = []
    for index in range(count):
        pairs = 2 + 8 * index // max(1, count - 1)
        examples = KeyValue(pairs=pairs).examples(model.tokenizer, count=1, positions=[index % pairs], seed=index)
        requests += [Request(item.prompt, answer=item.target, max_tokens=tokens) for item in examples]
    return requests


def left_padded(model: Any, texts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of a batch."""
    longest = max(map(len, texts))
    ids = [[0] * (longest - len(text)) + text for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return torch.tensor(ids, device=model.device), torch.tensor(mask, device=model.device)


@torch.no_grad()
def generated_by_peer(model: Any, requests: Sequence[Request]) -> list[str]:
    """The answers of transformers' `generate` to one left-padded batch."""
    ids, mask = left_padded(model, [tokens.prompt.tolist() for tokens in encode_requests(model.tokenizer, requests)])
    output = model.network.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=requests[0].max_tokens, do_sample=False, pad_token_id=0
    )
    texts: list[str] = model.tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    return texts


@torch.no_grad()
def scored_alone(model: Any, requests: Sequence[Request]) -> list[float]:
    """Log-probabilities of the answers from bare forward passes, one for each prompt, without padding."""
    scores = []
    for each in encode_requests(model.tokenizer, requests):
        answer = torch.as_tensor(each.answer, device=model.device)
        ids = torch.tensor([[*each.prompt, *each.answer[:-1]]], device=model.device)
        rows = model.network(ids, logits_to_keep=len(answer), use_cache=False).logits[0].log_softmax(-1)
        scores.append(float(rows.gather(1, answer[:, None]).sum()))
    return scores


def compare_batches(model: Any, requests: Sequence[Request], repeats: int) -> dict[str, float]:
    """Our time over the peer's for answers and for scores, medians of pairs in turn; results are asserted equal."""

    def answers() -> list[str]:
        replies = LocalResponder(model).respond(requests)
        return [reply.response.text for reply in replies if reply.response is not None]

    def scores() -> list[float]:
        replies = LocalResponder(model).respond(requests, generate=False, score=True)
        return [reply.score.logprob for reply in replies if reply.score is not None]

    def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
        clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        begin = clock()
        result = run()
        return clock() - begin, result

    ratios: dict[str, list[float]] = {"answers": [], "scores": []}
    pairs = (("answers", answers, generated_by_peer), ("scores", scores, scored_alone))
    for _ in range(repeats):
        for name, own, peers in pairs:
            (theirs, expected), (took, found) = seconds(lambda peers=peers: peers(model, requests)), seconds(own)  # type: ignore[misc]
            if name == "answers":
                assert found == expected, [pair for pair in zip(found, expected, strict=True) if pair[0] != pair[1]]
            else:
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)
            ratios[name].append(took / theirs)
    return {name: statistics.median(values) for name, values in ratios.items()}


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


def flops(model: Any, requests: Sequence[Request]) -> tuple[float, float]:
    """Of the matrix products and of the causal attention of every distinct beginning, the logits left out."""
    network = model.network
    linear = sum(m.weight.numel() for name, m in network.named_modules() if is_inner(name, m))
    width = model.sizes["heads"] * network.config.head_dim
    depth, products, attention = model.sizes["layers"], 0.0, 0.0
    held: Any = np.zeros(0, dtype=np.int64)
    prompts = [tokens.prompt for tokens in encode_requests(model.tokenizer, requests)]
    for index in visiting_order(prompts):
        begin = min(shared_length(held, prompts[index]), len(prompts[index]) - 1)
        held = prompts[index]
        products += 2.0 * linear * (len(held) - begin)
        attention += 4.0 * width * depth * (len(held) ** 2 - begin**2) / 2
    return products, attention


def is_inner(name: str, module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def rates(model: Any, n_tokens: int) -> tuple[float, float]:
    """Flops per second: of the layers' products alone, one after the other, and of causal attention; best of three."""
    config = model.network.config
    layer = [m for name, m in model.network.named_modules() if is_inner(name, m) and ".layers.0." in name]
    inputs = [torch.randn(n_tokens, m.in_features) for m in layer]
    query, key, value = (torch.randn(1, config.num_attention_heads, n_tokens, config.head_dim) for _ in range(3))
    kernel = torch.nn.functional.scaled_dot_product_attention

    def products() -> None:
        for module, given in zip(layer, inputs, strict=True):
            module(given)

    with torch.no_grad():
        linear = sum(2.0 * m.weight.numel() * n_tokens for m in layer) / best_of(products)
        causal = 2.0 * config.num_attention_heads * config.head_dim * n_tokens**2
        return linear, causal / best_of(lambda: kernel(query, key, value, is_causal=True))


def best_of(run: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def print_flops(model: Any, requests: Sequence[Request], *, generate: bool) -> None:
    """Where the time of our method goes, beside the floor in flops; seconds of the clock."""
    products, attention = flops(model, requests)
    longest = max(len(tokens.prompt) for tokens in encode_requests(model.tokenizer, requests))
    linear_rate, attention_rate = rates(model, longest)
    begin = time.perf_counter()
    ours(model, requests, generate=False)
    scored = time.perf_counter() - begin
    floor = products / linear_rate + attention / attention_rate
    print(f"prompts of up to {longest} tokens, {torch.get_num_threads()} threads")
    for name, count, rate in (("products", products, linear_rate), ("attention", attention, attention_rate)):
        print(f"{name:<12} {count / 1e12:8.2f} Tflop at {rate / 1e9:6.1f} Gflop/s: {count / rate:8.1f} s")
    print(f"scoring      {scored:8.1f} s, {scored / floor:.2f} of the floor of {floor:.1f} s")
    if generate:
        begin = time.perf_counter()
        ours(model, requests, generate=True)
        whole = time.perf_counter() - begin
        print(f"with answers {whole:8.1f} s, {whole / floor:.2f} of the same floor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--positions", type=int, default=10, help="of the gold pair, evenly spaced")
    parser.add_argument("--tokens", type=int, default=0, help="generated per answer; 0: scoring alone")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="without lm-eval")
    parser.add_argument("--batches", action="store_true", help="beside generate, on --samples prompts")
    parser.add_argument("--flops", action="store_true", help="ours alone, once, beside the floor in flops")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = load_model("demo")
    generate = arguments.tokens > 0
    requests = requests_of(model, arguments.pairs, arguments.samples, arguments.positions, max(1, arguments.tokens))
    if arguments.batches:
        moved = requests_of(model, arguments.pairs, 1, arguments.positions, max(1, arguments.tokens))
        mixed = mixed_requests(model, arguments.samples, tokens=max(1, arguments.tokens))
        print(f"process time over that of the peer, {arguments.repeats} pairs; load {os.getloadavg()[0]:.1f}")
        for name, batch in (("mixed lengths", mixed), ("items moved", moved)):
            lengths = [len(each.prompt) for each in encode_requests(model.tokenizer, batch)]
            ratios = compare_batches(model, batch, arguments.repeats)
            print(f"{len(batch)} prompts of {min(lengths)} to {max(lengths)} tokens, {name}: {ratios}", flush=True)
        return
    if arguments.flops:
        print_flops(model, requests, generate=generate)
        return
    plain, floor = count_tokens([tokens.prompt for tokens in encode_requests(model.tokenizer, requests)])
    methods: dict[str, Callable[[], Outcome]] = {
        "shared beginnings": lambda: ours(model, requests, generate=generate),
        "plain loop": lambda: one_by_one(model, requests, generate=generate),
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
