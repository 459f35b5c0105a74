"""`export`: a fitted adapter leaves the library, as a file or in the weights, with a card that says what it is.

What is written does to every prompt exactly what the adapter does here. All other methods are refused: what they do to
attention depends on the places of tokens, which no weight knows.

PEFT: W' = W + (alpha / r) B A; alpha = r here. GGUF: `blk.N.NAME.weight.lora_a` and `.lora_b`; of families whose rotary
features llama.cpp lists in pairs, not halves, the rows of queries and keys are put in its order.
"""

import json
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from posbias.checks import checked
from posbias.errors import RunError, UsageError
from posbias.evaluation.page import measure_words
from posbias.files import file_exists, follow_umask
from posbias.interventions.base import check_model
from posbias.mitigation.fitting import Fitted
from posbias.mitigation.methods.adapter import SIDES, Adapter, lora_config
from posbias.mitigation.methods.applying import resolve_method
from posbias.mitigation.methods.base import MITIGATIONS, Method, Mitigation
from posbias.mitigation.methods.recipe import RECIPE_SUFFIX, Recipe, read_recipe
from posbias.mitigation.page import reasons, seconds_each, text_change, warnings, words
from posbias.mitigation.result import ArmResult, MitigationTrial
from posbias.mitigation.run import ARMS, RECIPE
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.sources import quiet
from posbias.models.weights import dispatched, quantised, weights_sha256
from posbias.results.page import caveats_of
from posbias.results.records import RECORD_FILE
from posbias.results.result import load_record
from posbias.version import __version__

GGUF = ".gguf"
LARGEST_RANK, LARGER_RANKS = 16, (32, 64, 128, 256, 512)
"""Of adapters that vLLM serves unasked, and those that it can be asked for, each for all ranks below it."""
NOT_JUDGED = "Not judged yet: `posbias mitigate MODEL --task TASK --methods RECIPE.json`, on samples of no fit."
Judged = tuple[MitigationTrial, ArmResult]
"""A trial, and its arm of the method."""


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
def export(fitted: Any, directory: str | Path, *, model: Any, merged: bool = False, gguf: bool = False) -> Exported:
    """Write a fitted method for other programs: an adapter that PEFT, vLLM and llama.cpp load, or a whole checkpoint.

    Args:
        fitted: What `fit` returns, a method or its spelling, the path of a recipe, or the directory of a run of
            `mitigate` with one method that can be exported. The card has the verdict on a run's method or recipe.
        directory: A new directory; it gets a card, `README.md`, too.
        model: The loaded model that the method was fitted to.
        merged: Write the whole model with changed weights, tokenizer and generation settings, instead of a PEFT
            adapter.
        gguf: Write `adapter.gguf`, too, which llama.cpp loads beside the base model.

    Raises:
        UsageError: a directory that exists, a method that is no adapter, or was fitted to another model, or weights
            that are quantised or not all in memory.
        RunError: the files cannot be written.
    """
    target, loaded = Path(directory), check_model(model)
    if file_exists(target):
        raise UsageError(f"{str(target)!r} exists; a method is exported to a new directory only")
    if quantised(loaded.network):
        raise UsageError(f"export: the weights of {loaded.origin.source!r} are quantised; load the model unquantised")
    if dispatched(loaded.network):
        raise UsageError("export: the model is spread over devices; load it on one, such as device='cpu'")
    method, how, judged = _subject(fitted, loaded)
    if not isinstance(method, Adapter):
        inside = isinstance(method, Mitigation)
        why = "it depends on the places of tokens, which no weight knows" if inside else "it changes prompts"
        raise UsageError(f"{method.name} cannot be exported: {why}; allowed: adapter")
    updates = method.weight_updates(loaded)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            if gguf:
                write_gguf(loaded, updates, made / ADAPTER_GGUF)
            (write_merged if merged else write_adapter)(loaded, updates, made)
            card = _card(method, loaded, how, judged, name=target.name, merged=merged, gguf=gguf)
            (made / "README.md").write_text(card)
            follow_umask(made)
            made.rename(target)
    except OSError as error:
        raise RunError(f"cannot write to {str(target)!r}: {error.strerror or error}") from None
    files = tuple(sorted(path.name for path in target.iterdir()))
    return Exported(str(target), str(method), "merged" if merged else "adapter", files)


class Chosen(NamedTuple):
    """A recipe, with the trial and its arm that judged it, if they are known."""

    recipe: Path
    judged: Judged | None = None


def choose(named: str | Path, *, method: str | None = None) -> Chosen:
    """The recipe at a path, or that of an adapter in the directory of a run.

    Args:
        method: Name of the run's method; None: the recommended one, or the only adapter.
    """
    text, path = str(named), Path(named)
    if text.partition("(")[0] in MITIGATIONS and not file_exists(path):
        raise UsageError(f"{text!r} is a spelling, which holds no numbers; export takes a run of mitigate, or a recipe")
    if path.suffix == RECIPE_SUFFIX:
        path = path.resolve() if file_exists(path) else path
        run, within = path.parent.parent.parent, path.parent.parent.name
        arms = _adapters(run) if within == ARMS and (run / RECORD_FILE).exists() else {}
        return next((chosen for chosen in arms.values() if chosen.recipe == path), Chosen(path))
    arms = _adapters(path)
    recommended = {arm.judged[0].judgement.recommended for arm in arms.values() if arm.judged}
    names = [method] if method is not None else [name for name in arms if name in recommended] or list(arms)
    if len(names) != 1 or names[0] not in arms:
        asked = "" if method is None else f" {method!r}"
        raise UsageError(
            f"{text!r} has no single method{asked} to export; in it: {', '.join(arms) or 'none'}; name one"
        )
    return arms[names[0]]


def _adapters(run: Path) -> dict[str, Chosen]:
    """The adapters of a run whose recipes are there, by the names of their arms."""
    trial = load_record(run)
    if not isinstance(trial, MitigationTrial):
        raise UsageError(
            f"{str(run)!r} is a run of posbias {trial.record.verb}; export takes one of mitigate, or a recipe"
        )
    adapters = [arm for arm in trial.arms[1:] if arm.method.partition("(")[0] == Adapter.name]
    recipes = [run / arm.directory / RECIPE if arm.fitted is not None else Path(arm.recipe) for arm in adapters]
    return {
        arm.name: Chosen(recipe, (trial, arm))
        for arm, recipe in zip(adapters, recipes, strict=True)
        if recipe.suffix and file_exists(recipe)
    }


def _subject(fitted: Any, model: HuggingFaceModel) -> tuple[Method, dict[str, Any], Judged | None]:
    """The method, how it was fitted, and what judged it, as far as these are known."""
    if isinstance(fitted, Fitted | Method):
        how = fitted.how if isinstance(fitted, Fitted) else {}
        return resolve_method(fitted.method if isinstance(fitted, Fitted) else fitted, model), how, None
    if not isinstance(fitted, str | Path | Chosen):
        raise UsageError(f"export: give what fit returns, a method, a recipe or a run, got {type(fitted).__name__}")
    chosen = fitted if isinstance(fitted, Chosen) else choose(fitted)
    return read_recipe(chosen.recipe, model), Recipe.read(chosen.recipe).fitted.model_dump(), chosen.judged


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


def _card(
    method: Adapter,
    model: HuggingFaceModel,
    how: Mapping[str, Any],
    judged: Judged | None,
    *,
    name: str,
    merged: bool,
    gguf: bool,
) -> str:
    """The card, in Markdown: base, fit, verdict, costs and commands; `name` is the directory's."""
    source = model.origin.source
    revision = f", revision {model.origin.revision}" if model.origin.revision else ""
    precision, weights = str(model.dtype).removeprefix("torch."), weights_sha256(model.network)[:16]
    form = "The whole model with the change in its weights" if merged else "A PEFT (LoRA) adapter"
    also = "; `adapter.gguf` is the same change for llama.cpp" if gguf else ""
    fitted = "nothing that is on record"
    if samples := how.get("calibration_samples"):
        lengths = "of {} to {} tokens ".format(*how["prompt_tokens"]) if "prompt_tokens" in how else ""
        steps = len(how.get("answer_loss", []))
        fitted = f"{samples} samples in {how.get('calibration_prompts', '?')} prompts {lengths}in {steps} steps"
    head = [] if merged else [f"base_model: {source}", "library_name: peft"]
    lines = [
        *["---", *head, "tags: [position-bias]", "---"],
        f"# {method.name} against position bias, for {source}",
        f"\n{form}, written by posbias {__version__}{also}. Its method is `{method}`.",
        f"\n- Base model: {source}{revision}, weights {weights} ({precision}); made for these alone.",
        f"- Size: updates of rank {method.rank}; merged, no time.",
        f"- Fitted to: {fitted}.",
        "\n## Does it help?\n",
        *([NOT_JUDGED] if judged is None else _verdict_lines(*judged)),
        "\n## Use\n\n```bash",
        *(merged_commands(name) if merged else adapter_commands(source, name, method.rank)),
        *(gguf_commands(source, name) if gguf else []),
        "```\n",
    ]
    return "\n".join(lines)


def _verdict_lines(trial: MitigationTrial, arm: ArmResult) -> list[str]:
    """The verdict, what the trial measured beside the answers, and its caveats."""
    judgement, number = trial.judgement, trial.arms.index(arm)
    measure, verdict = judgement.measure, next(one for one in judgement.verdicts if one.name == arm.name)
    rows = zip(judgement.positions, trial.curves[measure][0], trial.curves[measure][number], strict=True)
    before, after = map(seconds_each, (trial.arms[0], arm))
    caveats = [*caveats_of(trial.record), *warnings(trial.choice, (trial.arms[0], arm))]
    return [
        f"On {verdict.n_samples} samples of `{trial.task}` that no fit saw: **{words(verdict)}**. "
        + " ".join(reasons(verdict, judgement)),
        f"\n| position | {measure_words(measure)}, before | with it |\n|---|---|---|",
        *(f"| {position} | {old} | {new} |" for position, old, new in rows),
        "\n## What does it cost?\n",
        f"- Ordinary text, loss per token: {text_change(verdict, arm)}; accepted: {trial.tolerance:g}.",
        f"- Seconds per request in that trial: {after}, without it {before}.",
        *(f"- Caveat: {caveat}." for caveat in caveats),
    ]


def adapter_commands(source: str, directory: str, rank: int) -> list[str]:
    """Commands that serve an adapter beside its base model, or the answer to one text; `transformers serve` takes none.

    A base model in a GGUF file is one for llama.cpp alone.
    """
    if source.endswith(GGUF):
        return [f"# vLLM and transformers take no adapter of {source}: export it with --merged"]
    base = ["posbias models get demo --out demo  # the base model, where the adapter looks for it"]
    place = shlex.quote(f"posbias={directory}")
    served = next((size for size in LARGER_RANKS if size >= rank), None)
    larger = f" --max-lora-rank {served}" if rank > LARGEST_RANK else ""
    loaded = f'pipeline("text-generation", {json.dumps(directory)})'
    program = f'from transformers import pipeline; print({loaded}("Hello", max_new_tokens=20))'
    return [
        *(base if source == "demo" else []),
        *([f"vllm serve {shlex.quote(source)} --enable-lora{larger} --lora-modules {place}"] if served else []),
        f"python -c {shlex.quote(program)}  # transformers, with peft installed",
    ]


def merged_commands(directory: str) -> list[str]:
    """Commands that serve a merged checkpoint."""
    return [f"{program} serve {shlex.quote(directory)}" for program in ("vllm", "transformers")]


def gguf_commands(source: str, directory: str) -> list[str]:
    """The command that serves a GGUF adapter beside a GGUF file of the base model."""
    given = source.endswith(GGUF)
    base, note = (shlex.quote(source), "") if given else ("BASE.gguf", f"  # {source}, converted by llama.cpp")
    return [f"llama-server -m {base} --lora {shlex.quote(directory + '/adapter.gguf')}{note}"]
