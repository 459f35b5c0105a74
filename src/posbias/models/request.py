"""`ModelRequest`: what `load_model` was asked for, enough to load the same model again in another process."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from posbias.errors import RunError, UsageError

if TYPE_CHECKING:
    from posbias.models.model import Model


@dataclass(frozen=True)
class ModelRequest:
    """The arguments of one `load_model`, picklable; local paths are absolute, so it belongs in no record."""

    source: str
    init_seed: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    max_memory: int | None = None
    """Bytes; None: whatever is there."""

    def load(self) -> "Model":
        """The model."""
        from posbias.models.loading import load_model

        return load_model(
            self.source, init_seed=self.init_seed, dtype=self.dtype, device=self.device, max_memory=self.max_memory
        )

    @staticmethod
    def load_same(request: "ModelRequest | None", network_sha256: str | None) -> "Model":
        """The model of a request, checked to have the weights and configuration it had where the request was made.

        Raises:
            UsageError: there is no request.
            RunError: another model lies here.
        """
        from posbias.models.weights import network_sha256 as hash_of

        if request is None:
            raise UsageError(
                "workers load the model themselves, which only models from load_model, without an intervention, allow"
            )
        model = request.load()
        if hash_of(model.network) != network_sha256:
            name = Path(request.source).name  # paths belong in no record, and this message goes into one
            raise RunError(f"a worker found another model under {name!r} than the run began with")
        return model


def absolute_source(source: str | Path) -> str:
    """The source as text that means the same in every working directory."""
    text = str(source)
    prefix = "config:" if text.startswith("config:") else ""
    wanted = text.removeprefix(prefix)
    path = Path(wanted).expanduser()
    # "demo" is a name, even where a file bears it, as for `load_model`.
    return text if wanted == "demo" or not path.exists() else f"{prefix}{path.resolve()}"
