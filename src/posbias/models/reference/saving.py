"""A reference model on disk: `reference.json` (configuration, where it came from) and `weights.safetensors`.

Nothing that could run code is read. The JSON file is written last, so that a directory with it is whole.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import Architecture
from posbias.directories import write_atomically
from posbias.errors import RunError, UsageError
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.models.reference.parameters import draw_parameters
from posbias.records import plain

CONFIG_FILE = "reference.json"
WEIGHTS_FILE = "weights.safetensors"
FORMAT = 1
ITEMS = "items"
"""Name of the table of input vectors beside the weights."""
DRAWN_ITEMS = 256
"""Items of a model that was saved without any."""


def save_reference(
    directory: str | Path,
    config: ReferenceConfig,
    *,
    parameters: Mapping[str, Tensor],
    provenance: Mapping[str, Any] | None = None,
    items: Float[Tensor, "item feature"] | None = None,
) -> Path:
    """Write a model so that `load_model(directory)` gives it back.

    Args:
        directory: Made if it is not there; files of an earlier model in it are replaced.
        config: The model.
        parameters: Its weights, named as `draw_parameters` names them.
        provenance: Plain values for the record: study, member, task, steps, seeds.
        items: For a model of vector inputs, the vectors that token ids shall name; None: 256 Gaussian ones of variance
            1 / width, which is how in-context retrieval draws its classes.

    Returns:
        The directory.

    Raises:
        UsageError: weights that are not the configuration's, or items for a model with a vocabulary.
    """
    from safetensors.torch import save

    check_parameters(config, parameters)
    if items is not None and config.vocabulary_size is not None:
        raise UsageError(f"items belong to models of vector inputs, this one has {config.vocabulary_size} tokens")
    tensors = dict(parameters)
    if config.vocabulary_size is None:
        tensors[ITEMS] = _drawn_items(config) if items is None else items.to(config.torch_dtype)
    document = {"format": FORMAT, "config": config.to_dict(), "provenance": plain(dict(provenance or {}))}
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG_FILE).unlink(missing_ok=True)
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_atomically(path / WEIGHTS_FILE, save(stored))
    write_atomically(path / CONFIG_FILE, json.dumps(document, indent=1).encode())
    return path


def is_reference(directory: str | Path) -> bool:
    """Whether a directory holds a saved reference model."""
    return (Path(directory) / CONFIG_FILE).is_file()


def load_reference(
    directory: str | Path, *, dtype: str | None = None, init_seed: int | None = None, device: str = "cpu"
) -> ReferenceTransformer:
    """A saved model, frozen.

    Args:
        directory: What `save_reference` wrote.
        dtype: `float32` or `float64`; None: as saved.
        init_seed: Draw the weights anew with this seed; items are kept.
        device: Where to compute.

    Raises:
        UsageError: no such model, an unknown format, a configuration or dtype that is not allowed.
        RunError: weights damaged, missing, of the wrong shape, or not finite.
    """
    path = Path(directory)
    document = _document(path)
    config = config_from(document["config"])
    tensors = _tensors(path)
    items = tensors.pop(ITEMS, None)
    try:
        check_parameters(config, tensors)
    except UsageError as error:
        raise RunError(f"model {path.name!r}: {error}") from None
    config = config if dtype is None else replace(config, dtype=dtype)
    if init_seed is not None:
        config = replace(config, seed=init_seed)
        tensors = draw_parameters(config, torch.Generator().manual_seed(init_seed))
    model = ReferenceTransformer(config, tensors, items=items)
    model.origin = {"source": path.resolve().name, "init_seed": init_seed, "provenance": document["provenance"]}
    return model.to(device)


def config_from(values: Mapping[str, Any]) -> ReferenceConfig:
    """The configuration that `ReferenceConfig.to_dict` described.

    Raises:
        UsageError: a field that is unknown or missing, or a value out of range.
    """
    known = {field.name for field in fields(ReferenceConfig)}
    unknown = sorted(set(values) - known)
    if unknown or "architecture" not in values:
        wrong = f"unknown field {unknown[0]!r}" if unknown else "no architecture"
        raise UsageError(f"reference configuration has {wrong}; known: {', '.join(sorted(known))}")
    try:
        return ReferenceConfig(**{**values, "architecture": Architecture(**values["architecture"])})
    except TypeError as error:
        raise UsageError(f"reference configuration is refused: {error}") from None


def check_parameters(config: ReferenceConfig, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not the configuration's, or not finite.

    Raises:
        UsageError: the first one that is missing, unknown, of another shape, or holds NaN or infinite values.
    """
    expected = draw_parameters(config, torch.Generator().manual_seed(0))
    for name in sorted(set(expected) ^ set(parameters)):
        raise UsageError(f"weight {name!r} is {'missing' if name in expected else 'not part of this model'}")
    for name, value in parameters.items():
        if value.shape != expected[name].shape:
            raise UsageError(f"weight {name!r} has shape {list(value.shape)}, expected {list(expected[name].shape)}")
        if not bool(value.isfinite().all()):
            raise UsageError(f"weight {name!r} holds NaN or infinite values; allowed: finite")


def _drawn_items(config: ReferenceConfig) -> Float[Tensor, "item feature"]:
    normal = torch.randn((DRAWN_ITEMS, config.width), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    items: Tensor = normal / config.width**0.5
    return items.to(config.torch_dtype)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(f"{path.name!r} holds no reference model ({CONFIG_FILE} is missing)") from None
    except ValueError:
        raise UsageError(f"model {path.name!r}: {CONFIG_FILE} is not JSON") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT or not {"config", "provenance"} <= set(document):
        raise UsageError(f"model {path.name!r} has format {found!r}; this version reads {FORMAT}")
    return dict(document)


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise RunError(f"model {path.name!r}: {WEIGHTS_FILE} cannot be read ({error})") from None
    return tensors
