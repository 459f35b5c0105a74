"""Tasks of posbias in Inspect: `pip install 'posbias[inspect]'`, then `inspect eval posbias/documents --model MODEL`.

Every task of `posbias list tasks` bears its name there. `-T` gives its parameters, and `count`, `positions`, `seed`,
`max_tokens` and `tokenizer` (for tasks that count tokens). Its own rule judges answers, in all and by position.
"""

from collections.abc import Callable, Sequence
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, grouped, mean, scorer, stderr
from inspect_ai.solver import TaskState, generate
from pydantic import TypeAdapter, ValidationError

from posbias.errors import UsageError
from posbias.models.loading import load_tokenizer
from posbias.registry import split_numbers
from posbias.tasks.language import LANGUAGE_TASKS, Example
from posbias.tasks.language.rules import Rule

MESSAGES: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


@scorer(
    metrics=[
        grouped(mean(), "position", name_template="accuracy_at_{group_name}", all_label="accuracy"),
        stderr(cluster="sample"),
    ]
)
def by_position(rule: Rule) -> Scorer:
    """Share of right answers by the rule of a task, of all samples and of those with the answer at each position."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=rule.right(state.output.completion, list(target)), answer=state.output.completion)

    return score


def sample_of(example: Example) -> Sample:
    """An example as Inspect asks it.

    Raises:
        UsageError: a conversation with messages that Inspect does not know, or no right answer.
    """
    example.check_answers()
    prompt, place = example.prompt, {"position": example.gold_position, "sample": example.sample}
    try:
        asked = prompt if isinstance(prompt, str) else MESSAGES.validate_python(prompt)
    except ValidationError:
        roles = ", ".join(str(message["role"]) for message in prompt if not isinstance(message, str))
        raise UsageError(f"Inspect cannot be asked messages of these roles, or without their texts: {roles}") from None
    return Sample(asked, target=list(example.answers), id=f"{example.sample}@{example.gold_position}", metadata=place)


def _registered(name: str) -> Callable[..., Task]:
    """The task of that name, known to Inspect."""

    @task(name=name)
    def asked(
        count: int = 20,
        positions: int | Sequence[int | str] | None = None,
        seed: int = 0,
        max_tokens: int | None = None,
        tokenizer: str | None = None,
        **kwargs: Any,
    ) -> Task:
        made = LANGUAGE_TASKS.build(name, **{"chat": True, **kwargs})
        listed = [positions] if isinstance(positions, int) else positions
        as_text = None if listed is None else ",".join(map(str, listed))  # Inspect does not read all as numbers
        places = None if as_text is None else [int(place) for place in split_numbers(as_text)]
        counting = None if tokenizer is None else load_tokenizer(tokenizer)
        return Task(
            dataset=[sample_of(each) for each in made.examples(counting, count=count, positions=places, seed=seed)],
            solver=generate(),
            scorer=by_position(made.answer_rule),
            config=GenerateConfig(max_tokens=max_tokens or made.max_tokens, temperature=0.0),
        )

    registered: Callable[..., Task] = asked
    return registered


TASKS = {name: _registered(name) for name in LANGUAGE_TASKS}
"""Every task by name."""
