"""What `dir` and `help` show of the library, and what its functions answer to arguments of a wrong class."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import posbias as pb
from posbias.checks import SEE

NAMES = [name for name in dir(pb) if name != "__version__"]
SCREEN = 60
"""Lines of a terminal's window."""


def test_there_are_few_names():
    assert len(NAMES) <= 41
    assert all(getattr(pb, name) is not None for name in NAMES)


def first_sentence(name):
    text = " ".join(inspect.cleandoc(getattr(pb, name).__doc__).split("\n\n")[0].split())
    return re.match(r".*?\.(?= [A-Z]|$)", text)[0]


def test_the_docstring_lists_every_name_with_its_first_sentence():
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", pb.__doc__, re.MULTILINE)
    assert {name: " ".join(text.split()) for name, text in entries} == {name: first_sentence(name) for name in NAMES}


def test_help_shows_them_on_two_screens():
    shown = pydoc.plain(pydoc.render_doc(pb))
    assert len(shown.splitlines()) <= 2 * SCREEN
    for name in NAMES:
        assert re.search(rf"^ {{8}}{name}: ", shown, re.MULTILINE), name


@pytest.fixture(scope="module")
def model(tiny_llama):
    return pb.load_model(tiny_llama)


@pytest.fixture(scope="module")
def prompts(model):
    return pb.load_prompts("default", model, n_positions=12, count=2)


def test_measuring_token_ids_says_what_makes_prompts_of_them(model):
    ids = [[1, 2, 3], [4, 5, 6]]
    for given in (ids, ids[0], np.array(ids), torch.tensor(ids), "some text", ["some", "texts"], None, model):
        with pytest.raises(pb.UsageError, match=r"^measure: prompts must be Prompts \(see posbias.load_prompts, which"):
            pb.measure(model, given)
    made = pb.load_prompts(ids, model, n_positions=3, count=2)
    assert pb.measure(model, made, kinds="probability").profiles["probability"].n_positions == 3


def test_a_model_may_be_a_path_or_a_network_wherever_it_is_the_subject(tiny_llama, model, prompts):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama)
    replaced = pb.DecomposeOptions(kinds=("probability",), interventions="no_rope")
    audited = pb.AuditOptions(kinds=("probability",), initialisations=0)
    measured = [pb.measure(of, prompts, kinds="probability") for of in (model, tiny_llama, str(tiny_llama), network)]
    assert len({found.profiles["probability"].influence.tobytes() for found in measured}) == 1
    for verb, subject in {
        lambda of: pb.attention(of, prompts): tiny_llama,
        lambda of: pb.decompose(of, prompts, options=replaced): tiny_llama,
        lambda of: pb.load_prompts(prompts, of, n_positions=12, count=2): network,
        lambda of: pb.audit(of, prompts=prompts, options=audited): network,
    }.items():
        verb(subject)
        with pytest.raises(pb.UsageError, match=r"^\w+: (model|source) must be .* or a model of transformers, got 7"):
            verb(7)
    assert pb.predict(tiny_llama, prompts=prompts).about["model"]["source"] == "tiny-llama"
    with pytest.raises(pb.UsageError, match=r"^theory rollout needs an Architecture or a model \(one of "):
        pb.predict(7, 12)


@pytest.mark.parametrize("source", ["default", "synthetic"])
def test_prompts_for_a_model_that_is_named_are_those_of_the_loaded_one(tiny_llama, model, source):
    named, loaded = (pb.load_prompts(source, subject, n_positions=12, count=2) for subject in (tiny_llama, model))
    assert np.array_equal(named.token_ids, loaded.token_ids)


def test_a_network_without_its_tokenizer_is_told_where_to_bring_it(tiny_llama):
    network = AutoModelForCausalLM.from_pretrained(tiny_llama)
    for reads in (lambda: pb.evaluate(network, "key_value"), lambda: pb.LocalResponder(network)):
        with pytest.raises(pb.UsageError, match=r"give posbias.load_model\(network, tokenizer\)"):
            reads()


def test_arguments_of_wrong_classes_are_refused_in_one_line(tiny_llama, tmp_path):
    script = Path(__file__).with_name("wrong_arguments.py")
    done = subprocess.run(
        [sys.executable, script, tiny_llama], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    *not_refused, tried = done.stdout.splitlines()
    assert not_refused == []
    assert int(tried) > 3000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"Record", "RunError", "UsageError"}])
def test_an_unknown_argument_is_one_line_that_names_the_allowed_ones(name):
    call = getattr(pb, name)
    with pytest.raises(pb.UsageError) as caught:
        call(colour="blue")
    allowed = ", ".join(inspect.signature(call).parameters)
    assert str(caught.value) == f"{name}: unknown argument 'colour'; allowed: {allowed}"
    assert caught.value.__suppress_context__
    assert len(caught.value._render_traceback_()) == 2  # in a notebook, the second says how to see more


def test_arguments_too_many_or_too_few_are_one_line():
    with pytest.raises(pb.UsageError, match=r"^load_record: missing a required argument: 'directory'; allowed: direct"):
        pb.load_record()
    with pytest.raises(pb.UsageError, match=r"^load_record: too many positional arguments; allowed: directory$"):
        pb.load_record(1, 2)


def test_every_function_that_a_refusal_names_is_public():
    named = re.findall(r"\b[A-Za-z_]+(?:\.\w+)?", " ".join(SEE.values()).replace(", which takes token ids too", ""))
    assert {name.removeprefix("posbias.").split(".")[0] for name in named} <= set(NAMES)


def test_a_report_takes_a_result_or_several(model, prompts, tmp_path):
    measured, predicted = pb.measure(model, prompts, kinds="probability"), pb.predict(pb.Architecture(depth=2), 12)
    for result in (measured, [measured, predicted], measured.as_run()):
        assert "tiny-llama" in pb.write_report(result, tmp_path).read_text()
    with pytest.raises(pb.UsageError, match=r"^a report is drawn from runs, and Profile\(12 positions.* allowed: "):
        pb.write_report(predicted.profile, tmp_path)
    with pytest.raises(pb.UsageError, match=r"^write_report: runs must be .*Record \(see posbias.load_record\)"):
        pb.write_report("runs/x", tmp_path)


def test_responders_methods_and_records_show_themselves(model):
    assert repr(pb.LocalResponder(model)) == f"LocalResponder({model!r})"
    assert (
        repr(pb.ServerResponder("http://localhost:1/v1", "served"))
        == "ServerResponder(served at http://localhost:1/v1)"
    )
    assert repr(pb.mitigated(model, "temperature(scale=0.5)")) == "mitigated(temperature(scale=0.5) on tiny-llama)"
    record = pb.predict(pb.Architecture(depth=2), 12).as_run()
    assert repr(record) == f"Record({record.line})"
    assert record.created in record._repr_html_()


def test_settings_are_spelled_in_python_as_in_the_shell(model, prompts):
    assert pb.measure(model, prompts, kinds="logit,probability").profiles.keys() == {"logit", "probability"}
    replaced = pb.DecomposeOptions(interventions="no_rope,no_content", kinds="logit, probability")
    assert [item.name for item in pb.decompose(model, prompts, options=replaced).counterfactuals] == [
        "no_rope",
        "no_content",
    ]
    tried = pb.MitigateOptions(fitting="steps=3, knots=[0, 4]", require="worst>=0.8")
    assert (tried.fitting.steps, str(tried.require)) == (3, "worst>=0.8")
    audited = pb.AuditOptions(kinds="jacobian(probes=8),logit", engine="ray(gpus=1)")
    assert (list(audited.kinds), audited.engine.gpus) == (["jacobian(probes=8)", "logit"], 1)
    assert pb.MitigateOptions("key_bias,ms_poe(k=2)").entries == ["key_bias", "ms_poe(k=2)"]
    assert [pb.MitigateOptions(word).methods for word in (" all ", "default", "temperature")] == [
        "all", "default", ["temperature"],
    ]  # fmt: skip
    assert list(pb.EvaluateOptions(lengths="512, 1024").lengths) == [512, 1024]
    assert pb.AttentionOptions(sink_thresholds="0.2,.5").sink_thresholds == (0.2, 0.5)
    assert pb.DesignOptions(depth=2, n_positions="64,16").lengths == (16, 64)
    for wrong in ({"lengths": "512,x"}, {"lengths": "1e3"}, {"lengths": "512,,1024"}):
        with pytest.raises(pb.UsageError, match=r"'[^']*'(: allowed are whole| has an empty item)"):
            pb.EvaluateOptions(**wrong)
    with pytest.raises(pb.UsageError, match="known: local, ray"):
        pb.AuditOptions(engine="cloud")
    for options, field in (("require", "best>1"), ("fitting", "colour=3")):
        with pytest.raises(pb.UsageError, match=r"allowed: worst|unknown argument 'colour'; allowed: steps"):
            pb.MitigateOptions(**{options: field})
