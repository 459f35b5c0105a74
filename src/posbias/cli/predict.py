"""`posbias predict` and `design`: a theory's position bias, and the architecture that has the one asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer
from annotated_types import Ge

from posbias.checks import RESIDUAL_MIXING
from posbias.cli import options
from posbias.cli.output import NOT_MET, fail, running
from posbias.designing.options import DesignOptions
from posbias.errors import UsageError
from posbias.measurement.options import Loading
from posbias.registry import split_literals

if TYPE_CHECKING:
    from posbias.designing.result import Design
    from posbias.theory import Prediction

MOST_CURVES = 24
"""Curves that one page has distinct strokes for."""


@dataclass(frozen=True)
class ArchitectureFlags:
    """Architectures described by options; several values make one architecture per combination."""

    depth: str = "12"
    """Layers. Options from here to --sinks take several values, separated by commas."""
    heads: str = "1"
    """Attention heads per layer."""
    mask: str = "causal"
    """causal, sliding_window(width=W), prefix(length=K), full."""
    encoding: str = "none"
    """none, alibi, decay(rate=R), rope(base=B, head_dim=D) ...; or a list per layer."""
    mixing: str = str(RESIDUAL_MIXING)
    """Share of attention in each layer's update, 0 to 1: number, or list per layer; 0.1 is a residual network, 1 is
    attention alone."""
    content: str = "0"
    """Diagonal logit offset: number or list."""
    sinks: str = "none"
    """Logit of an extra key that is not a position: number or list."""

    def combinations(self, theories: str) -> list[dict[str, Any]]:
        """The settings of every combination of the values, with a theory each."""
        values = {"theory": options.several("theory", theories)}
        for name in options.names_of(ArchitectureFlags):
            read = options.whole_numbers if name in ("depth", "heads") else options.several
            values[name] = read(name, getattr(self, name))
        count = prod(map(len, values.values()))
        if count > MOST_CURVES:
            varied = ", ".join(f"--{name} {len(choices)}" for name, choices in values.items() if len(choices) > 1)
            raise UsageError(f"{count} curves ({varied} values) do not fit one page; at most {MOST_CURVES} do")
        return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


def _of_architecture(context: typer.Context, settings: dict[str, Any], n_positions: int) -> "Prediction":
    """Predict an architecture; a theory that ignores an option that was given is refused."""
    from posbias.architecture import Architecture
    from posbias.theory import predict as predict_profile

    theory, sinks = str(settings.pop("theory")), settings.pop("sinks")
    architecture = Architecture(**settings, sinks=None if sinks == "none" else sinks)
    prediction = predict_profile(architecture, n_positions=n_positions, theory=theory)
    used = {} if prediction.architecture is None else prediction.architecture.describe()
    ignored = [name for name, value in architecture.describe().items() if used.get(name, value) != value]
    for name in ignored:
        if options.was_given(context, name):
            raise UsageError(
                f"theory {prediction.theory} ignores {name}; leave --{name} out, or see `posbias list theories`"
            )
    if options.was_given(context, "mixing") or "mixing" in ignored:
        return prediction
    return replace(prediction, caveats=(options.DEFAULT_MIXING, *prediction.caveats))


def predict(
    context: typer.Context,
    *,
    architecture: ArchitectureFlags,
    theory: str = "rollout",
    model: str | None = None,
    prompts: Annotated[options.PromptFlags, options.Take(prompts=None, count=8)],
    loading: Annotated[Loading, options.Take("template_options")],
    flags: options.RunFlags,
) -> None:
    """Predict the influence of every position on the last one.

    Architectures are described by options; a model is read from its weights, and on prompts if the theory needs them.

    Args:
        theory: Of `posbias list theories`, with parameters: 'power_rollout(key_path=False)'; or several.
        model: A model, as for measure, instead of the options that describe an architecture.

    Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · several on one page:
    `--encoding none,alibi --mixing 0.05,0.1 --depth 24 --length 4096` · a hybrid stack: `--depth 2 --mask '["causal",
    "sliding_window(width=64)"]'` · a model at initialisation: `--model config:demo --theory mean_field --length 2048` ·
    a trained one: `--model DIR --theory 'power_rollout(target=probability)' --prompts synthetic`
    """
    from posbias.theory import predictions_record

    _refuse_unread(context, theory, of_model=model is not None)
    with running(context, flags) as run:
        if model is not None:
            run.finish(_of_model(model, loading, prompts, theory).record)
            return
        combinations = architecture.combinations(theory)
        predictions = [_of_architecture(context, each, prompts.length) for each in combinations]
        run.finish(predictions[0].record if len(predictions) == 1 else predictions_record(predictions))


def _refuse_unread(context: typer.Context, theory: str, *, of_model: bool) -> None:
    """Refuse options of an architecture beside a model, and options of a model without one."""
    of_prompts = options.names_of(options.PromptFlags, without=["length", "seed"])
    if not of_model:
        options.refuse(context, [*of_prompts, *options.names_of(Loading)], "is read with --model only")
        return
    if len(split_literals(theory)) > 1:
        raise UsageError(f"--theory {theory}: with --model one at a time; `posbias audit` draws several of a model")
    prompted, (name, reads) = options.was_given(context, "prompts"), _reads_prompts(theory)
    if name == "attention_only" and prompted:
        raise UsageError("attention_only reads no --prompts; rollout measures a model's mixing on them")
    if not reads and not prompted:
        options.refuse(context, of_prompts, f"is read with --prompts only; {name} needs none")
    architecture = options.names_of(ArchitectureFlags)
    options.refuse(context, architecture, "cannot be given with --model, which has its own architecture")


def _reads_prompts(theory: str) -> tuple[str, bool]:
    """The name of a theory, and whether of a model it reads prompts: for activations, or to measure its mixing."""
    from posbias.theory import parse_theory

    name, parsed = parse_theory(theory)
    return name, parsed.reads_prompts


def _of_model(source: str, loading: Loading, prompts: options.PromptFlags, theory: str) -> "Prediction":
    """Predict a model, on prompts if they were asked for or the theory needs them."""
    from posbias.theory import THEORIES, ArchitectureTheory
    from posbias.theory import predict as predict_profile
    from posbias.theory.predict import known_mixing

    name, reads = _reads_prompts(theory)
    if name == "mean_field" and loading.init_seed is None and not source.startswith("config:"):
        raise UsageError(f"mean_field is about initialisation: give --init-seed, or --model config:{source}")
    loaded = loading.load(source)
    mixing_is_known = issubclass(THEORIES[name], ArchitectureTheory) and known_mixing(loaded) is not None
    needed = prompts.prompts is not None or (reads and not mixing_is_known)
    read = prompts.drawn(loaded) if needed else None
    return predict_profile(loaded, n_positions=prompts.length, theory=theory, prompts=read, seed=prompts.seed)


def design(
    context: typer.Context,
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
        over: key_bias, gamma_key, alibi or windows.
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
        lengths = options.whole_numbers("measured-at", measured_at)
    if model is None:
        unread = ["initialisations", "measured_at", "device", "dtype"]
        options.refuse(context, unread, "is read with --model only")
    else:
        options.refuse(context, ["depth", "heads", "mixing"], "cannot be given with --model, which has its own")
        if not model.startswith("config:"):
            raise UsageError(f"--model {model}: a design is for initialisation; write --model config:{model}")
    with running(context, flags) as run:
        if model is None:
            solution = find(target, over, options=settings)
        else:
            loaded = loading.load(model)
            solution = find(target, over, model=loaded, options=replace(settings, theory="mean_field"))
            if initialisations:
                solution = _measured(solution, loaded, lengths, count=max(initialisations, 2), seed=settings.seed)
        record = solution.record
        if model is None and not options.was_given(context, "mixing"):
            record.scalars["caveats"] = [options.DEFAULT_MIXING]
        run.finish(record)
    if strict and not solution.met:
        left = ", ".join(f"{solution.distances[n][0]:.2g} at {n}" for n in solution.lengths)
        fail(f"required W1 <= {TOLERANCE:g} to the target, got {left} positions", NOT_MET)


def _measured(solution: "Design", model: Any, lengths: Sequence[int], *, count: int, seed: int) -> "Design":
    """The design of a model with measurements of networks of Hugging Face, at each length."""
    from posbias.designing.initialisation import measure_design
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.prompts.loading import load_prompts

    measured = []
    for n_positions in lengths if isinstance(model, HuggingFaceModel) else ():
        prompts = load_prompts("synthetic", model, n_positions=n_positions, count=count, seed=seed)
        measured.append(measure_design(solution, model, prompts, seed=seed))
    return replace(solution, measured=tuple(measured))
