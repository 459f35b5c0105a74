"""What the influence on a task's prompts will take, said before anything is measured; refused where it cannot fit."""

from dataclasses import replace
from typing import Any

from posbias.auditing.behaviour_spans import spans_of
from posbias.evaluation.cost import SHORTER
from posbias.evaluation.samples import EvaluateOptions
from posbias.measurement import Kind, PassOptions
from posbias.measurement.cost import estimate_cost, in_bfloat16, tell_cost, without_passes
from posbias.models import Model
from posbias.tasks.language import LanguageTask


def influence_cost(
    model: Model, task: LanguageTask, *, kinds: tuple[Kind, ...], options: EvaluateOptions
) -> dict[str, Any]:
    """The expected cost of the influence on every prompt that fits into the context; theories come on top.

    Returns:
        Plain values for a record; empty where no prompt fits, or where short runs fail, which the run will report.

    Raises:
        UsageError: it does not fit into memory; the message says what would.
    """
    places = options.positions_of(task)
    samples = spans_of(task, model.tokenizer, places=places, count=options.count, seed=options.seed)
    lengths = [sample.examples[place].n_tokens or 0 for sample in samples for place in places]
    fitting = [length for length in lengths if model.max_positions is None or length <= model.max_positions]
    if not fitting:
        return {}
    longest = max(fitting)
    estimate = estimate_cost(model, longest, kinds=kinds, passes=PassOptions(precision_prompts=0))
    estimate = replace(estimate or without_passes(model, longest), shorter=SHORTER)
    remedies = in_bfloat16(model, estimate)
    told = tell_cost(estimate, len(fitting), max_memory=options.max_memory, remedies=remedies)
    return {**told, "prompts": len(fitting)} if told else {}
