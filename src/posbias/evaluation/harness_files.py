"""The examples of a task as a task of EleutherAI's lm-evaluation-harness, or of Inspect, for others to run there.

Three kinds of files: the prompts as they are (one JSON object per line), task descriptions that put nothing around
them, and the published scoring rule as a small module of its own, which the task of Inspect has in its own file. What
comes from a task, such as the name of a file, is written into source as `repr` or JSON says it, never as it is.
lm-eval reads the prompts relative to the directory it is started in, hence `cd DIRECTORY` first.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from posbias.checks import check_whole
from posbias.errors import RunError, UsageError
from posbias.files import write_atomically
from posbias.tasks.language import Example, LanguageTask

DATA_FILE = "examples.jsonl"
SCORING_FILE = "posbias_scoring.py"
INSPECT_FILE = "posbias_inspect.py"
EXPORTED_RULES = ("best_subspan_em", "contains")
"""Rules of scoring that the exported module has."""
LONGEST_STEM = 100
"""Characters of a task's spelling that stand in the names of its files."""

_SCORING = '''"""Scoring by position of the answer, of the task below; needs nothing but Python."""

import re
import string

TASK = {task!r}
RULE = {rule!r}


def _normalised(text):
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\\b(a|an|the)\\b", " ", bare).split())


def _right(prediction, answers):
    if RULE == "contains":
        return float(any(answer.lower() in prediction.lower() for answer in answers))
    first_line = _normalised(prediction.lstrip().split("\\n")[0])
    return float(any(_normalised(answer) in first_line for answer in answers))


def process_results(doc, results):
    right = _right(results[0], doc["answers"])
    return {{"accuracy": right, f"accuracy_at_{{doc['position']}}": right}}
'''
_INSPECT = """

from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, grouped, mean, scorer
from inspect_ai.solver import generate


def _sample(row):
    place = {{name: row[name] for name in ("position", "sample")}}
    return Sample(row["prompt"], target=row["answers"], metadata=place)


@scorer(metrics=[grouped(mean(), "position", name_template="accuracy_at_{{group_name}}", all_label="accuracy")])
def published():
    async def score(state, target):
        return Score(value=_right(state.output.completion, list(target)), answer=state.output.completion)

    return score


@task
def {name}():
    config = GenerateConfig(max_tokens={max_tokens}, temperature=0.0, stop_seqs={stop!r})
    data = json_dataset(str(Path(__file__).with_name({data!r})), _sample)
    return Task(dataset=data, solver=generate(), scorer=published(), config=config)
"""
_COMMON = f"""task: {{name}}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {DATA_FILE}
test_split: test
output_type: {{output_type}}
num_fewshot: 0
doc_to_text: "{{{{{{{{prompt}}}}}}}}"
doc_to_target: "{{{{{{{{target}}}}}}}}"
target_delimiter: ""
"""
_GENERATED = """process_results: !function {module}.process_results
generation_kwargs:
  until: {stop}
  max_gen_toks: {max_tokens}
  do_sample: false
  temperature: 0.0
metric_list:
{metrics}"""
_SCORED = """metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def write_lm_eval(
    task: LanguageTask, examples: Sequence[Example], directory: str | Path, *, max_tokens: int | None = None
) -> tuple[str, str]:
    """Write examples as two tasks: answers generated and judged by the published rule, and the right answer scored.

    Args:
        task: What the examples are of.
        examples: At least 1; conversations of one message are written as its text (start the harness with
            `--apply_chat_template`).
        directory: Files there are replaced.
        max_tokens: Generated at most; None: the task's own.

    Returns:
        Names of the two tasks as the harness knows them.

    Raises:
        UsageError: no examples, or a conversation of several messages.
        RunError: the files cannot be written.
    """
    stem, data = _exported(task, examples, max_tokens)
    metrics = [
        "accuracy",
        *(f"accuracy_at_{position}" for position in sorted({_position(example) for example in examples})),
    ]
    listed = "".join(f"  - metric: {metric}\n    aggregation: mean\n    higher_is_better: true\n" for metric in metrics)
    module, stop = Path(SCORING_FILE).stem, json.dumps(list(task.stop))
    generated = _GENERATED.format(module=module, stop=stop, max_tokens=max_tokens or task.max_tokens, metrics=listed)
    files = {
        DATA_FILE: data,
        SCORING_FILE: _SCORING.format(task=str(task), rule=task.answer_rule.name),
        f"{stem}.yaml": _COMMON.format(name=stem, output_type="generate_until") + generated,
        f"{stem}_logprob.yaml": _COMMON.format(name=f"{stem}_logprob", output_type="loglikelihood") + _SCORED,
    }
    _write(files, Path(directory))
    return stem, f"{stem}_logprob"


def write_inspect_ai(
    task: LanguageTask, examples: Sequence[Example], directory: str | Path, *, max_tokens: int | None = None
) -> str:
    """Write examples as a task of Inspect (inspect_ai): answers generated and judged by the published rule.

    Accuracy is that of all examples and of every position. Arguments and errors as `write_lm_eval`.

    Returns:
        The name of the task; `cd DIRECTORY && inspect eval posbias_inspect.py --model MODEL` runs it.
    """
    name, data = _exported(task, examples, max_tokens)
    settings = {"name": name, "max_tokens": max_tokens or task.max_tokens, "stop": list(task.stop), "data": DATA_FILE}
    scoring = _SCORING.format(task=str(task), rule=task.answer_rule.name).partition("\n\n\ndef process_results")[0]
    _write({DATA_FILE: data, INSPECT_FILE: scoring + "\n" + _INSPECT.format(**settings)}, Path(directory))
    return name


def _exported(task: LanguageTask, examples: Sequence[Example], max_tokens: int | None) -> tuple[str, str]:
    """The name of a task in another harness, and its examples, one JSON object per line."""
    if task.answer_rule.name not in EXPORTED_RULES:
        raise UsageError(
            f"{task.name} has a rule of scoring ({task.answer_rule.name}) that is not exported; allowed: other tasks"
        )
    if not examples:
        raise UsageError("no examples to export; give at least 1")
    if max_tokens is not None:
        check_whole("export: max_tokens", max_tokens, least=1)
    spelled = str(task)
    stem = re.sub("[^A-Za-z0-9]", "_", spelled).strip("_")
    if len(stem) > LONGEST_STEM or not spelled.isascii():  # what is left of it need not tell it from others
        stem = f"{stem[:LONGEST_STEM]}_{hashlib.sha256(spelled.encode()).hexdigest()[:8]}"
    # Every character beyond ASCII is escaped: some are taken for the end of a line.
    return f"posbias_{stem}", "".join(json.dumps(_row(example)) + "\n" for example in examples)


def _write(files: Mapping[str, str], directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(directory / name, text.encode())
    except OSError as error:
        raise RunError(f"cannot write to {str(directory)!r}: {error.strerror or error}") from None


def _row(example: Example) -> dict[str, object]:
    prompt = example.prompt
    if not isinstance(prompt, str):
        if len(prompt) != 1:
            raise UsageError(f"a conversation of {len(prompt)} messages cannot be exported; allowed: 1, the user's")
        prompt = prompt[0]["content"]
    return {
        "prompt": prompt,
        "answers": list(example.answers),
        "target": example.target,
        "position": _position(example),
        "n_items": example.n_items,
        "sample": example.sample,
        "condition": example.condition,
    }


def _position(example: Example) -> int:
    """Position of the answer; -1 if no item holds it."""
    return -1 if example.gold_position is None else example.gold_position
