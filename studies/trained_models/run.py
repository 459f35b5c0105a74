"""Measure trained models and set the power rollout beside them: models x lengths x kinds of text, prompt by prompt.

Every prompt of every cell is one file under --parts, written atomically; an interrupted study goes on where it stopped,
and several processes may share the work, each with models of its own. `summary.py` makes the record of what is there.
"""

import argparse
import hashlib
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cells import KEPT_HERE, kept_prompts
from safetensors.numpy import save
from variants import SCRAMBLED, SEED

from posbias.files import write_atomically
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.prompt import measure_prompt
from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts, shuffled
from posbias.theory.power_rollout import PowerRollout, attention_rollout_prompt
from posbias.theory.power_rollout.rollout import trace_model

SCHEDULE = (
    (256, 8),
    (512, 4),
    (256, 32),
    (1024, 4),
    (512, 32),
    (2048, 4),
    (1024, 32),
    (2048, 12),
    (2048, 20),
    (2048, 32),
)
"""(positions, prompts): small cells first, and a few prompts of every cell before the last ones of any."""
ALL_FORMS_UP_TO = 512
ALL_FORMS_PROMPTS = 8
"""Every form of the power rollout is computed on the first prompts of the shorter lengths; elsewhere the chosen one."""
KINDS = ("jacobian(probes=2)", "probability")
FORMS = {
    "diagonal_key": PowerRollout(key_path=True),
    "diagonal": PowerRollout(key_path=False),
}
"""The record has isotropic forms too; the last commit with their code is f6b61544."""
CHOSEN = "diagonal_key"
"""The form that wins on the first text over all models; see `summary.py`."""


@dataclass(frozen=True)
class Study:
    """What is measured, and where it is kept."""

    models: dict[str, str]
    texts: dict[str, Path]
    parts: Path
    kept: Path
    schedule: tuple[tuple[int, int], ...]
    only: frozenset[str]
    """Kinds of text to measure; empty: all."""


def main() -> None:
    study = _arguments()
    for n_positions, count in study.schedule:
        for name, source in study.models.items():
            model = load_model(source)
            for text, prompts in _texts(study, model, n_positions):
                done = kept_prompts(study.kept, name, n_positions, text)
                for index in range(count):
                    _piece(study.parts / name / str(n_positions) / text, model, prompts, index, done)
            print(f"{name} {n_positions}: {count} prompts of each text", flush=True)


def _texts(study: Study, model: Model, n_positions: int) -> Iterator[tuple[str, Prompts]]:
    """Every kind of text, and the first one with the tokens of each prompt in random order."""
    most = max(count for length, count in SCHEDULE + study.schedule if length == n_positions)
    loaded = {
        name: load_prompts(str(path), model, n_positions=n_positions, count=most, seed=SEED)
        for name, path in study.texts.items()
    }
    first = next(iter(loaded.values()))
    for name, prompts in itertools.chain(loaded.items(), [(SCRAMBLED, shuffled(first, SEED))]):
        if name in study.only or not study.only:
            yield name, prompts


def _piece(folder: Path, model: Model, prompts: Prompts, index: int, done: Collection[str]) -> None:
    """Measure one prompt and predict it, unless that was done."""
    token_ids = prompts.token_ids[index]
    digest = hashlib.sha256(token_ids.astype("<i8").tobytes()).hexdigest()[:12]
    path = folder / f"{index:03d}-{digest}.safetensors"
    if path.is_file() or path.stem in done:
        return
    measured = measure_prompt(model, token_ids, kinds=resolve_kinds(list(KINDS)), key=(SEED, index))
    trace = trace_model(model, token_ids)
    every = len(token_ids) <= ALL_FORMS_UP_TO and index < ALL_FORMS_PROMPTS
    forms = FORMS if every else {CHOSEN: FORMS[CHOSEN]}
    theories = {name: settings.profile_of(trace) for name, settings in forms.items()}
    theories["published"] = attention_rollout_prompt(model, token_ids, measured.mixing["token_mean"].tolist())
    arrays = {f"norms/{kind}": norms for kind, norms in measured.norms.items()} | {
        f"theory/{name}": profile for name, profile in theories.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))


def _arguments() -> Study:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=SOURCE", help="what load_model takes")
    parser.add_argument(
        "--text", action="append", required=True, metavar="NAME=FILE", help="the first is scrambled too"
    )
    parser.add_argument("--parts", type=Path, required=True, help="directory of the finished prompts")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these texts alone, or scrambled")
    parser.add_argument("--length", type=int, help="positions; all in turn where none is given")
    parser.add_argument("--count", type=int, default=32, help="prompts of each text, with --length")
    parser.add_argument("--kept", type=Path, default=KEPT_HERE, help="profiles kept of prompts that are not run again")
    given = parser.parse_args()
    models = dict(item.split("=", 1) for item in given.model)
    texts = {name: Path(path) for name, path in (item.split("=", 1) for item in given.text)}
    if unknown := set(given.only) - {*texts, SCRAMBLED}:
        parser.error(f"--only {min(unknown)}: allowed are {', '.join([*texts, SCRAMBLED])}")
    schedule = SCHEDULE if given.length is None else ((given.length, given.count),)
    return Study(models, texts, given.parts, given.kept, schedule, frozenset(given.only))


if __name__ == "__main__":
    main()
