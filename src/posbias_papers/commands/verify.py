"""`posbias verify`: published theorems and claims put to the test."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posbias.cli import options
from posbias.cli.output import print_json, running, say
from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.measurement.several import MeasurePlan

EXAMPLE = (
    "Examples: `posbias verify` · `posbias verify wu2025` · `posbias verify wu2025/theorem-4.5 --json` · "
    "as a page: `posbias verify --report --out runs/claims` · "
    "a mask: `posbias verify --mask 'prefix(length=4)'` · on a model: `posbias verify --model demo --length 48`"
)
DEFAULT_REPORT = Path("runs/verify")


@dataclass(frozen=True)
class OfModelFlags:
    """Prompts for a model on whose attention claims are tested."""

    prompts: Annotated[str, typer.Option(help="With --model: prompts, as for measure.")] = "default"
    count: options.Count = 8

    def plan(self, loading: options.ModelFlags, *, n_positions: int, seed: int) -> "MeasurePlan":
        """The prompts, and how the model is loaded."""
        from posbias.measurement.several import MeasurePlan
        from posbias.prompts.prompts import PromptSource

        source, settings = PromptSource(self.prompts), loading.settings(self.prompts)
        return MeasurePlan(source=source, n_positions=n_positions, count=self.count, seed=seed, **settings)


SINGLE = options.ModelFlags(dtype="float32")
"""Claims are held to single precision."""


@options.grouped
def verify(
    context: typer.Context,
    claim: Annotated[
        str | None, typer.Argument(help="A paper (wu2025) or a claim (wu2025/theorem-4.1); all by default.")
    ] = None,
    *,
    mask: Annotated[
        str | None,
        typer.Option(help="Find the centre nodes of this mask, such as prefix(length=4).", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Test the claims on this model's attention; models as for measure.", show_default=False),
    ] = None,
    read: OfModelFlags,
    loading: options.ModelFlags = SINGLE,
    length: options.Length = 32,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write an HTML page of all verdicts to --out (default runs/verify)."),
    ] = False,
    flags: options.RunFlags,
) -> None:
    """Test published theorems and claims.

    Each gets a verdict, with the number behind it and the correction or a sharper fact. With --model they are tested on
    that model's attention, trained or random: which premises it meets, and which claims hold.
    """
    import posbias_papers as papers
    from posbias.report import write_report

    of_model = [*options.names_of(OfModelFlags), *options.names_of(options.ModelFlags)]
    unread = of_model if model is None else ["mask"]
    options.refuse(context, unread, "needs --model" if model is None else "cannot go with --model")
    out = flags.out or (DEFAULT_REPORT if report else None)
    with running(context, replace(flags, out=out)) as run:
        described: dict[str, Any] | None = None
        if model is not None:
            plan = read.plan(loading, n_positions=length, seed=flags.seed)
            verdicts, described = papers.verify_source(model, claim, plan)
        elif mask is None:
            verdicts = papers.verify(claim, seed=flags.seed)
        elif claim in {None, "wu2025", "wu2025/centre-nodes"}:
            verdicts = [papers.verify_mask(papers.spelled_mask(mask, length), seed=flags.seed)]
        else:
            raise UsageError(f"--mask belongs to wu2025/centre-nodes, got claim {claim!r}")
        record = papers.claims_record(verdicts, run.arguments, seed=flags.seed, command=run.command, read=described)
        if run.directory is not None:
            record.write_run(run.directory)
        page = write_report([record], run.directory) if report and run.directory is not None else None
    if flags.json:
        print_json([verdict.as_dict() for verdict in verdicts])
        return
    texts = [f"{verdict.as_text()}\n" for verdict in verdicts]
    texts.append(papers.tally([verdict.verdict for verdict in verdicts], on_model=model is not None))
    say(*"\n".join(texts).split("\n"), *([] if page is None else [f"report: {page}"]))
