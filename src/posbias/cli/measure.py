"""`posbias measure`, `attention`, `decompose` and `train`: what is measured on models, and small ones to measure."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from posbias.cli import options
from posbias.cli.output import running
from posbias.decomposition.options import DecomposeOptions
from posbias.errors import RunError, UsageError
from posbias.measurement.options import AttentionOptions, MeasureOptions
from posbias.training.options import TrainOptions


def measure(
    model: list[str],
    *,
    prompts: options.PromptFlags,
    kinds: str = "jacobian,probability",
    settings: MeasureOptions,
    loading: options.Loaded,
    engine: options.EngineFlags,
    flags: options.RunFlags,
) -> None:
    """Measure the influence of every position on the last one.

    Also measures how strongly each layer mixes.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'; one.
        kinds: Kinds of influence (`posbias list kinds`), comma-separated.

    Examples: `posbias measure demo --length 256 --count 8 --out runs/measured` · at initialisation: `--init-seed 0` ·
    more probes: `--kinds 'jacobian(probes=16)'` · on a continuation: `--kinds logprob --output "target(text=' Paris')"`
    · layer by layer: `--depth-profiles all`
    """
    from posbias.measurement.kinds import resolve_kinds
    from posbias.measurement.measurement import measure as measured

    source, *others = model
    if others:
        raise UsageError(
            f"measure takes one model, got {', '.join(model)}; measure each into a directory of its own, and draw them "
            "on one page: posbias report DIRECTORY... --out BOTH"
        )
    asked, resolved = replace(settings, engine=engine.of(settings.engine), directory=flags.out), resolve_kinds(kinds)
    with running(flags, model=source) as run:
        loaded, drawn = prompts.opened(source, loading)
        run.finish(measured(loaded, drawn, kinds=resolved, seed=prompts.seed, options=asked).record)


def attention(
    model: str,
    *,
    prompts: options.PromptFlags,
    settings: AttentionOptions,
    loading: options.Loaded,
    flags: options.RunFlags,
) -> None:
    """Measure a model's attention and its rollouts.

    Distance, entropy, sinks, content, kernels and mixing are averaged over prompts; no whole matrix is ever held.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.

    Examples: `posbias attention demo --length 512 --count 8 --out runs/attention` · a long prompt: `--length 8192
    --count 1`
    """
    from posbias.measurement.attention import attention as measured

    with running(flags) as run:
        loaded, drawn = prompts.opened(model, loading)
        run.finish(measured(loaded, drawn, options=replace(settings, directory=flags.out)).record)


def decompose(
    model: str,
    *,
    prompts: Annotated[options.PromptFlags, options.Take(length=256, count=8)],
    settings: DecomposeOptions,
    loading: options.Loaded,
    flags: options.RunFlags,
) -> None:
    """Show what each ingredient contributes to a model's profile.

    Mask, residual stream, encoding, content and sinks are replaced one at a time, and the profile is measured again.

    Args:
        model: Hub id, directory, file.gguf, 'demo' or 'config:PATH_OR_ID'.

    Examples: `posbias decompose demo --length 256 --count 8 --out runs/decomposed` · chosen changes: `--interventions
    'no_rope,window(width=64),sink_masked(positions=4)'` · all of them: `posbias list interventions`
    """
    from posbias.decomposition.decomposition import decompose as decompose_model
    from posbias.interventions import resolve_interventions
    from posbias.measurement.kinds import resolve_kinds

    replaced, kinds = resolve_interventions(settings.interventions), resolve_kinds(settings.kinds)
    with running(flags) as run:
        loaded, drawn = prompts.opened(model, loading)
        asked = replace(settings, interventions=replaced, kinds=kinds, directory=flags.out)
        run.finish(decompose_model(loaded, drawn, options=asked).record)


def train(study: Path, *, settings: TrainOptions, engine: options.EngineFlags, flags: options.RunFlags) -> None:
    """Train every member of a study.

    A study is a grid of masks, encodings, depths and task settings, times seeds.

    Args:
        study: A study: task, model, optimiser, train, grid and seeds, in YAML.

    Example: `posbias train study.yaml --out runs/study` · then a member like any model: `posbias measure
    runs/study/models/0000 --length 10` · after a kill: the same with `--resume`
    """
    from posbias.training.running import train as train_study
    from posbias.training.study import load_study

    settings = replace(settings, engine=engine.of(settings.engine), directory=flags.out)
    with running(flags) as run:
        trained = train_study(load_study(study), options=settings)
        run.finish(trained.record)
    if trained.record.error is not None:
        raise RunError(trained.record.error)
