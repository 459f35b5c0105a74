"""The network that a GGUF file describes: every key of its metadata becomes an entry of a configuration, or is refused.

transformers reads some of these keys and supplies its own numbers for the others, so the configuration is made here;
of what the keys leave out the format's own defaults hold. Each architecture is one function; the tests write a network
of each to a file and get the same logits back. A tensor that the network has no place for is refused as well.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from posbias.errors import RunError, UsageError, one_line
from posbias.models.gguf_format import GgufFile

ARCHITECTURE = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"
HARMLESS = ("general", "tokenizer", "quantize", "mradermacher")
"""First parts of keys that change no network.

`general` says who made the file (its architecture, sort and alignment are checked), `tokenizer` is read with the
tokenizer, `quantize` and `mradermacher` say how the weights were made, which are stored as they then were.
"""
KINDS = ("model", None)
"""What `general.type` may be; others are adapters, projectors of images and statistics for a quantiser."""
TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
ALSO_KEPT = {"tokenizer.ggml.unknown_token_id": "unk_token_id", "general.name": "_model_name_or_path"}
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that belong to the configuration: what each frequency of the rotary positions is divided by."""
ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
DEFAULT_BASE = 10_000.0
RMS, LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
PUBLISHED_HIGH = 4.0
"""`high_freq_factor` of every published Llama 3, where one or no frequency lies in the blend to tell it by."""
FACTOR_TOLERANCE = 1e-5
"""Relative, between stored factors and those of Llama 3's rule: they are stored and computed in 32 bits."""
SCALE_TOLERANCE = 1e-6
"""Relative, of a logit scale: likewise."""
REQUIRED = object()


class _Keys:
    """The keys of a file's architecture; what is never asked for is refused at the end."""

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file, self.name = file, name
        self.architecture = str(file.entries.get(ARCHITECTURE))
        prefix = f"{self.architecture}."
        self.unread = {key.removeprefix(prefix): value for key, value in file.entries.items() if key.startswith(prefix)}
        self.unread_factors = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS} & set(file.tensors)

    def refusal(self, reason: str) -> UsageError:
        """The file, and what of it is refused."""
        return UsageError(f"model {self.name!r}: configuration refused: {one_line(reason)}")

    def take(self, key: str, sort: type, default: Any = REQUIRED) -> Any:
        """The value of a key, of one sort; a number is at least 1, or positive and finite."""
        value: Any = self.unread.pop(key, default)
        if value is REQUIRED:
            raise self.refusal(f"its metadata lacks {self.architecture}.{key}")
        if value is default:
            return value
        number = float(value) if isinstance(value, int | float) else 1.0
        if type(value) is not sort or not (math.isfinite(number) and number > 0):
            allowed = {int: "a whole number of at least 1", float: "a positive, finite float", str: "a text"}[sort]
            raise self.refusal(f"its metadata has {self.architecture}.{key} {value!r:.80}; {allowed} is allowed")
        return value

    def same(self, key: str, *allowed: Any) -> None:
        """Refuse a value other than those that the network runs by anyway."""
        value = self.unread.pop(key, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            allowed_text = " or ".join(str(choice) for choice in allowed)
            raise self.refusal(f"its metadata has {self.architecture}.{key} {value!r:.80}; only {allowed_text} is read")

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """The values of a tensor of RoPE factors, one for each frequency; None if the file has none."""
        if tensor not in self.file.tensors:
            return None
        self.unread_factors.discard(tensor)
        values = self.file.numbers(tensor)
        if len(values) != count or not all(math.isfinite(value) and value > 0 for value in values):
            raise self.refusal(f"its tensor {tensor} has {len(values)} values; {count} positive ones are allowed")
        return values

    def has(self, *tensors: str) -> bool:
        """Tell whether the file has a tensor of one of these names in its first block."""
        return any(f"blk.0.{tensor}" in self.file.tensors for tensor in tensors)

    def end(self) -> None:
        """Refuse what has not been asked for."""
        if self.unread:
            first = min(self.unread)
            raise self.refusal(
                f"{len(self.unread)} keys of its metadata are not read, first {self.architecture}.{first[:80]} "
                f"{self.unread[first]!r:.80}; a copy in safetensors has them in its config.json"
            )
        if self.unread_factors:
            raise self.refusal(f"its tensor {min(self.unread_factors)} is not read in a {self.architecture} file")


Reader = Callable[[_Keys], dict[str, Any]]
ARCHITECTURES: dict[str, tuple[str, Reader]] = {}
"""By `general.architecture`: the model type of transformers, and the function that reads the keys."""


def _reads(architecture: str, *, model_type: str = "") -> Callable[[Reader], Reader]:
    """Decorator of the function that reads an architecture's keys; its model type is the same unless it is named."""

    def register(read: Reader) -> Reader:
        ARCHITECTURES[architecture] = (model_type or architecture, read)
        return read

    return register


def gguf_configuration(file: GgufFile, name: str) -> Any:
    """The configuration of transformers that a file's metadata describes.

    Raises:
        UsageError: an architecture that is not among these, a key that is not read, or a value that no network has.
    """
    from transformers import CONFIG_MAPPING

    keys = _Keys(file, name)
    if ARCHITECTURE not in file.entries:
        raise keys.refusal(f"its metadata lacks {ARCHITECTURE}")
    if keys.architecture not in ARCHITECTURES:
        raise UsageError(
            f"model {name!r} is a GGUF file of architecture {keys.architecture!r:.80}, of which not every key is read; "
            f"allowed: {', '.join(ARCHITECTURES)}, or a copy in safetensors"
        )
    _check_other_keys(keys)
    model_type, read = ARCHITECTURES[keys.architecture]
    entries = {"tie_word_embeddings": "output.weight" not in file.tensors, **read(keys)}
    entries |= {entry: file.entries.get(key) for key, entry in TOKEN_IDS.items()}
    # Of no use to a network, but part of the fingerprint that configurations of these files have had.
    entries |= {entry: file.entries[key] for key, entry in ALSO_KEPT.items() if key in file.entries}
    keys.end()
    return CONFIG_MAPPING[model_type](**entries)


def check_places(file: GgufFile, weights: Mapping[str, Tensor], *, n_layers: int, name: str) -> None:
    """Refuse tensors of a file that are none of a network's weights, or another number of values.

    Weights that the file lacks are refused while loading.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(key for key, spelling in MODEL_ARCH_NAMES.items() if spelling == file.entries[ARCHITECTURE])
    names = get_tensor_name_map(architecture, n_layers)
    places = {}
    for weight, value in weights.items():
        stem, _, suffix = weight.rpartition(".")
        # Some are named with the body's own name in front, some (of BLOOM) without.
        places[f"{names.get_name(stem) or names.get_name(stem.partition('.')[2])}.{suffix}"] = value
    # The factors of RoPE have been read into the configuration, or refused there.
    unplaced = sorted(set(file.tensors) - set(places) - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
    if unplaced:
        first = unplaced[0][:80]
        raise RunError(
            f"model {name!r}: {len(unplaced)} tensors of its file have no place in its network, first {first!r}"
        )
    for tensor, value in places.items():
        shape = file.tensors[tensor].shape if tensor in file.tensors else value.shape
        if math.prod(shape) != value.numel():
            raise RunError(
                f"model {name!r}: tensor {tensor!r} has shape {list(shape)}, {list(value.shape)} by its metadata"
            )


def _check_other_keys(keys: _Keys) -> None:
    """Refuse keys beside the architecture's own that may say more of the network, and files that are no whole model."""
    entries = keys.file.entries
    kind = entries.get("general.type")
    if kind not in KINDS:
        raise keys.refusal(f"its general.type is {kind!r:.80}; only 'model' is a network")
    for key, value in entries.items():
        first = key.partition(".")[0]
        if first == "split":
            if key == "split.count" and value not in (0, 1):
                raise keys.refusal(f"it is one of {value!r:.20} files (split.count); merge them into one")
        elif first not in (keys.architecture, *HARMLESS):
            raise keys.refusal(f"its metadata has {key[:80]} {value!r:.80}, which is not read")


def _decoder(
    keys: _Keys, *, epsilon: tuple[str, str] = (RMS, "rms_norm_eps"), free_heads: bool = False, scaled: bool = True
) -> tuple[dict[str, Any], int]:
    """Sizes of a decoder, under the names that most configurations have for them, and the features of a head.

    Heads have width / heads features unless the architecture leaves them free. The logit scale, if the file names one,
    has to be 1 / sqrt(features) unless it is not `scaled` so.
    """
    tokens = keys.file.entries.get(TOKENS)
    heads, width = keys.take("attention.head_count", int), keys.take("embedding_length", int)
    keys.same("attention.causal", True)
    for absent in ("expert_count", "expert_used_count", "pooling_type"):
        keys.same(absent, 0)
    sizes = {
        "max_position_embeddings": keys.take("context_length", int),
        "hidden_size": width,
        "num_hidden_layers": keys.take("block_count", int),
        "intermediate_size": keys.take("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", int, heads),
        "vocab_size": keys.take("vocab_size", int, REQUIRED if tokens is None else len(tokens)),
        epsilon[1]: keys.take(epsilon[0], float),
    }
    if not free_heads:
        keys.same("attention.key_length", width // heads)
    head_dim: int = keys.take("attention.key_length", int, width // heads)
    keys.same("attention.value_length", head_dim)
    if scaled:
        _check_scale(keys, head_dim)
    return sizes, head_dim


def _check_scale(keys: _Keys, features: int) -> None:
    """Refuse a logit scale other than 1 / sqrt(features)."""
    scale = keys.take("attention.scale", float, None)
    if scale is not None and not math.isclose(scale, features**-0.5, rel_tol=SCALE_TOLERANCE):
        raise keys.refusal(f"{keys.architecture}.attention.scale is {scale:.6g}; only {features**-0.5:.6g} is read")


def _rope(keys: _Keys, head_dim: int, *, partial: bool = False) -> dict[str, Any]:
    """Rotary positions: base, what turns, and how the frequencies are scaled."""
    base = keys.take("rope.freq_base", float, DEFAULT_BASE)
    turned = keys.take("rope.dimension_count", int, head_dim)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if partial:
        rope["partial_rotary_factor"] = turned / head_dim
    if turned % 2 or turned > head_dim or (turned < head_dim and not partial):
        raise keys.refusal(f"{keys.architecture}.rope.dimension_count is {turned}; heads have {head_dim} features")
    rope |= _scaling(keys)
    factors = keys.factors(ROPE_FACTORS, turned // 2)
    if factors is None:
        return rope
    if rope["rope_type"] != "default" or partial:
        raise keys.refusal(f"its tensor {ROPE_FACTORS} is read only without another scaling, of whole heads")
    return _llama3(keys, factors, rope)


def _scaling(keys: _Keys) -> dict[str, Any]:
    """Read `rope.scaling`: nothing, or linear or YaRN with its factor."""
    # Linear is the format's default if there is a factor; `scale_linear` is its older name.
    older = keys.take("rope.scale_linear", float, None)
    factor = keys.take("rope.scaling.factor", float, older)
    if older not in (None, factor):
        raise keys.refusal(f"rope.scale_linear {older} and rope.scaling.factor {factor} contradict each other")
    sort = keys.take("rope.scaling.type", str, "none" if factor is None else "linear")
    original = keys.take("rope.scaling.original_context_length", int, None)
    fast, slow = (keys.take(f"rope.scaling.yarn_beta_{end}", float, None) for end in ("fast", "slow"))
    keys.unread.pop("rope.scaling.finetuned", None)  # says that the weights were trained with the scaling
    for multiplier in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        keys.same(f"rope.scaling.{multiplier}", 1.0)
    keys.same("rope.scaling.yarn_log_multiplier", 0.0)
    if sort == "none" or (sort == "linear" and factor in (None, 1.0)):
        return {}
    if factor is None or (sort == "yarn" and factor < 1):
        raise keys.refusal(f"rope.scaling.type {sort!r:.80} needs a rope.scaling.factor of at least 1, got {factor}")
    if sort == "linear":
        return {"rope_type": "linear", "factor": factor}
    if sort != "yarn":
        raise keys.refusal(f"rope.scaling.type is {sort!r:.80}; only none, linear and yarn are read")
    original = original or int(keys.file.entries[f"{keys.architecture}.context_length"])
    yarn = {"factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
    return {"rope_type": "yarn", **{key: value for key, value in yarn.items() if value is not None}}


def _llama3(keys: _Keys, factors: list[float], rope: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, found from the factors that it gave; refused if its rule gives others.

    The rule divides a frequency of wavelength w by F beyond w = O / low, by 1 below w = O / high, and in between by
    1 / ((1 - s) / F + s) with s = (O / w - low) / (high - low), which is a line in 1 / w. O, low and high count up to a
    common factor alone, so low is 1.
    """
    count, most = len(factors), float(f"{max(factors):.6g}")  # as it was before it was divided in 32 bits
    stored, waves = np.array(factors), 2 * math.pi * rope["rope_theta"] ** (np.arange(count) / count)
    if np.allclose(stored, most, rtol=FACTOR_TOLERANCE, atol=0):
        return (
            rope if math.isclose(most, 1, rel_tol=FACTOR_TOLERANCE) else {**rope, "rope_type": "linear", "factor": most}
        )
    blend, high = (1 / stored - 1 / most) / (1 - 1 / most), PUBLISHED_HIGH
    between = (blend > FACTOR_TOLERANCE) & (blend < 1 - FACTOR_TOLERANCE)
    if between.sum() > 1:
        slope, start = np.polyfit(1 / waves[between], blend[between], 1)
        high = round(float(1 - 1 / start), 4)
        original = slope * (high - 1)
    elif between.any():
        original = ((high - 1) * blend[between] + 1)[0] * waves[between][0]
    else:  # whatever lies between the two groups
        original = math.sqrt(high * waves[blend > 0.5].max() * waves[blend < 0.5].min())
    scaling = {"factor": most, "low_freq_factor": 1.0, "high_freq_factor": high}
    scaling["original_max_position_embeddings"] = round(float(original))
    share = np.clip((round(float(original)) / waves - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - share) / most + share), stored, rtol=FACTOR_TOLERANCE, atol=0):
        raise keys.refusal(f"its tensor {ROPE_FACTORS} holds factors that are not those of Llama 3's rule")
    return {**rope, "rope_type": "llama3", **scaling}


@_reads("llama")
def _llama(keys: _Keys) -> dict[str, Any]:
    # Mistral's files as well, without the window that only its first version had.
    sizes, head_dim = _decoder(keys, free_heads=True)
    keys.same("tensor_data_layout", "Meta AI original pth")
    return {
        **sizes,
        "head_dim": head_dim,
        "attention_bias": keys.has(*ATTENTION_BIASES),
        "mlp_bias": keys.has("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        "rope_parameters": _rope(keys, head_dim),
    }


@_reads("qwen2")
def _qwen2(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys)
    return {**sizes, "rope_parameters": _rope(keys, head_dim)}


@_reads("qwen3")
def _qwen3(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys, free_heads=True)
    bias = keys.has(*ATTENTION_BIASES)
    return {**sizes, "head_dim": head_dim, "attention_bias": bias, "rope_parameters": _rope(keys, head_dim)}


@_reads("phi3")
def _phi3(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys)
    original = keys.take("rope.scaling.original_context_length", int, sizes["max_position_embeddings"])
    rescaled = keys.take("rope.scaling.attn_factor", float, None)
    half = int(keys.unread.get("rope.dimension_count", head_dim)) // 2
    long, short = keys.factors(LONG_FACTORS, half), keys.factors(SHORT_FACTORS, half)
    if long is not None and keys.unread.get("rope.scaling.type") == "longrope":
        del keys.unread["rope.scaling.type"]
    rope = _rope(keys, head_dim, partial=True)
    if (long is None) != (short is None) or (long is not None and rope["rope_type"] != "default"):
        raise keys.refusal(f"its tensors {LONG_FACTORS} and {SHORT_FACTORS} are read together, without another scaling")
    if long is not None:
        rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope |= {"original_max_position_embeddings": original}
        rope |= {} if rescaled is None else {"attention_factor": rescaled}
    elif rescaled not in (None, 1.0):
        raise keys.refusal(f"its rope.scaling.attn_factor {rescaled} belongs to {LONG_FACTORS}, which it lacks")
    window = {"sliding_window": _window(keys), "original_max_position_embeddings": original}
    return {**sizes, **window, "rope_parameters": rope}


@_reads("starcoder2")
def _starcoder2(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys, epsilon=(LAYER_NORM, "norm_epsilon"))
    return {**sizes, "sliding_window": _window(keys), "rope_parameters": _rope(keys, head_dim)}


@_reads("stablelm")
def _stablelm(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys, epsilon=(LAYER_NORM, "layer_norm_eps"))
    parallel = not keys.has("ffn_norm.weight")
    keys.same("use_parallel_residual", parallel)
    return {
        **sizes,
        "use_parallel_residual": parallel,
        "use_qkv_bias": keys.has("attn_q.bias", "attn_k.bias", "attn_v.bias"),
        "rope_parameters": _rope(keys, head_dim, partial=True),
    }


@_reads("nemotron")
def _nemotron(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys, epsilon=(LAYER_NORM, "norm_eps"), free_heads=True)
    bias = keys.has(*ATTENTION_BIASES)
    biases = {"attention_bias": bias, "mlp_bias": keys.has("ffn_up.bias", "ffn_down.bias")}
    return {**sizes, **biases, "head_dim": head_dim, "rope_parameters": _rope(keys, head_dim, partial=True)}


@_reads("bloom")
def _bloom(keys: _Keys) -> dict[str, Any]:
    sizes, _ = _decoder(keys, epsilon=(LAYER_NORM, "layer_norm_epsilon"))
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if (sizes["intermediate_size"], sizes["num_key_value_heads"]) != (4 * width, heads):
        raise keys.refusal("bloom.feed_forward_length or bloom.attention.head_count_kv is not that of a BLOOM")
    read = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "layer_norm_epsilon")
    return {entry: sizes[entry] for entry in read}  # of positions, ALiBi has no end


@_reads("gpt2")
def _gpt2(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim = _decoder(keys, epsilon=(LAYER_NORM, "layer_norm_epsilon"))
    keys.same("rope.dimension_count", head_dim)  # written, and not used
    if sizes.pop("num_key_value_heads") != sizes["num_attention_heads"]:
        raise keys.refusal("gpt2.attention.head_count_kv differs from gpt2.attention.head_count")
    return {**sizes, "n_inner": sizes.pop("intermediate_size")}


@_reads("gemma2")
def _gemma2(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim, gemma = _gemma(keys, largest=46, period=2)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {**sizes, **gemma, **{cap: keys.take(cap, float) for cap in caps}, "rope_parameters": _rope(keys, head_dim)}


@_reads("gemma3", model_type="gemma3_text")
def _gemma3(keys: _Keys) -> dict[str, Any]:
    sizes, head_dim, gemma = _gemma(keys, largest=62, period=6)
    keys.unread.pop("mm.tokens_per_image", None)  # of images, whose encoder is another file
    local = {"rope_type": "default", "rope_theta": keys.take("rope.freq_base_swa", float, DEFAULT_BASE)}
    rope = {"full_attention": _rope(keys, head_dim), "sliding_attention": local}
    return {**sizes, **gemma, "rope_parameters": rope}


def _gemma(keys: _Keys, *, largest: int, period: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Sizes, features of a head, and what Gemma 2 and 3 share: windows, and a logit scale of their own.

    The scale is not in the files. In that with the most layers of each generation (27B) it is the one of width / heads
    features, in all others that of the features there are, as in llama.cpp.
    """
    sizes, head_dim = _decoder(keys, free_heads=True, scaled=False)
    usual = sizes["hidden_size"] // sizes["num_attention_heads"]
    scalar = usual if sizes["num_hidden_layers"] == largest else head_dim
    _check_scale(keys, scalar)
    gemma: dict[str, Any] = {"head_dim": head_dim, "query_pre_attn_scalar": scalar}
    gemma["layer_types"] = _layer_types(keys, sizes["num_hidden_layers"], period=period)
    return sizes, head_dim, {**gemma, "sliding_window": keys.take("attention.sliding_window", int)}


def _layer_types(keys: _Keys, depth: int, *, period: int) -> list[str]:
    """The layers that have a window: all but every `period`-th, or as the file says, by its period or one by one."""
    pattern = keys.unread.pop("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        pattern = [bool((layer + 1) % pattern) for layer in range(depth)]
    if not isinstance(pattern, list) or [type(windowed) for windowed in pattern] != [bool] * depth:
        raise keys.refusal(
            f"its attention.sliding_window_pattern is {pattern!r:.80}; a period, or one truth for each layer, is read"
        )
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]


def _window(keys: _Keys) -> int | None:
    """Keys that each query sees, its own among them; None, or 0 in the file, for all."""
    if keys.unread.get("attention.sliding_window") == 0:
        del keys.unread["attention.sliding_window"]
    window: int | None = keys.take("attention.sliding_window", int, None)
    return window
