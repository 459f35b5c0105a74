"""A reference model on disk: `reference.json` (configuration, where it came from) and `weights.safetensors`.

Nothing that could run code is read. The JSON file is written last, so that a directory with it is whole.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posbias.architecture import Architecture
from posbias.directories import write_atomically
from posbias.errors import RunError, UsageError, one_line
from posbias.files import read_json
from posbias.models.config_limits import check_numbers
from posbias.models.reference.config import ReferenceConfig
from posbias.models.reference.network import ReferenceTransformer
from posbias.models.reference.parameters import draw_parameters
from posbias.models.sources import CONFIG_BYTES
from posbias.models.weight_files import stored_tensors
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

    check_shapes(config, {name: value.shape for name, value in parameters.items()})
    check_finite(parameters)
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
    tensors = load_parameters(path, config)
    items = tensors.pop(ITEMS, None)
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
        wrong = f"unknown field {unknown[0][:80]!r}" if unknown else "no architecture"
        raise UsageError(f"reference configuration has {wrong}; known: {', '.join(sorted(known))}")
    check_numbers(values, "reference")
    try:
        return ReferenceConfig(**{**values, "architecture": Architecture(**values["architecture"])})
    except UsageError as error:
        raise UsageError(one_line(error)) from None  # it may repeat a value of any length
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UsageError(f"reference configuration is refused: {one_line(error)}") from None


def load_parameters(directory: Path, config: ReferenceConfig) -> dict[str, Tensor]:
    """The weights beside a configuration, and the items where there are any; read only if they are this model's.

    Raises:
        UsageError: the file is a pickled one.
        RunError: it is missing or damaged, or holds weights of another shape or not finite.
    """
    from safetensors.torch import load_file

    name, path = directory.name, directory / WEIGHTS_FILE
    shapes = {key: shape for key, (_, shape) in stored_tensors([path], name).items() if key != ITEMS}
    try:
        check_shapes(config, shapes)
        tensors: dict[str, Tensor] = load_file(path)
        check_finite(tensors)
    except UsageError as error:
        raise RunError(f"model {name!r}: {error}") from None
    return tensors


def check_shapes(config: ReferenceConfig, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse weights that are not the configuration's.

    Raises:
        UsageError: the first one that is missing, unknown, or of another shape.
    """
    expected = {name: list(value.shape) for name, value in draw_parameters(config, None).items()}
    for name in sorted(set(expected) ^ set(shapes)):
        raise UsageError(f"weight {name[:80]!r} is {'missing' if name in expected else 'not part of this model'}")
    for name, shape in shapes.items():
        if list(shape) != expected[name]:
            raise UsageError(f"weight {name!r} has shape {list(shape)}, expected {expected[name]}")


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinite values, and what are no such numbers at all.

    Raises:
        UsageError: the first weight that holds any.
    """
    for name, value in parameters.items():
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            raise UsageError(f"weight {name[:80]!r} holds NaN or infinite values; allowed: finite")


def _drawn_items(config: ReferenceConfig) -> Float[Tensor, "item feature"]:
    normal = torch.randn((DRAWN_ITEMS, config.width), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    items: Tensor = normal / config.width**0.5
    return items.to(config.torch_dtype)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path / CONFIG_FILE, most_bytes=CONFIG_BYTES)
    except OSError:
        raise UsageError(f"{path.name!r} holds no reference model ({CONFIG_FILE} is missing)") from None
    except ValueError as error:
        raise UsageError(f"model {path.name!r}: {CONFIG_FILE} {one_line(error)}") from None
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT or not isinstance(document.get("config"), dict) or "provenance" not in document:
        raise UsageError(f"model {path.name!r} has format {str(found)[:80]}; this version reads {FORMAT}")
    return dict(document)
