"""Options of the verbs that put tasks to a model: `evaluate`, and `audit --behaviour`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posbias.errors import UsageError

if TYPE_CHECKING:
    from posbias.tasks.language import LanguageTask

SPREAD = "spread"

EvaluatedModel = Annotated[
    str | None, typer.Argument(help="Hub id, directory, file.gguf or 'demo'; not with --server.", show_default=False)
]
Task = Annotated[str, typer.Option("--task", help="What is requested, as a literal call.")]
Positions = Annotated[
    str, typer.Option("--positions", help="all, spread (at most 9), spread(5), or some such as 0,4,9.")
]
Samples = Annotated[int, typer.Option("--count", help="Samples, each requested at every position.", min=1)]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Generated at most.", min=1, show_default="the task's own")
]
Generate = Annotated[bool, typer.Option(help="Generate answers and judge them by the published rule.")]
Score = Annotated[bool, typer.Option(help="Score the right answer by teacher forcing.")]
Batch = Annotated[int, typer.Option("--batch", help="Prompts of a local model decoded together at most.", min=1)]
Server = Annotated[
    str | None, typer.Option("--server", help="Base URL of an OpenAI-compatible server.", show_default=False)
]
ServedModel = Annotated[
    str | None, typer.Option("--served-model", help="The model's name on the server.", show_default=False)
]
ServerSettings = Annotated[
    str, typer.Option("--server-options", help="Such as: kind='text', concurrency=8, requests_per_minute=60.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="Tokenizer of the model on the server, to count tokens: a directory, hub id or 'demo'.",
        show_default=False,
    ),
]
LmEval = Annotated[
    Path | None,
    typer.Option("--lm-eval", help="Write the examples there as an lm-eval task and stop.", show_default=False),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from finished samples and a server's kept answers.")]

Behaviour = Annotated[
    str | None,
    typer.Option(
        "--behaviour",
        help="Correlate influence with the answers to a task, e.g. 'key_value(pairs=10)'.",
        show_default=False,
    ),
]
BehaviourCount = Annotated[int, typer.Option("--behaviour-count", help="Samples.", min=1)]
BehaviourPositions = Annotated[
    str, typer.Option("--behaviour-positions", help="all, spread(5), or some such as 0,4,9.")
]
BehaviourTokens = Annotated[
    int | None, typer.Option("--behaviour-tokens", help="Generated at most.", min=1, show_default="the task's own")
]
BehaviourKinds = Annotated[
    str, typer.Option("--behaviour-kinds", help="Kinds of influence on the task's prompts; as --kinds.")
]
BehaviourTheories = Annotated[
    bool, typer.Option(help="Theories that read each of the task's prompts: the slower ones.")
]


def positions_of(spelled: str, task: "LanguageTask") -> tuple[int, ...]:
    """The positions that `--positions` names.

    Raises:
        UsageError: not a list of whole numbers, or one that the task does not have.
    """
    from posbias.evaluation.samples import SPREAD_POSITIONS, spread_positions
    from posbias.registry import parse_literal_call

    text = spelled.strip()
    if text == "all":
        return task.positions()
    if text.startswith(SPREAD):
        name, values, keywords = parse_literal_call(text, "positions")
        if name == SPREAD and not keywords and len(values) <= 1:
            return spread_positions(task, *(values or [SPREAD_POSITIONS]))
    try:
        return task.positions([int(part) for part in text.split(",")])
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--positions {spelled!r}: allowed: all, spread, spread(5), or some such as 0,4,9") from None
