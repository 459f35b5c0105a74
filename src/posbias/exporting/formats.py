"""The formats: a PEFT adapter, a checkpoint with the change in its weights, and an adapter for llama.cpp.

PEFT: W' = W + (alpha / r) B A; alpha = r here. GGUF: `blk.N.NAME.weight.lora_a` and `.lora_b`; of families whose rotary
features llama.cpp lists in pairs, not halves, the rows of queries and keys are put in its order.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from posbias.errors import UsageError
from posbias.mitigation.methods.adapter import SIDES, lora_config
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.sources import quiet

ADAPTER_GGUF = "adapter.gguf"
ARCHITECTURES = {
    "llama": ("LLAMA", True),
    "mistral": ("LLAMA", True),
    "qwen2": ("QWEN2", False),
    "qwen3": ("QWEN3", False),
    "gemma": ("GEMMA", False),
    "gemma2": ("GEMMA2", False),
    "gemma3_text": ("GEMMA3", False),
}
"""By model type: llama.cpp's architecture, and whether it lists rotary features in pairs."""

Updates = Mapping[str, tuple[Tensor, Tensor]]
"""A and B by path of the projection, as `Adapter.weight_updates` gives them."""


def write_adapter(model: HuggingFaceModel, updates: Updates, directory: Path) -> None:
    """An adapter as PEFT saves it, but for the path of the base model, of which its name stays."""
    from safetensors.torch import save_file

    tensors = {
        f"base_model.model.{path}.{side}.weight": numbers.float().contiguous()
        for path, sides in updates.items()
        for side, numbers in zip(SIDES.values(), sides, strict=True)
    }
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    origin = model.origin
    config = lora_config(
        model.network,
        updates,
        targets=list(updates),
        task_type="CAUSAL_LM",
        base_model_name_or_path=origin.source,
        revision=origin.revision,
        inference_mode=True,
    )
    config.save_pretrained(directory)


def write_merged(model: HuggingFaceModel, updates: Updates, directory: Path) -> None:
    """The model with the change in its weights, as transformers saves it, with its tokenizer.

    The sum is rounded once to the weights' own type, and no weight in memory changes; peft's `merge_and_unload` rounds
    the change before it is added, to weights that it overwrites.
    """
    network: Any = model.network
    weights = dict(network.state_dict())
    for path, (down, up) in updates.items():
        transposed = type(network.get_submodule(path)).__name__ == "Conv1D"  # [features read, features made]
        stored, change = weights[f"{path}.weight"], (up @ down).to(network.get_submodule(path).weight.device)
        whole = stored.to(change.dtype) + (change.T if transposed else change)
        weights[f"{path}.weight"] = whole.to(stored.dtype).contiguous()
    with quiet(local=True):
        network.save_pretrained(directory, state_dict=weights)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(directory)


def write_gguf(model: HuggingFaceModel, updates: Updates, path: Path) -> None:
    """An adapter as llama.cpp reads it beside a GGUF file of the base model.

    Raises:
        UsageError: a family whose tensors this does not name.
    """
    import gguf

    if model.model_type not in ARCHITECTURES:
        raise UsageError(
            f"export: no GGUF adapter of a {model.model_type} model can be written; allowed: {', '.join(ARCHITECTURES)}"
        )
    architecture, in_pairs = ARCHITECTURES[model.model_type]
    kind = gguf.MODEL_ARCH[architecture]
    names = gguf.get_tensor_name_map(kind, model.sizes["layers"])
    heads = {"attn_q": model.sizes["heads"], "attn_k": model.sizes["key heads"]}
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    rank = len(next(iter(updates.values()))[0])
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))  # as a whole number llama.cpp ends at it
    for module, sides in updates.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None:
            raise UsageError(f"export: GGUF has no name for {module} of a {model.model_type} model")
        role = name.removesuffix(".weight").rpartition(".")[2]
        down, up = (side.float().numpy() for side in sides)
        if in_pairs and role in heads:
            up = pairs_of_halves(up, heads[role])
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(down))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(up))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pairs_of_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of every head in the order 0, d/2, 1, d/2 + 1, ..., so that what turns together stands together."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
