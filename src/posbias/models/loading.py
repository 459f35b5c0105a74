"""`load_model`: from what a user names (hub id, directory, GGUF file, "demo", "config:...") to a model.

A directory may hold a transformers checkpoint or one of our own trained reference models.

Only weights that cannot carry code are read (safetensors, GGUF), no repository's own code is run, and nothing local is
looked up on the network. Every refusal is one line.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.errors import RunError, UsageError
from posbias.memory import peak_bytes
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.initialise import attention_of, parameter_counts, random_network
from posbias.models.placement import AUTO, Placement, Sizes, check_device, check_room
from posbias.models.precision import cast_weights
from posbias.models.quiet import quiet
from posbias.models.reference import ReferenceTransformer, is_reference, load_reference
from posbias.models.request import ModelRequest, absolute_source
from posbias.models.sources import Source, one_line, read_config, resolve_source
from posbias.models.weight_files import weight_bytes
from posbias.models.weights import first_not_finite, quantised

DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


def load_model(
    source: str | Path,
    *,
    init_seed: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    max_memory: int | None = None,
) -> HuggingFaceModel | ReferenceTransformer:
    """Load a causal language model, frozen and in evaluation mode.

    Args:
        source: A hub id, a directory, a `.gguf` file, `"demo"` (SmolLM2-135M-Instruct), or `"config:PATH_OR_ID"` for a
            random network from a configuration alone.
        init_seed: Draw all weights anew from the model class's own initialiser with this seed, instead of loading
            them; same configuration. The global random state is left as it was. `"config:..."` without a seed takes 0.
        dtype: `float32`, `float64`, `bfloat16` or `float16`; of a quantised model, that of what is not packed.
        device: `cpu`, `cuda`, `cuda:1` ..., or `auto`: spread over the accelerators, the CPU and, where these
            are full, the disk. Measure such a model with checkpointing, or the passes keep all its weights in place.
        max_memory: Bytes that the process may hold while it loads the model; with `auto`, half of what they leave for
            weights, as on each accelerator half of them; None: what is free.

    Returns:
        The model; its tokenizer is None where none was found. A directory that `save_reference` wrote gives a
        `ReferenceTransformer` (float32 or float64).

    Raises:
        UsageError: no such model, not a decoder, pickled weights, remote code, an unknown dtype or device, weights
            quantised in a way that gradients do not pass, or more than fits.
        RunError: weights are damaged, missing or not finite, or the demo model cannot be obtained.
    """
    chosen_dtype, chosen_device, peak_before = _dtype(dtype), check_device(device), peak_bytes()
    trained = _trained_here(source, init_seed=init_seed, dtype=dtype, device=device)
    if trained is not None:
        return trained
    resolved = resolve_source(source)
    if resolved.config_only and init_seed is None:
        init_seed = 0
    with quiet(resolved.local):
        config = read_config(resolved)
        if init_seed is None:
            network = _placed_network(resolved, config, chosen_dtype, chosen_device, max_memory)
        elif chosen_device is None:
            raise UsageError(f"device {AUTO!r} spreads the weights of a file; name a device for random ones, e.g. cpu")
        else:
            sizes = _sizes_made(config, at_least=torch.float32.itemsize)
            check_room(resolved.name, sizes, dtype=chosen_dtype, spread=False, max_memory=max_memory)
            network = cast_weights(random_network(config, seed=init_seed), chosen_dtype).to(chosen_device)
        tokenizer = _tokenizer(resolved)
    drawn_from = None if init_seed is None else int(init_seed)
    origin = Origin(resolved.name, drawn_from, getattr(config, "_commit_hash", None))
    model = HuggingFaceModel(network, tokenizer, origin=origin)
    if quantised(network):
        _check_gradients(model, resolved.name)
    bad = first_not_finite(network)
    if bad is not None:
        raise RunError(f"model {resolved.name!r}: weight {bad!r} holds NaN or infinite values; allowed: finite")
    model.request = ModelRequest(absolute_source(source), drawn_from, dtype, device, max_memory)
    peak = peak_bytes()
    if peak is not None and peak_before is not None and peak > peak_before:
        model.loading_bytes = peak
    return model


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a model alone, or one that lies in a directory by itself; no weight is read.

    Args:
        source: As for `load_model`.

    Raises:
        UsageError: no such source, or none with a tokenizer.
    """
    resolved = resolve_source(source)
    with quiet(resolved.local):
        tokenizer = _tokenizer(resolved)
    if tokenizer is None:
        raise UsageError(f"{resolved.name!r} has no readable tokenizer; allowed: a model, or a directory, with one")
    return tokenizer


def _trained_here(source: str | Path, *, init_seed: int | None, dtype: str, device: str) -> ReferenceTransformer | None:
    """A saved reference model, or None where the source is none."""
    named = str(source).removeprefix("config:") if isinstance(source, str | Path) else ""
    path = Path(named).expanduser()
    if not named or named == "demo" or not is_reference(path):
        return None
    if device == AUTO:
        raise UsageError(f"device {AUTO!r} spreads large models; name a device for {path.name!r}, e.g. cpu")
    if str(source).startswith("config:") and init_seed is None:
        init_seed = 0
    model = load_reference(path, dtype=dtype, init_seed=init_seed, device=device)
    model.request = ModelRequest(absolute_source(source), init_seed, dtype, device)
    return model


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


def _placed_network(
    source: Source, config: Any, dtype: torch.dtype, device: torch.device | None, max_memory: int | None
) -> nn.Module:
    """The pretrained network where it will run: on one device, or spread."""
    packed = source.gguf is None and getattr(config, "quantization_config", None) is not None
    if device is not None:
        sizes = _sizes_made(config, gguf=source) if source.gguf else _sizes_stored(source, packed=packed)
        if sizes is not None:
            check_room(source.name, sizes, dtype=dtype, spread=source.gguf is None, max_memory=max_memory)
        # Packed weights are placed while loading; they can be neither cast nor, some of them, moved.
        network = _pretrained_network(source, config, dtype=dtype, placement={"device_map": device} if packed else {})
        return network if packed else network.to(device)
    if source.gguf is not None:
        raise UsageError(f"device {AUTO!r} needs safetensors weights, and {source.name!r} is a GGUF file")
    placement = Placement(max_memory)
    network = _pretrained_network(source, config, dtype=dtype, placement=placement.arguments)
    placement.belongs_to(network)
    return network


def _sizes_made(config: Any, *, at_least: int = 1, gguf: Source | None = None) -> Sizes:
    """Of weights expanded from a GGUF file, or drawn, `at_least` so many bytes each before they are cast."""
    counts = parameter_counts(config)
    packed = 0 if gguf is None else (Path(gguf.location) / str(gguf.gguf)).stat().st_size

    def sizes(dtype: torch.dtype) -> tuple[int, int]:
        return sum(counts) * max(dtype.itemsize, at_least), packed + max(counts) * torch.float32.itemsize

    return sizes


def _sizes_stored(source: Source, *, packed: bool) -> Sizes | None:
    """Of weights in files, which are mapped into memory: they count beside those that are made of them."""
    stored = weight_bytes(source, None)
    if stored is None:
        return None

    def sizes(dtype: torch.dtype) -> tuple[int, int]:
        weights = stored if packed else weight_bytes(source, dtype) or stored
        return weights, 0 if weights == stored else stored

    return sizes


def _pretrained_network(
    source: Source, config: Any, *, dtype: torch.dtype, placement: dict[str, Any] | None = None
) -> nn.Module:
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
            ignore_mismatched_sizes=True,
            **(placement or {}),
            **source.arguments,
        )
    except ImportError as error:
        raise UsageError(f"model {source.name!r} needs a package that is not there: {one_line(error)}") from None
    except OSError as error:
        raise UsageError(
            f"model {source.name!r} has no readable safetensors weights (pickled weights are refused; allowed: "
            f"safetensors or gguf): {one_line(error)}"
        ) from None
    except Exception as error:
        raise RunError(f"model {source.name!r} cannot be loaded: {one_line(error)}") from None
    if info["mismatched_keys"]:
        name, found, wanted = sorted(info["mismatched_keys"])[0]
        raise RunError(
            f"model {source.name!r}: weight {name!r} has shape {list(found)} in its files, {list(wanted)} by its"
            " configuration"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RunError(f"model {source.name!r}: {len(missing)} weights are not in its files, first {missing[0]!r}")
    if source.gguf is not None:
        _forget_quantisation(network)
        cast_weights(network, dtype)
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


def _check_gradients(model: HuggingFaceModel, name: str) -> None:
    """Refuse packed weights that no gradient passes, or not twice; some formats unpack themselves on their first pass.

    Raises:
        UsageError: a pass fails, its gradient is zero, or another one after a pass without gradients.
    """
    for module in model.network.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes would repack these weights in any pass without gradients, and give wrong ones ever after.
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010 (not an attribute of every module)
    try:
        first = _trial_gradient(model)
        with torch.no_grad():
            model.last(model.embed(model.token_tensor([[0, 1]])))
        reason = "" if bool(first.count_nonzero()) else "its gradient is zero"
        if not torch.equal(first, _trial_gradient(model)):
            reason = "its gradient changes after a pass without gradients"
    except Exception as error:
        reason = one_line(error)
    if reason:
        raise UsageError(
            f"model {name!r} is quantised in a way that cannot be differentiated here ({reason}); "
            "load an unquantised copy"
        )


def _trial_gradient(model: HuggingFaceModel) -> Float[Tensor, "one two width"]:
    inputs = model.embed(model.token_tensor([[0, 1]])).detach().requires_grad_()
    gradient: Tensor = torch.autograd.grad(model.last(inputs).logits.square().sum(), inputs)[0]
    return gradient


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is unknown; allowed: {', '.join(DTYPES)}")
    chosen: torch.dtype = DTYPES[name]
    return chosen
