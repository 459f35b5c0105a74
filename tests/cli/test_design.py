"""`posbias design`, run as a user runs it."""

import json
import re

from posbias.results.records import read_record


def test_a_target_that_is_missed_is_a_sentence_in_record_page_and_terminal(posbias, tmp_path):
    target = "u_shape"
    flags = ["--depth", 12, "--heads", 8, "--mixing", 0.9, "--length", 128, "--starts", 2, "--strict"]
    result = posbias("design", target, *flags, "--out", tmp_path / "run")
    assert result.returncode == 3
    assert "required W1 <= 0.01 to the target, got 0.0" in result.stderr
    record = read_record(tmp_path / "run")
    assert record.status == "done"
    assert record.scalars["met"] is False
    assert record.scalars["distances"][1]["after"] > record.scalars["tolerance"] == 0.01
    assert record.seeds == {"design": 0}
    page = (tmp_path / "run" / "report.html").read_text()
    for said in (" ".join(result.stdout.split()), " ".join(page.split())):
        assert "The target is not met to W1 0.01: the residual rollout leaves W1 0.0" in said
        assert "a key bias meets any target at one length: --over key_bias" in said
    assert "meets the target" not in result.stdout
    assert posbias("design", target, *flags, "--over", "key_bias").returncode == 0


def test_a_target_that_a_flat_line_meets_is_named(posbias):
    flags = ["--depth", 4, "--length", 64, "--json"]
    shallow = posbias("design", "u_shape(middle=0.95)", *flags)
    assert "So does a flat line: W1 0.0022 at 64 positions." in json.loads(shallow.stdout)["verdict"]


def test_a_models_design_is_measured(posbias, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = [
        "--model",
        f"config:{tmp_path}",
        "--dtype",
        "float64",
        "--length",
        32,
        "--measured-at",
        "32,48",
        "--initialisations",
        6,
        "--out",
        tmp_path / "run",
    ]
    result = posbias("design", "flat", *flags)
    assert result.returncode == 0, result.stderr
    assert re.findall("model .*", result.stderr) == [f"model config:{tmp_path.name}: float64 on cpu"]
    assert "Measured at 32 positions on 6 fresh initialisations: W1 to the target 0.0" in result.stdout
    record = read_record(tmp_path / "run")
    assert (record.arguments["device"], record.resolved["model"]["dtype"]) == ("auto", "float64")
    assert [found["n_positions"] for found in record.scalars["measured"]] == [32, 48]
    assert all(found["distance"]["value"] < found["before"]["value"] for found in record.scalars["measured"])
    asked = record.scalars["measured"][0]
    assert asked["distance"]["value"] < 0.03 < 0.08 < asked["before"]["value"]
    assert record.arrays["measured/48/networks"].shape == (6, 48)
