"""What the influence on a task's prompts will take, said before anything is measured; refused where it cannot fit."""

from typing import Any

from posbias.auditing.behaviour_spans import spans_of
from posbias.evaluation.cost import check_prompts_fit
from posbias.evaluation.evaluation import EvaluateOptions, spread_positions
from posbias.measurement import Kind, PassOptions
from posbias.measurement.cost import estimate_cost
from posbias.models import Model
from posbias.progress import tell
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
    places = spread_positions(task) if options.positions is None else task.positions(list(options.positions))
    contents = spans_of(task, model.tokenizer, places=places, count=options.count, seed=options.seed)
    lengths = [content.examples[place].n_tokens or 0 for content in contents for place in places]
    fitting = [length for length in lengths if model.max_positions is None or length <= model.max_positions]
    if not fitting:
        return {}
    estimate = estimate_cost(model, max(fitting), kinds=kinds, passes=PassOptions(precision_prompts=0))
    if estimate is None:
        return {}
    ways = ["--dtype bfloat16"] if model.dtype.itemsize > 2 else []
    check_prompts_fit(estimate, max_memory=options.max_memory, ways=ways)
    tell(f"{estimate.line(len(fitting))} of {task}")
    return {**estimate.describe(len(fitting)), "prompts": len(fitting)}
