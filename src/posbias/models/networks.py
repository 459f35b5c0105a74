"""Networks of transformers where they will run, with the weights of checked files or drawn from a seed; tokenizers.

What a configuration describes is counted, and held against the files and the memory, before anything is allocated. The
weights lie on one device, or accelerate spreads them over all devices, the CPU and the disk: then they are fetched when
their module runs, and with checkpointing when it runs again for its gradient, so that no more than a block's worth is
in place at a time.
"""

import copy
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posbias.checks import check_whole, checked
from posbias.errors import RunError, UsageError, one_line
from posbias.files import read_json
from posbias.memory import available_bytes, show_bytes
from posbias.models.config_limits import check_text_growth
from posbias.models.gguf_config import check_places
from posbias.models.gguf_format import read_gguf
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.placement import LoadingMemory, LoadingPlan, NetworkSize, weight_shares
from posbias.models.sources import Source, quiet
from posbias.models.weight_files import (
    POINTER,
    Tensors,
    check_frequencies,
    check_once,
    check_types,
    fetch_weights,
    loaded_files,
    stored_tensors,
    weight_bytes,
    without_place,
)
from posbias.models.weights import cast_weights

BEYOND_FILES, BEYOND_ALWAYS = 2, 10**7
"""A network of more than this many times the numbers its files hold, and this many more, is not the files' network."""
TOKENIZER_BYTES = 100_000_000
"""The largest file of a tokenizer read; those of 262,144 tokens have 40 MB."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "chat_template*")
"""What the files of tokenizers are called."""
TOKENIZER_NOTES = ("tokenizer_config", "special_tokens_map", "added_tokens", "chat_template")
"""Those that hold no vocabulary; without another one there is no tokenizer."""


def pretrained_network(config: Any, plan: LoadingPlan) -> nn.Module:
    """The network with the weights of its files, on its device or spread.

    Raises:
        UsageError: weights that could carry code, lie elsewhere or do not fit; a configuration that builds no network.
        RunError: weights that are damaged, missing, or another network's.
    """
    source = plan.source
    packed = source.gguf is None and getattr(config, "quantization_config", None) is not None
    if packed:
        _check_method(config.quantization_config, source.name)
    try:
        local = fetch_weights(source)
    except OSError as error:
        raise RunError(f"model {source.name!r}: the hub did not provide its weights: {one_line(error)}") from None
    files = [] if source.gguf is not None else loaded_files(local)
    tensors = None if source.gguf is not None else stored_tensors(files, source.name)
    outline, size = _checked_outline(config, source, tensors, packed=packed)
    device, dtype = LoadingMemory(size, source, tensors, packed).place(plan, config)
    if tensors is not None:
        check_once(tensors, outline.base_model_prefix, source.name)
        check_types(tensors, outline.state_dict(), packed=packed, name=source.name)
    elif source.gguf is not None:
        file = read_gguf(Path(source.location) / source.gguf)
        check_places(file, outline.state_dict(), n_layers=config.num_hidden_layers, name=source.name)
    arguments: dict[str, Any] = {"dtype": dtype}
    if device is not None:
        # What goes to an accelerator takes no memory here; packed weights can be neither cast nor, some of them, moved.
        if packed or (device.type != "cpu" and tensors is not None):
            arguments["device_map"] = device
        network = _loaded(config, local, arguments, files=files, tensors=tensors)
        vars(network).pop("hf_device_map", None)  # of weights that stay where they are
        return network if packed else network.to(device)
    folder = tempfile.TemporaryDirectory(prefix="posbias-offload-", ignore_cleanup_errors=True)
    shares = weight_shares(plan.max_memory).items()
    of_accelerate = {device.type if device.index is None else device.index: share for device, share in shares}
    arguments |= {"device_map": "auto", "max_memory": of_accelerate, "offload_folder": folder.name}
    try:
        network = _loaded(config, local, arguments, files=files, tensors=tensors)
    except BaseException:
        folder.cleanup()
        raise
    weakref.finalize(network, folder.cleanup)
    return network


def _check_method(quantization: Any, name: str) -> None:
    """Refuse weights quantised in a way that transformers does not know, which it would take for plain ones."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    entries: Any = quantization if isinstance(quantization, dict) else {}
    method = entries.get("quant_method")
    if method is None and (entries.get("load_in_8bit") or entries.get("load_in_4bit")):
        return  # bitsandbytes, before it was named
    methods = ["bitsandbytes", *(methods for methods in AUTO_QUANTIZATION_CONFIG_MAPPING if methods != "gguf")]
    if method not in methods:
        raise UsageError(
            f"model {name!r} is quantised by quant_method {method!r:.80}, which is unknown; allowed: "
            f"{', '.join(sorted(methods))}"
        )


def drawn_network(config: Any, plan: LoadingPlan, seed: int) -> nn.Module:
    """The network with random weights; refused if it does not fit or cannot be built."""
    source = plan.source
    _, size = _checked_outline(config, source, None, packed=False)
    device, dtype = LoadingMemory(size, source, None, packed=False).place(plan, config)
    with refused_configuration(source.name):
        return cast_weights(random_network(config, seed=seed), dtype).to(device)


def random_network(config: Any, *, seed: int) -> nn.Module:
    """A network of the configuration's class with all weights drawn by its own initialiser, in float32.

    Built anew from a copy of the configuration, so that norms and biases are reset too and no attention setting is
    shared with another model. The weights are those of `torch.manual_seed(seed)` (within [0, 2^63)), followed by
    `AutoModelForCausalLM.from_config(config)`, but the global random state is left as it was.
    """
    check_whole("init_seed", seed, least=0, below=2**63, numpy=True)
    # All initialisers draw on the CPU, so that every device has the same; its generator is given back as it was.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int(seed))
        return _unquantised_network(config)


def network_size(network: nn.Module) -> NetworkSize:
    """The size of a network, which may be one without numbers."""
    tables = sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
    counts = [parameter.numel() for parameter in network.parameters()]
    return NetworkSize(sum(counts), max(counts, default=0), tables)


def outline_of(config: Any) -> nn.Module:
    """A network of the configuration without its numbers, which takes no memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _unquantised_network(config)


def _unquantised_network(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    fresh = copy.deepcopy(config)
    if hasattr(fresh, "quantization_config"):
        del fresh.quantization_config
    network: nn.Module = AutoModelForCausalLM.from_config(
        fresh, dtype=torch.float32, attn_implementation=attention_of(fresh), trust_remote_code=False
    )
    return network


@checked
def reinitialise(model: HuggingFaceModel, seed: int) -> HuggingFaceModel:
    """A new model: the same configuration with all weights drawn anew, as `random_network` draws them."""
    with quiet(local=True):
        network = cast_weights(random_network(model.network.config, seed=seed), model.dtype).to(model.device)
    origin = Origin(model.origin.source, int(seed), model.origin.revision)
    anew = HuggingFaceModel(network, model.tokenizer, origin=origin)
    anew.reads_tokens = model.reads_tokens
    return anew


def attention_of(config: Any) -> str:
    """The attention implementation we ask for: `sdpa` if the model class has it, else `eager` (BLOOM, MPT)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    network_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if getattr(network_class, "_supports_sdpa", False) else "eager"


@contextmanager
def refused_configuration(name: str) -> Iterator[None]:
    """Refuse in one line what transformers, torch or a family's description cannot make of a configuration."""
    try:
        yield
    except (UsageError, RunError):
        raise
    except Exception as error:
        raise UsageError(
            f"model {name!r}: configuration refused: no network can be built from it "
            f"({type(error).__name__}: {one_line(error)})"
        ) from None


def _checked_outline(config: Any, source: Source, tensors: Tensors | None, *, packed: bool) -> tuple[Any, NetworkSize]:
    """The outline of the network that a configuration describes, and its size, held against its files and the memory
    before anything is allocated."""
    with refused_configuration(source.name):
        outline = outline_of(config)
        size = network_size(outline)
    if tensors is not None and not packed:
        stored = weight_bytes(tensors, torch.int8)
        if size.numbers > max(BEYOND_FILES * stored, stored + BEYOND_ALWAYS):
            raise RunError(
                f"model {source.name!r}: its configuration describes {size.numbers:,} numbers, "
                f"its files hold {stored:,}"
            )
    free = available_bytes()
    if free is not None and size.tables > free:
        raise UsageError(
            f"model {source.name!r}: its configuration describes tables of {show_bytes(size.tables)} beside its "
            f"weights; {show_bytes(free)} are free"
        )
    return outline, size


def _loaded(
    config: Any, source: Source, arguments: Mapping[str, Any], *, files: Sequence[Path], tensors: Tensors | None
) -> nn.Module:
    """The network with the weights of its files; `arguments` of `from_pretrained` say where, and in which dtype."""
    from transformers import AutoModelForCausalLM

    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=copy.deepcopy(config),
            attn_implementation=attention_of(config),
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
            **source.arguments,
        )
    except ImportError as error:
        raise UsageError(f"model {source.name!r} needs a package that is not installed: {one_line(error)}") from None
    except Exception as error:
        raise RunError(f"model {source.name!r} cannot be loaded: {one_line(error)}") from None
    _check_complete(config, info, tensors, name=source.name)
    check_frequencies(files, network, config, name=source.name)
    if source.gguf is not None:
        # Its weights were expanded while loading; what is left is a plain model and must be saved as one.
        vars(network.config).pop("quantization_config", None)
        for name in ("is_quantized", "hf_quantizer", "quantization_method"):
            vars(network).pop(name, None)
        cast_weights(network, arguments["dtype"])
    return network  # type: ignore[no-any-return]


def _check_complete(config: Any, info: Mapping[str, Any], tensors: Tensors | None, *, name: str) -> None:
    """Refuse a network whose weights are not those of its files, one by one."""
    if info["mismatched_keys"]:
        weight, stored, described = min(info["mismatched_keys"])
        raise RunError(
            f"model {name!r}: weight {weight!r} has shape {list(stored)} in its files, {list(described)} by its"
            " configuration"
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise RunError(f"model {name!r}: {len(missing)} weights are not in its files, first {missing[0]!r}")
    unplaced = without_place(info["unexpected_keys"], tensors or {}, config)
    if unplaced:
        raise RunError(
            f"model {name!r}: {len(unplaced)} weights of its files have no place in the network of its configuration, "
            f"first {unplaced[0][:80]!r}"
        )


def read_tokenizer(source: Source) -> tuple[Any, str]:
    """The tokenizer, or None and why there is none to be read: models are usable with token ids alone.

    Refused are files larger than those of every tokenizer, or that are not the JSON they are called.
    """
    from transformers import AutoTokenizer

    directory = Path(source.location)
    if source.local and directory.is_file():
        return None, "a configuration by itself has no tokenizer"
    directories = [directory] if source.local and source.gguf is None else []
    files = sorted({path for folder in directories for pattern in TOKENIZER_FILES for path in folder.glob(pattern)})
    files = [path for path in files if path.is_file()]
    for path in files:
        if path.stat().st_size > TOKENIZER_BYTES:
            raise UsageError(f"model {source.name!r}: {path.name} is larger than {TOKENIZER_BYTES:,} bytes")
        with open(path, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                return None, f"of the model's tokenizer only a Git LFS pointer is there ({path.name}; git lfs pull)"
        if path.suffix == ".json":
            try:
                check_text_growth(read_json(path, most_bytes=TOKENIZER_BYTES))
            except (OSError, ValueError) as error:
                raise UsageError(f"model {source.name!r}: {path.name} {one_line(error)}") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
        tokenizer.decode(tokenizer("A trial.")["input_ids"])
        no_tokens = not tokenizer("A trial.", add_special_tokens=False)["input_ids"]
        # Without files some classes are made of their special tokens alone, and look like a tokenizer.
        reason = "it holds special tokens alone" if len(tokenizer) <= len(tokenizer.get_added_vocab()) else ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # anything a damaged or absent one may raise (a panic of Rust is no Exception)
        reason = one_line(error)
        for place in (str(directory.resolve()), source.location):  # a path belongs in no message
            reason = reason.replace(f"{place}/", "").replace(place, source.name)
        reason = reason[:200] or type(error).__name__
    if not reason:
        if no_tokens:
            raise UsageError(f"model {source.name!r}: its tokenizer turns the text 'A trial.' into no tokens at all")
        return tokenizer, ""
    own_code = _tokenizer_code(source)
    if own_code:
        return None, f"the model's tokenizer needs its own code ({own_code}), which is not run"
    if directories and all(path.name.startswith(TOKENIZER_NOTES) for path in files):
        return None, "the model has no tokenizer"
    return None, f"the model's tokenizer cannot be read ({reason})"


def _tokenizer_code(source: Source) -> str | None:
    """The class of its own that a tokenizer says it needs, if any."""
    try:
        path = source.file("tokenizer_config.json")
        settings = {} if path is None else read_json(path, most_bytes=TOKENIZER_BYTES)
    except (OSError, ValueError):
        return None
    named = settings.get("auto_map") if isinstance(settings, dict) else None
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    first = next((name for name in classes if name), None) if isinstance(classes, list) else classes
    return str(first)[:80] if first else None
