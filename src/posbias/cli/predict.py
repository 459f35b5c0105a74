"""`posbias predict` and `design`: a theory's position bias, and the architecture that has the one asked for."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_types import Ge

from posbias.checks import RESIDUAL_MIXING
from posbias.cli import options
from posbias.cli.output import running
from posbias.designing.options import DesignOptions
from posbias.errors import RunError, UsageError
from posbias.measurement.options import Loading
from posbias.registry import split_literals

if TYPE_CHECKING:
    from posbias.architecture import Architecture
    from posbias.designing.result import Design
    from posbias.measurement.measurement import MeasurePlan
    from posbias.models.model import Model
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

    def predict(self, theories: str, *, n_positions: int, options_given: Container[str]) -> "list[Prediction]":
        """Predict every combination with every theory; a theory that ignores one of `options_given` is refused."""
        from posbias.architecture import Architecture

        counted = {name: options.whole_numbers(name, getattr(self, name)) for name in ("depth", "heads")}
        spelled = {name: getattr(self, name) for name in options.names_of(ArchitectureFlags, without=list(counted))}
        values = {**counted, **{name: options.several(name, text) for name, text in spelled.items()}}
        values["theory"] = options.several("theory", theories)
        count = prod(map(len, values.values()))
        if count > MOST_CURVES:
            varied = ", ".join(f"--{name} {len(choices)}" for name, choices in values.items() if len(choices) > 1)
            raise UsageError(f"{count} curves ({varied} values) do not fit one page; at most {MOST_CURVES} do")
        predictions = []
        for combination in product(*values.values()):
            settings = dict(zip(values, combination, strict=True))
            theory = str(settings.pop("theory"))
            if settings["sinks"] == "none":
                del settings["sinks"]
            predictions.append(_of_architecture(Architecture(**settings), theory, n_positions, options_given))
        return predictions


def _of_architecture(
    architecture: "Architecture", theory: str, n_positions: int, options_given: Container[str]
) -> "Prediction":
    """Predict an architecture; a theory that ignores one of `options_given` is refused."""
    from posbias.theory import predict as predict_profile

    prediction = predict_profile(architecture, n_positions=n_positions, theory=theory)
    used = {} if prediction.architecture is None else prediction.architecture.describe()
    ignored = [name for name, value in architecture.describe().items() if used.get(name, value) != value]
    for name in ignored:
        if f"--{name}" in options_given:
            raise UsageError(
                f"theory {prediction.theory} ignores {name}; leave --{name} out, or see `posbias list theories`"
            )
    if "--mixing" in options_given or "mixing" in ignored:
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
        if model is None:
            predictions = architecture.predict(theory, n_positions=prompts.length, options_given=options.given(context))
            if len(predictions) == 1:
                run.finish(predictions[0].record)
            else:
                asked, command = options.passed_arguments(context), options.command_line(context)
                run.finish(predictions_record(predictions, asked, command=command))
            return
        prediction = _of_model(model, prompts.plan(loading), theory, prompted=prompts.prompts is not None)
        run.finish(prediction.record)


def _refuse_unread(context: typer.Context, theory: str, *, of_model: bool) -> None:
    """Refuse options of an architecture beside a model, and options of a model without one."""
    of_prompts = options.names_of(options.PromptFlags, without=["length", "seed"])
    if not of_model:
        names = [*of_prompts, *options.names_of(Loading)]
        options.refuse(context, names, "is read with --model only")
        return
    from posbias.theory import parse_theory

    if len(split_literals(theory)) > 1:
        raise UsageError(f"--theory {theory}: with --model one at a time; `posbias audit` draws several of a model")
    name, _ = parse_theory(theory)
    if name == "attention_only" and options.given(context, ["prompts"]):
        raise UsageError("attention_only reads no --prompts; rollout measures a model's mixing on them")
    if not _needs_prompts(theory) and not options.given(context, ["prompts"]):
        options.refuse(context, of_prompts, f"is read with --prompts only; {name} needs none")
    architecture = options.names_of(ArchitectureFlags)
    options.refuse(context, architecture, "cannot be given with --model, which has its own architecture")


def _needs_prompts(theory: str) -> bool:
    """True if a theory of a model reads prompts, for activations or to measure the model's mixing."""
    from posbias.theory import ModelTheory, parse_theory

    name, parsed = parse_theory(theory)
    return parsed.reads_prompts if isinstance(parsed, ModelTheory) else name != "attention_only"


def _of_model(source: str, plan: "MeasurePlan", theory: str, *, prompted: bool) -> "Prediction":
    """Predict a model; `prompted`: whether prompts were asked for."""
    from posbias.theory import ModelTheory, parse_theory
    from posbias.theory import predict as predict_profile
    from posbias.theory.predict import known_mixing

    name, parsed = parse_theory(theory)
    if name == "mean_field" and plan.init_seed is None and not source.startswith("config:"):
        raise UsageError(f"mean_field is about initialisation: give --init-seed, or --model config:{source}")
    loaded = plan.load(source)
    mixing_is_known = not isinstance(parsed, ModelTheory) and known_mixing(loaded) is not None
    needed = prompted or (_needs_prompts(theory) and not mixing_is_known)
    read = plan.prompts(loaded) if needed else None
    return predict_profile(loaded, n_positions=plan.n_positions, theory=theory, prompts=read, seed=plan.seed)


@dataclass(frozen=True)
class NetworkFlags:
    """Networks at initialisation that are measured with the design of their model, and without."""

    initialisations: Annotated[int, Ge(0)] = 8
    """With --model: fresh initialisations that are measured; 0: none."""
    measured_at: str | None = None
    """With --model: lengths at which they are measured; by default the longest."""

    def lengths(self, of_design: Sequence[int]) -> list[int]:
        """The lengths at which they are measured; none if no networks are."""
        at = [max(of_design)] if self.measured_at is None else options.whole_numbers("measured-at", self.measured_at)
        return at if self.initialisations else []


def design(
    context: typer.Context,
    target: str = "flat",
    *,
    over: str = "gamma_key",
    settings: Annotated[DesignOptions, options.Take(depth=12)],
    model: str | None = None,
    loading: Annotated[Loading, options.Take("init_seed", "template_options")],
    strict: bool = False,
    networks: NetworkFlags,
    flags: options.RunFlags,
) -> None:
    """Design an architecture with a chosen position bias.

    If there is a closed form, the design is exact; otherwise it is searched for.

    Args:
        target: flat, power(exponent=E), recency(rate=R), u_shape(middle=M), a run, or a .csv file.
        over: key_bias, gamma_key, gamma_alibi, alibi, windows, mixing; several with commas.
        model: A model at initialisation, 'config:PATH_OR_ID', by mean field.
        strict: Exit with 1 if the design misses the target by more than W1 0.01.

    Examples: `posbias design flat --depth 24 --heads 8 --mixing 0.1 --length 512` · any target at one length: `posbias
    design 'u_shape(middle=4.0)' --over key_bias --depth 12` · what a model needs to be born flat, and whether networks
    are: `posbias design flat --model config:demo --length 128 --initialisations 8`
    """
    from posbias.designing.design import design as find
    from posbias.designing.result import TOLERANCE

    free, measured_at = split_literals(over), networks.lengths(settings.lengths)
    _refuse_unread_of_design(context, model)
    with running(context, flags) as run:
        if model is None:
            solution = find(target, free, options=settings)
        else:
            loaded, count = loading.load(model), max(networks.initialisations, 2)
            solution = _design_of_model(target, free, loaded, settings, measured_at=measured_at, count=count)
        record = solution.record
        if model is None and "mixing" not in solution.over and not options.given(context, ["mixing"]):
            record.scalars["caveats"] = [options.DEFAULT_MIXING]
        run.finish(record)
    if strict and not solution.met:
        left = ", ".join(f"{solution.distances[n][0]:.2g} at {n}" for n in solution.lengths)
        raise RunError(f"required W1 <= {TOLERANCE:g} to the target, got {left} positions")


def _refuse_unread_of_design(context: typer.Context, model: str | None) -> None:
    """Refuse options of an architecture beside a model, and options of a model without one."""
    of_model = options.names_of(NetworkFlags)
    if model is None:
        options.refuse(context, [*of_model, "device", "dtype"], "is read with --model only")
        return
    options.refuse(context, ["depth", "heads", "mixing"], "cannot be given with --model, which has its own")
    if not model.startswith("config:"):
        raise UsageError(f"--model {model}: a design is for initialisation; write --model config:{model}")


def _design_of_model(
    target: str, over: list[str], model: "Model", search: DesignOptions, *, measured_at: list[int], count: int
) -> "Design":
    """Design a model at initialisation, with the measurements of it."""
    from posbias.designing.design import design as find
    from posbias.designing.initialisation import measure_design
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.prompts.loading import load_prompts

    measured = []
    solution = find(target, over, model=model, options=replace(search, theory="mean_field"))
    if isinstance(model, HuggingFaceModel):
        for n_positions in measured_at:
            prompts = load_prompts("synthetic", model, n_positions=n_positions, count=count, seed=search.seed)
            measured.append(measure_design(solution, model, prompts, seed=search.seed))
    return replace(solution, measured=tuple(measured))
