"""`load_model`: from what a user names (hub id, directory, GGUF file, "demo", "config:...") or has in hand to a model.

A directory may hold a transformers checkpoint or one of our own trained reference models.

Only weights that cannot carry code are read (safetensors, GGUF), no repository's own code is run, and nothing local is
looked up on the network. Files are held to stated limits before they are used. Every refusal is one line.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.chat_templates import with_template_options
from posbias.checks import checked
from posbias.errors import RunError, UsageError, one_line
from posbias.memory import peak_bytes
from posbias.models.demo import fetch_demo
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.model import Model, ModelRequest
from posbias.models.networks import (
    AUTO,
    Wanted,
    check_device,
    drawn_network,
    pretrained_network,
    read_tokenizer,
    refused_configuration,
)
from posbias.models.reference.network import ReferenceTransformer, is_reference, load_reference
from posbias.models.sources import (
    Source,
    absolute_source,
    check_decoder,
    named_path,
    quiet,
    read_config,
    resolve_source,
)
from posbias.models.weights import first_not_finite, network_sha256, quantised

CACHED_MODEL = "models--"
"""How the hub's cache begins the name of a model's directory: models--ORGANISATION--NAME/snapshots/COMMIT."""
COMPILED = "_orig_mod"
"""Where `torch.compile` keeps the network that it has wrapped."""
COMPILED_CALL = "_compiled_call_impl"
"""What a module is called by in place of its hooks and its forward pass, if `compile()` has set it."""
DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}


@checked
def load_model(
    source: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    init_seed: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    max_memory: int | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> HuggingFaceModel | ReferenceTransformer:
    """Load a causal language model, frozen and in evaluation mode.

    Args:
        source: A hub id, a directory, a `.gguf` file, `"demo"` (SmolLM2-135M-Instruct), or `"config:PATH_OR_ID"` for a
            random network from a configuration alone. Or a causal language model of transformers: it is frozen and
            evaluates from now on, where it is; worker processes cannot load it.
        tokenizer: Of a model of transformers, where text will be read; one that is named has its own.
        init_seed: Draw all weights anew from the model class's own initialiser with this seed, instead of loading
            them; same configuration. The global random state is left as it was. `"config:..."` without a seed takes 0.
        dtype: `float32`, `float64`, `bfloat16` or `float16`; of a quantised model, that of what is not packed.
        device: `cpu`, `cuda`, `cuda:1` ..., or `auto`: spread over the accelerators, the CPU and, where these
            are full, the disk. Measure such a model with checkpointing, or the passes keep all its weights in place.
        max_memory: Bytes that the process may hold while it loads the model; with `auto`, half of what they leave for
            weights, as on each accelerator half of them; None: what is free.
        template_options: What the tokenizer's chat template is told beside the messages, wherever a conversation is
            rendered: `{"enable_thinking": False}` turns thoughts off in templates that know it.

    Returns:
        The model; its tokenizer is None where none was found. What `save_reference` wrote is a `ReferenceTransformer`.

    Raises:
        UsageError: no such model, not a decoder, pickled weights, remote code, a configuration that no network runs by
            or that is beyond every model, an unknown dtype or device, weights quantised in a way that gradients do not
            pass, or more than fits.
        RunError: weights are damaged, missing, without a place in the network or not finite, or the demo model cannot
            be obtained.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    if isinstance(source, nn.Module):
        tokenizer = with_template_options(tokenizer, template_options)
        return _usable_in_hand(source, tokenizer, (init_seed, dtype, device, max_memory))
    if tokenizer is not None:
        raise UsageError(f"a tokenizer goes with a model of transformers; {str(source)[:120]!r} has its own")
    chosen_device, peak_before = check_device(device), peak_bytes()
    trained = _trained_here(source, init_seed=init_seed, dtype=dtype, device=device)
    if trained is not None:
        if template_options:
            raise UsageError("template options go with a tokenizer's chat template; this model has no tokenizer")
        return trained
    resolved = _resolved(source)
    if resolved.config_only and init_seed is None:
        init_seed = 0
    with quiet(resolved.local):
        config = read_config(resolved)
        wanted = Wanted(resolved, DTYPES[dtype], chosen_device, max_memory)
        network = pretrained_network(config, wanted) if init_seed is None else drawn_network(config, wanted, init_seed)
        read, unread = read_tokenizer(resolved)
        if read is None and template_options:
            raise UsageError(f"{unread}, so template options do nothing; allowed: none")
        tokenizer = with_template_options(read, template_options)
    drawn_from = None if init_seed is None else int(init_seed)
    with refused_configuration(resolved.name):
        model = HuggingFaceModel(network, tokenizer, origin=Origin(resolved.name, drawn_from, resolved.revision))
    model.no_tokenizer = unread or model.no_tokenizer
    _check_usable(model, resolved.name)
    model.request = ModelRequest(absolute_source(source), drawn_from, dtype, device, max_memory, template_options)
    peak = peak_bytes()
    if peak is not None and peak_before is not None and peak > peak_before:
        model.loading_bytes = peak
    return model


def model_in_hand(network: Any, tokenizer: Any = None) -> HuggingFaceModel:
    """A network that transformers loaded, as a model: it is frozen and evaluates from now on.

    What `torch.compile` or peft has wrapped around it is left out: the network inside is run, uncompiled, with the
    adapters that peft has put into its layers.

    Raises:
        UsageError: not a causal language model of transformers, parts of it are compiled, what peft adds to prompts, or
            a tokenizer that cannot be called.
    """
    network, adapters = _within(network)
    if not isinstance(network, nn.Module) or not hasattr(network, "config"):
        raise UsageError(f"a model of load_model or of transformers is needed, got {type(network).__name__}")
    given = str(getattr(network.config, "_name_or_path", "") or type(network).__name__)
    name = model_name(given) if Path(given).is_absolute() or absolute_source(given) != given else given
    name += "".join(f" with {adapter}" for adapter in adapters)
    check_decoder(network.config, name)
    if network.get_output_embeddings() is None:  # type: ignore[operator]
        raise UsageError(
            f"model {name!r} ({type(network).__name__}) has no language modelling head; take ...ForCausalLM"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise UsageError(f"tokenizer must be one of transformers, got {tokenizer!r:.80}")
    with refused_configuration(name):
        return HuggingFaceModel(network, tokenizer, origin=Origin(name))


def _within(network: Any) -> tuple[Any, list[str]]:
    """The network of transformers in what torch.compile and peft make of it, and the adapters that are active."""
    adapters: list[str] = []
    while isinstance(network, nn.Module):
        wrapper: Any = network
        if COMPILED in network._modules:
            network = network._modules[COMPILED]
        elif hasattr(network, "peft_config") and type(network).__module__.startswith("peft."):
            active = wrapper.active_adapters if hasattr(network, "active_adapters") else wrapper.active_adapter
            for adapter in [active] if isinstance(active, str) else active:
                settings = wrapper.peft_config[adapter]
                kind = str(getattr(settings.peft_type, "value", settings.peft_type))
                if settings.is_prompt_learning:
                    raise UsageError(
                        f"adapter {adapter!r} ({kind}) adds vectors to prompts, which have no position of their own; "
                        "allowed: adapters inside layers, such as LORA"
                    )
                adapters.append(f"adapter {adapter} ({kind})")
            network = wrapper.base_model.model
        else:
            break
    parts = network.named_modules() if isinstance(network, nn.Module) else ()
    for path, module in parts:
        call = getattr(module, COMPILED_CALL, None)  # under a method, one that compilers leave alone
        if COMPILED in module._modules or not (call is None or getattr(call, "_torchdynamo_disable", False)):
            raise UsageError(
                f"a network must not be compiled in place or in parts ({path or 'as a whole'} is); allowed: one that "
                "is not compiled, or torch.compile(network), whose network is taken"
            )
    return network, adapters


def model_name(path: str | Path) -> str:
    """What the model at a local path is called: the last part, or of a snapshot in the hub's cache its hub id."""
    *_, cache, kind, last = ("", "", *Path(path).expanduser().resolve().parts)
    known = kind == "snapshots" and cache.startswith(CACHED_MODEL)
    return cache.removeprefix(CACHED_MODEL).replace("--", "/") if known else last


def _usable_in_hand(network: nn.Module, tokenizer: Any, options: tuple[Any, ...]) -> HuggingFaceModel:
    """As `model_in_hand`, checked as a model that was loaded by name is; options other than the default are refused."""
    if options != (None, "float32", "cpu", None):
        raise UsageError("init_seed, dtype, device and max_memory go with a model's name; this one is loaded already")
    model = model_in_hand(network, tokenizer)
    _check_usable(model, model.origin.source)
    return model


def _check_usable(model: HuggingFaceModel, name: str) -> None:
    """Refuse weights that are not finite, and a network that cannot be run or differentiated."""
    bad = first_not_finite(model.network)
    if bad is not None:
        raise RunError(f"model {name!r}: weight {bad[:80]!r} holds NaN or infinite values; allowed: finite")
    if quantised(model.network):
        _check_gradients(model, name)
    # Numbers of a configuration that do not fit each other can build a network that cannot be run.
    with refused_configuration(name):
        model.compare_inputs()
        if model.described:
            model.architecture_traits()


def load_tokenizer(source: str | Path, *, template_options: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer of a source as for `load_model`, or one that lies in a directory by itself; no weight is read."""
    resolved = _resolved(source)
    with quiet(resolved.local):
        tokenizer, unread = read_tokenizer(resolved)
    if tokenizer is None:
        raise UsageError(
            f"{resolved.name!r} has no readable tokenizer ({unread}); allowed: a model, or a directory, with one"
        )
    return with_template_options(tokenizer, template_options)


def load_same(request: ModelRequest | None, expected_sha256: str | None) -> Model:
    """The model of a request, checked to have the weights and configuration it had where the request was made."""
    if request is None:
        raise UsageError(
            "workers load the model themselves, which only models from load_model, without an intervention, allow"
        )
    model = load_model(**asdict(request))
    if network_sha256(model.network) != expected_sha256:
        name = Path(request.source).name  # paths belong in no record, and this message goes into one
        raise RunError(f"a worker found another model under {name!r} than the run began with")
    return model


def _resolved(source: str | Path) -> Source:
    """What a source is, the demo model fetched."""
    if str(source).removeprefix("config:") == "demo":
        return Source(str(source), str(fetch_demo()), local=True, config_only=str(source) != "demo")
    found = resolve_source(source)
    if not found.local or found.gguf is not None or not Path(found.location).is_dir():
        return found
    return replace(found, name=("config:" if found.config_only else "") + model_name(found.location))


def _trained_here(source: str | Path, *, init_seed: int | None, dtype: str, device: str) -> ReferenceTransformer | None:
    """A saved reference model, or None where the source is none."""
    named = str(source).removeprefix("config:")
    if not named or named == "demo" or not is_reference(path := named_path(named)):
        return None
    if device == AUTO:
        raise UsageError(f"device {AUTO!r} spreads large models; name a device for {path.name!r}, e.g. cpu")
    if str(source).startswith("config:") and init_seed is None:
        init_seed = 0
    model = load_reference(path, dtype=dtype, init_seed=init_seed, device=device)
    model.request = ModelRequest(absolute_source(source), init_seed, dtype, device)
    return model


def _check_gradients(model: HuggingFaceModel, name: str) -> None:
    """Refuse packed weights that no gradient passes, or not twice; some formats unpack themselves on the first pass."""
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
