"""Caveats: what a record keeps of a refusal is a name with numbers, from which the sentence is made."""

import ast
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest
import torch

import posbias
import posbias_papers
from posbias.errors import RunError
from posbias.interventions import INTERVENTIONS
from posbias.measurement import theories
from posbias.runs.caveats import caveat_text, fact_of, failure, refusal
from posbias.runs.sentences import SENTENCES
from tiny_families import shaken_model

SOURCES = [*Path(posbias.__file__).parent.rglob("*.py"), *Path(posbias_papers.__file__).parent.rglob("*.py")]
MODELS = ("phi3-longrope",)
"""Families of which a theory does not speak."""


def facts_in_sources() -> Iterator[tuple[str, set[str]]]:
    """The name of every caveat that a module spells, and the names of its numbers."""
    for path in SOURCES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "caveat" in text else ():
            match node:
                case ast.Call(ast.Name("refusal" | "failure"), [ast.Constant(str(name))], keywords):
                    yield name, {str(keyword.arg) for keyword in keywords}
                case ast.Dict([ast.Constant("caveat"), *keys], [ast.Constant(str(name)), *_]) if None not in keys:
                    yield name, {str(ast.literal_eval(key)) for key in keys if key is not None}


def test_every_caveat_has_a_sentence_with_places_for_its_numbers():
    for name, numbers in facts_in_sources():
        assert {place for _, place, _, _ in Formatter().parse(SENTENCES[name]) if place} == numbers, name


def test_every_sentence_is_one_that_something_says():
    said = "".join(path.read_text() for path in SOURCES if path.name != "sentences.py")
    assert [name for name in SENTENCES if f'"{name}"' not in said and name != "message"] == []


def test_an_error_that_carries_a_fact_reads_as_its_sentence():
    error = refusal("no_learned_sinks", intervention=INTERVENTIONS.parse("no_learned_sinks"), family="llama")
    assert str(error) == "no_learned_sinks: llama models have no learned sinks" == caveat_text(fact_of(error))
    assert fact_of(error) == {"caveat": "no_learned_sinks", "intervention": "no_learned_sinks", "family": "llama"}
    nested = failure("mixing_not_finite", where={"caveat": "on_prompt", "prompt": 3}, layer=1)
    assert str(nested).startswith("mixing: |x| + |a| is zero or not finite on prompt 3 in layer 1;")
    listed = refusal("power_rollout_of_kind", known=["jacobian", "logprob"], kind="logit")
    assert "speaks of jacobian, logprob, and" in str(listed)


def test_words_of_others_and_of_old_records_stay_as_they_are():
    assert fact_of(RunError("the server says no")) == {"caveat": "message", "text": "the server says no"}
    for stored in ("a sentence of an old record", {"caveat": "message", "text": "a sentence of an old record"}):
        assert caveat_text(stored) == "a sentence of an old record"
    assert caveat_text({"caveat": "of a later version", "n": 1}) == "{'caveat': 'of a later version', 'n': 1}"


@pytest.mark.parametrize("name", MODELS)
def test_no_theory_is_left_out_by_a_message(name):
    model, token_ids = shaken_model(name), torch.arange(3, 15).numpy()
    with theories.prompt_theories(model, token_ids, initialisation=0) as read:
        model.last(model.embed(model.token_tensor([token_ids.tolist()])))
        _, left_out = read(None)
    assert left_out
    for fact in left_out:
        assert fact["because"]["caveat"] != "message", caveat_text(fact)
