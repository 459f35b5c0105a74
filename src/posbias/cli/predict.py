"""`posbias predict`, `design` and `explore`: a theory's position bias, an architecture that has the one asked for."""

import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Interval, MinLen

from posbias.checks import RESIDUAL_MIXING, checked, checked_value
from posbias.cli import options
from posbias.cli.output import NOT_MET, fail, running
from posbias.designing.options import DesignOptions
from posbias.errors import UsageError
from posbias.measurement.options import Loading
from posbias.registry import read_literal, split_literals, split_numbers

if TYPE_CHECKING:
    from posbias.theory import Prediction, Theory

DEFAULT_MIXING = (
    f"Mixing {RESIDUAL_MIXING} in every layer is the default (--mixing): attention carries a tenth of each layer's "
    "update and the residual stream nine tenths; five published models have 0.06 to 0.14 on average."
)
"""A caveat."""
MOST_CURVES = 24
"""Curves that one page has distinct strokes for."""


def _literals(text: str) -> list[Any]:
    return [read_literal(part) for part in split_literals(text)]


Numbers = Annotated[tuple[Annotated[int, Ge(1)], ...], MinLen(1), split_numbers]
Values = Annotated[tuple[Any, ...], MinLen(1), _literals]


@checked
@dataclass(frozen=True)
class ArchitectureFlags:
    """Architectures described by options; several values make one architecture per combination."""

    depth: Numbers = (12,)
    """Layers. Options from here to --sinks take several values, separated by commas."""
    heads: Numbers = (1,)
    """Attention heads per layer."""
    mask: Values = ("causal",)
    """causal, sliding_window(width=W), prefix(length=K), full."""
    encoding: Values = ("none",)
    """none, alibi, decay(rate=R), rope(base=B, head_dim=D) ...; or a list per layer."""
    mixing: Values = (RESIDUAL_MIXING,)
    """Share of attention in each layer's update, 0 to 1: number, or list per layer; 0.1 is a residual network, 1 is
    attention alone."""
    content: Values = (0,)
    """Diagonal logit offset: number or list."""
    sinks: Values = ("none",)
    """Logit of an extra key that is not a position: number or list."""
    theory: Values = ("rollout",)
    """Of `posbias list theories`, with parameters: 'power_rollout(key_path=False)'; or several."""

    def __post_init__(self) -> None:
        values = vars(self)
        for name, choices in values.items():
            if twice := [value for place, value in enumerate(choices) if value in choices[:place]]:
                raise UsageError(f"--{name}: {twice[0]} is given twice")
        if (count := prod(map(len, values.values()))) > MOST_CURVES:
            varied = ", ".join(f"--{name} {len(choices)}" for name, choices in values.items() if len(choices) > 1)
            raise UsageError(f"{count} curves ({varied} values) do not fit one page; at most {MOST_CURVES} do")


def _of_architecture(settings: dict[str, Any], n_positions: int, flags: options.RunFlags) -> "Prediction":
    """Predict an architecture; a theory that ignores an option that was given is refused."""
    from posbias.architecture import Architecture
    from posbias.theory import predict as predict_profile

    theory, sinks = str(settings.pop("theory")), settings.pop("sinks")
    architecture = Architecture(**settings, sinks=None if sinks == "none" else sinks)
    prediction = predict_profile(architecture, n_positions=n_positions, theory=theory)
    used = {} if prediction.architecture is None else prediction.architecture.describe()
    ignored = [name for name, value in architecture.describe().items() if used.get(name, value) != value]
    for name in ignored:
        if flags.given(name):
            raise UsageError(
                f"theory {prediction.theory} ignores {name}; leave --{name} out, or see `posbias list theories`"
            )
    if flags.given("mixing") or "mixing" in ignored:
        return prediction
    return replace(prediction, caveats=(DEFAULT_MIXING, *prediction.caveats))


def predict(
    *,
    architecture: ArchitectureFlags,
    model: str | None = None,
    prompts: Annotated[options.PromptFlags, options.Take(prompts=None, count=8)],
    loading: options.Loaded,
    flags: options.RunFlags,
) -> None:
    """Predict the influence of every position on the last one.

    Architectures are described by options; a model is read from its weights, and on prompts if the theory needs them.

    Args:
        model: A model, as for measure, instead of the options that describe an architecture.

    Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · several on one page:
    `--encoding none,alibi --mixing 0.05,0.1 --depth 24 --length 4096` · a hybrid stack: `--depth 2 --mask '["causal",
    "sliding_window(width=64)"]'` · a model at initialisation: `--model config:demo --theory mean_field --length 2048` ·
    a trained one: `--model DIR --theory 'power_rollout(target=probability)' --prompts synthetic`
    """
    from posbias.theory import parse_theory, predictions_record

    of_prompts = options.names_of(options.PromptFlags, without=["length", "seed"])
    if model is None:
        flags.refuse([*of_prompts, *options.names_of(Loading)], "is read with --model only")
        values = {"theory": architecture.theory, **vars(architecture)}  # theories vary slowest
        settings = [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]
        with running(flags) as run:
            found = [_of_architecture(each, prompts.length, flags) for each in settings]
            run.finish(found[0].record if len(found) == 1 else predictions_record(found))
        return
    if len(architecture.theory) > 1:
        listed = ",".join(map(str, architecture.theory))
        raise UsageError(f"--theory {listed}: with --model one at a time; `posbias audit` draws several of a model")
    name, theory = parse_theory(str(architecture.theory[0]))
    if name == "attention_only" and flags.given("prompts"):
        raise UsageError("attention_only reads no --prompts; rollout measures a model's mixing on them")
    if not theory.reads_prompts and not flags.given("prompts"):
        flags.refuse(of_prompts, f"is read with --prompts only; {name} needs none")
    described = options.names_of(ArchitectureFlags, without=["theory"])
    flags.refuse(described, "cannot be given with --model, which has its own architecture")
    if name == "mean_field" and loading.init_seed is None and not model.startswith("config:"):
        raise UsageError(f"mean_field is about initialisation: give --init-seed, or --model config:{model}")
    with running(flags) as run:
        run.finish(_of_model(loading.load(model), theory, prompts).record)


def _of_model(model: Any, theory: "Theory", prompts: options.PromptFlags) -> "Prediction":
    """Predict a model, on prompts if they were asked for or the theory needs them."""
    from posbias.theory import ArchitectureTheory
    from posbias.theory import predict as predict_profile
    from posbias.theory.predict import known_mixing

    mixing_is_known = isinstance(theory, ArchitectureTheory) and known_mixing(model) is not None
    needed = prompts.prompts is not None or (theory.reads_prompts and not mixing_is_known)
    read = prompts.drawn(model) if needed else None
    return predict_profile(model, n_positions=prompts.length, theory=theory, prompts=read, seed=prompts.seed)


def design(
    target: str = "flat",
    *,
    over: str = "gamma_key",
    settings: Annotated[DesignOptions, options.Take(depth=12)],
    model: str | None = None,
    loading: Annotated[Loading, options.Take("init_seed", "template_options")],
    initialisations: Annotated[int, Ge(0)] = 8,
    measured_at: str | None = None,
    strict: bool = False,
    flags: options.RunFlags,
) -> None:
    """Design an architecture with a chosen position bias.

    If there is a closed form, the design is exact; otherwise it is searched for.

    Args:
        target: flat, power(exponent=E), recency(rate=R), u_shape(middle=M), a run, or a .csv file.
        over: key_bias or gamma_key.
        model: A model at initialisation, 'config:PATH_OR_ID', by mean field.
        initialisations: With --model: fresh initialisations that are measured, with the design and without; 0: none.
        measured_at: With --model: lengths at which they are measured; by default the longest.
        strict: Exit with 1 if the design misses the target by more than W1 0.01.

    Examples: `posbias design flat --depth 24 --heads 8 --mixing 0.1 --length 512` · any target at one length: `posbias
    design 'u_shape(middle=4.0)' --over key_bias --depth 12` · what a model needs to be born flat, and whether networks
    are: `posbias design flat --model config:demo --length 128 --initialisations 8`
    """
    from posbias.designing.design import design as find
    from posbias.designing.result import TOLERANCE

    lengths = [max(settings.lengths)]
    if measured_at is not None:
        lengths = checked_value("--measured-at", measured_at, Numbers)
    if model is None:
        flags.refuse(["initialisations", "measured_at", "device", "dtype"], "is read with --model only")
    else:
        flags.refuse(["depth", "heads", "mixing"], "cannot be given with --model, which has its own")
        if not model.startswith("config:"):
            raise UsageError(f"--model {model}: a design is for initialisation; write --model config:{model}")
    with running(flags) as run:
        if model is None:
            solution = find(target, over, options=settings)
        else:
            from posbias.designing.initialisation import measure_design
            from posbias.models.hugging_face import HuggingFaceModel
            from posbias.prompts.loading import load_prompts

            loaded = loading.load(model)
            solution = find(target, over, model=loaded, options=replace(settings, theory="mean_field"))
            if initialisations and isinstance(loaded, HuggingFaceModel):
                count = max(initialisations, 2)
                for n_positions in lengths:
                    drawn = load_prompts("synthetic", loaded, n_positions=n_positions, count=count, seed=settings.seed)
                    measured = measure_design(solution, loaded, drawn, seed=settings.seed)
                    solution = replace(solution, measured=(*solution.measured, measured))
        record = solution.record
        if model is None and not flags.given("mixing"):
            record.scalars["caveats"] = [DEFAULT_MIXING]
        run.finish(record)
    if strict and not solution.met:
        left = ", ".join(f"{solution.distances[n][0]:.2g} at {n}" for n in solution.lengths)
        fail(f"required W1 <= {TOLERANCE:g} to the target, got {left} positions", NOT_MET)


def explore(*, port: Annotated[int, Interval(ge=1, le=65535)] | None = None, headless: bool = False) -> None:
    """Explore architectures in the browser.

    Sliders set what mixes positions; a target is designed for. Needs `pip install 'posbias[explore]'`.

    Args:
        port: Port on this machine; a free one by default.
        headless: Open no browser; print the address alone.

    Example: `posbias explore` · on a machine without a browser: `posbias explore --port 2718 --headless`
    """
    from importlib.resources import files

    if importlib.util.find_spec("marimo") is None:
        raise UsageError("explore is an app of marimo, which is not installed: pip install 'posbias[explore]'")
    flags = [*(["--port", str(port)] if port else []), *(["--headless"] if headless else [])]
    app = str(files("posbias") / "explorer.py")
    os.execv(sys.executable, [sys.executable, "-m", "marimo", "run", app, *flags])  # its signals are marimo's
