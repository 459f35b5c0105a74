"""`posbias predict`: a theory's position bias, of architectures given by options or of a model."""

from collections.abc import Container
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.architecture import Architecture
    from posbias.measurement.measurement import MeasurePlan
    from posbias.theory import Prediction

EXAMPLE = (
    "Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · "
    "several on one page: `--encoding none,alibi --mixing 0.05,0.1 --depth 24 --length 4096` · "
    'a hybrid stack: `--depth 2 --mask \'["causal", "sliding_window(width=64)"]\'` · '
    "a model at initialisation: `--model config:demo --theory mean_field --length 2048` · "
    "a trained one: `--model DIR --theory 'power_rollout(target=probability)' --prompts synthetic`"
)
UNASKED = options.PromptFlags(prompts=None, count=8)


MOST_CURVES = 24
"""Curves that one page has distinct strokes for."""


@dataclass(frozen=True)
class ArchitectureFlags:
    """Architectures described by options; several values make one architecture per combination."""

    depth: Annotated[
        str, typer.Option(help="Layers. Options from here to --sinks take several values, separated by commas.")
    ] = "12"
    heads: Annotated[str, typer.Option(help="Attention heads per layer.")] = "1"
    mask: Annotated[str, typer.Option(help="causal, sliding_window(width=W), prefix(length=K), full.")] = "causal"
    encoding: Annotated[
        str, typer.Option(help="none, alibi, decay(rate=R), rope(base=B, head_dim=D) ...; or a list per layer.")
    ] = "none"
    mixing: options.Mixing = options.RESIDUAL
    content: Annotated[str, typer.Option(help="Diagonal logit offset: number or list.")] = "0"
    sinks: Annotated[str, typer.Option(help="Logit of an extra key that is not a position: number or list.")] = "none"

    def predict(self, theories: str, *, n_positions: int, options_given: Container[str]) -> "list[Prediction]":
        """Predict every combination with every theory; a theory that ignores one of `options_given` is refused."""
        from posbias.architecture import Architecture

        counted = {name: options.whole_numbers(name, getattr(self, name)) for name in ("depth", "heads")}
        spelled = {name: getattr(self, name) for name in options.names_of(ArchitectureFlags, without=counted)}
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


@options.grouped
def predict(
    context: typer.Context,
    *,
    architecture: ArchitectureFlags,
    theory: Annotated[
        str,
        typer.Option(help="Of `posbias list theories`, with parameters: 'power_rollout(key_path=False)'; or several."),
    ] = "rollout",
    model: Annotated[
        str | None,
        typer.Option(
            help="A model, as for measure, instead of the options that describe an architecture.", show_default=False
        ),
    ] = None,
    prompts: options.PromptFlags = UNASKED,
    loading: options.ModelFlags,
    flags: options.RunFlags,
) -> None:
    """Predict the influence of every position on the last one.

    Architectures are described by options; a model is read from its weights, and on prompts if the theory needs them.
    """
    from posbias.measurement.measurement import MeasurePlan
    from posbias.theory import predictions_record

    _refuse_unread(context, theory, of_model=model is not None)
    arguments = {**options.passed_arguments(context), "theory": theory}
    with running(context, flags, arguments=arguments) as run:
        if model is None:
            predictions = architecture.predict(theory, n_positions=prompts.length, options_given=options.given(context))
            if len(predictions) == 1:
                run.finish(predictions[0].record)
            else:
                run.finish(predictions_record(predictions, arguments, command=run.command))
            return
        plan = MeasurePlan(
            source=prompts.source,
            n_positions=prompts.length,
            count=prompts.count,
            seed=flags.seed,
            **loading.settings(prompts.prompts),
        )
        prediction = _of_model(model, plan, theory, prompted=prompts.prompts is not None)
        run.finish(prediction.record)


def _refuse_unread(context: typer.Context, theory: str, *, of_model: bool) -> None:
    """Refuse options of an architecture beside a model, and options of a model without one."""
    of_prompts = options.names_of(options.PromptFlags, without=["length"])
    if not of_model:
        names = [*of_prompts, *options.names_of(options.ModelFlags)]
        options.refuse(context, names, "is read with --model only")
        return
    from posbias.registry import split_literals
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
