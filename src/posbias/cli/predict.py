"""`posbias predict`: a theory's position bias, of an architecture given by flags or of a model."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments, was_given
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.architecture import Architecture
    from posbias.theory import Prediction

EXAMPLE = (
    "Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · "
    'a hybrid stack: `--depth 2 --mask \'["causal", "sliding_window(width=64)"]\'` · '
    "a model at birth: `--model config:demo --theory mean_field --length 2048` · "
    "a trained one: `--model DIR --theory power_rollout --prompts synthetic`"
)

ARCHITECTURE_FLAGS: tuple[str, ...] = ("depth", "heads", "mask", "encoding", "mixing", "content")
MODEL_FLAGS: tuple[str, ...] = ("prompts", "count", "init_seed")
"""Only with `--model`. A seed may always be given: every verb has one, and it goes into the record."""


UNPROMPTED: tuple[str, ...] = ("attention_only", "mean_field")
"""Theories of a model that need no prompts."""
PROMPTED: tuple[str, ...] = ("power_rollout", "shared_direction")
"""Theories that read activations; the others need prompts only where a model's mixing has to be measured."""


def predict(
    context: typer.Context,
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 12,
    heads: Annotated[int, typer.Option(help="Attention heads per layer.", min=1)] = 1,
    length: options.Length = 512,
    mask: Annotated[str, typer.Option(help="causal, sliding_window(width=W), prefix(length=K), full.")] = "causal",
    encoding: Annotated[
        str, typer.Option(help="none, alibi, decay(rate=R), rope(base=B, head_dim=D) ...; or a list per layer.")
    ] = "none",
    mixing: Annotated[
        str, typer.Option(help="Share of attention in each layer's update, 0 to 1: number, list or schedule.")
    ] = "1.0",
    content: Annotated[str, typer.Option(help="Diagonal logit offset: number or list.")] = "0",
    theory: Annotated[str, typer.Option(help="One of `posbias list theories`.")] = "rollout",
    model: Annotated[
        str | None,
        typer.Option(help="The model, as for measure, in place of the flags of an architecture.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts, to read a model's activations or mixing on.", show_default=False)
    ] = None,
    count: options.Count = 8,
    init_seed: options.InitSeed = None,
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Predict the influence of every position on the last one, from an architecture, or from a model's weights."""
    from posbias.architecture import Architecture
    from posbias.cli.output import finish
    from posbias.records import run_directory
    from posbias.theory import predict as predict_profile

    arguments, command = passed_arguments(context), command_line(context)
    _refuse_unread(context, theory, of_model=model is not None)
    with run_directory(out, verb="predict", arguments=arguments) as directory:
        if model is not None:
            prediction, read = _of_model(model, prompts, theory, length=length, draw=(count, seed, init_seed))
        else:
            architecture = Architecture(
                depth=depth,
                heads=heads,
                mask=options.literal(mask),
                encoding=options.literal(encoding),
                mixing=options.literal(mixing),
                content=options.literal(content),
            )
            prediction, read = predict_profile(architecture, n_positions=length, theory=theory), {}
            _refuse_ignored(architecture, prediction)
        finish(prediction.record(arguments, command=command, **read), out=directory, as_json=json)


def _refuse_unread(context: typer.Context, theory: str, *, of_model: bool) -> None:
    """Flags of an architecture beside a model, and flags of a model without one, would be passed over in silence."""
    unread, reason = MODEL_FLAGS, "is read with --model only"
    if of_model:
        unread, reason = ARCHITECTURE_FLAGS, "cannot be given with --model, which has its own architecture"
        if theory == "attention_only" and was_given(context, "prompts"):
            raise UsageError("attention_only reads no --prompts; rollout measures a model's mixing on them")
        if theory in UNPROMPTED and not was_given(context, "prompts") and was_given(context, "count"):
            raise UsageError(f"--count is read with --prompts only; {theory} needs none")
    for name in unread:
        if was_given(context, name):
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def _refuse_ignored(architecture: "Architecture", prediction: "Prediction") -> None:
    """What the theory took out of the architecture, the user asked for in vain."""
    used = {} if prediction.architecture is None else prediction.architecture.describe()
    for name, value in architecture.describe().items():
        if used.get(name, value) != value:
            raise UsageError(
                f"theory {prediction.theory} ignores {name}; leave --{name} out, or see `posbias list theories`"
            )


def _of_model(
    source: str, prompts: str | None, theory: str, *, length: int, draw: tuple[int, int, int | None]
) -> "tuple[Prediction, dict[str, Any]]":
    """What a theory says of a model, and what it read; `draw`: count and seed of prompts, seed of initialisation."""
    from posbias.models import load_model
    from posbias.prompts import load_prompts
    from posbias.theory import THEORIES
    from posbias.theory import predict as predict_profile
    from posbias.theory.model_architecture import known_mixing

    _ = THEORIES[theory]
    count, seed, init_seed = draw
    if theory == "mean_field" and init_seed is None and not source.startswith("config:"):
        raise UsageError(f"mean_field is about initialisation: give --init-seed, or --model config:{source}")
    loaded = load_model(source, init_seed=init_seed)
    unprompted = theory in UNPROMPTED or (theory not in PROMPTED and known_mixing(loaded) is not None)
    if prompts is None and not unprompted:
        prompts = "default"
    drawn = None if prompts is None else load_prompts(prompts, loaded, n_positions=length, count=count, seed=seed)
    prediction = predict_profile(loaded, n_positions=length, theory=theory, prompts=drawn)
    return prediction, {"model": loaded.describe(), "prompts": None if drawn is None else drawn.describe()}
