"""The networks of published experiments as configurations, for any architecture of one head, to test on."""

from typing import Any

from posbias import Architecture
from posbias.models.reference.config import ReferenceConfig

SHARED: dict[str, Any] = {"attention": "content", "values": "gaussian", "absolute": "added"}
SHARED |= {"initialisation": "linear", "dtype": "float32"}
ADDED = {True: "added", False: "none"}


def retrieval_network(
    architecture: Architecture, *, width: int = 64, labels: int = 32, residual: bool = False
) -> ReferenceConfig:
    """The in-context retrieval network: attention only, then a three-layer ReLU MLP that reads the last token.

    A layer is A x W_V (plus x with a residual), logits (x W_Q).(x W_K) / sqrt(d): no biases, output map or norm. An
    absolute encoding of the architecture is added to the input, a rotary one turns queries and keys, and decay
    multiplies attention before it is normalised. Weights begin as those of PyTorch's linear layers.

    Args:
        architecture: Depth, mask and encoding; one head.
        width: Features of items and labels.
        labels: Classes of the readout.
        residual: Whether each layer's input is added to its output.

    Source: Wu et al. 2025 (arXiv 2502.01951), section 5 and appendix J, whose inputs are vectors.
    """
    of_vectors: dict[str, Any] = {"vocabulary_size": None, "outputs": labels, "output_map": False}
    readout: dict[str, Any] = {"readout": "mlp", "readout_width": width}
    return ReferenceConfig(architecture, width=width, residual=ADDED[residual], **of_vectors, **readout, **SHARED)


def copy_network(
    architecture: Architecture, *, width: int = 10, vocabulary: int = 10, residual: bool = False, mlp: bool = False
) -> ReferenceConfig:
    """The position copy network: embedding, attention layers with output maps, unembedding.

    Args:
        architecture: Depth, mask (causal in the source) and encoding (none in the source); one head in the source.
        width: Features of the stream.
        vocabulary: Tokens.
        residual: Whether each branch's input is added to its output.
        mlp: Whether each layer has an MLP of 4 `width` hidden features with GELU.

    Source: Liu 2026, "Sparse attention 7". Initialisation is not stated there; ours is that of PyTorch's linear layers.
    """
    sizes: dict[str, Any] = {"width": width, "vocabulary_size": vocabulary}
    return ReferenceConfig(architecture, residual=ADDED[residual], mlp=mlp, **sizes, **SHARED)
