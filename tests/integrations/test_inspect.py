"""Tasks of posbias run by Inspect itself, which finds them as installed: `pip install -e '.[inspect]'`."""

import pytest

from posbias.tasks.language import LANGUAGE_TASKS

inspect_ai = pytest.importorskip("inspect_ai")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_answers_are_judged_by_position(tmp_path):
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    task = LANGUAGE_TASKS.parse("key_value(pairs=3, chat=True)")
    examples = {each.prompt[0]["content"]: each for each in task.examples(None, count=2)}

    def answer(messages, *_):
        """Right at position 0 and, of the first sample, at position 1; wrong elsewhere."""
        example = examples[messages[-1].text]
        right = example.gold_position == 0 or (example.gold_position == 1 and example.sample == "0-0")
        output = ModelOutput.from_content("mockllm/model", example.answers[0] if right else "nothing")
        output.usage = ModelUsage()  # counting tokens would load a table from elsewhere
        return output

    model = get_model("mockllm/model", custom_outputs=answer)
    (log,) = inspect_ai.eval(
        "posbias/key_value", model=model, task_args={"pairs": 3, "count": 2}, log_dir=str(tmp_path), display="none"
    )
    assert log.status == "success"
    found = {name: metric.value for score in log.results.scores for name, metric in score.metrics.items()}
    assert found.pop("stderr") > 0
    assert found == {"accuracy": 0.5, "accuracy_at_0": 1.0, "accuracy_at_1": 0.5, "accuracy_at_2": 0.0}


def test_every_task_is_there():
    from posbias.integrations.inspect import TASKS

    assert list(TASKS) == list(LANGUAGE_TASKS)
    assert len(TASKS["pairwise"](count=2).dataset) == 4
