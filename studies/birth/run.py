"""Where untrained models have their influence: 14 families at two sizes by mean field, six measured, and what decides.

`python studies/birth/run.py` writes `mean_field.csv`, `variations.csv` and `measured.csv`, in twenty minutes on one
core; `--only mean_field --families gpt2 bloom` a part.
"""

import argparse
import csv
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from jaxtyping import Float64

import posbias as pb
from posbias.comparison.distances import Sample, summarise
from posbias.comparison.metrics import STATISTICS, wasserstein
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.networks import random_network
from posbias.profiles import Profile
from posbias.prompts.prompts import Prompts
from posbias.theory import closed_form, continuous_profile
from posbias.theory.mean_field import spec_of
from posbias.theory.mean_field.bins import Kernel, unit_bins
from posbias.theory.mean_field.prediction import resolve_level
from posbias.theory.mean_field.recursion import (
    Forward,
    Level,
    SampledHeads,
    Setting,
    input_kernel,
    run_backward,
    run_forward,
)
from posbias.theory.mean_field.spec import (
    AttentionSpec,
    LayerSpec,
    LinearSpec,
    MeanFieldSpec,
    MlpSpec,
    NormSpec,
)

HERE = Path(__file__).resolve().parent
PLACEMENTS = {"pre": (True, False), "output": (False, True), "sandwich": (True, True)}
"""Norms before a branch and on its output."""
N, HEADS, PROBES = 256, 32, 2
VOCABULARY = {"vocab_size": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
"""The profile knows the embeddings' mean square alone, so that a small vocabulary serves."""
TRIAL_MIXINGS = np.geomspace(0.005, 0.9, 120)
SHARES = ("first_tenth", "middle_tenth", "last_tenth", "last_token", "interior_recency", "last_over_middle")


def _hidden(width: int, depth: int, heads: int, inner: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    return {**VOCABULARY, **dict(zip(names, (width, depth, heads, inner), strict=True)), **more}


def _gpt2(width: int, depth: int, heads: int, **more: Any) -> transformers.GPT2Config:
    return transformers.GPT2Config(**VOCABULARY, n_embd=width, n_layer=depth, n_head=heads, **more)


def _qwen2(width: int, depth: int, heads: int, inner: int, keys: int = 2, **more: Any) -> transformers.Qwen2Config:
    return transformers.Qwen2Config(**_hidden(width, depth, heads, inner, num_key_value_heads=keys, **more))


def _neox(width: int, depth: int, heads: int) -> transformers.GPTNeoXConfig:
    return transformers.GPTNeoXConfig(**_hidden(width, depth, heads, 4 * width, rotary_pct=0.25))


def _bloom(width: int, depth: int, heads: int) -> transformers.BloomConfig:
    return transformers.BloomConfig(**VOCABULARY, hidden_size=width, n_layer=depth, n_head=heads)


def _mpt(width: int, depth: int, heads: int) -> transformers.MptConfig:
    return transformers.MptConfig(**VOCABULARY, d_model=width, n_layers=depth, n_heads=heads)


def _granite(width: int, heads: int, inner: int, logits: float, keys: int = 8) -> transformers.GraniteConfig:
    factors = {"embedding_multiplier": 12.0, "attention_multiplier": heads / width, "residual_multiplier": 0.22}
    return transformers.GraniteConfig(
        **_hidden(width, 40, heads, inner, num_key_value_heads=keys, logits_scaling=logits, **factors)
    )


def _qwen3(width: int, inner: int) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(**_hidden(width, 28, 16, inner, num_key_value_heads=8, head_dim=128))


def _llama(width: int, depth: int, heads: int, inner: int, keys: int, std: float) -> transformers.LlamaConfig:
    shape = _hidden(width, depth, heads, inner, num_key_value_heads=keys)
    return transformers.LlamaConfig(**shape, rms_norm_eps=1e-5, initializer_range=std)


def _opt(width: int, depth: int, heads: int) -> transformers.OPTConfig:
    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    return transformers.OPTConfig(**VOCABULARY, **shape, ffn_dim=4 * width, word_embed_proj_dim=width)


def _phi(width: int, depth: int, part: float) -> transformers.PhiConfig:
    return transformers.PhiConfig(**_hidden(width, depth, 32, 4 * width, partial_rotary_factor=part))


def _gemma(width: int, depth: int, heads: int, keys: int, inner: int) -> transformers.GemmaConfig:
    return transformers.GemmaConfig(**_hidden(width, depth, heads, inner, num_key_value_heads=keys, head_dim=256))


def _gemma3(width: int, depth: int, inner: int) -> transformers.Gemma3TextConfig:
    shape = _hidden(width, depth, 4, inner, num_key_value_heads=1, head_dim=256, query_pre_attn_scalar=256)
    return transformers.Gemma3TextConfig(**shape, sliding_window=512)


def _olmo2(width: int, depth: int, inner: int) -> transformers.Olmo2Config:
    return transformers.Olmo2Config(**_hidden(width, depth, width // 128, inner, rms_norm_eps=1e-6))


def _falcon(width: int, depth: int, heads: int, **more: Any) -> transformers.FalconConfig:
    shape = {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
    return transformers.FalconConfig(**VOCABULARY, **shape, **more)


MODELS: dict[str, dict[str, Callable[[], Any]]] = {
    "gpt2": {"GPT-2 small": lambda: _gpt2(768, 12, 12), "GPT-2 medium": lambda: _gpt2(1024, 24, 16)},
    "gpt_neox": {"Pythia 160M": lambda: _neox(768, 12, 12), "Pythia 410M": lambda: _neox(1024, 24, 16)},
    "bloom": {"BLOOM 560M": lambda: _bloom(1024, 24, 16), "BLOOM 1.7B": lambda: _bloom(2048, 24, 16)},
    "mpt": {"MPT 125M": lambda: _mpt(768, 12, 12), "MPT 1B": lambda: _mpt(2048, 24, 16)},
    "granite": {
        "Granite 3.1 2B": lambda: _granite(2048, 32, 8192, 8.0),
        "Granite 3.1 8B": lambda: _granite(4096, 32, 12800, 16.0),
    },
    "qwen2": {
        "Qwen2 0.5B": lambda: _qwen2(896, 24, 14, 4864),
        "Qwen2 1.5B": lambda: _qwen2(1536, 28, 12, 8960),
    },
    "qwen3": {"Qwen3 0.6B": lambda: _qwen3(1024, 3072), "Qwen3 1.7B": lambda: _qwen3(2048, 6144)},
    "llama": {
        "SmolLM2 135M": lambda: _llama(576, 30, 9, 1536, 3, 1 / 24),
        "Llama 3.2 1B": lambda: _llama(2048, 16, 32, 8192, 8, 0.02),
    },
    "opt": {"OPT 125M": lambda: _opt(768, 12, 12), "OPT 1.3B": lambda: _opt(2048, 24, 32)},
    "phi": {"Phi 1.5": lambda: _phi(2048, 24, 0.5), "Phi 2": lambda: _phi(2560, 32, 0.4)},
    "gemma": {
        "Gemma 2B": lambda: _gemma(2048, 18, 8, 1, 16384),
        "Gemma 7B": lambda: _gemma(3072, 28, 16, 16, 24576),
    },
    "gemma3_text": {"Gemma 3 270M": lambda: _gemma3(640, 18, 2048), "Gemma 3 1B": lambda: _gemma3(1152, 26, 6912)},
    "olmo2": {"OLMo 2 1B": lambda: _olmo2(2048, 16, 8192), "OLMo 2 7B": lambda: _olmo2(4096, 32, 11008)},
    "falcon": {
        "Falcon RW 1B": lambda: _falcon(2048, 24, 32, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        "Falcon 7B": lambda: _falcon(4544, 32, 71),
    },
}
"""Published shapes and initialiser ranges; the vocabulary alone is smaller."""
MEASURED: dict[str, Callable[[], Any]] = {
    "GPT-2 small": MODELS["gpt2"]["GPT-2 small"],
    "Pythia 160M, width 384": lambda: _neox(384, 12, 6),
    "MPT 125M, width 384": lambda: _mpt(384, 12, 8),
    "BLOOM 560M, width 512": lambda: _bloom(512, 24, 8),
    "Granite 3.1 2B, width 256": lambda: _granite(256, 4, 1024, 8.0, keys=2),
    "Qwen2 0.5B, width 448": lambda: _qwen2(448, 24, 7, 2432, keys=1),
}
"""Published depths; narrower than published where that took too long."""


def drawn(config: Any, seed: int) -> HuggingFaceModel:
    """A model with the weights of the family's own initialiser."""
    return HuggingFaceModel(random_network(config, seed=seed), origin=Origin("born", init_seed=seed))


def describe(config: Any) -> MeanFieldSpec:
    """The model's description: one layer is drawn and stands for all."""
    depth, config.num_hidden_layers = config.num_hidden_layers, 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]  # windows of 512 hide nothing of 256 positions
    spec = spec_of(drawn(config, 0))
    if config.model_type == "gpt2":  # which draws what writes to the stream with variances over the depth
        spec = _outputs(spec, 1 / depth)
    return replace(spec, layers=spec.layers * depth)


def _outputs(spec: MeanFieldSpec, factor: float) -> MeanFieldSpec:
    """What branches write to the stream, its variance so many times larger."""

    def scaled(linear: LinearSpec) -> LinearSpec:
        return replace(linear, variance=linear.variance * factor)

    layers = []
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        assert attention is not None
        assert isinstance(mlp, MlpSpec)
        attention, mlp = replace(attention, output=scaled(attention.output)), replace(mlp, down=scaled(mlp.down))
        layers.append(replace(layer, attention=attention, mlp=mlp))
    return replace(spec, layers=tuple(layers))


def gains(spec: MeanFieldSpec, forward: Forward, setting: Setting) -> Float64[np.ndarray, "layer"]:
    """Energy that each attention branch carries down, beside all else that its step does: g^2 / s^2 of docs/theory.

    All else is the stream, and an MLP that reads the same stream (parallel blocks).
    """

    def through(norm: NormSpec | None, power: float) -> float:
        return 1.0 if norm is None else norm.gain / (power + norm.epsilon)

    ones = Kernel(np.ones((setting.bins.count,) * 2), np.ones(setting.bins.count))
    values = []
    for step in forward.steps:
        attention, beside = None, 1.0
        for branch in step:
            part = branch.spec
            norms = through(part.pre_norm, branch.stream.same[-1]) * through(part.post_norm, branch.output.same[-1])
            if isinstance(part, AttentionSpec):
                maps = part.value.variance * spec.width * part.output.variance * part.heads * part.value_dim
                attention = maps * norms
            else:
                beside += norms * part.backward(setting.width, branch.x, ones).same[-1]
        if attention is not None:
            values.append(np.divide(attention, beside))
    return np.array(values)


def mixings(forward: Forward) -> Float64[np.ndarray, "layer"]:
    """|a| / (|x| + |a|) of each attention branch, the mean over positions."""
    values = []
    for branch in (branch for step in forward.steps for branch in step):
        if isinstance(part := branch.spec, AttentionSpec):
            output = branch.output if part.post_norm is None else part.post_norm.forward(branch.output)
            size = np.sqrt(output.same)
            values.append(float((size / (np.sqrt(branch.stream.same) + size)).mean()))
    return np.array(values)


def shares(profile: Float64[np.ndarray, "n_positions"]) -> dict[str, float]:
    """The tenths, the last position alone, the last tenth without it, and whether that rises above the middle."""
    return {name: float(STATISTICS[name](profile)) for name in SHARES}


@dataclass(frozen=True, eq=False)
class Born:
    """A description with its profile and the sizes of its branches."""

    spec: MeanFieldSpec
    influence: Float64[np.ndarray, "n_positions"]
    gains: Float64[np.ndarray, "layer"]
    mixings: Float64[np.ndarray, "layer"]

    @classmethod
    def of(cls, spec: MeanFieldSpec, n_positions: int) -> "Born":
        """Mean field of a description, all tokens different; heads are sampled where logits are large."""
        level: Level = resolve_level(spec, "auto", n_positions)
        if isinstance(level, SampledHeads):
            level = SampledHeads(HEADS)
        bins = unit_bins(n_positions)
        setting = Setting(bins, spec.width, np.random.default_rng(0))
        forward = run_forward(spec, input_kernel(spec, bins), level, setting)
        profile = Profile.normalised(np.sqrt(run_backward(spec, forward, level, setting).same))
        return cls(spec, profile.influence, gains(spec, forward, setting), mixings(forward))

    def row(self) -> dict[str, Any]:
        """Shares and sizes, and the published density: its W1, and its atom beside the last position's share."""
        n_positions, depth = len(self.influence), len(self.mixings)
        trials = [continuous_profile(n_positions, np.full(depth, trial)) for trial in TRIAL_MIXINGS]
        fits = np.array([float(wasserstein(trial, self.influence)) for trial in trials])
        fitted = float(TRIAL_MIXINGS[fits.argmin()])
        exact = closed_form(n_positions, np.arange(n_positions), self.mixings)
        return {
            **shares(self.influence),
            "layers": depth,
            "width": self.spec.width,
            "first_gain": float(self.gains[0]),
            "mixing": float(self.mixings.mean()),
            "atom": float(np.prod(1 - self.mixings)),
            "w1_own_mixing": float(wasserstein(exact, self.influence)),
            "fitted_mixing": fitted,
            "fitted_atom": float((1 - fitted) ** depth),
            "w1_fitted": float(fits.min()),
            "w1_flat": float(wasserstein(np.full(n_positions, 1 / n_positions), self.influence)),
        }


def by_mean_field(families: Iterable[str], n_positions: int) -> list[dict[str, Any]]:
    """One row for each model."""
    rows = []
    for family in families:
        for name, config in MODELS[family].items():
            row = {"family": family, "model": name, **Born.of(describe(config()), n_positions).row()}
            report(row)
            rows.append(row)
    return rows


def measured(models: Mapping[str, Callable[[], Any]], n_positions: int, seeds: int) -> list[dict[str, Any]]:
    """Jacobians of drawn networks, each with distinct random tokens of its own, beside mean field."""
    rows = []
    for name, config in models.items():
        profiles = []
        for seed in range(seeds):
            tokens = np.random.default_rng(seed).permutation(np.arange(3, VOCABULARY["vocab_size"]))[:n_positions]
            run = pb.measure(drawn(config(), seed), Prompts(tokens[None]), kinds=f"jacobian(probes={PROBES})")
            profiles.append(next(iter(run.profiles.values())).influence)
        sample = Sample.of(np.array(profiles))
        summary = summarise(sample, generator=np.random.default_rng(0))
        predicted = Born.of(describe(config()), n_positions).influence
        row: dict[str, Any] = {"model": name, "seeds": seeds}
        for share in SHARES:
            interval = summary[share]
            row |= {share: interval.value, f"{share}_low": interval.low, f"{share}_high": interval.high}
            row[f"{share}_mean_field"] = shares(predicted)[share]
        row["w1_mean_field"] = float(wasserstein(predicted, sample.average))
        row["w1_flat"] = float(wasserstein(np.full(n_positions, 1 / n_positions), sample.average))
        report(row)
        rows.append(row)
    return rows


def _larger(spec: MeanFieldSpec, factor: float) -> MeanFieldSpec:
    """The vectors that enter the first block, so many times larger."""
    return replace(spec, embedding=spec.embedding * factor**2, positions=spec.positions * factor**2)


def _without_mlp(spec: MeanFieldSpec) -> MeanFieldSpec:
    return replace(spec, layers=tuple(replace(layer, mlp=None) for layer in spec.layers))


def _attending(spec: MeanFieldSpec, other: MeanFieldSpec) -> MeanFieldSpec:
    """A description with the masks and encodings of another's heads."""
    given = other.layers[0].attention
    assert given is not None

    def attention(layer: LayerSpec) -> AttentionSpec:
        assert layer.attention is not None
        return replace(layer.attention, mask=given.mask, encoding=given.encoding)

    return replace(spec, layers=tuple(replace(layer, attention=attention(layer)) for layer in spec.layers))


def _with_norms(spec: MeanFieldSpec, placement: str) -> MeanFieldSpec:
    """A decoder of pre-norm with its norms moved."""

    def moved(branch: Any) -> Any:
        before, after = (branch.pre_norm if there else None for there in PLACEMENTS[placement])
        return replace(branch, pre_norm=before, post_norm=after)

    layers = tuple(replace(layer, attention=moved(layer.attention), mlp=moved(layer.mlp)) for layer in spec.layers)
    return replace(spec, layers=layers)


def variations() -> dict[tuple[str, str, str], Callable[[], MeanFieldSpec]]:
    """Base, what is changed, its value: one thing at a time."""
    bases: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "GPT-2 small": (_gpt2, (768, 12, 12)),
        "Qwen2 0.5B": (_qwen2, (896, 24, 14, 4864)),
    }
    rows: dict[tuple[str, str, str], Callable[[], MeanFieldSpec]] = {}
    for base, (make, (width, depth, *rest)) in bases.items():
        whole = describe(make(width, depth, *rest))
        for std in (0.005, 0.01, 0.02, 0.04):
            rows[base, "initializer_range", f"{std:g}"] = lambda m=make, a=(width, depth, *rest), s=std: describe(
                m(*a, initializer_range=s)
            )
        for factor in (0.25, 1, 4, 16, 64):
            rows[base, "embeddings times", f"{factor:g}"] = lambda w=whole, f=factor: _larger(w, f)
        for layers in (3, 6, 12, 24, 48):
            rows[base, "layers", str(layers)] = lambda m=make, a=(width, layers, *rest): describe(m(*a))
        for placement in PLACEMENTS:
            rows[base, "norms", placement] = lambda w=whole, p=placement: _with_norms(w, p)
        rows[base, "MLPs", "without"] = lambda w=whole: _without_mlp(w)
    for width, heads in ((256, 4), (512, 8), (896, 14), (1536, 24)):
        rows["Qwen2 0.5B", "width", str(width)] = lambda w=width, h=heads: describe(
            _qwen2(w, 24, h, int(w * 4864 / 896))
        )
    rows["MPT 125M", "ALiBi", "with"] = lambda: describe(_mpt(768, 12, 12))
    rows["MPT 125M", "ALiBi", "without"] = lambda: _attending(describe(_mpt(768, 12, 12)), describe(_gpt2(768, 1, 12)))
    return rows


def varied(n_positions: int) -> list[dict[str, Any]]:
    """One row for each variation."""
    rows = []
    for (base, what, value), make in variations().items():
        with np.errstate(divide="ignore"):
            row = {"base": base, "varied": what, "value": value, **Born.of(make(), n_positions).row()}
        report(row)
        rows.append(row)
    return rows


def report(row: Mapping[str, Any]) -> None:
    """One row on the terminal."""
    cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()]
    print("| " + " | ".join(cells) + " |", flush=True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rows as a file of comma-separated values, four digits each."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()})


PARTS: dict[str, Callable[[argparse.Namespace], list[dict[str, Any]]]] = {
    "mean_field": lambda chosen: by_mean_field(chosen.families, chosen.positions),
    "variations": lambda chosen: varied(chosen.positions),
    "measured": lambda chosen: measured(MEASURED, chosen.positions, chosen.seeds),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--families", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--positions", type=int, default=N)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="mean field")
    for part, make in PARTS.items():
        if arguments.only in (None, part):
            write(arguments.out / f"{part}.csv", make(arguments))
