"""`posbias design`: the architecture, or the key bias of a model, with the position bias that is asked for."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import RunError, UsageError

if TYPE_CHECKING:
    from posbias.designing import Design

EXAMPLE = (
    "Examples: `posbias design flat --depth 24 --heads 8 --mixing 0.1 --length 512` · any target at one length: "
    "`posbias design 'u_shape(middle=4.0)' --over key_bias --depth 12` · what a model needs to be born flat, and "
    "whether networks are: `posbias design flat --model config:demo --length 128 --count 8`"
)


@options.grouped
def design(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="flat, power(exponent=E), recency(rate=R), u_shape(middle=M), a run, or a .csv file.")
    ] = "flat",
    *,
    over: Annotated[
        str,
        typer.Option(
            help="key_bias, gamma_key, gamma_alibi, spline, alibi, windows, mixing, sinks; with --model also "
            "norm_placement; several with commas."
        ),
    ] = "gamma_key",
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 12,
    heads: Annotated[int, typer.Option(help="Attention heads per layer.", min=1)] = 1,
    mixing: options.Mixing = options.RESIDUAL,
    model: Annotated[
        str | None,
        typer.Option(help="A model at initialisation, 'config:PATH_OR_ID', by mean field.", show_default=False),
    ] = None,
    length: Annotated[str, typer.Option(help="Context length N, or several with commas.")] = "512",
    starts: Annotated[
        int | None,
        typer.Option(help="Searches that are tried, the best kept.", min=1, show_default="8; with --model 2"),
    ] = None,
    require: Annotated[
        bool, typer.Option("--require", help="Exit with 1 if the design misses the target by more than W1 0.01.")
    ] = False,
    count: Annotated[
        int, typer.Option(help="With --model: fresh initialisations that are measured; 0: none.", min=0)
    ] = 8,
    measured_at: Annotated[
        str | None,
        typer.Option(
            help="With --model: lengths at which they are measured. [default: the longest]", show_default=False
        ),
    ] = None,
    flags: options.RunFlags,
) -> None:
    """Design an architecture with a chosen position bias. Exactly where a closed form exists; else by search."""
    from posbias.designing import design as find
    from posbias.designing import design_record

    lengths = options.whole_numbers("length", length)
    measured_lengths = [max(lengths)] if measured_at is None else options.whole_numbers("measured-at", measured_at)
    given: dict[str, Any] = {"over": options.split_literals(over), "n_positions": lengths}
    given |= {"starts": starts, "seed": flags.seed}
    if model is None:
        options.refuse(context, ["count", "measured_at"], "is read with --model only")
    elif "norm_placement" in given["over"]:
        options.refuse(context, ["count", "measured_at"], "needs norms where they are: those of a network do not move")
    else:
        options.refuse(context, ["depth", "heads", "mixing"], "cannot be given with --model, which has its own")
        if not model.startswith("config:"):
            raise UsageError(f"--model {model}: a design is for initialisation; write --model config:{model}")
    with running(context, flags) as run:
        if model is not None:
            found, facts = _of_model(target, model, given, measured_lengths if count else [], count=max(count, 2))
            record = design_record(found, run.arguments, command=run.command, **facts)
        else:
            found = find(target, depth=depth, heads=heads, mixing=options.literal(mixing), **given)
            record = design_record(found, run.arguments, command=run.command)
            if "mixing" not in found.over and not options.given(context, ["mixing"]):
                record.scalars["caveats"] = [options.RESIDUAL_SAID]
        run.finish(record)
    if require and not found.met:
        left = ", ".join(f"{found.distances[n][0]:.2g} at {n}" for n in found.lengths)
        raise RunError(f"required W1 <= {record.scalars['tolerance']:g} to the target, got {left} positions")


def _of_model(
    target: str, source: str, given: dict[str, Any], measured_at: list[int], *, count: int
) -> tuple["Design", dict[str, Any]]:
    """The design of a model at initialisation; what was measured of it, and the model as it describes itself."""
    from posbias.designing import design as find
    from posbias.designing import measure_design
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.models.loading import load_model
    from posbias.prompts.loading import load_prompts

    model, seed = load_model(source), given["seed"]
    found, measured = find(target, model=model, theory="mean_field", **given), []
    if isinstance(model, HuggingFaceModel) and not found.choices:
        for n_positions in measured_at:
            prompts = load_prompts("synthetic", model, n_positions=n_positions, count=count, seed=seed)
            measured.append(measure_design(found, model, prompts, seed=seed))
    return found, {"measured": measured, "model": model.describe()}
