"""Cost of methods against position bias, per token, beside the plain demo model.

`python benchmarks/mitigate/run.py` (`--device cuda` on a GPU): one thread; a prompt of 648 tokens and 30 more, one by
one with a cache. Methods and the plain model take turns, and medians are taken, of the seconds that the processor
worked (by the clock, on a GPU).
"""

import argparse
import contextlib
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from posbias.mitigation.methods.applying import mitigated
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.context_bias import ContextBias
from posbias.models.loading import load_model

CONTEXT_BIAS = "context_bias"
"""Numbers and scales for every head and layer, for the queries of the last tenth and of what is decoded."""
METHODS = (
    "plain",
    "key_bias(biases='gamma_key(alpha=1.5)')",
    CONTEXT_BIAS,
    "temperature(scale=0.15)",
    "ms_poe()",
    "pine",
    "positional_channel(channel=100)",
    "positional_channel(channel=100, from_question=True)",
    "attention_calibration",
)
PASSAGES = 8
"""Of equal lengths, in the first nine tenths of the prompt; what is left is the question."""
ROW = "{:<52} {:>9} {:>9} {:>9} {:>7}"


def seconds(model: Any, method: str, tokens: torch.Tensor, n_decoded: int) -> tuple[float, float]:
    """Of the prompt, and of the tokens after it."""
    way: Any = contextlib.nullcontext()
    if method != "plain":
        given: Any = context_bias(model) if method == CONTEXT_BIAS else MITIGATIONS.parse(method)
        way = mitigated(model, given, passages=given.known(passages(tokens.shape[1]), tokens.shape[1]))
    with way, torch.no_grad():
        start = now(model.device)
        output = model.network(input_ids=tokens, use_cache=True, logits_to_keep=1)
        read = now(model.device)
        for _ in range(n_decoded):
            cache = output.past_key_values
            output = model.network(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
        return read - start, now(model.device) - read


def now(device: torch.device) -> float:
    """Seconds: of the processor, or by the clock when all is done that a GPU was given."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def passages(n_tokens: int) -> list[tuple[int, int]]:
    """Spans of a prompt of random tokens, one behind the other."""
    ends = [n_tokens * 9 // 10 * (index + 1) // PASSAGES for index in range(PASSAGES)]
    return list(zip([0, *ends], ends, strict=False))


def context_bias(model: Any) -> ContextBias:
    """Of the size that a fit gives."""
    depth, heads = model.sizes["layers"], model.sizes["heads"]
    return ContextBias(values=[[0.5] * heads] * depth, scales=[[1.1] * heads] * depth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=648)
    parser.add_argument("--decoded", type=int, default=30)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model: Any = load_model(given.model, device=given.device, dtype=given.dtype)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, model.vocabulary_size, (1, given.tokens), generator=generator).to(model.device)
    taken: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    for turn in range(given.turns + 1):
        for method in METHODS:
            found = seconds(model, method, tokens, given.decoded)
            if turn:
                taken[method].append(found)
    medians = {
        method: (statistics.median(one for one, _ in pairs), statistics.median(two for _, two in pairs))
        for method, pairs in taken.items()
    }
    plain = medians["plain"]
    print(ROW.format("seconds x plain", "prompt", "decoding", "both", "s"))
    for method, (prompt, decoding) in medians.items():
        ratios = prompt / plain[0], decoding / plain[1], (prompt + decoding) / sum(plain)
        print(ROW.format(method, *(f"{ratio:.2f}" for ratio in ratios), f"{prompt + decoding:.2f}"))


if __name__ == "__main__":
    main()
