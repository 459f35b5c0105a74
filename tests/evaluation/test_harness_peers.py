"""Exported tasks run in the real harnesses, which find what posbias finds: `pip install lm_eval inspect_ai`."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

import posbias as pb
from posbias.evaluation.harness_files import INSPECT_FILE, write_inspect_ai, write_lm_eval
from posbias.tasks.language import LANGUAGE_TASKS

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TASK, COUNT, POSITIONS = "key_value(pairs=3)", 2, (0, 1, 2)


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture
def exported():
    task = LANGUAGE_TASKS.parse(TASK)
    return task, list(task.examples(None, count=COUNT, positions=POSITIONS, seed=0))


def answer(examples, prompt):
    """Right at position 0 and, of the first sample, at position 1; wrong elsewhere."""
    example = next(each for each in examples if each.prompt == prompt)
    right = example.gold_position == 0 or (example.gold_position == 1 and example.sample == examples[0].sample)
    return example.answers[0] if right else "nothing"


FOUND = {"accuracy": 0.5, "accuracy_at_0": 1.0, "accuracy_at_1": 0.5, "accuracy_at_2": 0.0}


@needs("lm_eval")
def test_lm_eval_judges_answers_and_scores_them_as_posbias_does(exported, long_llama, tmp_path, monkeypatch):
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    task, examples = exported
    generated, scored = write_lm_eval(task, examples, tmp_path)
    monkeypatch.chdir(tmp_path)
    manager = TaskManager(include_path=str(tmp_path))

    class Answering(LM):
        def generate_until(self, requests, **_):
            return [answer(examples, request.args[0]) for request in requests]

        def loglikelihood(self, requests, **_):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    found = simple_evaluate(Answering(), tasks=[generated], task_manager=manager, bootstrap_iters=0)
    results = found["results"][generated]
    assert {name: results[f"{name},none"] for name in FOUND} == pytest.approx(FOUND)

    model = pb.load_model(long_llama)
    tokenizer = AutoTokenizer.from_pretrained(long_llama, eos_token="!", pad_token="!")  # lm-eval needs both
    backend = HFLM(pretrained=model.network, tokenizer=tokenizer, batch_size=1)
    found = simple_evaluate(backend, tasks=[scored], task_manager=manager, bootstrap_iters=0)
    options = pb.EvaluateOptions(count=COUNT, positions=POSITIONS, generate=False, score=True)
    own = pb.evaluate(pb.LocalResponder(model), task, options=options)
    expected = math.exp(-float(np.mean(own.tables["logprob"])))
    assert found["results"][scored]["perplexity,none"] == pytest.approx(expected, rel=1e-3)


@needs("inspect_ai")
def test_inspect_judges_answers_as_they_are(exported, tmp_path, monkeypatch):
    from inspect_ai import eval as inspect_eval
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    task, examples = exported
    name = write_inspect_ai(task, examples, tmp_path, max_tokens=9)

    def reply(messages, *_):
        output = ModelOutput.from_content("mockllm/model", answer(examples, messages[-1].text))
        output.usage = ModelUsage()  # else it is counted with a tokenizer that is downloaded
        return output

    model = get_model("mockllm/model", custom_outputs=reply)
    monkeypatch.chdir(tmp_path)
    (log,) = inspect_eval(INSPECT_FILE, model=model, log_dir=str(tmp_path / "logs"), display="none")
    assert log.status == "success", log.error
    assert log.eval.task.endswith(name)
    assert log.plan.config.max_tokens == 9
    metrics = {key: metric.value for key, metric in log.results.scores[0].metrics.items()}
    assert metrics == pytest.approx(FOUND)
