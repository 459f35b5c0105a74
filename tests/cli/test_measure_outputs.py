"""`posbias measure` on other outputs, in half precision: what the record holds and what is printed."""

import json

import numpy as np

from posbias import load_record


def test_the_record_holds_the_output(posbias, tiny_llama, tmp_path) -> None:
    arguments = ["measure", tiny_llama, "--length", 20, "--count", 3, "--dtype", "bfloat16", "--out", tmp_path / "run"]
    arguments += ["--kinds", "jacobian(probes=2),integrated_gradients(steps=2),perturbation"]
    for wrong, said in (
        (("--output", "first"), "unknown output 'first'"),
        (("--depth-profiles", "all"), "--depth-profiles left posbias after 0.1.0"),
    ):
        refused = posbias(*arguments, *wrong)
        assert (refused.returncode, said in refused.stderr) == (2, True)
    result = posbias(*arguments, "--output", "at(position=-5)")
    assert result.returncode == 0, result.stderr
    record = load_record(tmp_path / "run").record
    measurement = record.resolved["measurement"]
    assert measurement["output"] == "at(position=-5)"
    assert np.all(record.arrays["trained/measured/jacobian/influence"][-4:] == 0)
    assert len(record.scalars["details"]["integrated_gradients"]["completeness_gap"]) == 3


def test_a_target_is_measured(posbias, tiny_llama) -> None:
    arguments = ["measure", tiny_llama, "--length", 12, "--count", 2, "--kinds", "logprob", "--json"]
    result = posbias(*arguments, "--output", "target(text=' Paris, France')")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["resolved"]["measurement"]["output"] == "target(text=' Paris, France')"
    assert len(document["arrays"]["trained/measured/logprob/influence"]) == 12
