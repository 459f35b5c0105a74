"""`posbias predict`: a theory's position bias, of an architecture given by flags or of a model."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments, was_given
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.architecture import Architecture
    from posbias.auditing import MeasurePlan
    from posbias.theory import Prediction

EXAMPLE = (
    "Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · "
    'a hybrid stack: `--depth 2 --mask \'["causal", "sliding_window(width=64)"]\'` · '
    "a model at initialisation: `--model config:demo --theory mean_field --length 2048` · "
    "a trained one: `--model DIR --theory 'power_rollout(form=isotropic)' --prompts synthetic` · "
    "what each of its ingredients costs: `--model demo --ingredients --length 128`"
)

ARCHITECTURE_FLAGS: tuple[str, ...] = ("depth", "heads", "mask", "encoding", "mixing", "content")
PROMPT_FLAGS: tuple[str, ...] = ("count", "windows", "shuffle")
"""Only where prompts are read."""
MODEL_FLAGS: tuple[str, ...] = ("prompts", *PROMPT_FLAGS, "init_seed", "dtype", "device", "ingredients")
"""Only with `--model`. A seed may always be given: every verb has one, and it goes into the record."""


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
    theory: Annotated[
        str, typer.Option(help="One of `posbias list theories`, with parameters: 'power_rollout(form=isotropic)'.")
    ] = "rollout",
    model: Annotated[
        str | None,
        typer.Option(help="The model, as for measure, in place of the flags of an architecture.", show_default=False),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts, to read a model's activations or mixing on.", show_default=False)
    ] = None,
    windows: options.Windows = "random",
    shuffle: options.Shuffle = False,
    count: options.Count = 8,
    ingredients: Annotated[
        bool, typer.Option("--ingredients", help="Measure too: what leaving out each part of power_rollout costs.")
    ] = False,
    init_seed: options.InitSeed = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    seed: options.Seed = 0,
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Predict the influence of every position on the last one, from an architecture, or from a model's weights."""
    from posbias.auditing import MeasurePlan, ingredient_record
    from posbias.cli.output import finish
    from posbias.prompts import PromptSource
    from posbias.records import run_directory

    if ingredients and not was_given(context, "theory"):
        theory = "power_rollout"
    arguments, command = {**passed_arguments(context), "theory": theory}, command_line(context)
    _refuse_unread(context, theory, of_model=model is not None)
    with run_directory(out, verb="predict", arguments=arguments) as directory:
        if model is None:
            flags = {"mask": mask, "encoding": encoding, "mixing": mixing, "content": content}
            prediction = _of_architecture(depth, heads, flags, theory, length=length)
            finish(prediction.record(arguments, command=command), out=directory, as_json=json)
            return
        plan = MeasurePlan(
            source=PromptSource("default" if prompts is None else prompts, windows, shuffle),
            n_positions=length,
            count=count,
            seed=seed,
            init_seed=init_seed,
            dtype=dtype,
            device=device,
        )
        if ingredients:
            found = ingredient_record(model, plan, theory=theory, arguments=arguments, command=command)
            finish(found, out=directory, as_json=json)
            return
        prediction, read = _of_model(model, plan, theory, prompted=prompts is not None)
        finish(prediction.record(arguments, command=command, **read), out=directory, as_json=json)


def _refuse_unread(context: typer.Context, theory: str, *, of_model: bool) -> None:
    """Flags of an architecture beside a model, and flags of a model without one, would be passed over in silence."""
    unread, reason = MODEL_FLAGS, "is read with --model only"
    if of_model:
        from posbias.theory import parse_theory

        unread, reason = ARCHITECTURE_FLAGS, "cannot be given with --model, which has its own architecture"
        name, _ = parse_theory(theory)
        if name == "attention_only" and was_given(context, "prompts"):
            raise UsageError("attention_only reads no --prompts; rollout measures a model's mixing on them")
        if not _needs_prompts(theory) and not was_given(context, "prompts"):
            for flag in PROMPT_FLAGS:
                if was_given(context, flag):
                    raise UsageError(f"--{flag} is read with --prompts only; {name} needs none")
    for flag in unread:
        if was_given(context, flag):
            raise UsageError(f"--{flag.replace('_', '-')} {reason}")


def _needs_prompts(theory: str) -> bool:
    """Whether a theory of a model reads prompts, be it for activations or for a model's mixing."""
    from posbias.theory import ModelTheory, parse_theory

    name, parsed = parse_theory(theory)
    return parsed.reads_prompts if isinstance(parsed, ModelTheory) else name != "attention_only"


def _of_architecture(depth: int, heads: int, flags: Mapping[str, str], theory: str, *, length: int) -> "Prediction":
    """What a theory says of the architecture that the flags describe."""
    from posbias.architecture import Architecture
    from posbias.theory import predict as predict_profile

    architecture = Architecture(
        depth=depth, heads=heads, **{name: options.literal(value) for name, value in flags.items()}
    )
    prediction = predict_profile(architecture, n_positions=length, theory=theory)
    _refuse_ignored(architecture, prediction)
    return prediction


def _refuse_ignored(architecture: "Architecture", prediction: "Prediction") -> None:
    """What the theory took out of the architecture, the user asked for in vain."""
    used = {} if prediction.architecture is None else prediction.architecture.describe()
    for name, value in architecture.describe().items():
        if used.get(name, value) != value:
            raise UsageError(
                f"theory {prediction.theory} ignores {name}; leave --{name} out, or see `posbias list theories`"
            )


def _of_model(source: str, plan: "MeasurePlan", theory: str, *, prompted: bool) -> "tuple[Prediction, dict[str, Any]]":
    """What a theory says of a model, and what it read; `prompted`: whether prompts were asked for."""
    from posbias.theory import ModelTheory, parse_theory
    from posbias.theory import predict as predict_profile
    from posbias.theory.predict import known_mixing

    name, parsed = parse_theory(theory)
    if name == "mean_field" and plan.init_seed is None and not source.startswith("config:"):
        raise UsageError(f"mean_field is about initialisation: give --init-seed, or --model config:{source}")
    loaded = plan.load(source)
    known = not isinstance(parsed, ModelTheory) and known_mixing(loaded) is not None
    drawn = plan.prompts(loaded) if prompted or (_needs_prompts(theory) and not known) else None
    prediction = predict_profile(loaded, n_positions=plan.n_positions, theory=theory, prompts=drawn, seed=plan.seed)
    return prediction, {"model": loaded.describe(), "prompts": None if drawn is None else drawn.describe()}
