"""Exported tasks: valid YAML, prompts exactly ours, the scoring module equal to the published rules."""

import ast
import dataclasses
import importlib.util
import json

import jinja2
import pytest
import yaml

from posbias import RunError, UsageError
from posbias.evaluation.harness_files import DATA_FILE, INSPECT_FILE, SCORING_FILE, write_inspect_ai, write_lm_eval
from posbias.tasks.language import LANGUAGE_TASKS

TASKS = ["key_value(pairs=4)", "documents(documents=4)", "example_order(shots=4)", "key_value(pairs=3, chat=True)"]


class Loader(yaml.SafeLoader):
    """YAML with the harness's own tag, which names a function beside the file."""


Loader.add_constructor("!function", lambda loader, node: ("function", loader.construct_scalar(node)))


def exported(spelled, directory):
    task = LANGUAGE_TASKS.parse(spelled)
    examples = list(task.examples(None, count=2, seed=1))
    return task, examples, write_lm_eval(task, examples, directory, max_tokens=7)


def scoring_module(directory):
    spec = importlib.util.spec_from_file_location("exported_scoring", directory / SCORING_FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("spelled", TASKS)
def test_rendered_prompts_and_targets_are_exactly_ours(spelled, tmp_path):
    _, examples, found = exported(spelled, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / DATA_FILE).read_text().splitlines()]
    assert len(examples) == len(rows)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    for name in found:
        settings = yaml.load((tmp_path / f"{name}.yaml").read_text(), Loader)
        assert settings["task"] == name
        assert settings["dataset_kwargs"]["data_files"][settings["test_split"]] == DATA_FILE
        for example, row in zip(examples, rows, strict=True):
            text = environment.from_string(settings["doc_to_text"]).render(row)
            prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[0]["content"]
            assert text == prompt
            assert environment.from_string(settings["doc_to_target"]).render(row) == example.target
    assert settings["target_delimiter"] == ""


def test_generation_has_our_limit_stop_and_a_metric_for_every_position(tmp_path):
    _, _, found = exported("documents(documents=4)", tmp_path)
    settings = yaml.load((tmp_path / f"{found[0]}.yaml").read_text(), Loader)
    assert settings["generation_kwargs"] == {"until": ["\n"], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0}
    assert settings["process_results"] == ("function", "posbias_scoring.process_results")
    assert [entry["metric"] for entry in settings["metric_list"]] == [
        "accuracy",
        *(f"accuracy_at_{position}" for position in range(4)),
    ]


@pytest.mark.parametrize("spelled", TASKS)
@pytest.mark.parametrize(
    ("prediction", "answers"),
    [
        ("The Eiffel Tower.\nno", ["eiffel tower"]),
        ("\nEiffel", ["Eiffel"]),
        ("it is AN apple", ["Apple"]),
        ("nothing", ["Eiffel", "apple"]),
        ("", ["a b"]),
    ],
)
def test_the_scoring_module_judges_as_the_published_rule(spelled, prediction, answers, tmp_path):
    task, _, _ = exported(spelled, tmp_path)
    found = scoring_module(tmp_path).process_results({"answers": answers, "position": 3}, [prediction])
    assert found["accuracy"] == found["accuracy_at_3"] == task.answer_rule.right(prediction, answers)


def test_what_cannot_be_exported_is_refused(tmp_path):
    task = LANGUAGE_TASKS.parse("key_value(pairs=3)")
    with pytest.raises(UsageError, match="at least 1"):
        write_lm_eval(task, [], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        write_lm_eval(task, list(task.examples(None, count=1)), tmp_path / "file" / "below")


RUNS = 'open("ran", "w")'
HOSTILE_NAMES = [
    f'a"""\n{RUNS}\n"""b',
    f"a'; {RUNS}; 'b",
    f'a" + str({RUNS}) + "b',
    f'a"""; {RUNS}; """b',
    f"a\\'''\n{RUNS}\n'''b",
    f"{{{{{RUNS}}}}} {{% x %}} {{0}} {{task}} %s",
    f"a\r{RUNS}\u2028{RUNS}\x0c\\",
    "²½ª日本\u202e: [x, &y, !!python/none]",
    "x" * 250,
    "#\n- y: 1\n",
]
"""Names of files that say something else to Python, YAML or Jinja once they stand in it as they are."""
SPELLINGS = [
    "documents(documents=2, file={0!r})",
    "documents(documents=2, template={0!r})",
    "needle(tokens=64, corpus={0!r})",
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_name_of_a_file_is_taken_for_source(spelling, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = LANGUAGE_TASKS.parse(spelling.format(name))
    asked = LANGUAGE_TASKS.parse("documents(documents=2)")
    examples = list(asked.examples(None, count=1, seed=0))
    stem, _ = write_lm_eval(task, examples, "out")
    assert write_inspect_ai(task, examples, "out") == stem
    assert stem.isidentifier()
    assert stem.isascii()
    directory = tmp_path / "out"
    found = scoring_module(directory)
    assert (str(task), task.answer_rule.name) == (found.TASK, found.RULE)
    assert found.process_results({"answers": ["x"], "position": 0}, ["x"])["accuracy"] == 1.0
    program = ast.parse((directory / INSPECT_FILE).read_text())
    allowed = ast.Expr, ast.Import, ast.ImportFrom, ast.Assign, ast.FunctionDef
    assert all(isinstance(node, allowed) for node in program.body)
    assert [node.value.value[:7] for node in program.body if isinstance(node, ast.Expr)] == ["Scoring"]
    assert program.body[-1].name == stem
    assert yaml.load((directory / f"{stem}.yaml").read_text(), Loader)["task"] == stem
    assert not (tmp_path / "ran").exists()


def test_rows_stay_rows_whatever_stands_in_them(tmp_path):
    task = LANGUAGE_TASKS.parse("key_value(pairs=3)")
    (example, *_) = task.examples(None, count=1)
    odd = dataclasses.replace(example, prompt="one\u2028two\x85three\u2029\U0001f600 \x1b", passages=())
    write_lm_eval(task, [odd], tmp_path)
    (row,) = (tmp_path / DATA_FILE).read_text().splitlines()
    assert json.loads(row)["prompt"] == odd.prompt


@pytest.mark.parametrize("wrong", [0, -1, 2**63])
def test_a_limit_of_tokens_is_a_whole_number(wrong, tmp_path):
    task = LANGUAGE_TASKS.parse("key_value(pairs=3)")
    for export in (write_lm_eval, write_inspect_ai):
        with pytest.raises(UsageError, match="export: max_tokens must be a whole number"):
            export(task, list(task.examples(None, count=1)), tmp_path, max_tokens=wrong)
