"""`export`: a fitted adapter leaves the library, as a file or in the weights, with a card that says what it is.

What is written does to every prompt exactly what the adapter does here. All other methods are refused: what they do to
attention depends on the places of tokens, which no weight knows.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posbias.checks import checked
from posbias.display.showing import Presented, Shown
from posbias.errors import RunError, UsageError
from posbias.exporting.formats import ADAPTER_GGUF, write_adapter, write_gguf, write_merged
from posbias.files import file_exists, follow_umask
from posbias.interventions.base import check_model
from posbias.mitigation import MITIGATIONS, MitigationTrial
from posbias.mitigation.fitting.base import Fitted
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.recipe import RECIPE_SUFFIX, Recipe, read_recipe
from posbias.mitigation.trial.plan import ARMS
from posbias.mitigation.trial.result import ArmResult
from posbias.mitigation.trial.run import RECIPE
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.weights import dispatched, quantised
from posbias.report.export import Card, card_text
from posbias.runs.records import RECORD_FILE
from posbias.runs.results import load_record

CARD = "README.md"


@dataclass(frozen=True, repr=False)
class Exported(Presented):
    """A method as files."""

    directory: str
    method: str
    """Spelling of the method."""
    form: str
    """`adapter` or `merged`."""
    files: tuple[str, ...]
    """Names of the files, sorted."""

    def shown(self) -> Shown:
        """Directory with the files."""
        return Shown(f"{self.form} of {self.method} in {self.directory}: {', '.join(self.files)}")


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
    method.check_model(loaded)
    updates = method.weight_updates(loaded)
    card = Card(method, loaded, how, judged, merged=merged, gguf=gguf)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            if gguf:
                write_gguf(loaded, updates, made / ADAPTER_GGUF)
            (write_merged if merged else write_adapter)(loaded, updates, made)
            (made / CARD).write_text(card_text(card, name=target.name))
            follow_umask(made)
            made.rename(target)
    except OSError as error:
        raise RunError(f"cannot write to {str(target)!r}: {error.strerror or error}") from None
    files = tuple(sorted(path.name for path in target.iterdir()))
    return Exported(str(target), str(method), "merged" if merged else "adapter", files)


@dataclass(frozen=True, eq=False)
class Chosen:
    """A recipe, with what judged it."""

    recipe: Path
    judged: tuple[MitigationTrial, ArmResult] | None = None
    """The trial and its arm; None if none is known."""


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
    names = [method] if method is not None else [name for name, arm in arms.items() if _recommended(arm)]
    names = names or list(arms)
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


def _recommended(chosen: Chosen) -> bool:
    return chosen.judged is not None and chosen.judged[0].recommended is chosen.judged[1]


def _subject(
    fitted: Any, model: HuggingFaceModel
) -> tuple[Method, dict[str, Any], tuple[MitigationTrial, ArmResult] | None]:
    """The method, how it was fitted, and what judged it, as far as these are known."""
    if isinstance(fitted, Fitted):
        return fitted.method, fitted.how, None
    if isinstance(fitted, Method):
        return fitted, {}, None
    if not isinstance(fitted, str | Path | Chosen):
        raise UsageError(f"export: give what fit returns, a method, a recipe or a run, got {type(fitted).__name__}")
    chosen = fitted if isinstance(fitted, Chosen) else choose(fitted)
    return read_recipe(chosen.recipe, model), Recipe.read(chosen.recipe).fitted.model_dump(), chosen.judged
