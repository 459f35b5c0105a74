"""The method `adapter`: it computes as if its updates were in the weights, in every family; its numbers are kept."""

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import posbias as pb
from mitigation.test_fitting import one_of_two
from posbias import FitOptions, MitigateOptions, UsageError, mitigate, mitigated
from posbias.evaluation.responders import Request
from posbias.mitigation.fits import adapter_numbers
from posbias.mitigation.methods.adapter import target_projections
from posbias.mitigation.methods.base import MITIGATIONS
from posbias.mitigation.methods.recipe import read_recipe, write_recipe
from posbias.models.layout import projections_of, weight_of
from tiny_families import DESCRIBED, UNLISTED, VOCABULARY, random_adapter, shaken_model

NAMES = "Ada", "Bo", "Cy", "Di", "Ed", "Flo", "Gus"
TOKENS = torch.arange(3, 15)[None] % VOCABULARY
VARIANTS = ("falcon-new", "falcon-alibi", "granite_swa", "recurrent_gemma", "olmo_hybrid", "apertus", "falcon_h1")
FAMILIES = [name for name in (DESCRIBED | UNLISTED) if name in VARIANTS or ("-" not in name and name in DESCRIBED)]


def logits(network):
    with torch.no_grad():
        return network(TOKENS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_computes_as_if_its_updates_were_in_the_weights(family):
    model = shaken_model(family)
    before = logits(model.network)
    found = projections_of(model.network, model.family if model.described else None, model.config)
    present = {role for one in found for role in one.rows}
    assert "o" in present
    for targets in ("q,k", "o", "v", "mlp"):
        if not set(targets.replace("mlp", "down").split(",")) <= present:
            continue
        adapter = random_adapter(model, f"adapter(rank=2, targets={targets!r}, strength=0.5)")
        changed = copy.deepcopy(model.network)
        for one in target_projections(model, adapter):
            down, up = (torch.tensor(adapter.updates[f"{one.path}.{side}"]).double() for side in ("down", "up"))
            others = set(range(one.shape[0])) - {int(row) for rows in one.rows.values() for row in rows}
            assert not up[sorted(others)].any(), "rows that are no target stay"
            with torch.no_grad():
                weight_of(changed.get_submodule(one.path)).add_(0.5 * up @ down)
        with mitigated(model, adapter):
            torch.testing.assert_close(logits(model.network), logits(changed), rtol=1e-5, atol=1e-8)
            assert not torch.allclose(logits(model.network), before, atol=1e-4)
    assert torch.equal(logits(model.network), before)


@pytest.mark.parametrize("family", ["llama", "falcon", "gpt2", "phi3", "bloom", "gpt_neox", "bamba"])
def test_the_targets_are_fitted_and_nothing_else(family):
    model = shaken_model(family, dtype=torch.float32)
    numbers = adapter_numbers(MITIGATIONS.parse("adapter(rank=1, targets='q,v')"), model, FitOptions())
    with numbers.applied(model, 0):
        model.network(TOKENS).logits.square().sum().backward()
    assert sum(one.grad.abs().sum() for one in numbers.free) > 0
    with torch.no_grad():
        for one in numbers.free:
            one -= 0.1 * one.grad.sign()
    for one in target_projections(model, MITIGATIONS.parse("adapter(targets='k')")):
        up = numbers.method().updates.get(f"{one.path}.up")
        assert up is None or not up[one.rows["k"].numpy()].any()


def test_adapters_are_refused_where_they_do_not_belong():
    mixture, llama, other = (shaken_model(family) for family in ("mixtral", "llama", "lfm2"))
    for model, targets, message in (
        (
            mixture,
            "q,mlp",
            "no layer of this mixtral model has linear projections gate, up, down under names "
            "that are known (experts of a mixture are none); allowed targets: q, k, v, o",
        ),
        (
            other,
            "q,o",
            "projections o under names that are known (experts of a mixture are none); allowed targets: q, k, v",
        ),
        (shaken_model("mamba2"), "all", "allowed targets: none"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            target_projections(model, MITIGATIONS.parse(f"adapter(targets={targets!r})"))
    assert len(target_projections(mixture, MITIGATIONS.parse("adapter(targets='q')"))) == 3
    other = random_adapter(shaken_model("qwen3"))
    with pytest.raises(UsageError, match=r"^adapter: it was fitted to another model, which has no model.*q_proj of 32"):
        mitigated(llama, other).install()
    with pytest.raises(UsageError, match="its numbers are others than those that `weights` names"):
        replace(other, weights="0" * 32)
    llama.network.hf_quantizer = object()
    with pytest.raises(UsageError, match=r"^adapter: the weights of 'network' are quantised; others are allowed"):
        target_projections(llama, other)


def test_a_recipe_brings_its_numbers(tmp_path):
    model, path = shaken_model("llama", dtype=torch.float32), tmp_path / "recipe.json"
    adapter = random_adapter(model)
    write_recipe(path, adapter, model, {})
    assert len(path.read_text()) < 1000
    again = read_recipe(path, model)
    assert again == adapter
    with mitigated(model, adapter):
        expected = logits(model.network)
    with mitigated(model, str(path)):
        assert torch.equal(logits(model.network), expected)
    beside = path.with_suffix(".safetensors")
    beside.write_bytes(beside.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"^'.*recipe.json': the file of numbers beside it, 'recipe.safetensors', is"):
        read_recipe(path, model)
    beside.unlink()
    with pytest.raises(UsageError, match=r"^'.*recipe.json': cannot read '.*recipe.safetensors': No such file"):
        read_recipe(path, model)
    write_recipe(path, random_adapter(model, seed=3), model, {})
    recipe = json.loads(path.read_text())
    path.write_text(json.dumps({**recipe, "method": str(adapter)}))
    with pytest.raises(UsageError, match="its numbers are others than those that `weights` names"):
        read_recipe(path, model)


@pytest.fixture(scope="module")
def trial(long_llama, tmp_path_factory):
    """A run whose adapter lowers the loss of the answers, on samples with one answer."""
    directory = tmp_path_factory.mktemp("trial")
    options = MitigateOptions(
        methods="adapter(rank=2)",
        calibration=5,
        evaluation=pb.EvaluateOptions(count=2, positions=(0, 1), generate=False, resume=True),
        documents=2,
        length=24,
        short=False,
        fitting=FitOptions(steps=2, rate=0.05),
    )
    return mitigate(str(long_llama), "key_value(pairs=2)", options=options, directory=directory), options, directory


def test_a_trial_fits_an_adapter_and_keeps_it(trial, long_llama, monkeypatch):
    result, options, directory = trial
    (arm,) = result.arms[1:]
    assert re.match(r"adapter\((strength=0\.5, )?rank=2, weights='\w{32}'\)", arm.method)
    assert arm.fitted["batch"] == 4
    model = pb.load_model(str(long_llama))
    fitted = read_recipe(directory / arm.directory / "recipe.json", model)
    assert str(fitted) == arm.method
    scores = result.scores("logprob", 1) - result.scores("logprob", 0)
    assert np.abs(scores).min() > 0
    monkeypatch.setattr("posbias.mitigation.fits.descend", None)  # the fit is taken over
    again = mitigate(str(long_llama), "key_value(pairs=2)", options=replace(options, by="logprob"), directory=directory)
    np.testing.assert_array_equal(again.scores("logprob", 1), result.scores("logprob", 1))


def test_lines_without_answers_are_fitted_to_and_never_judged(long_llama, tmp_path):
    path, answers = tmp_path / "own.jsonl", {"answers": ["sings"]}
    lines = [one_of_two(name, **(answers if name in ("Ed", "Flo") else {})) for name in NAMES]
    del lines[0]["question"]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = MitigateOptions(
        methods="adapter(rank=1)",
        calibration=4,
        evaluation=pb.EvaluateOptions(count=2, generate=False),
        documents=0,
        fitting=FitOptions(steps=2, teacher="gold_alone", penalty=0.0),
    )
    found = mitigate(str(long_llama), f"documents(file={str(path)!r})", options=options).arms[1].fitted
    assert len(found["teacher_answers"]) == 4
    asked = "Document [1] Ada sings.\n\nWrite one short question that this text answers.\nQuestion:"
    (reply,) = pb.LocalResponder(str(long_llama)).respond([Request(asked, stop=("\n",))])
    assert found["questions"] == {"0-0": reply.response.text.strip()}
    options = replace(options, evaluation=pb.EvaluateOptions(count=3, generate=False))
    with pytest.raises(UsageError, match=r"own.jsonl.?, line 7: replies are judged by 'question' and 'answers'; only"):
        mitigate(str(long_llama), f"documents(file={str(path)!r})", options=options)


def test_an_order_follows_the_curve_under_a_method_of_a_run(trial, posbias):
    result, _, directory = trial
    few = posbias("place", "--run", directory / result.arms[1].directory, "--scores", "0.7,0.3")
    assert few.returncode == 2
    assert "placing needs 2 positions and 6 complete samples, got 2 and 2" in few.stderr
