"""Theories beside measured Jacobians on born models with linear layers, by the layers that have attention.

`python studies/linear_layers/run.py` prints two tables, `theories` and `patterns`, and writes `places.csv` and its
table on the page; an hour on one core. `--only theories --families lfm2` does a part of it.
"""

import argparse
import csv
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import posbias as pb
from posbias.comparison import compare_with_prompts
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
THIRD = (2, 5)
PLACES = ((), (0,), (0, 1), (0, 3), THIRD, tuple(range(DEPTH)))
"""Layers that have attention; the others are linear."""


def types(attention: Sequence[int], linear: str = "linear_attention", full: str = "full_attention") -> list[str]:
    """The sort of every layer."""
    return [full if layer in attention else linear for layer in range(DEPTH)]


DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4}
FAMILIES: dict[str, Callable[[Sequence[int]], Any]] = {
    "mamba2": lambda _: transformers.Mamba2Config(
        **SPECIAL, hidden_size=WIDTH, num_hidden_layers=DEPTH, num_heads=8, head_dim=32, state_size=16, n_groups=1
    ),
    "qwen3_5_text": lambda attention: transformers.Qwen3_5TextConfig(
        **BASE, **DELTA, head_dim=32, layer_types=types(attention)
    ),
    "bamba": lambda attention: transformers.BambaConfig(**BASE, **MAMBA, attn_layer_indices=list(attention)),
    "recurrent_gemma": lambda attention: transformers.RecurrentGemmaConfig(
        **{**BASE, "num_key_value_heads": 1},
        lru_width=WIDTH,
        attention_window_size=32,
        block_types=types(attention, "recurrent", "attention"),
    ),
    "lfm2": lambda attention: transformers.Lfm2Config(
        **BASE, layer_types=types(attention, "conv"), block_auto_adjust_ff_dim=False
    ),
    "olmo_hybrid": lambda attention: transformers.OlmoHybridConfig(**BASE, **DELTA, layer_types=types(attention)),
    "granitemoehybrid": lambda attention: transformers.GraniteMoeHybridConfig(
        **{**BASE, **MAMBA, **GRANITE, "intermediate_size": 128},
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        layers_block_type=types(attention),
    ),
    "jamba": lambda attention: transformers.JambaConfig(
        **BASE,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        attn_layer_offset=attention[0] if attention else DEPTH,
        attn_layer_period=attention[1] - attention[0] if len(attention) > 1 else DEPTH + 1,
    ),
}
IMPOSSIBLE = {"mamba2": PLACES, "olmo_hybrid": (PLACES[0], PLACES[-1]), "jamba": ((0, 1),)}
"""Places that a family's configuration does not allow."""
FIRST_TWO = ((0, 1), (0, 3))
"""Places that are judged beside mean field, and with larger matrices, too; the first that a family has."""
THEORIES = ("power_rollout", "mean_field", "rollout")
PATTERNS = ([], [0], [5], [0, 1], [4, 5], [1, 3, 5], list(range(DEPTH)))
LARGER = (1.0, 4.0)
"""How many times larger matrices are than at birth."""
PLACES_SHEET, PAGE = (Path(__file__).parent / name for name in ("places.csv", "README.md"))


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
        for larger in LARGER:
            rows = []
            for seed in seeds:
                model, read = born(FAMILIES[name](THIRD), seed, larger=larger), prompt(seed)
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


HEAD = ("family", "larger", "attention in", "seeds")
HEAD += tuple(f"{name}{end}" for name in ("power rollout", "flat", "less flat") for end in ("", ", low", ", high"))
HEAD += ("noise", "mean field")


def places(names: Iterable[str], seeds: Sequence[int]) -> list[dict[str, str]]:
    """A line of `places.csv` for every family, size of matrices and set of layers with attention."""
    lines = []
    for larger, name, attention in itertools.product(LARGER, names, PLACES):
        first = next((each for each in FIRST_TWO if each not in IMPOSSIBLE.get(name, ())), ())
        if attention in IMPOSSIBLE.get(name, ()) or (larger > 1 and attention != first):
            continue
        rows = []
        for seed in seeds:
            model, read = born(FAMILIES[name](attention), seed, larger=larger), prompt(seed)
            measured = next(iter(pb.measure(model, read, kinds="jacobian(probes=2)").profiles.values()))
            rows.append([measured.influence, pb.predict(model, theory="power_rollout", prompts=read).profile.influence])
        measured, predicted = np.swapaxes(rows, 0, 1)
        power = compare_with_prompts(predicted, measured, generator=np.random.default_rng(0))
        values = [
            end for each in (power.distance, power.flat, power.difference) for end in (each.value, each.low, each.high)
        ]
        values.append(power.noise.mean)
        if attention == first and larger == 1:
            model, read = born(FAMILIES[name](attention), 0), prompt(0)
            field = pb.predict(model, theory="mean_field", prompts=read).profile.influence
            values.append(distance(measured.mean(0), field))
        told = [name, f"{larger:g}", places_name(attention), str(len(rows)), *(f"{value:.4f}" for value in values)]
        lines.append(dict(itertools.zip_longest(HEAD, told, fillvalue="")))
        print(*told, flush=True)
    return lines


def places_name(attention: Sequence[int]) -> str:
    """Layers as tables have them."""
    return "all" if len(attention) == DEPTH else " ".join(map(str, attention)) or "none"


def places_table(lines: Sequence[dict[str, str]]) -> str:
    """Markdown at the families' own initialisation: W1 of the power rollout / of the flat line (/ of mean field)."""
    names = [places_name(attention) for attention in PLACES]
    rows = ["| family | " + " | ".join(names) + " |", "|" + "---|" * (1 + len(names))]
    for family in FAMILIES:
        cells = []
        for name in names:
            line = next((each for each in lines if [each[key] for key in HEAD[:3]] == [family, "1", name]), None)
            cells.append("" if line is None else _cell(line))
        if any(cells):
            rows.append(f"| {family} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(line: dict[str, str]) -> str:
    """Bold where the power rollout is nearer than the flat line by its interval."""
    power, *others = (
        f"{float(line[key]):.3f}".lstrip("0") for key in ("power rollout", "flat", "mean field") if line[key]
    )
    return "/".join([f"**{power}**" if float(line["less flat, high"]) < 0 else power, *others])


def with_table(page: str, lines: Sequence[dict[str, str]]) -> str:
    """The page with its table of `places.csv`."""
    before, rest = page.split("<!-- table places -->\n")
    _, after = rest.split("<!-- end of table -->", 1)
    return f"{before}<!-- table places -->\n{places_table(lines)}\n<!-- end of table -->{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="of `theories`")
    parser.add_argument("--more-seeds", type=int, default=6, help="of `patterns` and `places`")
    parser.add_argument("--only", choices=("theories", "patterns", "places"))
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="mean field")
    if given.only in (None, "theories"):
        theories(given.families, range(given.seeds))
    if given.only in (None, "patterns"):
        patterns(range(given.more_seeds))
    if given.only in (None, "places"):
        lines = places(given.families, range(given.more_seeds))
        with PLACES_SHEET.open("w", newline="") as sheet:
            writer = csv.DictWriter(sheet, HEAD, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        PAGE.write_text(with_table(PAGE.read_text(), lines))


if __name__ == "__main__":
    main()
