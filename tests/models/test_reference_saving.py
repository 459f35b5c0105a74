"""Saved reference models come back as they were, through `load_model` too, and damaged ones are refused in one line."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posbias import Architecture, RunError, UsageError, load_model, load_prompts, measure
from posbias.models.reference.config import draw_parameters
from posbias.models.reference.network import ReferenceTransformer, load_reference, save_reference
from published_networks import copy_network, retrieval_network

CONFIGS = {
    "copy": copy_network(Architecture(2, encoding=["none", "rope(head_dim=10)"]), residual=True, mlp=True),
    "retrieval": retrieval_network(Architecture(1, mask="prefix(length=2)", encoding="sinusoidal(width=64)")),
    "per-head": replace(
        copy_network(Architecture(2, 2, mask=["causal", ["full", "causal"]], mixing=[0.2, 1.0], content=0.5)),
        residual="mixed",
    ),
}


def saved(directory: Path, name: str = "copy") -> Path:
    config = CONFIGS[name]
    parameters = draw_parameters(config, torch.Generator().manual_seed(7))
    provenance = {"study": "trial", "steps": 3}
    items = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) if name == "retrieval" else None
    return save_reference(directory / name, config, parameters=parameters, provenance=provenance, items=items)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_comes_back(name: str, tmp_path: Path) -> None:
    directory = saved(tmp_path, name)
    model, config = load_reference(directory), CONFIGS[name]
    assert model.config.to_dict() == config.to_dict()
    original = ReferenceTransformer(
        config, draw_parameters(config, torch.Generator().manual_seed(7)), items=model.items
    )
    token_ids = torch.tensor([[1, 2, 3, 1, 0]])
    assert torch.equal(model.last(model.embed(token_ids)).logits, original.last(original.embed(token_ids)).logits)
    description = model.describe()
    assert description["source"] == name
    assert description["provenance"] == {"study": "trial", "steps": 3}
    json.dumps(description)


@pytest.mark.parametrize("name", ["copy", "retrieval"])
def test_trained_models_are_measured_like_any_other(name: str, tmp_path: Path) -> None:
    model = load_model(saved(tmp_path, name), dtype="float64")
    assert isinstance(model, ReferenceTransformer)
    assert model.dtype == torch.float64
    prompts = load_prompts("synthetic", model, n_positions=6, count=2)
    measured = measure(model, prompts, kinds="jacobian(exact=True)")
    assert measured.profiles["jacobian"].influence.sum() == pytest.approx(1)
    again = model.reload_request
    assert again is not None
    assert torch.equal(load_model(**asdict(again)).network.blocks[0].query, model.network.blocks[0].query)
    assert Architecture.from_model(model).describe()["depth"] == model.config.architecture.depth


def test_items_name_the_vectors_of_a_vector_model(tmp_path: Path) -> None:
    config = CONFIGS["retrieval"]
    parameters = draw_parameters(config, torch.Generator())
    items = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    model = load_reference(save_reference(tmp_path, config, parameters=parameters, items=items))
    assert model.vocabulary_size == 5
    assert torch.equal(model.embed(torch.tensor([[4, 0]]))[0], items[[4, 0]])
    with pytest.raises(UsageError, match="this reference model takes vectors; give it items"):
        load_reference(save_reference(tmp_path, config, parameters=parameters)).embed(torch.tensor([[0]]))
    with pytest.raises(UsageError, match="items belong to models of vector inputs, this one has 10 tokens"):
        save_reference(
            tmp_path, CONFIGS["copy"], parameters=draw_parameters(CONFIGS["copy"], torch.Generator()), items=items
        )


def test_the_same_network_can_be_drawn_anew(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    one, same, other = (load_model(directory, init_seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.network.embedding, same.network.embedding)  # type: ignore[arg-type]
    assert not torch.equal(one.network.embedding, other.network.embedding)  # type: ignore[arg-type]
    assert one.describe()["init_seed"] == 1


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "reference.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    plain = json.loads((directory / "reference.json").read_text())["config"]
    edit(directory, config={**plain, "colour": 1})
    with pytest.raises(UsageError, match=r"ReferenceConfig: unknown argument 'colour'.* trained again"):
        load_model(directory)
    edit(directory, config={**plain, "width": 12})
    with pytest.raises(
        RunError, match=r"model 'copy': weight 'blocks.0.down' has shape \[40, 10\], expected \[48, 12\]"
    ):
        load_model(directory)
    edit(directory, config={**plain, "mlp": False})
    with pytest.raises(RunError, match=r"model 'copy': weight 'blocks\.0\.down' is not part of this model"):
        load_model(directory)
    edit(directory, config=plain, format=99)
    with pytest.raises(UsageError, match="model 'copy' has format 99; this version reads 1"):
        load_model(directory)
    edit(directory, format=1)
    weights = directory / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RunError, match=r"weights\.safetensors is missing or damaged"):
        load_model(directory)
    (directory / "reference.json").write_text("[")
    with pytest.raises(UsageError, match=r"reference\.json: is not JSON"):
        load_model(directory)


def test_what_is_not_the_model_is_not_saved(tmp_path: Path) -> None:
    config = CONFIGS["copy"]
    parameters = draw_parameters(config, torch.Generator())
    with pytest.raises(UsageError, match="weight 'unembedding' is missing"):
        save_reference(tmp_path, config, parameters={k: v for k, v in parameters.items() if k != "unembedding"})
    with pytest.raises(UsageError, match="weight 'unembedding' holds NaN or infinite values"):
        save_reference(
            tmp_path, config, parameters={**parameters, "unembedding": parameters["unembedding"] * torch.nan}
        )
    with pytest.raises(UsageError, match="device 'spread' is for large models"):
        load_model(saved(tmp_path), device="spread")
    with pytest.raises(UsageError, match="reference: dtype must be one of"):
        load_model(saved(tmp_path), dtype="float16")
