"""What a stored piece and a worker may be taken for: only the very same model, as it computes at the moment."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import posbias as pb
from posbias import MeasureOptions, UsageError, intervened
from posbias.runs.engines import Local
from posbias.runs.parts import clear_parts

TOKENS = np.arange(3, 35).reshape(2, 16)


def measured(model, options=None):
    prompts = pb.load_prompts(TOKENS, model, n_positions=16, count=2)
    return pb.measure(model, prompts, kinds="probability", options=options).per_prompt["probability"]


def test_workers_refuse_a_model_that_is_intervened_on(tiny_llama):
    model = pb.load_model(tiny_llama)
    with (
        intervened(model, "window(width=4)") as changed,
        pytest.raises(UsageError, match="without an intervention"),
    ):
        measured(changed, MeasureOptions(engine=Local(workers=2)))


def test_resuming_takes_no_piece_from_before_an_intervention(tiny_llama, tmp_path):
    model = pb.load_model(tiny_llama)
    before = measured(model, MeasureOptions(directory=tmp_path))
    with intervened(model, "window(width=4)") as changed:
        assert changed.describe()["intervention"] == "window(width=4)"
        after = measured(changed, MeasureOptions(directory=tmp_path, resume=True))
        fresh = measured(changed)
    np.testing.assert_array_equal(after, fresh)
    assert np.abs(after - before).max() > 0
    assert model.intervention is None


def test_resuming_takes_no_piece_of_another_configuration(tiny_llama, tmp_path):
    before = measured(pb.load_model(tiny_llama), MeasureOptions(directory=tmp_path))
    document = json.loads((tiny_llama / "config.json").read_text())
    document["rope_parameters"] = {"rope_theta": 10.0, "rope_type": "default"}
    document.pop("rope_theta", None)
    (tiny_llama / "config.json").write_text(json.dumps(document))
    model = pb.load_model(tiny_llama)
    np.testing.assert_array_equal(measured(model, MeasureOptions(directory=tmp_path, resume=True)), measured(model))
    assert np.abs(measured(model) - before).max() > 0


def test_half_precision_is_measured_under_a_changed_mask(tiny_llama):
    model = pb.load_model(tiny_llama, dtype="bfloat16")
    with intervened(model, "bidirectional") as changed:
        assert np.isfinite(measured(changed)).all()


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_any_edit_of_a_weight_changes_its_fingerprint(tiny_llama, dtype):
    model = pb.load_model(tiny_llama, dtype=dtype)
    weight = model.network.get_parameter("model.layers.0.mlp.down_proj.weight").data
    seen = {model.describe()["weights_sha256"]}
    weight[1, 3] += 1
    seen.add(model.describe()["weights_sha256"])
    weight[[0, 1]] = weight[[1, 0]]
    assert len(seen | {model.describe()["weights_sha256"]}) == 3


def test_clearing_leaves_files_that_are_not_pieces(tmp_path):
    (tmp_path / "parts").mkdir()
    save_file({"weight": np.ones(2)}, tmp_path / "parts" / "model-00001.safetensors")
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    clear_parts(tmp_path)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["model-00001.safetensors", "notes.txt"]
