"""Studies: what a file may say, what its grid becomes, and what is refused before anything is trained."""

import pytest

from posbias import UsageError
from posbias.files import read_yaml
from posbias.training.members import AdamW, Below
from posbias.training.study import load_study, plain_value, study_of

STUDY = """
name: tiny
task: position_copy(0, context=6, vocabulary=5)
model: {depth: 2, width: 8, residual: none}
optimiser: adamw(weight_decay=0.1)
train: {steps: 20, batch: 8, window: 5, stopping: "below(loss=0.5)"}
grid:
  task.target: [0, 5]
  look:
    near: {model.mask: sliding_window(width=2), model.encoding: alibi}
    far: {model.mask: causal}
  optimiser.learning_rate: [1e-3, 0.01]
seeds: [3, 7]
"""


def written(tmp_path, text):
    path = tmp_path / "study.yaml"
    path.write_text(text)
    return path


def test_a_grid_is_every_combination_with_every_seed(tmp_path):
    study = load_study(written(tmp_path, STUDY))
    members = study.members()
    assert study.name == "tiny"
    assert len(members) == 16
    assert len({member.name for member in members}) == 16
    first, last = members[0], members[-1]
    assert first.name == "target=0 look=near learning_rate=0.001 seed=3"
    assert dict(last.coordinates) == {"task.target": 5, "look": "far", "optimiser.learning_rate": 0.01}
    assert (last.task.target, last.task.context, last.seed) == (5, 6, 7)
    assert str(first.config.architecture.mask) == "sliding_window(width=2)"
    assert str(last.config.architecture.encoding) == "none"
    assert (first.optimiser.learning_rate, last.optimiser.learning_rate) == (0.001, 0.01)
    assert first.optimiser.weight_decay == 0.1
    assert (first.config.vocabulary_size, first.config.n_outputs, first.config.width) == (5, 5, 8)
    assert (first.config.attention, first.config.values, first.config.dtype) == ("content", "gaussian", "float32")
    assert study.schedule.stopping == Below(0.5)


def test_another_variant_in_the_grid_brings_its_own_parameters():
    document = {
        "task": "position_copy(target=0)",
        "model": {"depth": 1, "width": 8},
        "optimiser": "adam(beta1=0.5)",
        "train": {"steps": 1},
        "grid": {"optimiser.name": ["adam", "adamw"]},
    }
    with_adam, with_adamw = study_of(document, name="s").members()
    assert with_adam.optimiser.beta1 == 0.9
    assert with_adamw.optimiser == AdamW()


GOOD = {
    "task": {"name": "position_copy", "target": 0},
    "model": {"depth": 1, "width": 8},
    "train": {"steps": 1},
}
RETRIEVAL = {"task": "in_context_retrieval(features=7)", "model": {"depth": 1}, "train": {"steps": 1}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (["a"], "the study must be a mapping"),
        ({**GOOD, "grids": {}}, "the study has no field 'grids'; fields: name, task, model"),
        ({"task": "position_copy(target=0)"}, "study 's' has no section 'train'"),
        ({**GOOD, "train": {"batch": 3}}, "TrainingSchedule: missing a required argument: 'steps'"),
        ({**GOOD, "train": {"steps": 1, "epochs": 3}}, "train has no field 'epochs'; fields: steps, batch"),
        ({**GOOD, "train": {"steps": 1, "stopping": "soon"}}, "unknown stopping rule 'soon'"),
        ({**GOOD, "model": {"depth": 1, "widht": 8}}, "model has no field 'widht'"),
        ({**GOOD, "task": "position_cpy"}, "unknown synthetic task 'position_cpy'"),
        ({**GOOD, "task": {"target": 0}}, "task needs a name"),
        ({**GOOD, "seeds": 0}, "seeds must be a count in 1 ... 1000000 or a list"),
        ({**GOOD, "seeds": [1, 1]}, "seeds must be a count in 1 ... 1000000 or a list"),
        ({**GOOD, "seeds": 10**9}, "seeds must be a count in 1 ... 1000000"),
        (
            {**GOOD, "grid": {"model.depth": [1, 2], "size": {"large": {"model.depth": 3}}}},
            "grid axes 'model.depth' and 'size' both set 'model.depth'; one of them may",
        ),
        ({**GOOD, "grid": {"model.widht": [1]}}, "grid setting 'model.widht' is unknown"),
        ({**GOOD, "grid": {"train.steps": [1]}}, "grid setting 'train.steps' is unknown"),
        ({**GOOD, "grid": {"model.width": []}}, "grid axis 'model.width' has no values"),
        ({**GOOD, "grid": {"model.width": 3}}, "grid axis 'model.width' must be a list"),
        (
            {**GOOD, "grid": {"task.targt": [1]}},
            "'targt'; parameters of position_copy: target",
        ),
        ({**GOOD, "model": {"width": 8}}, "model.depth is not given"),
        ({**GOOD, "grid": {"task.target": [0, 10]}}, "target must lie in the context, 0 ... 9, got 10"),
        ({**GOOD, "grid": {"model.heads": [3]}}, "width 8 is not a multiple of 3 heads"),
        ({**GOOD, "model": {"depth": 1, "width": 7, "encoding": "sinusoidal(width=7)"}}, "even"),
        (
            {**GOOD, "model": {"depth": 1, "width": 7, "absolute": "added", "encoding": "sinusoidal(width=8)"}},
            "reference width 7 differs from the 8 features of sinusoidal(width=8)",
        ),
        (
            {**GOOD, "train": {"steps": 1, "evaluate_every": 7}},
            "evaluate_every must be a multiple of window (10), got 7",
        ),
        ({**GOOD, "train": {"steps": 1, "evaluate_every": -1}}, "evaluate_every must be a whole number >= 0"),
        *(
            ({**GOOD, "optimiser": spelled}, message)
            for spelled, message in (
                ("adam(learning_rate=0)", "adam: learning_rate must be a finite number > 0, got 0"),
                ("adamw(weight_decay=-1)", "adamw: weight_decay must be a finite number >= 0, got -1"),
                ("adamw(beta2=1)", "adamw: beta2 must be a number >= 0 and < 1, got 1"),
                ("sgd(momentum=0.5)", "optimiser sgd left posbias after 0.1.0: adam or adamw"),
                ("adagrad", "unknown optimiser 'adagrad'; known: adam, adamw"),
                ("adam(weight_decay=1)", "parameters of adam: learning_rate, beta1, beta2, epsilon"),
            )
        ),
        ({**RETRIEVAL, "grid": {"task.answers": ["start"]}}, "answers must be one of any, first, middle"),
        ({**RETRIEVAL, "grid": {"task.classes": [16]}}, "classes must be at least labels = 32, got 16"),
        ({**RETRIEVAL, "model": {"depth": 1, "width": 8}}, "the model's width is 8"),
    ],
)
def test_what_makes_no_study_is_one_line_that_names_it(document, message):
    with pytest.raises(UsageError) as caught:
        study_of(document, name="s").members()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a: [1", "is not YAML"),
        ("a: 1\na: 2", "'a' is given twice, again in line 2"),
        ("a: !!python/object/apply:os.system ['true']", "a tag, 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("a: !!binary aGk=", "a tag, 'tag:yaml.org,2002:binary'"),
        ("? [a]\n: 1", "a key must be a text or a number"),
        ("a: &a [*a]", "an alias for a list or mapping; write it out"),
        ("a:\n - " + "9" * 5000, "value has 5000 digits"),
        ("[" * 5000, "is not YAML of plain values"),
    ],
)
def test_files_that_are_not_plain_yaml_are_refused(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        load_study(written(tmp_path, text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_are_numbers(tmp_path):
    path = written(tmp_path, "{a: 1e-3, b: 1_000, c: .5, d: none, e: '1', f: true, g: null, h: -2, i: 1.5e+3}")
    expected = {"a": 1e-3, "b": 1000, "c": 0.5, "d": "none", "e": "1", "f": True, "g": None, "h": -2, "i": 1500.0}
    assert read_yaml(path, "study", plain_value) == expected
    with pytest.raises(UsageError, match="cannot read"):
        load_study(tmp_path / "nothing.yaml")


def test_words_are_words_and_labels_keep_their_text(tmp_path):
    path = written(tmp_path, "{on: off, yes: [no, On, y], True: true, false: False, 1e-2: 1e-2, n: OFF}")
    expected = {"on": "off", "yes": ["no", "On", "y"], "True": True, "false": False, "1e-2": 0.01, "n": "OFF"}
    assert read_yaml(path, "study", plain_value) == expected
    model = {"depth": 1, "residual": "none"}
    text = f"""
        task: position_copy(target=0)
        model: {model}
        train: {{steps: 1}}
        grid: {{positions: {{on: {{model.encoding: alibi}}, off: {{model.encoding: none}}}}}}
    """
    members = load_study(written(tmp_path, text)).members()
    assert [member.name for member in members] == ["positions=on seed=0", "positions=off seed=0"]
    with pytest.raises(UsageError, match="'no'"):
        load_study(written(tmp_path, text.replace("'none'", "no"))).members()
    shared = text.replace("alibi", "&far alibi").replace("model.encoding: none", "model.encoding: *far")
    assert len(load_study(written(tmp_path, shared)).members()) == 2
