"""The formats: a PEFT adapter, a checkpoint with the change in its weights, and an adapter for llama.cpp.

PEFT: W' = W + (alpha / r) B A, `adapter_config.json` beside `adapter_model.safetensors`; alpha = r here.
GGUF: `blk.N.NAME.weight.lora_a` and `.lora_b`; of families whose rotary features llama.cpp lists in pairs, not halves,
the rows of queries and keys are put in its order.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from posbias.errors import UsageError
from posbias.mitigation.methods.base import Mitigation
from posbias.mitigation.methods.weight_changes import LowRank
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


@dataclass(frozen=True, eq=False)
class Exporting:
    """A method as updates of a model's projections, which lie within linear modules."""

    model: HuggingFaceModel
    method: Mitigation
    updates: Mapping[str, LowRank]
    """Exact changes by path of the projection."""

    def transposed(self, path: str) -> bool:
        """True if the module stores its weights as [features read, features made]."""
        return type(self.model.network.get_submodule(path)).__name__ == "Conv1D"


def write_adapter(work: Exporting, directory: Path) -> None:
    """An adapter as PEFT saves it, but for the path of the base model, of which its name stays."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for path, update in work.updates.items():
        for side, numbers in (("lora_A", update.down), ("lora_B", update.up)):
            tensors[f"base_model.model.{path}.{side}.weight"] = numbers.detach().float().cpu().contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": work.model.origin.source,
        "revision": work.model.origin.revision,
        "inference_mode": True,
        "r": work.method.update_rank,
        "lora_alpha": work.method.update_rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": all(map(work.transposed, work.updates)),
        "target_modules": module_names(work.model.network, set(work.updates)),
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings, indent=1))


def module_names(network: nn.Module, paths: set[str]) -> list[str]:
    """The shortest ends of paths, such as `q_proj`, that name these modules and no others; else whole paths."""
    modules = [path for path, _ in network.named_modules()]
    names: set[str] = set()
    for path in sorted(paths):
        parts = path.split(".")
        for first in range(len(parts) - 1, -1, -1):
            end = ".".join(parts[first:])
            if {module for module in modules if f".{module}".endswith(f".{end}")} <= paths:
                names.add(end)
                break
    return sorted(names)


def write_merged(work: Exporting, directory: Path) -> None:
    """The model with the change in its weights, as transformers saves it, with its tokenizer."""
    network: Any = work.model.network
    weights = dict(network.state_dict())
    for path, change in work.updates.items():
        stored = weights[f"{path}.weight"]
        weight = stored.T if work.transposed(path) else stored
        whole = weight.to(change.up.dtype) + change.up @ change.down
        weights[f"{path}.weight"] = (whole.T if work.transposed(path) else whole).to(stored.dtype).contiguous()
    with quiet(local=True):
        network.save_pretrained(directory, state_dict=weights)
        if work.model.tokenizer is not None:
            work.model.tokenizer.save_pretrained(directory)


def write_gguf(work: Exporting, path: Path) -> None:
    """An adapter as llama.cpp reads it beside a GGUF file of the base model.

    Raises:
        UsageError: a family whose tensors this does not name.
    """
    import gguf

    model = work.model
    if model.model_type not in ARCHITECTURES:
        raise UsageError(
            f"export: no GGUF adapter of a {model.model_type} model can be written; allowed: {', '.join(ARCHITECTURES)}"
        )
    updates = work.updates
    architecture, in_pairs = ARCHITECTURES[model.model_type]
    kind = gguf.MODEL_ARCH[architecture]
    names = gguf.get_tensor_name_map(kind, model.sizes["layers"])
    heads = {"attn_q": model.sizes["heads"], "attn_k": model.sizes["key heads"]}
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # As a whole number llama.cpp ends at it.
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(work.method.update_rank or 0))
    for module, update in updates.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None:
            raise UsageError(f"export: GGUF has no name for {module} of a {model.model_type} model")
        role = name.removesuffix(".weight").rpartition(".")[2]
        down, up = (side.detach().float().cpu().numpy() for side in (update.down, update.up))
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
