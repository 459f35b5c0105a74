"""Theories beside measured Jacobians on born models with linear layers, and the pattern of layers that is flattest.

`python studies/linear_layers/run.py` prints both tables of the study; half an hour on one core, less with fewer seeds:
`--seeds 2` for the first table, `--pattern-seeds 2` for the second, `--families lfm2` for rows of the first.
"""

import argparse
import warnings
from collections.abc import Iterable

import numpy as np
import torch
import transformers

import posbias as pb
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.prompts.prompts import Prompts

N, VOCABULARY, WIDTH, DEPTH = 96, 200, 128, 6
KIND = "jacobian(probes=8)"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY}
BASE = {
    **SPECIAL,
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
THIRD = ["linear_attention", "linear_attention", "full_attention"] * 2
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "layer_types": THIRD,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
FAMILIES = {
    "mamba2": lambda: transformers.Mamba2Config(
        **SPECIAL, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_heads=8, head_dim=32, state_size=16, n_groups=1
    ),
    "qwen3_5_text": lambda: transformers.Qwen3_5TextConfig(**BASE, **DELTA, head_dim=32),
    "bamba": lambda: transformers.BambaConfig(**BASE, **MAMBA, attn_layer_indices=[2, 5]),
    "recurrent_gemma": lambda: transformers.RecurrentGemmaConfig(
        **{**BASE, "num_key_value_heads": 1}, lru_width=WIDTH, attention_window_size=32
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **BASE, layer_types=["conv", "conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**BASE, **DELTA),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **{**BASE, **MAMBA, **GRANITE, "intermediate_size": 128},
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        layers_block_type=THIRD,
    ),
}
THEORIES = ("power_rollout", "mean_field", "rollout")
PATTERNS = ([], [0], [5], [0, 1], [4, 5], [1, 3, 5], list(range(DEPTH)))


def prompt(seed: int) -> Prompts:
    """Distinct random tokens."""
    return Prompts(np.random.default_rng(seed).permutation(np.arange(3, VOCABULARY))[None, :N])


@torch.no_grad()
def born(config: object, seed: int, *, larger: float = 1.0) -> HuggingFaceModel:
    """The family's own initialisation, with matrices so many times larger and norms moved then."""
    network = random_network(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters() if larger != 1 else ():
        if parameter.ndim >= 2 and "embed" not in name and "A_log" not in name:
            parameter.mul_(larger)
        elif parameter.ndim == 1 and "norm" in name:
            parameter.add_(0.25 * torch.randn(parameter.shape, generator=generator))
    return HuggingFaceModel(network, origin=Origin("born", init_seed=seed))


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """W1 over positions scaled to [0, 1]."""
    return float(np.abs(np.cumsum(first - second)).sum() / (N - 1))


def theories(names: Iterable[str], seeds: Iterable[int]) -> None:
    """W1 of every theory and of the flat line to the mean of measured profiles, beside that of their halves."""
    for name in names:
        config = FAMILIES[name]
        for larger in (1.0, 4.0):
            rows = []
            for seed in seeds:
                model, read = born(config(), seed, larger=larger), prompt(seed)
                measured = next(iter(pb.measure(model, read, kinds=KIND).profiles.values()))
                predictions = [pb.predict(model, theory=theory, prompts=read) for theory in THEORIES]
                rows.append([measured.influence, *(prediction.profile.influence for prediction in predictions)])
            profiles = np.array(rows)
            mean, *predicted = profiles.mean(0)
            half = len(profiles) // 2
            noise = distance(profiles[:half, 0].mean(0), profiles[half:, 0].mean(0))
            others = [distance(mean, other) for other in (*predicted, np.full(N, 1 / N))]
            print(
                f"| {name} | {larger:g} | {' | '.join(f'{value:.4f}' for value in others)} | {noise:.4f} |", flush=True
            )


def patterns(seeds: Iterable[int]) -> None:
    """The measured profile of Bamba at birth by the layers that have attention."""
    for attention in PATTERNS:
        profiles = []
        for seed in seeds:
            config = transformers.BambaConfig(**BASE, **MAMBA, attn_layer_indices=attention, initializer_range=0.06)
            measured = pb.measure(born(config, seed), prompt(seed), kinds=KIND)
            profiles.append(next(iter(measured.profiles.values())).influence)
        rows = np.array(profiles)
        shares = [rows[:, first : first + 10].sum(1) for first in (0, 43, 86)]
        cells = [f"{share.mean():.4f} ± {share.std(ddof=1) / len(rows) ** 0.5:.4f}" for share in shares]
        flat = distance(rows.mean(0), np.full(N, 1 / N))
        print(f"| {attention or 'none'} | {flat:.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--pattern-seeds", type=int, default=6)
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="mean field")
    theories(arguments.families, range(arguments.seeds))
    if arguments.pattern_seeds:
        patterns(range(arguments.pattern_seeds))
