"""`posbias design`: the architecture, or the key bias of a model, with the position bias that is asked for."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import RunError, UsageError

if TYPE_CHECKING:
    from posbias.designing import Design, DesignOptions
    from posbias.models.model import Model

EXAMPLE = (
    "Examples: `posbias design flat --depth 24 --heads 8 --mixing 0.1 --length 512` · any target at one length: "
    "`posbias design 'u_shape(middle=4.0)' --over key_bias --depth 12` · what a model needs to be born flat, and "
    "whether networks are: `posbias design flat --model config:demo --length 128 --initialisations 8`"
)


@dataclass(frozen=True)
class NetworkFlags:
    """Networks at initialisation that are measured with the design of their model, and without."""

    initialisations: Annotated[
        int, typer.Option(help="With --model: fresh initialisations that are measured; 0: none.", min=0)
    ] = 8
    measured_at: Annotated[
        str | None,
        typer.Option(
            help="With --model: lengths at which they are measured. [default: the longest]", show_default=False
        ),
    ] = None

    def lengths(self, of_design: list[int]) -> list[int]:
        """The lengths at which they are measured; none if no networks are."""
        at = [max(of_design)] if self.measured_at is None else options.whole_numbers("measured-at", self.measured_at)
        return at if self.initialisations else []


@options.grouped
def design(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(help="flat, power(exponent=E), recency(rate=R), u_shape(middle=M), a run, or a .csv file.")
    ] = "flat",
    *,
    over: Annotated[
        str,
        typer.Option(help="key_bias, gamma_key, gamma_alibi, alibi, windows, mixing; several with commas."),
    ] = "gamma_key",
    depth: Annotated[int, typer.Option(help="Layers.", min=1)] = 12,
    heads: Annotated[int, typer.Option(help="Attention heads per layer.", min=1)] = 1,
    mixing: options.Mixing = options.RESIDUAL,
    model: Annotated[
        str | None,
        typer.Option(help="A model at initialisation, 'config:PATH_OR_ID', by mean field.", show_default=False),
    ] = None,
    device: options.Device = options.AUTO,
    dtype: options.Dtype = options.AUTO,
    length: Annotated[str, typer.Option(help="Context length N, or several with commas.")] = "512",
    starts: Annotated[
        int | None,
        typer.Option(help="Searches to try; the best is kept.", min=1, show_default="8; with --model 2"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 if the design misses the target by more than W1 0.01.")
    ] = False,
    networks: NetworkFlags,
    flags: options.RunFlags,
) -> None:
    """Design an architecture with a chosen position bias.

    If there is a closed form, the design is exact; otherwise it is searched for.
    """
    from posbias.designing import DesignOptions
    from posbias.designing import design as find
    from posbias.designing.result import TOLERANCE
    from posbias.measurement.measurement import Loading
    from posbias.registry import split_literals

    lengths = options.whole_numbers("length", length)
    measured_at = networks.lengths(lengths)
    free = split_literals(over)
    _refuse_unread(context, model)
    search = DesignOptions(depth, heads, options.literal(mixing), n_positions=lengths, starts=starts, seed=flags.seed)
    with running(context, flags) as run:
        if model is None:
            solution = find(target, free, options=search)
        else:
            loaded, count = Loading(dtype=dtype, device=device).load(model), max(networks.initialisations, 2)
            solution = _of_model(target, free, loaded, search, measured_at=measured_at, count=count)
        record = solution.record
        if model is None and "mixing" not in solution.over and not options.given(context, ["mixing"]):
            record.scalars["caveats"] = [options.DEFAULT_MIXING]
        run.finish(record)
    if strict and not solution.met:
        left = ", ".join(f"{solution.distances[n][0]:.2g} at {n}" for n in solution.lengths)
        raise RunError(f"required W1 <= {TOLERANCE:g} to the target, got {left} positions")


def _refuse_unread(context: typer.Context, model: str | None) -> None:
    """Refuse options of an architecture beside a model, and options of a model without one."""
    of_model = options.names_of(NetworkFlags)
    if model is None:
        options.refuse(context, [*of_model, "device", "dtype"], "is read with --model only")
        return
    options.refuse(context, ["depth", "heads", "mixing"], "cannot be given with --model, which has its own")
    if not model.startswith("config:"):
        raise UsageError(f"--model {model}: a design is for initialisation; write --model config:{model}")


def _of_model(
    target: str, over: list[str], model: "Model", search: "DesignOptions", *, measured_at: list[int], count: int
) -> "Design":
    """Design a model at initialisation, with the measurements of it."""
    from posbias.designing import design as find
    from posbias.designing import measure_design
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.prompts.loading import load_prompts

    measured = []
    solution = find(target, over, model=model, options=replace(search, theory="mean_field"))
    if isinstance(model, HuggingFaceModel):
        for n_positions in measured_at:
            prompts = load_prompts("synthetic", model, n_positions=n_positions, count=count, seed=search.seed)
            measured.append(measure_design(solution, model, prompts, seed=search.seed))
    return replace(solution, measured=tuple(measured))
