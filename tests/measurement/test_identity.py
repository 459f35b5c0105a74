"""What a stored piece and a worker may be taken for: only the very same model, as it computes at the moment."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import posbias as pb
from posbias import MeasureOptions, UsageError, intervened
from posbias.models.model import Model
from posbias.models.weights import config_sha256, weights_sha256
from posbias.runs.engines import Local
from posbias.runs.parts import clear_parts
from tiny_families import shaken_model

TOKENS = np.arange(3, 35).reshape(2, 16)


def measured(model: Model, options: MeasureOptions | None = None) -> np.ndarray:
    prompts = pb.load_prompts(TOKENS, model, n_positions=16, count=2)
    return pb.measure(model, prompts, kinds="probability", options=options).per_prompt["probability"]


def test_workers_refuse_a_model_that_is_intervened_on(tiny_llama: Path) -> None:
    model = pb.load_model(tiny_llama)
    with (
        intervened(model, "window(width=4)") as changed,
        pytest.raises(UsageError, match="without an intervention"),
    ):
        measured(changed, MeasureOptions(engine=Local(workers=2)))


def test_resuming_takes_no_piece_from_before_an_intervention(tiny_llama: Path, tmp_path: Path) -> None:
    model = pb.load_model(tiny_llama)
    before = measured(model, MeasureOptions(directory=tmp_path))
    with intervened(model, "window(width=4)") as changed:
        assert changed.describe()["intervention"] == "window(width=4)"
        after = measured(changed, MeasureOptions(directory=tmp_path, resume=True))
        fresh = measured(changed)
    np.testing.assert_array_equal(after, fresh)
    assert np.abs(after - before).max() > 0
    assert model.intervention is None


def test_resuming_takes_no_piece_of_another_configuration(tiny_llama: Path, tmp_path: Path) -> None:
    before = measured(pb.load_model(tiny_llama), MeasureOptions(directory=tmp_path))
    document = json.loads((tiny_llama / "config.json").read_text())
    document["rope_parameters"] = {"rope_theta": 10.0, "rope_type": "default"}
    document.pop("rope_theta", None)
    (tiny_llama / "config.json").write_text(json.dumps(document))
    model = pb.load_model(tiny_llama)
    np.testing.assert_array_equal(measured(model, MeasureOptions(directory=tmp_path, resume=True)), measured(model))
    assert np.abs(measured(model) - before).max() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_edit_of_a_weight_changes_its_fingerprint(dtype: torch.dtype) -> None:
    network = shaken_model("llama", dtype=dtype).network
    seen = {weights_sha256(network)}
    weight = network.get_parameter("model.layers.0.mlp.down_proj.weight").data
    weight[1, 3] += 1
    seen.add(weights_sha256(network))
    weight[[0, 1]] = weight[[1, 0]]
    seen.add(weights_sha256(network))
    assert len(seen) == 3
    told = config_sha256(network)
    network.config.rms_norm_eps = 0.5
    assert config_sha256(network) != told


def test_half_precision_is_measured_under_a_changed_mask(tiny_llama: Path) -> None:
    model = pb.load_model(tiny_llama, dtype="bfloat16")
    with intervened(model, "bidirectional") as changed:
        assert np.isfinite(measured(changed)).all()


def test_clearing_leaves_files_that_are_not_pieces(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    (tmp_path / "parts").mkdir()
    save_file({"weight": np.ones(2)}, tmp_path / "parts" / "model-00001.safetensors")
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    clear_parts(tmp_path)
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["model-00001.safetensors", "notes.txt"]
