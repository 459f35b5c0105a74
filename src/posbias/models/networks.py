"""Networks of transformers where they will run, with the weights of files or drawn from a seed; tokenizers.

The weights lie on one device, or accelerate spreads them over all devices, the CPU and the disk: then they are fetched
when their module runs, and with checkpointing when it runs again for its gradient.
"""

import copy
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posbias.checks import AUTO, Natural, checked, checked_value
from posbias.errors import RunError, UsageError, one_line
from posbias.memory import check_room
from posbias.models.devices import CPU, SPREAD, accelerators, check_device, check_precision, has_room
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.sources import Source, check_files, check_places, quiet
from posbias.models.weights import cast_weights

OWN = "own"
"""The dtype of a checkpoint's numbers."""
DTYPES = {
    AUTO: None,
    OWN: None,
    **{name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")},
}
"""By name; None: by device, or the checkpoint."""
UNEXPECTED = re.compile(
    "|".join(
        (
            # Tables and masks that older versions of transformers saved beside the weights.
            r"(^|\.)(rotary_emb\.((original_)?inv_freq|cos_cached|sin_cached)|position_ids)$",
            r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$",
            # Heads that predict the tokens after the next, of value models and of classifiers: nothing else reads them.
            r"(^|\.)(mtp|mtp_layers|mtp_block)\.",
            r"^(v_head|value_head|reward_head|score|classifier)\.",
            # Encoders of images and sound: a prompt of text passes none.
            r"(^|\.)(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|mm_projector|embed_vision)\.",
        )
    )
)
"""Weights of a checkpoint that its network may lack, with the reason above each."""
LATER_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Entries of a configuration that count blocks after the last, which predict later tokens."""
TOKENIZER_FILES = ("*token*", "*vocab*", "*merges*", "chat_template*")
"""What the files of tokenizers are called."""
TOKENIZER_NOTES = ("tokenizer_config", "special_tokens_map", "added_tokens", "chat_template")
"""Those that hold no vocabulary; without another one there is no tokenizer."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that stands for one which Git LFS has not fetched."""


def build_network(
    config: Any, source: Source, *, device: str = AUTO, dtype: str = AUTO, init_seed: int | None = None
) -> nn.Module:
    """The network with the weights of its files, or drawn ones, on its device or spread; arguments as `load_model`.

    Raises:
        UsageError: weights that could carry code, or that do not fit.
        RunError: weights that are damaged, missing, or another network's.
    """
    drawn, packed = init_seed is not None, source.gguf is not None
    if not drawn:
        check_files(source)
    outline = outline_of(config)
    if packed and not drawn:
        check_places(Path(source.location) / str(source.gguf), outline, source.name)
    named = getattr(torch, str(getattr(config, "dtype", None)).removeprefix("torch."), None)
    own = torch.bfloat16 if packed else named if isinstance(named, torch.dtype) else torch.float32
    place, precision = placed(outline, device, own if dtype == OWN else DTYPES[dtype], own=own, name=source.name)
    if place is None and (drawn or packed):
        is_other = "those are drawn" if drawn else f"{source.name!r} is a GGUF file"
        raise UsageError(f"device {SPREAD!r} is for weights of safetensors files, and {is_other}")
    if init_seed is not None:
        return cast_weights(random_network(config, seed=init_seed), precision).to(place)
    if place is not None:
        return _loaded(config, source, {"dtype": precision, "device_map": {"": place}})
    with ExitStack() as later:
        folder = tempfile.TemporaryDirectory(prefix="posbias-offload-", ignore_cleanup_errors=True)
        offload = {"device_map": "auto", "offload_folder": later.enter_context(folder)}
        network = _loaded(config, source, {"dtype": precision, **offload})
        weakref.finalize(network, later.pop_all().close)
    return network


def placed(
    outline: nn.Module, name_of_device: str, dtype: torch.dtype | None, *, own: torch.dtype, name: str
) -> tuple[torch.device | None, torch.dtype]:
    """The device, None for all at once, and the precision; refused if the memory of a CPU cannot hold the weights.

    Without a `dtype`: float32 on the CPU, the checkpoint's own on an accelerator.
    """
    numbers = sum(weight.numel() for weight in outline.parameters())
    device = check_device(name_of_device)
    accelerated = device.type != CPU.type if device else next(accelerators(), None) is not None
    dtype = dtype or (own if accelerated else torch.float32)
    if name_of_device == AUTO:
        with_room = (place for place in accelerators() if has_room(place, numbers * dtype.itemsize))
        device = next(with_room, None) if accelerated else CPU
    if device is not None:
        check_precision(device, dtype)
    if device == CPU:
        check_room(
            numbers * dtype.itemsize,
            f"the weights of {name!r} in {str(dtype).removeprefix('torch.')}",
            f"try --dtype bfloat16, --device {SPREAD} or a smaller model",
        )
    return device, dtype


def random_network(config: Any, *, seed: int) -> nn.Module:
    """A network of the configuration's class with all weights drawn by its own initialiser, in float32.

    Built anew from a copy of the configuration, so that norms and biases are reset too and no attention setting is
    shared with another model. The weights are those of `torch.manual_seed(seed)` (within [0, 2^63)), followed by
    `AutoModelForCausalLM.from_config(config)`, but the global random state is left as it was.
    """
    seed = checked_value("init_seed", seed, Natural)
    # All initialisers draw on the CPU, so that every device has the same; its generator is given back as it was.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _unquantised_network(config)


def outline_of(config: Any) -> nn.Module:
    """A network of the configuration without its numbers, which takes no memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return _unquantised_network(config)


def _unquantised_network(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    fresh = copy.deepcopy(config)
    if hasattr(fresh, "quantization_config"):
        del fresh.quantization_config
    # How to attend is left to transformers: what a configuration names may be a kernel of the hub, code of its own.
    network: nn.Module = AutoModelForCausalLM.from_config(
        fresh, dtype=torch.float32, attn_implementation=None, trust_remote_code=False
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


def _loaded(config: Any, source: Source, arguments: Mapping[str, Any]) -> nn.Module:
    """The network with the weights of its files; `arguments` of `from_pretrained` say where, and in which dtype."""
    from transformers import AutoModelForCausalLM

    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=copy.deepcopy(config),
            attn_implementation=None,  # transformers' choice, see above
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **arguments,
            **source.arguments,
        )
    except ImportError as error:
        raise UsageError(f"model {source.name!r} needs a package that is not installed: {one_line(error)}") from None
    except Exception as error:
        raise RunError(f"model {source.name!r} cannot be loaded: {one_line(error)[:300]}") from None
    _check_complete(config, info, name=source.name)
    if isinstance(arguments["device_map"], dict):
        vars(network).pop("hf_device_map", None)  # of weights that stay where they are
    if source.gguf is not None:
        # Its weights were expanded while loading; what is left is a plain model and must be saved as one.
        vars(network.config).pop("quantization_config", None)
        for entry in ("is_quantized", "hf_quantizer", "quantization_method"):
            vars(network).pop(entry, None)
    return network  # type: ignore[no-any-return]


def _check_complete(config: Any, info: Mapping[str, Any], *, name: str) -> None:
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
    text = config.get_text_config()
    last = text.num_hidden_layers + max(int(getattr(text, entry, None) or 0) for entry in LATER_LAYERS)
    later = [f"layers.{layer}." for layer in range(text.num_hidden_layers, last)]
    unplaced = sorted(
        key
        for key in info["unexpected_keys"]
        if not UNEXPECTED.search(key) and not any(layer in key for layer in later)
    )
    if unplaced:
        raise RunError(
            f"model {name!r}: {len(unplaced)} weights of its files have no place in the network of its configuration, "
            f"first {unplaced[0][:80]!r}"
        )


def read_tokenizer(source: Source) -> tuple[Any, str]:
    """The tokenizer, or None and why there is none to be read: models are usable with token ids alone."""
    from transformers import AutoTokenizer

    directory = Path(source.location)
    if source.local and directory.is_file():
        return None, "a configuration by itself has no tokenizer"
    local = source.local and source.gguf is None
    files = sorted(path for pattern in TOKENIZER_FILES for path in directory.glob(pattern)) if local else []
    for path in files:
        if path.is_file() and path.open("rb").read(len(POINTER)) == POINTER:
            return None, f"of the model's tokenizer only a Git LFS pointer is there ({path.name}; git lfs pull)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.arguments)
        tokenizer.decode(tokenizer("A trial.")["input_ids"])
        tokens = tokenizer("A trial.", add_special_tokens=False)["input_ids"]
        # Without files some classes are made of their special tokens alone, and look like a tokenizer.
        reason = "it holds special tokens alone" if len(tokenizer) <= len(tokenizer.get_added_vocab()) else ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # anything a damaged or absent one may raise (a panic of Rust is no Exception)
        reason = str(error)
        if "trust_remote_code" in reason:  # what transformers would be told
            return None, "the model's tokenizer needs its own code, which is not run"
        for place in (str(directory.resolve()), source.location):  # a path belongs in no message, nor its beginning
            reason = reason.replace(f"{place}/", "").replace(place, source.name)
        reason = one_line(reason.strip() or type(error).__name__)[:200]
    if not reason and not tokens:
        raise UsageError(f"model {source.name!r}: its tokenizer turns the text 'A trial.' into no tokens at all")
    if not reason:
        return tokenizer, ""
    if local and all(path.name.startswith(TOKENIZER_NOTES) for path in files):
        return None, "the model has no tokenizer"
    return None, f"the model's tokenizer cannot be read ({reason})"
