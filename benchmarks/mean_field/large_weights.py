"""Mean field at large initialisations: its error over all seeds and over eight, and the scatter of single networks.

    python benchmarks/mean_field/large_weights.py --cache DIRECTORY [--cases llama_128_4_0.1] [--markdown FILE]

A case is model type, width, layers, initializer_range and, after a stroke, heads (default width / 32). Columns: logit
variance; W1 of the flat line; W1 of mean field (2000 heads) to the root mean square over all seeds with its 95 %
bootstrap interval, and how far resampled seeds lie from all (95 % of them); the same W1 with eight seeds; distance of
one network, measured and predicted; W1 to the mean of the normalised profiles: of mean field, of 48 networks of few
heads.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from families import Case, gpt2_like, llama_like
from run import distance

from measurement import fresh_model, measure
from posbias.theory.mean_field import mean_field, network_profiles, spec_of
from posbias.theory.mean_field.prediction import scatter

SEEDS = {
    "llama_64_4_0.1": 256,
    "llama_64_4_0.2": 192,
    "llama_64_8_0.1": 192,
    "llama_128_4_0.07": 256,
    "llama_128_4_0.1": 256,
    "llama_128_4_0.1/16": 96,
    "llama_128_8_0.07": 192,
    "llama_128_8_0.1": 192,
    "llama_256_4_0.05": 64,
    "llama_256_4_0.07": 96,
    "llama_256_4_0.1": 96,
    "llama_256_8_0.05": 48,
    "gpt2_128_4_0.07": 256,
    "gpt2_128_4_0.1": 256,
}
N, FEW, NETWORKS = 128, 8, 48


def main() -> None:
    """Print the table and write it as Markdown if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="directory for measured seeds")
    parser.add_argument("--cases", default=",".join(SEEDS), help="comma-separated names; default all")
    parser.add_argument("--markdown", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    for name in options.cases.split(","):
        lines.append("| " + " | ".join([name, str(SEEDS[name]), *cells(case_of(name), options.cache)]) + " |")
        print(lines[-1], flush=True)
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


def case_of(name: str) -> Case:
    """The case of a name."""
    sizes, _, heads = name.partition("/")
    model_type, width, layers, deviation = sizes.split("_")
    count = int(heads or int(width) // 32)
    common = {"initializer_range": float(deviation), "vocab_size": 512}
    if model_type == "gpt2":
        settings = gpt2_like(n_embd=int(width), n_head=count, n_layer=int(layers), n_positions=256, **common)
    else:
        shared = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), count)
        sized = {"hidden_size": int(width), "intermediate_size": 4 * int(width), "num_hidden_layers": int(layers)}
        settings = llama_like(**shared, **sized, **common)
    return Case(name.replace("/", "-"), model_type, N, SEEDS[name], ("sampled(heads=2000)",), settings)


def cells(case: Case, cache: Path) -> list[str]:
    """The row of a case."""
    squares = measure(case, cache).squares
    spec = spec_of(fresh_model(case, 0))
    theory = mean_field(spec, N, level=case.levels[0])
    norms, whole = np.sqrt(squares), np.sqrt(squares.mean(axis=0))
    profiles, networks = norms / norms.sum(axis=1, keepdims=True), network_profiles(spec, N, count=NETWORKS)
    samples = np.random.default_rng(0).integers(0, len(squares), size=(300, len(squares)))
    drawn = [np.sqrt(squares[sample].mean(axis=0)) for sample in samples]
    low, high = np.quantile([distance(theory.jacobian_norm, norm) for norm in drawn], (0.025, 0.975))
    few = [np.sqrt(squares[first : first + FEW].mean(axis=0)) for first in range(0, len(squares) - FEW + 1, FEW)]
    numbers = [
        distance(np.ones(N), whole),
        distance(theory.jacobian_norm, whole),
        np.quantile([distance(norm, whole) for norm in drawn], 0.95),
        np.mean([distance(theory.jacobian_norm, norm) for norm in few]),
        scatter(profiles),
        scatter(networks),
        distance(theory.jacobian_norm, profiles.mean(axis=0)),
        distance(networks.mean(axis=0), profiles.mean(axis=0)),
    ]
    texts = [f"{number:.4f}" for number in numbers]
    texts[1] += f" [{low:.4f}, {high:.4f}]"
    return [f"{theory.logit_variance.max():.2g}", *texts]


if __name__ == "__main__":
    main()
