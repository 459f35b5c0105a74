"""`posbias predict`: a theory's position bias of an architecture, without any model."""

from typing import Annotated

import typer

from posbias.cli import options
from posbias.cli.invocation import command_line, passed_arguments

EXAMPLE = (
    "Example: `posbias predict --depth 32 --heads 32 --encoding alibi --mixing 0.1 --length 4096` · "
    'a hybrid stack: `--depth 2 --mask \'["causal", "sliding_window(width=64)"]\'`'
)


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
    out: options.Out = None,
    json: options.Json = False,
) -> None:
    """Predict the influence of every position on the last one, from the architecture alone."""
    from posbias.architecture import Architecture
    from posbias.auditing import prediction_record
    from posbias.cli.output import finish
    from posbias.records import run_directory
    from posbias.theory import predict as predict_profile

    arguments = passed_arguments(context)
    with run_directory(out, verb="predict", arguments=arguments) as directory:
        architecture = Architecture(
            depth=depth,
            heads=heads,
            mask=options.literal(mask),
            encoding=options.literal(encoding),
            mixing=options.literal(mixing),
            content=options.literal(content),
        )
        prediction = predict_profile(architecture, n_positions=length, theory=theory)
        finish(prediction_record(prediction, arguments, command=command_line(context)), out=directory, as_json=json)
