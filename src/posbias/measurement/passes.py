"""`PassOptions`: what is read off the passes over every prompt, and how they are run."""

from dataclasses import dataclass

from posbias.checks import check_whole, checked
from posbias.errors import UsageError
from posbias.measurement.outputs import Output, resolve_output

ALL_LAYERS = "all"


@checked
@dataclass(frozen=True)
class PassOptions:
    """Per prompt: the output that is read, what else is recorded, memory against time. All values are plain."""

    checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    rows: int = 1
    """Vector-Jacobian products per backward pass (copies of the prompt in the batch), >= 1."""
    output: str | Output = "last"
    """Which output the influence is on: `last`, `at(position=-5)`, `mean(last=16)`, `target(text=" Paris")`."""
    layers: str | tuple[int, ...] | None = None
    """Layers whose own output's influence profile is measured too: "all", or indices; None for none."""
    precision_prompts: int = 1
    """How many prompts of a model below float32 are measured again with its weights in float32, >= 0."""

    def __post_init__(self) -> None:
        if not isinstance(self.checkpointing, bool):
            raise UsageError(f"checkpointing must be True or False, got {self.checkpointing!r}")
        check_whole("rows", self.rows, least=1)
        check_whole("precision_prompts", self.precision_prompts, least=0)
        object.__setattr__(self, "output", str(resolve_output(self.output)))
        object.__setattr__(self, "layers", _checked_layers(self.layers))

    @property
    def read_output(self) -> Output:
        """The output as an object."""
        return resolve_output(self.output)


def _checked_layers(layers: object) -> str | tuple[int, ...] | None:
    if layers is None or layers == ALL_LAYERS:
        return None if layers is None else ALL_LAYERS
    if not isinstance(layers, list | tuple) or not layers:
        raise UsageError(f'layers must be "all" or a list of layer indices, got {layers!r}')
    for layer in layers:
        check_whole("a layer", layer, least=0)
    if len(set(layers)) < len(layers):
        raise UsageError(f"layers {list(layers)} name a layer twice")
    return tuple(sorted(layers))
