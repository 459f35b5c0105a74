"""`load_model`: from what a user names (hub id, directory, GGUF file, "demo", "config:...") to a `HuggingFaceModel`.

Only weights that cannot carry code are read (safetensors, GGUF), no repository's own code is run, and nothing local is
looked up on the network. Every refusal is one line.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posbias.errors import RunError, UsageError
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.initialise import attention_of, random_network
from posbias.models.quiet import quiet
from posbias.models.sources import Source, one_line, read_config, resolve_source

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def load_model(
    source: str | Path, *, init_seed: int | None = None, dtype: str = "float32", device: str = "cpu"
) -> HuggingFaceModel:
    """Load a causal language model, frozen and in evaluation mode.

    Args:
        source: A hub id, a directory, a `.gguf` file, `"demo"` (SmolLM2-135M-Instruct), or `"config:PATH_OR_ID"` for a
            random network from a configuration alone.
        init_seed: Draw all weights anew from the model class's own initialiser with this seed, instead of loading
            them; same configuration. The global random state is left as it was. `"config:..."` without a seed takes 0.
        dtype: `float32`, `float64`, `bfloat16` or `float16`.
        device: `cpu`, `cuda`, `cuda:1`, `mps` ...

    Returns:
        The model; its tokenizer is None where none was found.

    Raises:
        UsageError: no such model, not a decoder, pickled weights, remote code, an unknown dtype or device.
        RunError: weights are damaged, missing or not finite, or the demo model cannot be obtained.
    """
    chosen_dtype, chosen_device = _dtype(dtype), _device(device)
    resolved = resolve_source(source)
    if resolved.config_only and init_seed is None:
        init_seed = 0
    with quiet(resolved.local):
        config = read_config(resolved)
        if init_seed is not None:
            network = random_network(config, seed=init_seed)
        else:
            network = _pretrained_network(resolved, config, dtype=chosen_dtype)
        tokenizer = _tokenizer(resolved)
        network = network.to(device=chosen_device, dtype=chosen_dtype)
    bad = _first_not_finite(network)
    if bad is not None:
        raise RunError(f"model {resolved.name!r}: weight {bad!r} holds NaN or infinite values; allowed: finite")
    drawn_from = None if init_seed is None else int(init_seed)
    origin = Origin(resolved.name, drawn_from, getattr(config, "_commit_hash", None))
    return HuggingFaceModel(network, tokenizer, origin=origin)


def read_gguf(path: Path) -> tuple[Any, Any]:
    """Network (float32) and tokenizer of a GGUF file, as an ordinary unquantised model.

    Raises:
        UsageError: the file does not hold a decoder.
        RunError: transformers cannot read it.
    """
    source = Source(path.name, str(path.parent), local=True, gguf=path.name)
    with quiet(local=True):
        network = _pretrained_network(source, read_config(source), dtype=torch.float32)
        return network, _tokenizer(source)


def _pretrained_network(source: Source, config: Any, *, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    if source.local and source.gguf is None:
        _check_weight_files(Path(source.location), source.name)
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention_of(config),
            use_safetensors=True,
            output_loading_info=True,
            **source.arguments,
        )
    except OSError as error:
        raise UsageError(
            f"model {source.name!r} has no readable safetensors weights (pickled weights are refused; allowed: "
            f"safetensors or gguf): {one_line(error)}"
        ) from None
    except Exception as error:
        raise RunError(f"model {source.name!r} cannot be loaded: {one_line(error)}") from None
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RunError(f"model {source.name!r}: {len(missing)} weights are not in its files, first {missing[0]!r}")
    if source.gguf is not None:
        _forget_quantisation(network)
    return network  # type: ignore[no-any-return]


def _forget_quantisation(network: Any) -> None:
    """GGUF weights were expanded while loading; what is left is a plain model and must be saved as one."""
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    for name in ("is_quantized", "hf_quantizer", "quantization_method"):
        if name in vars(network):
            delattr(network, name)


def _check_weight_files(directory: Path, name: str) -> None:
    if any(directory.glob("*.safetensors")):
        return
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        raise UsageError(f"model {name!r} has pickled weights ({pickled[0]}), which can run code; allowed: safetensors")
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    advice = f"; name the file itself, e.g. {gguf[0]}" if gguf else ""
    raise UsageError(f"model {name!r} has no weights; allowed: *.safetensors in the directory{advice}")


def _tokenizer(source: Source) -> Any:
    """The tokenizer, or None: models are usable with token ids alone, and the prompts room asks for one when needed."""
    from transformers import AutoTokenizer

    if source.local and Path(source.location).is_file():
        return None
    try:
        return AutoTokenizer.from_pretrained(source.location, **source.arguments)
    except Exception:  # anything a damaged or absent tokenizer may raise; a model without one is still a model
        return None


def _first_not_finite(network: nn.Module) -> str | None:
    """Name of the first parameter that holds NaN or infinite values, or None."""
    for name, parameter in network.named_parameters():
        # A finite sum has finite terms, and is several times cheaper; a sum may also overflow, hence the second look.
        if not bool(parameter.sum().isfinite()) and not bool(parameter.isfinite().all()):
            return name
    return None


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is unknown; allowed: {', '.join(DTYPES)}")
    chosen: torch.dtype = DTYPES[name]
    return chosen


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:
        raise UsageError(f"device {name!r} cannot be used ({one_line(error)}); cpu always can") from None
    return device
