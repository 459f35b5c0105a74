"""`export`: a fitted adapter leaves the library, as a file or in the weights, with a card that says what it is.

What is written does to every prompt exactly what the adapter does here. All other methods are refused: what they do to
attention depends on the places of tokens, which no weight knows.

PEFT: W' = W + (alpha / r) B A; alpha = r here. GGUF: `blk.N.NAME.weight.lora_a` and `.lora_b`; of families whose rotary
features llama.cpp lists in pairs, not halves, the rows of queries and keys are put in its order. An adapter that acts
from the question on names the tokens that open it: PEFT looks for their last place in a prompt, as the method does, and
so does llama-server, which then begins one token before them (tools/server/server-context.cpp), and so gets all but the
first.
"""

import json
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.page import measure_words
from posbias.files import file_exists, follow_umask
from posbias.mitigation.fitting import Fitted
from posbias.mitigation.methods.adapter import SIDES, Adapter, lora_config
from posbias.mitigation.methods.applying import resolve_method
from posbias.mitigation.methods.recipe import RECIPE_SUFFIX, Recipe, read_recipe
from posbias.mitigation.page import reasons, seconds_each, text_change, words
from posbias.mitigation.result import ArmResult, MitigationTrial
from posbias.mitigation.run import RECIPE
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.sources import quiet
from posbias.models.weights import dispatched, quantised, weights_sha256
from posbias.results.result import load_record
from posbias.version import __version__

LARGEST_RANK = 16
"""Of adapters that vLLM serves unasked; it can be asked for powers of two above it."""
NOT_JUDGED = "No verdict at hand: export the run that judged it, or judge it (`posbias mitigate --methods RECIPE`)."


class Chosen(NamedTuple):
    """A recipe, with the trial and its arm that judged it, if they are known."""

    recipe: Path
    judged: tuple[MitigationTrial, ArmResult] | None = None


@dataclass(frozen=True)
class Exported:
    """A method as files."""

    directory: str
    method: str
    """Spelling of the method."""
    form: str
    """`adapter` or `merged`."""
    files: tuple[str, ...]
    """Names of the files, sorted."""


@checked
def export(
    fitted: Fitted | Chosen | str | Path,
    directory: str | Path,
    *,
    model: HuggingFaceModel,
    merged: bool = False,
    gguf: bool = False,
) -> Exported:
    """Write a fitted method for other programs: an adapter that PEFT, vLLM and llama.cpp load, or a whole checkpoint.

    Args:
        fitted: What `fit` returns, the path of a recipe, or the directory of a run of `mitigate` with one method that
            can be exported, on which the card has the verdict.
        directory: A new directory; it gets a card, `README.md`, too.
        model: The loaded model that the method was fitted to.
        merged: Write the whole model with changed weights, tokenizer and generation settings, instead of a PEFT
            adapter.
        gguf: Write `adapter.gguf`, too, which llama.cpp loads beside the base model.

    Raises:
        UsageError: a directory that exists, a method that is no adapter, or was fitted to another model, one that acts
            from the question on if merged, or weights that are quantised or not all in memory.
        RunError: the files cannot be written.
    """
    target = Path(directory)
    if file_exists(target):
        raise UsageError(f"{str(target)!r} exists; a method is exported to a new directory only")
    if quantised(model.network):
        raise UsageError(f"export: the weights of {model.origin.source!r} are quantised; load the model unquantised")
    if dispatched(model.network):
        raise UsageError("export: the model is spread over devices; load it on one, such as device='cpu'")
    if isinstance(fitted, Fitted):
        method, how, judged = resolve_method(fitted.method, model), fitted.how, None
    else:
        recipe, judged = fitted if isinstance(fitted, Chosen) else choose(fitted)
        method, how = read_recipe(recipe, model), Recipe.read(recipe).fitted.model_dump()
    if not isinstance(method, Adapter):
        why = "no weight knows the places of tokens, and none changes a prompt"
        raise UsageError(f"{method.name} cannot be exported: {why}; allowed: adapter")
    if merged and method.invocation:
        raise UsageError("export: a merged weight acts on all tokens, this adapter from the question on: not merged")
    updates = method.weight_updates(model)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            if gguf:
                write_gguf(model, updates, made / ADAPTER_GGUF, method.invocation)
            (write_merged if merged else partial(write_adapter, invocation=method.invocation))(model, updates, made)
            form = "merged" if merged else "activated" if method.invocation else "adapter"
            commands = serving(model.origin.source, target.name, method.rank, form=form, gguf=gguf)
            verdict = _verdict_lines(*judged) if judged else [NOT_JUDGED]
            card = [*_card(method, model, how, merged=merged), *verdict, *commands]
            (made / "README.md").write_text("\n".join(card))
            follow_umask(made)
            made.rename(target)
    except OSError as error:
        raise RunError(f"cannot write to {str(target)!r}: {error.strerror or error}") from None
    files = tuple(sorted(path.name for path in target.iterdir()))
    return Exported(str(target), str(method), "merged" if merged else "adapter", files)


def choose(named: str | Path, *, method: str | None = None) -> Chosen:
    """The recipe at a path, or that of an adapter in the directory of a run.

    Args:
        method: Name of the run's method; None: the recommended one, or the only adapter.
    """
    path = Path(named)
    if path.suffix == RECIPE_SUFFIX:
        return Chosen(path)
    trial = load_record(path)
    if not isinstance(trial, MitigationTrial):
        raise UsageError(
            f"{str(path)!r} is a run of posbias {trial.record.verb}; export takes one of mitigate, or a recipe"
        )
    adapters: dict[str, Chosen] = {}
    for arm in trial.arms[1:]:
        recipe = path / arm.directory / RECIPE if arm.fitted is not None else Path(arm.recipe)
        if arm.method.partition("(")[0] == Adapter.name and recipe.suffix and file_exists(recipe):
            adapters[arm.name] = Chosen(recipe, (trial, arm))
    recommended = [name for name in adapters if name == trial.judgement.recommended]
    names = [method] if method is not None else recommended or list(adapters)
    if len(names) != 1 or names[0] not in adapters:
        asked = "" if method is None else f" {method!r}"
        raise UsageError(
            f"{str(path)!r} has no single method{asked} to export; in it: {', '.join(adapters) or 'none'}; name one"
        )
    return adapters[names[0]]


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


def write_adapter(model: HuggingFaceModel, updates: Updates, directory: Path, invocation: Sequence[int]) -> None:
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
        alora_invocation_tokens=list(invocation) or None,
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


def write_gguf(model: HuggingFaceModel, updates: Updates, path: Path, invocation: Sequence[int]) -> None:
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
    if invocation:
        tokens, kinds = list(invocation[1:] or invocation), (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
        writer.add_key_value(gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS, tokens, *kinds)
    for module, sides in updates.items():
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None:
            raise UsageError(f"export: GGUF has no name for {module} of a {model.model_type} model")
        role = name.removesuffix(".weight").rpartition(".")[2]
        down, up = (side.float().numpy() for side in sides)
        if in_pairs and role in heads:  # of every head 0, d/2, 1, d/2 + 1, ...: what turns together stands together
            up = up.reshape(heads[role], 2, -1, up.shape[1]).swapaxes(1, 2).reshape(up.shape)
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(down))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(up))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _card(method: Adapter, model: HuggingFaceModel, how: Mapping[str, Any], *, merged: bool) -> list[str]:
    """The beginning of the card, in Markdown: base and fit."""
    source, revision = model.origin.source, model.origin.revision
    fitted = "nothing that is on record"
    if samples := how.get("calibration_samples"):
        prompts, steps = how.get("calibration_prompts", "?"), len(how.get("answer_loss", []))
        fitted = f"{samples} samples in {prompts} prompts, in {steps} steps"
    form = "The whole model with the change in its weights" if merged else "A PEFT (LoRA) adapter"
    weights, precision = weights_sha256(model.network)[:16], str(model.dtype).removeprefix("torch.")
    acting = "act from its invocation's last place in a prompt on, and leave what is cached before it valid"
    base = f"{source}{f', revision {revision}' if revision else ''}, weights {weights} ({precision})"
    return [
        *["---", *([] if merged else [f"base_model: {source}", "library_name: peft"]), "tags: [position-bias]", "---"],
        f"# {method.name} against position bias, for {source}",
        f"\n{form}, written by posbias {__version__}. Its method is `{method}`.",
        f"\n- Base model: {base}; made for these alone.",
        f"- Size: updates of rank {method.rank}; {acting if method.invocation else 'merged, no time'}.",
        f"- Fitted to: {fitted}.",
        "\n## Does it help?\n",
    ]


def _verdict_lines(trial: MitigationTrial, arm: ArmResult) -> list[str]:
    """The verdict, and what the trial measured beside the answers."""
    verdict = next(one for one in trial.judgement.verdicts if one.name == arm.name)
    measure, why = measure_words(trial.judgement.measure), " ".join(reasons(verdict, trial.judgement))
    return [
        f"On {verdict.n_samples} samples of `{trial.task}` that no fit saw, by {measure}: **{words(verdict)}**. {why}",
        "\n## What does it cost?\n",
        f"- Ordinary text, loss per token: {text_change(verdict, arm)}; accepted: {trial.tolerance:g}.",
        f"- Seconds per request in that trial: {seconds_each(arm)}, without it {seconds_each(trial.arms[0])}.",
    ]


def serving(source: str, directory: str, rank: int, *, form: str, gguf: bool) -> list[str]:
    """The end of the card: commands that serve what was written, or the answer to one text.

    `transformers serve` takes no adapter. A base model in a GGUF file is one for llama.cpp alone. An adapter that is
    `activated` by the question is not for vLLM, which refuses it, nor for adapters in transformers itself, which pass
    over its tokens, as peft's own do not.
    """
    base, based_on_gguf = shlex.quote(source), source.endswith(".gguf")
    if form == "merged":
        lines = [f"{program} serve {shlex.quote(directory)}" for program in ("vllm", "transformers")]
    elif based_on_gguf:
        instead = ": export it with --merged" if form == "adapter" else ""
        lines = [f"# vLLM and transformers take no adapter of {source}{instead}"]
    else:
        larger = max(LARGEST_RANK, 1 << (rank - 1).bit_length())
        named = shlex.quote(f"posbias={directory}")
        served = f"vllm serve {base} --enable-lora --max-lora-rank {larger} --lora-modules {named}"
        unserved = "# not for vLLM, which refuses activated LoRA (0.32 does), nor for SGLang"
        program = (
            "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; "
            f"m, t = M.from_pretrained({json.dumps(directory)}), T.from_pretrained({json.dumps(source)}); "
            'print(t.decode(m.generate(**t("PROMPT", return_tensors="pt"), max_new_tokens=20)[0]))'
        )
        lines = [unserved if form == "activated" else served, f"python -c {shlex.quote(program)}"]
    if source == "demo" and form != "merged":
        lines.insert(0, "posbias models get demo --out demo  # where the adapter looks for its base")
    if gguf:
        given, note = (base, "") if based_on_gguf else ("BASE.gguf", f"  # {source}, converted by llama.cpp")
        lines.append(f"llama-server -m {given} --lora {shlex.quote(f'{directory}/{ADAPTER_GGUF}')}{note}")
    return ["\n## Use\n\n```bash", *lines, "```\n"]
