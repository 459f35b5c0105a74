"""Settings of loading a model, of its passes, and of `measure` and `attention`.

Nothing heavy is imported here: the command line makes its flags from these fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import MinLen

from posbias.checks import AUTO, Count, CountOrZero, Flag, Later, Natural, Share, checked
from posbias.errors import UsageError
from posbias.progress import report
from posbias.registry import split_numbers, split_settings

if TYPE_CHECKING:
    from posbias.measurement.outputs import Output
    from posbias.models.hugging_face import HuggingFaceModel
    from posbias.models.model import Model
    from posbias.models.reference.network import ReferenceTransformer
    from posbias.runs.engines import Engine
else:
    Output = Annotated[Any, Later("posbias.measurement.outputs:Output")]
    Engine = Annotated[Any, Later("posbias.runs.engines:Engine")]

ALL_LAYERS = "all"
EngineOption = Annotated[Engine, Flag(default="local")]


def local_engine() -> Engine:
    """The engine that is taken if none is named."""
    from posbias.runs.engines import Local

    return Local()


@checked
@dataclass(frozen=True)
class Loading:
    """How models are loaded, as `load_model` takes it."""

    init_seed: int | None = None
    """Replace the weights by random initial ones, drawn with this seed."""
    dtype: str = AUTO
    """float32, bfloat16, float16, float64, own: the model's, or auto: float32 on a CPU, else own."""
    device: str = AUTO
    """Where to run: cpu, cuda, cuda:1, mps ...; auto: an accelerator if there is one; spread: all devices, and the disk
    if needed (auto also spreads if no single device holds the model)."""
    template_options: Annotated[Mapping[str, Any], split_settings, Flag(default="")] = field(default_factory=dict)
    """Options of the chat template that renders conversations, such as enable_thinking=False."""

    @property
    def of_loading(self) -> dict[str, Any]:
        """The settings above, as `load_model` takes them, without those of a subclass."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Loading)}

    def load(self, source: str | Path) -> "HuggingFaceModel | ReferenceTransformer":
        """Load the model of a source, and say in what precision it runs where."""
        from posbias.models.loading import load_model

        model = load_model(source, **self.of_loading)
        report(f"model {model.identity['source']}: {model.precision}")
        return model

    def opened(self, subject: Any) -> "Model":
        """The model of a subject: loaded so, unless it is loaded already, and then these settings are refused."""
        from posbias.models.loading import as_model, refuse_loaded

        if isinstance(subject, str | Path):
            return self.load(subject)
        refuse_loaded(subject, self.of_loading)
        return as_model(subject)


def _layers(text: str) -> str | list[int]:
    if text.strip() == ALL_LAYERS:
        return ALL_LAYERS
    try:
        return list(map(int, split_numbers(text)))
    except UsageError:
        raise UsageError(f"{text!r}: allowed are all, or whole numbers, such as 0,5,11") from None


@checked
@dataclass(frozen=True)
class PassOptions:
    """Settings of the passes of one prompt, all plain: the output, what else is recorded, memory against time."""

    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    output: str | Output = "last"
    """The output that influence is measured on: last, at(position=-5), mean(last=16), target(text=' Paris')."""
    layers: Annotated[Literal["all"] | tuple[Natural, ...] | None, _layers, Flag("depth_profiles")] = None
    """Layers whose own output's influence profile is measured too: all, or indices such as 0,5,11."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output", str(self.read_output))
        if isinstance(self.layers, tuple):
            if not self.layers or len(set(self.layers)) < len(self.layers):
                raise UsageError(f'layers must be "all" or indices, each once, such as "0,5,11", got {self.layers}')
            object.__setattr__(self, "layers", tuple(sorted(self.layers)))

    @property
    def read_output(self) -> Output:
        """The output as an object."""
        from posbias.measurement.outputs import OUTPUTS

        return OUTPUTS.parse(self.output) if isinstance(self.output, str) else self.output


@checked
@dataclass(frozen=True)
class MeasureOptions(PassOptions):
    """Settings of `measure`: those of the passes, and where the work is done and kept."""

    together: Annotated[Count | None, Flag(None)] = None
    """Prompts that are measured in one batch, >= 1; None: as many as fill an accelerator and fit into its memory, and
    one on a processor."""
    engine: EngineOption = field(default_factory=local_engine)
    """Where the work is done (`posbias list engines`). Of this setting and those below, only the engine's threads can
    change results."""
    precision_prompts: CountOrZero = 1
    """Prompts of a model below float32 that are measured again by a copy in float32 (4 bytes a weight)."""
    directory: Annotated[Path | None, Flag(None)] = None
    """Run directory of the record, and of finished prompts (in `parts/`) until then; None keeps nothing."""
    resume: bool = False
    """Take over what the directory holds of the same measurement: its record, or finished prompts."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""

    @property
    def passes(self) -> PassOptions:
        """The settings that the measurement of a single prompt depends on."""
        return PassOptions(**{setting.name: getattr(self, setting.name) for setting in fields(PassOptions)})


@checked
@dataclass(frozen=True)
class AttentionOptions:
    """Settings of `attention`."""

    sink_thresholds: Annotated[tuple[Share, ...], MinLen(1), partial(split_numbers, sort=float)] = (0.2, 0.3)
    """Thresholds of the sink score, in (0, 1), at least one: 0.2 in Wu et al. (arXiv 2502.01951), 0.3 in Gu et al."""
    rollouts: Annotated[bool, Flag(None)] = True
    """Roll the same attention out, too, if nothing else mixes positions."""
    directory: Annotated[Path | None, Flag(None)] = None
    """Run directory of the record; None keeps nothing."""
    overwrite: bool = False
    """Replace finished work in the directory, which is refused otherwise."""
