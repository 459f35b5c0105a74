"""The commands of published work, which `posbias.cli.app` finds by name: claims tested, experiments run again."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from posbias.cli import options
from posbias.cli.output import running
from posbias.errors import UsageError
from posbias.measurement.options import Loading
from posbias.training.options import TrainOptions

if TYPE_CHECKING:
    from posbias_papers import Experiment

Read = Annotated[options.PromptFlags, options.Take("shuffle", length=32, count=8)]
Single = Annotated[Loading, options.Take(dtype="float32")]
"""Claims are held to single precision."""


def verify(
    claim: str | None = None,
    *,
    mask: str | None = None,
    model: str | None = None,
    read: Read,
    loading: Single,
    flags: options.RunFlags,
) -> None:
    """Test published theorems and claims.

    Each gets a verdict, with the number behind it and the correction or a sharper fact. With --model they are tested on
    that model's attention, trained or random: which premises it meets, and which claims hold.

    Args:
        claim: A paper (wu2025) or a claim (wu2025/theorem-4.1); all by default.
        mask: Find the centre nodes of this mask, such as prefix(length=4).
        model: Test the claims on this model's attention; models as for measure.

    Examples: `posbias verify` · `posbias verify wu2025` · `posbias verify wu2025/theorem-4.5 --json` · as a page:
    `posbias verify --out runs/claims` · a mask: `posbias verify --mask 'prefix(length=4)'` · on a model: `posbias
    verify --model demo --length 48`
    """
    from posbias.checks import OneOf, checked_value
    from posbias_papers import published as papers  # registers the claims, looked up before a model is loaded
    from posbias_papers.claims import selected

    of_model = ["prompts", "count", *options.names_of(Loading)]
    unread = of_model if model is None else ["mask"]
    flags.refuse(unread, "needs --model" if model is None else "cannot go with --model")
    with running(flags) as run:
        described: dict[str, Any] | None = None
        if model is not None:
            selected(claim)  # before the model is loaded
            checked_value("dtype", loading.dtype, Annotated[str, OneOf("float32", "float64")])
            loaded, prompts = read.opened(model, loading)
            verdicts = papers.verify_model(loaded, prompts, claim)
            described = {"model": loaded.describe(), "prompts": prompts.describe()}
        elif mask is None:
            verdicts = papers.verify(claim, seed=read.seed)
        elif claim in {None, "wu2025", "wu2025/centre-nodes"}:
            verdicts = [papers.verify_mask(papers.spelled_mask(mask, read.length), seed=read.seed)]
        else:
            raise UsageError(f"--mask belongs to wu2025/centre-nodes, got claim {claim!r}")
        record = papers.claims_record(verdicts, seed=read.seed, read=described)
        texts = [f"{verdict.as_text()}\n" for verdict in verdicts]
        texts.append(papers.tally([verdict.verdict for verdict in verdicts], on_model=model is not None))
        run.finish(record, [verdict.as_dict() for verdict in verdicts], *"\n".join(texts).split("\n"))


@dataclass(frozen=True)
class BirthFlags:
    """Settings of the experiment on initialisations."""

    length: Annotated[int, Ge(1)] = 256
    """Context length N in positions."""
    initialisations: Annotated[int, Ge(2)] = 8
    """birth: random initialisations, each with its own prompt."""
    probes: Annotated[int, Ge(1)] = 8
    """birth: random probes per Jacobian."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of everything that is drawn."""


def reproduce(
    paper: str,
    *,
    size: str = "small",
    birth: BirthFlags,
    study: list[str] | None = None,
    training: Annotated[TrainOptions, options.Take("stack_size")],
    engine: options.EngineFlags,
    flags: options.RunFlags,
) -> None:
    """Run a published experiment again.

    The report compares the paper's numbers with the new ones and gives a verdict on each statement.

    Args:
        paper: rollout-2602.16837, birth-2603.10123, icl-2502.01951 or position-copy-liu2026.
        size: birth: small (d 256), full (Qwen2-0.5B, GPT-2 medium) or tiny; trained: smoke (a minute), small (half an
            hour of two cores) or full (the source's steps).
        study: trained: one of the paper's studies (repeatable); by default all.

    Examples: `posbias reproduce rollout-2602.16837 --out runs/rollout` · `posbias reproduce birth-2603.10123` · at the
    real sizes: `posbias reproduce birth-2603.10123 --size full --initialisations 2` · trained: `posbias reproduce
    position-copy-liu2026 --size small --out runs/copy`
    """
    from posbias_papers import PAPERS

    experiment: Experiment = PAPERS[paper]()
    _refuse_settings(flags, paper)
    values = {
        **{"n_positions" if name == "length" else name: value for name, value in vars(birth).items()},
        "size": size,
        "studies": tuple(study or ()),
        "run": replace(training, engine=engine.of(training.engine), directory=flags.out),
    }
    settings = None
    if experiment.settings is not None:
        settings = experiment.settings(**{each.name: values[each.name] for each in fields(experiment.settings)})
    settings = experiment.check(settings)
    with running(flags) as run:
        run.finish(experiment.run(settings).record)


def _refuse_settings(flags: options.RunFlags, paper: str) -> None:
    """Refuse options of another experiment, which would change nothing here."""
    from posbias_papers import PAPERS

    training = ["device", "engine", *options.names_of(options.EngineFlags), "resume"]
    spelled = {"n_positions": ["length"], "studies": ["study"], "run": training}
    taken: dict[str, list[str]] = {
        name: [flag for each in fields(PAPERS[name].settings) for flag in spelled.get(each.name, [each.name])]
        for name in PAPERS
        if PAPERS[name].settings is not None
    }
    own = taken.get(paper, [])
    for name in dict.fromkeys(name for names in taken.values() for name in names if name not in own):
        owners = ", ".join(owner for owner, names in taken.items() if name in names)
        allowed = " ".join(f"--{other.replace('_', '-')}" for other in (*own, "out", "json"))
        flags.refuse([name], f"belongs to {owners}; {paper} takes {allowed} only")
