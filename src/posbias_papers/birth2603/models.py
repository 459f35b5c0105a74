"""The untrained models of arXiv 2603.10123 measured and predicted: Qwen2 with and without RoPE, GPT-2, 24 layers each.

Models come from configurations alone, one per seed, drawn by the model classes' own initialisers. A case is a model on
one sort of tokens; all are measured over the same seeds. With and without RoPE share weights, prompts and probes, so
that their difference is RoPE's alone.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.checks import CELLS, Count, Natural, OneOf, checked
from posbias.comparison import Sample
from posbias.comparison.metrics import wasserstein
from posbias.errors import UsageError, check_most
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import combine
from posbias.measurement.prompt import PromptMeasurement, measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts, TokenModel
from posbias.theory import closed_form, continuous_profile, predict
from posbias.theory.mean_field import mean_field

TOKENS = ("random", "text")
TOKENIZERS = ("bytes", "demo")
FAMILIES = ("qwen2", "gpt2")
DEPTH = 24


def _qwen2(depth: int, width: int, inner: int, heads: tuple[int, int], vocabulary: int) -> dict[str, Any]:
    """Heads of queries, and of keys and values."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "num_hidden_layers": depth,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocabulary,
    }


def _gpt2(depth: int, width: int, heads: int, positions: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": depth,
        "bos_token_id": None,
        "eos_token_id": None,
        "n_embd": width,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocabulary,
    }


SIZES = {
    "tiny": {"qwen2": _qwen2(4, 32, 96, (2, 1), 1024), "gpt2": _gpt2(4, 32, 2, 1024, 1024)},
    "small": {"qwen2": _qwen2(DEPTH, 256, 1408, (4, 1), 50257), "gpt2": _gpt2(DEPTH, 256, 4, 4096, 50257)},
    "full": {"qwen2": _qwen2(DEPTH, 896, 4864, (14, 2), 151936), "gpt2": _gpt2(DEPTH, 1024, 16, 1024, 50257)},
}
"""`full` is Qwen2-0.5B and GPT-2 medium; `small` keeps depth and head size; `tiny` (4 layers) is for trying out."""


@checked
@dataclass(frozen=True)
class BirthSettings:
    """Settings of `reproduce birth-2603.10123`."""

    size: Annotated[str, OneOf(*SIZES)] = "small"
    """"small" (d = 256), "full" (Qwen2-0.5B and GPT-2 medium) or "tiny" (4 layers, d = 32)."""
    n_positions: Annotated[int, Ge(20)] = 256
    """Context length N, >= 20 so that the last tenth has an interior."""
    initialisations: Annotated[Count, Ge(2)] = 8
    """Random initialisations, each with a prompt of its own, >= 2."""
    probes: Count = 8
    """Rademacher probes per Jacobian, >= 1."""
    seed: Natural = 0
    """Initialisation k is drawn with seed + k; prompts, probes and bootstrap follow it too."""
    tokenizer: Annotated[str, OneOf(*TOKENIZERS)] = "bytes"
    """How the corpus text becomes token ids: "bytes", or "demo" for the demo model's tokenizer (fetched if missing)."""

    def __post_init__(self) -> None:
        check_most("initialisations x n_positions", self.initialisations * self.n_positions, CELLS)

    def describe(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**asdict(self), "models": SIZES[self.size]}


class ByteTokenizer:
    """UTF-8 bytes as token ids; as much of a tokenizer as prompts ask of one."""

    def __call__(
        self,
        text: str | list[str],
        *,
        add_special_tokens: bool = True,
        return_attention_mask: bool = True,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Token ids of a text, or of each text of a list; there are no special tokens."""
        texts = [text] if isinstance(text, str) else text
        token_ids = [list(entry.encode()) for entry in texts]
        return {"input_ids": token_ids[0] if isinstance(text, str) else token_ids}

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool = False) -> str:
        """The text of bytes, of which a window may cut a character."""
        return bytes(token_ids).decode(errors="replace")


@dataclass
class Bytes:
    """A `TokenModel` for prompts of bytes."""

    tokenizer: Any
    vocabulary_size: int = 256
    max_positions: int | None = None


def untrained(family: str, size: str, *, seed: int, dtype: str = "float32") -> HuggingFaceModel:
    """A model with freshly drawn weights."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / f"{family}-{size}.json"
        path.write_text(json.dumps(SIZES[size][family]))
        model = load_model(f"config:{path}", init_seed=seed, dtype=dtype, device="cpu")
        assert isinstance(model, HuggingFaceModel)  # made from a transformers configuration
        return model


def birth_prompts(settings: BirthSettings, tokens: str) -> dict[str, Prompts]:
    """One prompt per initialisation for every family: random token ids, or windows of the default corpus."""
    if tokens == "random":
        generator = np.random.default_rng([settings.seed, 2603])
        shape = (settings.initialisations, settings.n_positions)
        return {
            family: Prompts(
                generator.integers(0, SIZES[settings.size][family]["vocab_size"], shape),
                source="random token ids",
                seed=settings.seed,
            )
            for family in FAMILIES
        }
    reader: TokenModel = Bytes(ByteTokenizer())
    if settings.tokenizer != "bytes":
        reader = load_model("config:demo", init_seed=0, device="cpu")
    prompts = load_prompts(
        "default", reader, n_positions=settings.n_positions, count=settings.initialisations, seed=settings.seed
    )
    smallest = min(SIZES[settings.size][family]["vocab_size"] for family in FAMILIES)
    if prompts.token_ids.max() >= smallest:
        raise UsageError(
            f"size {settings.size!r} knows {smallest} tokens, too few for tokenizer {settings.tokenizer!r}"
        )
    return dict.fromkeys(FAMILIES, prompts)


MODELS = {"qwen2": ("qwen2", "qwen2 without RoPE"), "gpt2": ("gpt2",)}
"""The models of a family, the one as built first."""
TRIAL_MIXINGS = np.geomspace(0.005, 0.9, 120)
"""Constant mixings among which the published density's best is looked for."""


@dataclass(frozen=True)
class Case:
    """One model on one sort of tokens."""

    model: str
    tokens: str

    def __str__(self) -> str:
        return f"{self.model}, {self.tokens}"


@dataclass(frozen=True, eq=False)
class Measured:
    """A case over its initialisations."""

    case: Case
    sample: Sample
    """One normalised Jacobian profile per initialisation."""
    mixing: Float64[np.ndarray, "layers"]
    """Mean over initialisations and tokens of |a| / (|x| + |a|), every layer."""
    theories: dict[str, Profile]
    fitted_mixing: float
    """The constant mixing with which the published density comes closest."""


def measure_cases(settings: BirthSettings) -> list[Measured]:
    """Every case measured, with every theory's prediction."""
    prompts = {tokens: birth_prompts(settings, tokens) for tokens in TOKENS}
    units: dict[Case, list[PromptMeasurement]] = {}
    theories: dict[Case, Profile] = {}
    architectures: dict[Case, Callable[[np.ndarray], Architecture]] = {}
    for family, index in track(
        [(family, k) for family in FAMILIES for k in range(settings.initialisations)], "initialisations"
    ):
        for name, model in _models(family, settings, index):
            for tokens in TOKENS:
                case, chosen = Case(name, tokens), prompts[tokens][family]
                units.setdefault(case, []).append(_measure(model, chosen, index, settings))
                if index == 0:
                    repeats = None if tokens == "random" else chosen
                    theories[case] = mean_field(model, settings.n_positions, prompts=repeats).profile
                    architectures[case] = _architecture(model)
    return [
        _finished(case, measured, theories[case], architectures[case], settings) for case, measured in units.items()
    ]


def published_profiles(
    n_positions: int, mixing: Float64[np.ndarray, "layers"], measured: Float64[np.ndarray, "n_positions"]
) -> tuple[dict[str, Profile], float]:
    """The published theory, from most literal to most favourable, and the constant mixing that favours it most.

    Returns:
        `continuous` and `finite`: limit and exact form with constant mixing, the mean of the measured ones;
        `continuous_fitted`: the limit with the constant mixing nearest to the measurement in W1; `closed_form`: the
        exact form with every layer's measured mixing. And that fitted mixing.
    """
    depth, everywhere = len(mixing), np.arange(n_positions)
    constant = np.full(depth, mixing.mean())
    trials = [continuous_profile(n_positions, np.full(depth, trial)) for trial in TRIAL_MIXINGS]
    distances = [float(wasserstein(trial, measured)) for trial in trials]
    best = int(np.argmin(distances))
    profiles = {
        "continuous": Profile(continuous_profile(n_positions, constant)),
        "continuous_fitted": Profile(trials[best]),
        "finite": Profile(closed_form(n_positions, everywhere, constant)),
        "closed_form": Profile(closed_form(n_positions, everywhere, mixing)),
    }
    return profiles, float(TRIAL_MIXINGS[best])


def ones_probe_share(settings: BirthSettings) -> dict[str, float]:
    """The one-pass surrogate: gradient of the sum of the last hidden state, over that of random probes, in float64.

    Returns:
        By family the root mean square over positions of the all-ones probe's gradient, divided by that of Rademacher
        probes of the same length: 1 for a fair probe, 0 (to round-off) where the vector lies in a null space.
    """
    shares = {}
    for family in FAMILIES:
        model = untrained(family, settings.size, seed=settings.seed, dtype="float64")
        token_ids = birth_prompts(settings, "random")[family].token_ids[0]
        norms = [
            measure_prompt(model, token_ids, kinds=resolve_kinds([kind]), key=(settings.seed, 0)).norms["jacobian"]
            for kind in ('jacobian(probe="ones")', f"jacobian(probes={settings.probes})")
        ]
        shares[family] = float(np.linalg.norm(norms[0]) / np.linalg.norm(norms[1]))
    return shares


def _models(family: str, settings: BirthSettings, index: int) -> Iterator[tuple[str, HuggingFaceModel]]:
    """One initialisation as built, then without RoPE where it has it: no weight differs."""
    model = untrained(family, settings.size, seed=settings.seed + index)
    yield MODELS[family][0], model
    for name in MODELS[family][1:]:
        with intervened(model, "no_rope") as unturned:
            yield name, unturned


def _measure(model: HuggingFaceModel, prompts: Prompts, index: int, settings: BirthSettings) -> PromptMeasurement:
    kinds = resolve_kinds([f"jacobian(probes={settings.probes})"])
    return measure_prompt(model, prompts.token_ids[index], kinds=kinds, key=(settings.seed, index))


def _architecture(model: HuggingFaceModel) -> Callable[[np.ndarray], Architecture]:
    """The model's architecture as a function of its mixing, which is known only after all initialisations."""
    traits = model.architecture_traits()
    return lambda mixing: Architecture(**traits, mixing=mixing)


def _finished(
    case: Case,
    units: list[PromptMeasurement],
    predicted: Profile,
    architecture: Callable[[np.ndarray], Architecture],
    settings: BirthSettings,
) -> Measured:
    kinds = resolve_kinds([f"jacobian(probes={settings.probes})"])
    measurement = combine(units, kinds=kinds, seed=settings.seed)
    assert measurement.mixing is not None
    sample = Sample.of(measurement.per_prompt["jacobian"])
    published, fitted = published_profiles(settings.n_positions, measurement.mixing, sample.average)
    rollout = predict(architecture(measurement.mixing), settings.n_positions, theory="rollout").profile
    reciprocal = Profile.normalised(1 / np.arange(1.0, settings.n_positions + 1))
    theories = {**published, "rollout": rollout, "mean_field": predicted, "reciprocal": reciprocal}
    return Measured(case, sample, measurement.mixing, theories, fitted)
