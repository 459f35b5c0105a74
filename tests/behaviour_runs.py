"""Evaluations as audits with behaviour leave them, without a model."""

import numpy as np

import posbias as pb
from posbias.evaluation.curve import PositionCurve, position_curve
from posbias.evaluation.evaluation import Evaluation, measures_of
from posbias.results.result import as_stored

PLACES = (0, 1, 2, 3, 4)
GOLD = "influence/measured/logprob/gold"


def saved(*, model="demo", seed=0, count=8, task="key_value(pairs=5)", level=1.0):
    """An evaluation as `audit_behaviour` leaves one: influence falls with the position, accuracy with the influence."""
    generator = np.random.default_rng([seed, count, len(model)])
    falling = np.linspace(0.5, 0.1, len(PLACES))
    noise = generator.normal(0, 0.05, (2, count, len(PLACES)))
    record = pb.Record(verb="evaluate", arguments={})
    record.resolved = {
        "title": f"{model}: {task}",
        "task": task,
        "count": count,
        "positions": list(PLACES),
        "max_tokens": 4,
        "responder": {"kind": "local", "model": {"source": model, "weights_sha256": model, "dtype": "float32"}},
    }
    record.seeds = {"samples": seed}
    blank = np.full((count, len(PLACES)), np.nan)
    record.arrays = {
        "positions": np.array(PLACES),
        "scores/correct": (generator.random((count, len(PLACES))) < falling).astype(float),
        "scores/logprob": level * (falling - 3) + noise[0],
        "scores/answer_tokens": np.ones_like(blank),
        "scores/first_rank": np.full_like(blank, 2.0),
        "scores/prompt_tokens": np.full_like(blank, 51.0),
        GOLD: level * falling + noise[1],
    }
    tables = {name.removeprefix("scores/"): table for name, table in record.arrays.items() if name != "positions"}
    curves = {name: as_stored(position_curve(table, positions=PLACES)) for name, table in measures_of(tables).items()}
    series = {"source": "measured", "kind": "logprob", "what": "gold", "correlations": {}}
    record.scalars = {"n_items": len(PLACES), "influence": {"series": [series]}, "curves": curves}
    record.scalars |= {"skipped": {}, "cut_off": 0, "reading": {}, "examples": count * len(PLACES)}
    return Evaluation.from_record(record)


def measured(scores):
    """An evaluation with these scores, one column for each of its positions."""
    nothing = np.full_like(scores, np.nan)
    tables = {"correct": scores, **dict.fromkeys(("logprob", "answer_tokens", "first_rank"), nothing)}
    n_items, unread = scores.shape[1], PositionCurve((), (), (), 0, 0)
    return Evaluation(
        pb.Record("evaluate", {}), "", len(scores), tuple(range(n_items)), n_items, tables, {"accuracy": unread}
    )
