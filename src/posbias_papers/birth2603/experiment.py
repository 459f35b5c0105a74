"""arXiv 2603.10123, "Lost in the Middle at Birth": its theory and its claims against the Jacobian of untrained models.

Qwen2 with and without RoPE and GPT-2, 24 layers each, come from configurations alone, one per seed, drawn by the model
classes' own initialisers. A case is a model on one sort of tokens; all are measured over the same seeds. With and
without RoPE share weights, prompts and probes, so that their difference is RoPE's alone. Distances have intervals over
initialisations, beside the flat line and the split-half noise; what survives of the paper is one table made from the
rows. docs/theory, sections 2 and 4.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.checks import CELLS, Count, Natural, OneOf, checked
from posbias.comparison.distances import UNITS_FOR_CLAIM, Sample, compare_with_prompts, split_half_noise, summarise
from posbias.comparison.metrics import METRICS, STATISTICS, wasserstein
from posbias.errors import check_most
from posbias.interventions import intervened
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.measurement import combine
from posbias.measurement.prompt import PromptMeasurement, measure_prompt
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.loading import load_model
from posbias.profiles import Profile
from posbias.progress import track
from posbias.prompts import Prompts
from posbias.prompts.loading import load_prompts
from posbias.results.figures import BLUE, GREEN, PURPLE, SKY, VERMILION, Figure, Stroke, profile_figure
from posbias.results.records import plain
from posbias.results.tables import Table, interval_text, number_text
from posbias.statistics import MISSING, jackknife, leave_one_out
from posbias.theory import closed_form, continuous_profile, predict
from posbias.theory.mean_field import mean_field
from posbias_papers.reproduction import PAPERS, Columns, Experiment, Reproduction, Rows, tabled

TOKENS = ("random", "text")
WITH, WITHOUT = "qwen2", "qwen2 without RoPE"
MODELS = {"qwen2": (WITH, WITHOUT), "gpt2": ("gpt2",)}
"""The models of a family."""
FAMILIES = tuple(MODELS)
TRIAL_MIXINGS = np.geomspace(0.005, 0.9, 120)
"""Constant mixings among which the published density's best is looked for."""
DEPTH = 24


def _qwen2(*sizes: int) -> dict[str, Any]:
    """Layers, width, inner width, heads of queries, heads of keys and values, vocabulary."""
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **dict(zip((*names, "vocab_size"), sizes, strict=True)),
    }


def _gpt2(*sizes: int) -> dict[str, Any]:
    """Layers, width, heads, positions, vocabulary."""
    named = dict(zip(("n_layer", "n_embd", "n_head", "n_positions", "vocab_size"), sizes, strict=True))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **ends, **named}


SIZES = {
    "tiny": {"qwen2": _qwen2(4, 32, 96, 2, 1, 1024), "gpt2": _gpt2(4, 32, 2, 1024, 1024)},
    "small": {"qwen2": _qwen2(DEPTH, 256, 1408, 4, 1, 50257), "gpt2": _gpt2(DEPTH, 256, 4, 4096, 50257)},
    "full": {"qwen2": _qwen2(DEPTH, 896, 4864, 14, 2, 151936), "gpt2": _gpt2(DEPTH, 1024, 16, 1024, 50257)},
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

    def __post_init__(self) -> None:
        check_most("initialisations x n_positions", self.initialisations * self.n_positions, CELLS)


class Bytes:
    """UTF-8 bytes as token ids; as much of a model with a tokenizer as prompts ask of one."""

    vocabulary_size = 256
    max_positions = None

    @property
    def tokenizer(self) -> Any:
        """The reader itself."""
        return self

    def __call__(self, text: str | list[str], **settings: bool) -> dict[str, Any]:
        """Token ids of a text, or of each text of a list; there are no special tokens."""
        if isinstance(text, str):
            return {"input_ids": list(text.encode())}
        return {"input_ids": [list(entry.encode()) for entry in text]}

    def decode(self, token_ids: list[int], **settings: bool) -> str:
        """The text of bytes, of which a window may cut a character."""
        return bytes(token_ids).decode(errors="replace")


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
    prompts = load_prompts(
        "default", Bytes(), n_positions=settings.n_positions, count=settings.initialisations, seed=settings.seed
    )
    return dict.fromkeys(FAMILIES, prompts)


@dataclass(frozen=True, eq=False)
class Measured:
    """One model on one sort of tokens, over its initialisations."""

    model: str
    tokens: str
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
    kinds = resolve_kinds([f"jacobian(probes={settings.probes})"])
    units: dict[tuple[str, str], list[PromptMeasurement]] = {}
    fields: dict[tuple[str, str], Profile] = {}
    traits: dict[tuple[str, str], dict[str, Any]] = {}
    for family, index in track(
        [(family, k) for family in FAMILIES for k in range(settings.initialisations)], "initialisations"
    ):
        built = untrained(family, settings.size, seed=settings.seed + index)
        for name in MODELS[family]:
            with intervened(built, "no_rope") if name == WITHOUT else nullcontext(built) as model:
                for tokens in TOKENS:
                    case, chosen = (name, tokens), prompts[tokens][family]
                    measured = measure_prompt(model, chosen.token_ids[index], kinds=kinds, key=(settings.seed, index))
                    units.setdefault(case, []).append(measured)
                    if index == 0:
                        repeats = None if tokens == "random" else chosen
                        fields[case] = mean_field(model, settings.n_positions, prompts=repeats).profile
                        traits[case] = model.architecture_traits()
    cases = []
    for case, each in units.items():
        subject, _ = combine(each)
        mixing = subject.mixing["token_mean"].value
        sample = Sample.of(np.stack([of_unit.norms["jacobian"] for of_unit in each]))
        published, fitted = published_profiles(settings.n_positions, mixing, sample.average)
        rollout = predict(Architecture(**traits[case], mixing=mixing), settings.n_positions, theory="rollout").profile
        reciprocal = Profile.normalised(1 / np.arange(1.0, settings.n_positions + 1))
        theories = {**published, "rollout": rollout, "mean_field": fields[case], "reciprocal": reciprocal}
        cases.append(Measured(*case, sample, mixing, theories, fitted))
    return cases


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


PAPER = "arXiv 2603.10123, Lost in the Middle at Birth: An Exact Theory of Transformer Position Bias"
COMPARED = {"wasserstein": (0.0, 1.0), "spearman": (-1.0, 1.0), "log_error": (0.0, np.inf)}
"""Metrics with an interval, and the range of each."""
LABELS = {
    "continuous": "published density, mean mixing",
    "continuous_fitted": "published density, mixing fitted",
    "finite": "exact at finite N, mean mixing",
    "closed_form": "exact at finite N, measured mixing",
    "rollout": "residual rollout, measured mixing",
    "mean_field": "mean field, nothing fitted",
    "reciprocal": "1/(j + 1), no theory",
    "flat": "flat line",
}
_DRAWN = {
    "continuous": Stroke(SKY, "dashdot"),
    "continuous_fitted": Stroke(BLUE, "dash"),
    "closed_form": Stroke(VERMILION, "dash"),
    "mean_field": Stroke(GREEN, "solid"),
    "reciprocal": Stroke(PURPLE, "dot"),
}


DISTANCES: Columns = {
    "model": lambda row: row["model"],
    "tokens": lambda row: row["tokens"],
    "theory": lambda row: LABELS[row["theory"]],
    "W1 [95 %]": lambda row: interval_text(row["wasserstein"], ".4f"),
    "flat line": lambda row: number_text(row["flat_wasserstein"]["value"], 4),
    "noise": lambda row: number_text(row["noise"]["mean"], 4),
    "rank": lambda row: number_text(row["spearman"]["value"], 3),
    "log error [95 %]": lambda row: interval_text(row["log_error"], ".2f"),
    "interior recency": lambda row: number_text(row["interior_recency"], 4),
}
SHAPE: Columns = {
    "model": lambda row: row["model"],
    "tokens": lambda row: row["tokens"],
    "first tenth": lambda row: interval_text(row["first_tenth"], ".3f"),
    "interior recency": lambda row: interval_text(row["interior_recency"], ".4f"),
    "flat": lambda row: number_text(row["flat_interior_recency"], 4),
    "interior recency minus middle tenth": lambda row: interval_text(row["last_over_middle"], ".4f"),
    "last position": lambda row: interval_text(row["last_token"], ".3f"),
    "minimum at": lambda row: interval_text(row["minimum_position"], ".0f"),
    "middle / flat": lambda row: number_text(row["middle_over_flat"]),
    "mixing": lambda row: number_text(row["mixing"]),
    "fitted": lambda row: number_text(row["fitted_mixing"]),
}
ROPE: Columns = {
    "model": lambda row: row["model"],
    "tokens": lambda row: row["tokens"],
    "W1 [95 %]": lambda row: interval_text(row["wasserstein"], ".5f"),
    "noise": lambda row: number_text(row["noise"]["mean"], 4),
    "flat line": lambda row: number_text(row["flat_wasserstein"], 4),
    "rank": lambda row: number_text(row["spearman"]["value"], 4),
    "log error [95 %]": lambda row: interval_text(row["log_error"], ".4f"),
}


@PAPERS.register("birth-2603.10123")
class Birth(Experiment):
    """The position bias of untrained Qwen2- and GPT-2-shaped models, and the paper's claims that survive."""

    paper = PAPER
    settings = BirthSettings

    def run(self, settings: BirthSettings) -> Reproduction:
        """Measure all models over initialisations and compare every theory with them.

        Raises:
            UsageError: a length beyond the models' positions.
            RunError: a gradient is not finite.
        """
        cases = measure_cases(settings)
        generator = np.random.default_rng(settings.seed)
        theories = plain([row for measured in cases for row in theory_rows(measured, generator)])
        shapes = plain([shape_row(measured, generator) for measured in cases])
        contrasts = plain(rope_rows(cases, generator))
        probe = ones_probe_share(settings).items()
        probes = [{"sort": "probe", "model": name, "share": share} for name, share in probe]
        return Reproduction(
            experiment=self.name,
            title=f"Position bias at initialisation: {settings.initialisations} initialisations, "
            f"{settings.n_positions} positions, size {settings.size}",
            rows=[*theories, *shapes, *contrasts, *probes],
            statements=told_of(theories, shapes),
            tables=[
                claims_table(theories, shapes, contrasts, probes),
                tabled("Every theory against the measured Jacobian", theories, DISTANCES),
                tabled("The measured shape (interior recency: last tenth without the last position)", shapes, SHAPE),
                tabled("With against without RoPE, the same weights and prompts", contrasts, ROPE),
            ],
            figures=[_figure(measured) for measured in cases],
            arrays=_arrays(cases),
            settings={**asdict(settings), "models": SIZES[settings.size]},
            seeds={"seed": settings.seed},
        )


def told_of(theories: Rows, shapes: Rows) -> list[str]:
    """Whether there is a U, and how near the published theory comes; the first table has every claim."""
    found, verdict = _u_shape(shapes)
    literal, field = (_values(theories, "wasserstein", name) for name in ("continuous", "mean_field"))
    initialisations = min(int(row["initialisations"]) for row in shapes)
    few = f"With {initialisations} initialisations no interval here supports a claim; {UNITS_FOR_CLAIM} would."
    return [
        f"U-shape at initialisation: {found}: {verdict}.",
        f"W1 {CLAIMED_W1}: with the mixing that the models have the published density is {_span(literal, 3)} away, "
        f"{_within(literal)}; mean field, where paths add in squares and nothing is fitted, "
        f"{_span(field, 4)}.",
        *([few] if initialisations < UNITS_FOR_CLAIM else []),
    ]


def theory_rows(measured: Measured, generator: np.random.Generator) -> list[dict[str, Any]]:
    """One row per theory, the flat line last: distances over initialisations, noise, interior recency."""
    seed = int(generator.integers(2**63))
    sample = measured.sample
    noise = split_half_noise(sample, generator=np.random.default_rng(seed))
    weights = leave_one_out(len(sample.units))
    rows = []
    for name, theory in {**measured.theories, "flat": Profile.uniform(sample.units.shape[1])}.items():
        pair = compare_with_prompts(theory, sample, generator=np.random.default_rng(seed))
        rows.append(
            {
                "sort": "theory",
                "model": measured.model,
                "tokens": measured.tokens,
                "theory": name,
                **_distances(theory.influence, weights @ sample.units),
                "flat_wasserstein": pair.flat.as_record(),
                "noise": vars(noise),
                "than_flat": None if name == "flat" else pair.decides,
                "interior_recency": float(STATISTICS["interior_recency"](theory.influence)),
                "minimum_position": float(STATISTICS["minimum_position"](theory.influence)),
            }
        )
    return rows


def shape_row(measured: Measured, generator: np.random.Generator) -> dict[str, Any]:
    """The measured profile's shares with intervals, and what the published theory says of its middle and its end."""
    n_positions = measured.sample.units.shape[1]
    average = measured.sample.average
    shares = {name: value.as_record() for name, value in summarise(measured.sample, generator=generator).items()}
    return {
        "sort": "shape",
        "model": measured.model,
        "tokens": measured.tokens,
        **shares,
        "flat_interior_recency": float(STATISTICS["interior_recency"](Profile.uniform(n_positions).influence)),
        "middle_over_flat": float(n_positions * average[n_positions // 2]),
        "least_over_flat": float(n_positions * average.min()),
        "last_over_flat": float(n_positions * average[-1]),
        "atom": float(np.prod(1 - measured.mixing)),
        "dead_zone": float(np.prod(1 / np.arange(1.0, len(measured.mixing)))),
        "layers": len(measured.mixing),
        "mixing": float(measured.mixing.mean()),
        "fitted_mixing": measured.fitted_mixing,
        "initialisations": len(measured.sample.units),
    }


def rope_rows(cases: Sequence[Measured], generator: np.random.Generator) -> list[dict[str, Any]]:
    """Profiles with against without RoPE, initialisations paired: W1 and log error beside split-half noise."""
    samples = {(measured.model, measured.tokens): measured.sample for measured in cases}
    rows = []
    for tokens in TOKENS:
        first, second = samples[WITH, tokens], samples[WITHOUT, tokens]
        weights = leave_one_out(len(first.units))
        rows.append(
            {
                "sort": "rope",
                "model": WITH,
                "without": WITHOUT,
                "tokens": tokens,
                **_distances(weights @ first.units, weights @ second.units),
                "noise": vars(split_half_noise(first, generator=generator)),
                "flat_wasserstein": float(
                    wasserstein(np.full(first.average.shape, 1 / first.average.size), first.average)
                ),
            }
        )
    return rows


def _distances(first: np.ndarray, second: np.ndarray) -> dict[str, dict[str, float | None]]:
    """Each compared metric of two profiles with its interval, from what it is without each initialisation in turn."""
    return {
        name: jackknife(METRICS[name](first, second)).interval(least=least, most=most).as_record()
        for name, (least, most) in COMPARED.items()
    }


def _arrays(cases: Sequence[Measured]) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for measured in cases:
        stem = f"{measured.model}/{measured.tokens}"
        arrays[f"{stem}/per_initialisation"] = measured.sample.units
        arrays[f"{stem}/mixing"] = measured.mixing
        arrays.update({f"{stem}/theories/{name}": theory.influence for name, theory in measured.theories.items()})
    return arrays


def _figure(measured: Measured) -> Figure:
    theories = [measured.theories[name].curve(LABELS[name], stroke) for name, stroke in _DRAWN.items()]
    average = measured.sample.average
    minimum = float(STATISTICS["minimum_position"](average))
    shares = [100 * float(STATISTICS[name](average)) for name in ("first_tenth", "interior_recency", "last_token")]
    title = (
        f"{measured.model}, {measured.tokens} at initialisation: {shares[0]:.0f} % on the first tenth, "
        f"{shares[1]:.1f} % on the last without the last position, {shares[2]:.0f} % on the last position; minimum at "
        f"{minimum:.0f}"
    )
    slug = f"initialisation-{measured.model}-{measured.tokens}".lower().replace(" ", "-")
    banded = Profile.mean_of(measured.sample.units)
    return profile_figure(slug, title, theories, measured=[banded.curve("measured Jacobian")])


CLAIMED_RANK = 0.99
CLAIMED_W1 = 0.02
CLAIM_DIGIT = 0.005
"""Half a unit of the claims' last digit."""


def claims_table(theories: Rows, shapes: Rows, contrasts: Rows, probes: Rows) -> Table:
    """Every claim of the paper beside what came out, over all cases."""
    ranks, control = (_values(theories, "spearman", name) for name in ("continuous", "reciprocal"))
    literal, fitted, flat = (
        _values(theories, "wasserstein", name) for name in ("continuous", "continuous_fitted", "flat")
    )
    reached = sum(rank >= CLAIMED_RANK - CLAIM_DIGIT for rank in ranks)
    moved = ", ".join(f"{row['mixing']:.3f} to {row['fitted_mixing']:.3f}" for row in shapes)
    middle, least = ([float(row[name]) for row in shapes] for name in ("middle_over_flat", "least_over_flat"))
    layers, dead = int(shapes[0]["layers"]), float(shapes[0]["dead_zone"])
    gaps, noise = _values(contrasts, "wasserstein"), [float(row["noise"]["mean"]) for row in contrasts]
    same = all(gap <= level for gap, level in zip(gaps, noise, strict=True))
    blind = [row["model"] for row in probes if row["share"] < 1e-6]  # in float64 round-off
    cells = [
        [
            "rank correlation of the density",
            f"{CLAIMED_RANK}",
            f"{_span(ranks, 3)}; 1/(j + 1), no theory, {_span(control, 3)}",
            f"reached in {reached} of {len(ranks)}, which decides nothing",
        ],
        [
            "W1, the mixing that the models have",
            f"{CLAIMED_W1}",
            f"{_span(literal, 3)}; flat line {_span(flat, 3)}",
            _within(literal),
        ],
        [
            "W1, one mixing fitted to the very curve",
            f"{CLAIMED_W1}",
            f"{_span(fitted, 3)}; moves the mixing from {moved}",
            _within(fitted),
        ],
        ["U-shape", "influence rises again towards the end", *_u_shape(shapes)],
        [
            "factorial dead zone",
            f"1/({layers}-1)! = {dead:.0e}",
            f"of an even share the middle has {_span(middle, 2)}, the least position {_span(least, 2)}",
            "no such zone" if min(least) > 10 * dead else "of that order",
        ],
        [
            "recency anchor: share of the last position",
            f"prod(1 - m_l) = {_span([float(row['atom']) for row in shapes], 3)}",
            _span(_values(shapes, "last_token"), 3),
            MISSING,
        ],
        [
            "RoPE changes nothing",
            "W1 0",
            f"{_span(gaps, 5)}; split-half noise {_span(noise, 4)}",
            "holds to within that noise" if same else "does not hold as stated at this size",
        ],
        [
            "one-pass scalar probe, over a random one",
            MISSING,
            "; ".join(f"{row['model']} {row['share']:.2g}" for row in probes),
            f"zero but for round-off on {', '.join(blind)}: it measures nothing" if blind else "one noisy probe",
        ],
    ]
    return Table("What the paper says, and what came out", ["claim", "published", "here", "verdict"], cells)


def _within(distances: Sequence[float]) -> str:
    within = sum(distance <= CLAIMED_W1 + CLAIM_DIGIT for distance in distances)
    verdict = "survives" if within == len(distances) else "survives in part" if within else "does not survive"
    return f"{within} of {len(distances)} cases within the claim: it {verdict}"


def _u_shape(shapes: Rows) -> tuple[str, str]:
    """What the ends hold beside the middle, with the last position and without; and whether that is a U."""
    bends = [row["last_over_middle"] for row in shapes]
    rising = sum(bend["low"] is not None and bend["low"] > 0 for bend in bends)
    falling = sum(bend["high"] is not None and bend["high"] < 0 for bend in bends)
    bounds = [(row["middle_tenth"]["high"], row["first_tenth"]["low"], row["last_tenth"]["low"]) for row in shapes]
    both = sum(None not in bound and bound[0] < min(bound[1:]) for bound in bounds)
    first, middle, last = (_span(_values(shapes, f"{name}_tenth"), 3) for name in ("first", "middle", "last"))
    verdict = "a U by the last position alone" if both else "an L before the last position, no U"
    if rising:
        verdict = f"a U, spike apart, in {rising} of {len(shapes)}"
    elif falling < len(shapes):
        verdict = "no U shown"
    return (
        f"first, middle and last tenth hold {first}, {middle} and {last} (flat line 0.1, the last position included), "
        f"both ends above the middle in {both} of {len(shapes)} cases; without the last position the last tenth lies "
        f"below the middle one in {falling} and above it in {rising}, intervals apart"
    ), verdict


def _values(rows: Rows, name: str, theory: str | None = None) -> list[float]:
    """A compared number of every row, or of those of one theory; NaN where none could be stored."""
    stored = [row[name]["value"] for row in rows if theory in (None, row.get("theory"))]
    return [math.nan if value is None else float(value) for value in stored]


def _span(values: Sequence[float], digits: int) -> str:
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
