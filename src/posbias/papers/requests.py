"""Published work as `verify` and `reproduce` request it: names and plain settings in, verdicts and records out."""

from collections.abc import Mapping
from typing import Any

from posbias.models.loading import load_model
from posbias.papers.birth2603.models import BirthSettings
from posbias.papers.claims import Verdict, selected
from posbias.papers.model_claims import verify_model
from posbias.papers.reproduction import reproduce, reproduction_record
from posbias.papers.study_runs import (
    FOLDERS,
    StudySettings,
    finished_reproduction,
    reproduction_settings,
    shipped_studies,
)
from posbias.prompts.loading import load_prompts
from posbias.runs.parts import fingerprint
from posbias.runs.records import Record
from posbias.training import TrainOptions

BIRTH = "birth-2603.10123"


def verify_source(
    source: str, claim: str | None, *, prompts: str, n_positions: int, count: int, init_seed: int | None, seed: int
) -> tuple[list[Verdict], dict[str, Any]]:
    """Verdicts on the model that `source` names, and the model and the prompts as they describe themselves."""
    selected(claim)  # before the model is loaded
    loaded = load_model(source, init_seed=init_seed)
    drawn = load_prompts(prompts, loaded, n_positions=n_positions, count=count, seed=seed)
    return verify_model(loaded, drawn, claim), {"model": loaded.describe(), "prompts": drawn.describe()}


def requested_settings(
    paper: str, *, size: str, seed: int, birth: Mapping[str, Any], studies: tuple[str, ...], run: TrainOptions
) -> Any:
    """A paper's settings: of `birth` those of the experiment on initialisations, of `studies` and `run` the trained."""
    if paper == BIRTH:
        chosen = {name: value for name, value in birth.items() if name != "length"}
        return BirthSettings(size=size, n_positions=birth["length"], seed=seed, **chosen)
    if paper not in FOLDERS:
        return None
    settings = StudySettings(size=size, studies=studies, seed=seed, run=run)
    shipped_studies(paper, settings)
    return settings


def requested_reproduction(
    paper: str, settings: Any, arguments: Mapping[str, Any], *, command: str, resume: bool
) -> tuple[Record, bool]:
    """The record of a reproduction, and whether it was found finished in its directory, where `resume` looks for it."""
    finished = finished_reproduction(paper, settings) if resume else None
    if finished is not None:
        return finished, True
    record = reproduction_record(reproduce(paper, settings=settings), arguments, command=command)
    if isinstance(settings, StudySettings) and settings.run.directory is not None:
        record.resolved["fingerprint"] = fingerprint(reproduction_settings(paper, settings))
    return record, False
