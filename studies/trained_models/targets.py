"""Whether the probability gradient is predicted better from its own gradient than from the whole final state.

The study judges one profile on both kinds of influence: energies that start from the whole final state. Here they start
from the squared gradient of the predicted token's probability as well, and both are set beside what is measured.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from run import CHOSEN, FORMS
from variants import SCRAMBLED, SEED, computed_once, options

from posbias.comparison.distances import compare_with_prompts
from posbias.measurement.kinds import resolve_kinds
from posbias.measurement.prompt import measure_prompt
from posbias.models.loading import load_model
from posbias.models.model import Model
from posbias.prompts.loading import load_prompts
from posbias.prompts.prompts import Prompts, shuffled
from posbias.results.records import Record
from posbias.theory.power_rollout import trace_model

KIND = "probability"
STARTS = ("jacobian", KIND)
"""Where the energies start."""


def main() -> None:
    parser = options(__doc__ or "", count=16)
    parser.add_argument("--out", type=Path, help="directory of the record")
    given = parser.parse_args()
    record = Record(verb="study", arguments={"length": given.length, "count": given.count, "seed": SEED})
    for name, source in (item.split("=", 1) for item in given.model):
        model = load_model(source)
        for text, prompts in _texts(given.text, model, given.length, given.count):
            folder = given.parts / name / str(given.length) / text / "targets"
            rows = [_prompt(folder / f"{index:03d}.safetensors", model, prompts, index) for index in range(given.count)]
            record.scalars.setdefault(name, {})[text] = _compare(rows)
    print(table(record))
    if given.out is not None:
        record.save(given.out, overwrite=True)


def _texts(given: list[str], model: Model, n_positions: int, count: int) -> Iterator[tuple[str, Prompts]]:
    """Every text, and the first one scrambled."""
    texts = [item.split("=", 1) for item in given]
    loaded = [load_prompts(path, model, n_positions=n_positions, count=count, seed=SEED) for _, path in texts]
    yield from zip([name for name, _ in texts], loaded, strict=True)
    yield SCRAMBLED, shuffled(loaded[0], SEED)


def _prompt(path: Path, model: Model, prompts: Prompts, index: int) -> dict[str, np.ndarray]:
    """Measured and predicted from both starts, computed once."""
    token_ids = prompts.token_ids[index]

    def compute() -> dict[str, np.ndarray]:
        found = measure_prompt(model, token_ids, kinds=resolve_kinds([KIND]), key=(SEED, index))
        theories = {
            start: replace(FORMS[CHOSEN], target=start).profile_of(trace_model(model, token_ids, target=start))
            for start in STARTS
        }
        return theories | {"measured": found.norms[KIND]}

    return computed_once(path, compute)


def _compare(rows: list[dict[str, np.ndarray]]) -> dict[str, object]:
    """W1 of both to the measured profile, beside the flat line and the noise of the measurement."""
    measured = np.stack([row["measured"] for row in rows])
    found: dict[str, object] = {}
    for start in STARTS:
        predicted = np.stack([row[start] for row in rows]).astype(np.float64)
        compared = compare_with_prompts(predicted, measured, generator=np.random.default_rng(SEED))
        found[start] = compared.distance.as_record()
        found["flat"], found["noise"] = compared.flat.as_record(), compared.noise.mean
    return found


def table(record: Record) -> str:
    """Markdown: a line per model and text."""
    lines = ["| model | text | flat | noise | from the final state | from its own gradient |", "|" + "---|" * 6]
    for model, texts in record.scalars.items():
        for text, found in texts.items():
            cells = [f"{found['flat']['value']:.3f}", f"{found['noise']:.3f}"]
            cells += [f"{found[s]['value']:.3f} [{found[s]['low']:.3f}, {found[s]['high']:.3f}]" for s in STARTS]
            lines.append(f"| {model} | {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
