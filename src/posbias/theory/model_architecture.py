"""The `Architecture` of a loaded model as the theories of architectures need it: with its residual share.

Mask and positional logits come from the configuration. The mixing m_l is known where a reference model's residual is
`none` (1) or `mixed` (its own m_l); everywhere else it is measured on prompts: mean of |a| / (|x| + |a|).
"""

from typing import Any

import numpy as np
from jaxtyping import Float64

from posbias.architecture import Architecture
from posbias.errors import RunError, UsageError


def architecture_of(model: Any, prompts: Any, *, theory: str) -> Architecture:
    """What mixes positions in a model, for a theory of the architecture.

    Args:
        model: What `load_model` returns.
        prompts: What `load_prompts` returns, to measure mixing on; None where it is known or not wanted.
        theory: `attention_only` leaves mixing out, `rollout_content` needs content logits.

    Raises:
        UsageError: no family description, mixing or content that is not known.
    """
    content = _content(model, theory)
    if theory == "attention_only":
        return Architecture.from_model(model)
    if prompts is not None:
        return Architecture.from_model(model, mixing=measured_mixing(model, prompts), content=content)
    known = known_mixing(model)
    if known is None:
        raise UsageError(f"theory {theory} of a model measures its residual share: give prompts=load_prompts(...)")
    return Architecture.from_model(model, mixing=known, content=content)


def known_mixing(model: Any) -> Float64[np.ndarray, "layers"] | None:
    """The mixing that a model's configuration fixes; None where it depends on weights and prompts."""
    from posbias.models.reference import ReferenceTransformer

    if not isinstance(model, ReferenceTransformer) or model.config.residual == "added":
        return None
    architecture = model.config.architecture
    return np.ones(architecture.depth) if model.config.residual == "none" else architecture.layer_mixing


def measured_mixing(model: Any, prompts: Any) -> Float64[np.ndarray, "layers"]:
    """Mean over tokens, then over prompts, of |a| / (|x| + |a|) in every layer; 1 without a residual connection.

    Raises:
        UsageError: no family description.
        RunError: norms of stream and branch are not finite, or both vanish.

    Source: arXiv 2602.16837, their code's definition.
    """
    shares = []
    for row in prompts.token_ids:
        norms = model.branch_norms(model.token_tensor([row.tolist()]))
        stream, branch = (part[:, 0].double().cpu().numpy() for part in (norms.stream, norms.branch))
        total = stream + branch
        if not np.isfinite(total).all() or (total == 0).any():
            layer = int(np.flatnonzero(~(np.isfinite(total) & (total > 0)).all(axis=1))[0])
            raise RunError(f"mixing: |x| + |a| is zero or not finite in layer {layer}; it must be finite and > 0")
        shares.append((branch / total).mean(axis=1))
    return np.asarray(np.mean(shares, axis=0))


def _content(model: Any, theory: str) -> Any:
    """Diagonal content of a reference model without content attention; 0 where the theory does not want it."""
    from posbias.models.reference import ReferenceTransformer

    if theory != "rollout_content":
        return 0.0
    if isinstance(model, ReferenceTransformer) and model.config.attention == "positional":
        return model.config.architecture.layer_content
    raise UsageError(
        "theory rollout_content needs the diagonal content of attention, which a model's configuration does not give; "
        "give an Architecture with content=..."
    )
