"""Influence of every input position of one prompt on the last one, by vector-Jacobian products (theory, section 6).

One forward pass from the embeddings x to the last position's output, then one backward pass to x for each covector
of each kind; the weights are not differentiated. Squares are summed in float64 whatever the model's precision.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError
from posbias.measurement.checkpointing import first_non_finite_layer
from posbias.measurement.kinds import Kind, Site
from posbias.models.model import LastOutput, Model


@dataclass(frozen=True, eq=False)
class Influence:
    """One kind of influence on one prompt, not normalised."""

    norms: Float64[np.ndarray, "n_positions"]
    """||.||_j, non-negative."""
    standard_errors: Float64[np.ndarray, "n_positions"] | None
    """Of the norms, from the spread over probes (infinite with one probe); None where nothing was sampled."""


def influence_of_positions(
    model: Model, token_ids: Int64[np.ndarray, "n_positions"], *, kinds: Sequence[Kind], key: tuple[int, int], rows: int
) -> dict[str, Influence]:
    """Every kind of influence of every position of one prompt, from one forward pass.

    Cost: with P weights outside the embedding table and N positions, 2 P N flops for the forward and as many for
    every covector (plus attention, about 2 L N^2 d each); memory is the forward's saved activations, of order L N d
    numbers, times `rows`. The vocabulary enters once, at the last position.

    Args:
        model: Any causal language model.
        token_ids: One prompt.
        kinds: What to measure, distinct names.
        key: (seed, index of the prompt): random covectors depend on these and the kind's name, on nothing else.
        rows: Vector-Jacobian products per backward pass, >= 1: the prompt is repeated that often in the batch.

    Returns:
        By kind name.

    Raises:
        RunError: the output or a gradient is not finite.
    """
    passes = sum(kind.passes(model.width) for kind in kinds)
    rows = min(rows, passes)
    tokens = model.token_tensor([token_ids.tolist()])
    inputs = model.embed(tokens).detach().repeat(rows, 1, 1).requires_grad_()
    output = model.last(inputs)
    finite = bool(output.hidden.isfinite().all()) and bool(output.logits.isfinite().all())
    if not finite:
        names = ", ".join(kind.name for kind in kinds)
        raise RunError(f"{names}: the output on prompt {key[1]} is not finite{_where(model, inputs)}")
    covectors = [kind.covectors(output, _generator(key, kind)) for kind in kinds]
    pulled = [(kind.site, vector) for kind, vectors in zip(kinds, covectors, strict=True) for vector in vectors]
    squares = _pull_back(output, inputs, pulled)
    sections = np.cumsum([len(vectors) for vectors in covectors])[:-1]
    results = {}
    for kind, section in zip(kinds, np.split(squares, sections), strict=True):
        if not np.all(np.isfinite(section)):
            raise RunError(f"{kind.name}: the gradient on prompt {key[1]} is not finite{_where(model, inputs)}")
        results[kind.name] = _influence(section, sampled=kind.sampled)
    return results


def _pull_back(
    output: LastOutput, inputs: Float[Tensor, "rows position feature"], covectors: Sequence[tuple[Site, Tensor]]
) -> Float64[np.ndarray, "passes n_positions"]:
    """||c' d(output)/dx_j||^2 for every covector c, as many per backward pass as the batch has rows."""
    rows = len(inputs)
    squares = []
    for start in range(0, len(covectors), rows):
        chunk = covectors[start : start + rows]
        # Unit covectors go through the network and their lengths, down to 1e-150, come back in float64: the
        # probability of a sure prediction has a gradient that half and single precision would flush to zero.
        lengths = [float(vector.norm()) or 1.0 for _, vector in chunk]
        cotangents: dict[Site, Tensor] = {}
        for row, (site, vector) in enumerate(chunk):
            target = getattr(output, site)
            cotangents.setdefault(site, torch.zeros_like(target))[row] = (vector / lengths[row]).to(target)
        gradient = torch.autograd.grad(
            [getattr(output, site) for site in cotangents],
            inputs,
            list(cotangents.values()),
            retain_graph=start + rows < len(covectors),
        )[0]
        of_units = gradient[: len(chunk)].double().square().sum(dim=2).cpu().numpy()
        squares.append(of_units * np.square(lengths)[:, None])
    return np.concatenate(squares)


def _influence(squares: Float64[np.ndarray, "passes n_positions"], *, sampled: bool) -> Influence:
    """Root of the sum over covectors, or of the mean over random ones with its standard error (delta method)."""
    if not sampled:
        return Influence(np.sqrt(squares.sum(axis=0)), None)
    count = len(squares)
    norms = np.sqrt(squares.mean(axis=0))
    if count < 2:
        return Influence(norms, np.full_like(norms, np.inf))
    spread = squares.std(axis=0, ddof=1) / np.sqrt(count)
    # d sqrt(s) = ds / (2 sqrt(s)); a position without any influence has no spread either.
    return Influence(norms, np.divide(spread, 2 * norms, out=np.zeros_like(norms), where=norms > 0))


def _generator(key: tuple[int, int], kind: Kind) -> torch.Generator:
    """The generator of one kind on one prompt, independent of all others."""
    entropy = np.random.SeedSequence([*key, zlib.crc32(kind.name.encode())])
    return torch.Generator().manual_seed(int(entropy.generate_state(1, np.uint64)[0]))


def _where(model: Model, inputs: Float[Tensor, "rows position feature"]) -> str:
    """Where the forward pass first went wrong, as the end of a sentence."""
    inputs = inputs.detach()
    if not bool(inputs.isfinite().all()):
        return ", already in the embeddings"
    layer = first_non_finite_layer(model, inputs)
    return "" if layer is None else f", first in layer {layer}"
