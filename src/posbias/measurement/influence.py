"""Influence of every input position of one prompt on an output, by vector-Jacobian products (theory, section 6).

One forward pass from the embeddings x to the outputs that are read, then one backward pass to x for each covector of
each kind; the weights are not differentiated. Squares are summed in float64 whatever the model's precision.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posbias.errors import RunError
from posbias.measurement.blocks import first_in_backward, first_in_forward
from posbias.measurement.kinds import Experiment, Kind, Pullback, Site
from posbias.measurement.outputs import Influence, Key, PassOptions, Question, TokenIds
from posbias.models.model import Model

Pulled = tuple[Site, Float64[Tensor, "outputs _"]]
"""A covector to pull back: the site where it lives, and its part at every output."""


def influence_of_positions(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions
) -> dict[str, Influence]:
    """Every kind of influence of every position of one prompt, by name.

    Cost: with P weights outside the embedding table and N positions, 2 P N flops for the forward and as many for
    every covector (plus attention, about 2 L N^2 d each); memory is the forward's saved activations, of order L N d
    numbers, times `rows`. The vocabulary enters once per output that is read. Kinds with passes of their own state
    their cost themselves. Random covectors depend on the key, (seed, index of the prompt), and the kind's name alone.
    """
    output = options.read_output
    for kind in kinds:
        kind.check_output(output)
    question = Question(model, output.read(model, token_ids), key, options.rows)
    results: dict[str, Influence] = {}
    pulled = [kind for kind in kinds if isinstance(kind, Pullback)]
    if pulled:
        results |= _pull_back_kinds(question, pulled)
    for kind in kinds:
        if isinstance(kind, Experiment):
            results[kind.name] = kind.measure(question)
    return {kind.name: results[kind.name] for kind in kinds}


def _pull_back_kinds(question: Question, kinds: Sequence[Pullback]) -> dict[str, Influence]:
    """All covectors of all kinds, from one forward pass."""
    model, prompt = question.model, question.key[1]
    rows = min(question.rows, sum(kind.passes(model.width) for kind in kinds))
    inputs = question.embeddings.repeat(rows, 1, 1).requires_grad_()
    output = question.outputs(inputs)
    if not (bool(output.hidden.isfinite().all()) and bool(output.logits.isfinite().all())):
        names = ", ".join(kind.name for kind in kinds)
        raise RunError(f"{names}: the output on prompt {prompt} is not finite{first_in_forward(model, inputs)}")
    by_kind = [kind.covectors(output, question.reading, question.generator(kind.name)) for kind in kinds]
    pulled = [(kind.site, vector) for kind, covectors in zip(kinds, by_kind, strict=True) for vector in covectors]
    sources: dict[Site, Tensor] = {"hidden": output.hidden, "logits": output.logits}
    squares = pull_back(sources, inputs, pulled)[:, : question.reading.n_positions] * question.reading.share**2
    results = {}
    sections = np.split(squares, np.cumsum([len(covectors) for covectors in by_kind])[:-1])
    for kind, covectors, section in zip(kinds, by_kind, sections, strict=True):
        if not np.all(np.isfinite(section)):
            failing = int(np.argmax(~np.isfinite(section).all(axis=1)))
            where = _fault(question, (kind.site, covectors[failing]))
            raise RunError(f"{kind.name}: the gradient on prompt {prompt} is not finite{where}")
        results[kind.name] = from_squares(section, sampled=kind.sampled)
    return results


def pull_back(
    sources: Mapping[Site, Float[Tensor, "rows outputs _"]],
    inputs: Float[Tensor, "rows position feature"],
    covectors: Sequence[Pulled],
    *,
    keep_graph: bool = False,
) -> Float64[np.ndarray, "passes n_inputs"]:
    """||c' d(source)/dx_j||^2 for every covector c, as many per backward pass as the batch has rows.

    The sources, by the covectors' site, are differentiated by the inputs; `keep_graph` leaves the saved activations.
    """
    rows = len(inputs)
    squares = []
    for start in range(0, len(covectors), rows):
        chunk = covectors[start : start + rows]
        # Unit covectors go through the network and their lengths, down to 1e-150, come back in float64: the
        # probability of a sure prediction has a gradient that half and single precision would flush to zero.
        lengths = [float(vector.norm()) or 1.0 for _, vector in chunk]
        cotangents: dict[Site, Tensor] = {}
        for row, (site, vector) in enumerate(chunk):
            target = sources[site]
            cotangents.setdefault(site, torch.zeros_like(target))[row] = (vector / lengths[row]).to(target)
        gradient = torch.autograd.grad(
            [sources[site] for site in cotangents],
            inputs,
            list(cotangents.values()),
            retain_graph=keep_graph or start + rows < len(covectors),
        )[0]
        of_units = gradient[: len(chunk)].double().square().sum(dim=2).cpu().numpy()
        squares.append(of_units * np.square(lengths)[:, None])
        del gradient, cotangents, of_units  # else they lie beside those of the next backward pass
    return np.concatenate(squares)


def from_squares(squares: Float64[np.ndarray, "passes n_positions"], *, sampled: bool) -> Influence:
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


def _fault(question: Question, covector: Pulled) -> str:
    """The block in which the gradient of one covector goes wrong, by a second forward and backward pass."""
    with first_in_backward(question.model.network) as answer:
        inputs = question.embeddings.clone().requires_grad_()
        output = question.outputs(inputs)
        pull_back({"hidden": output.hidden, "logits": output.logits}, inputs, [covector])
    return answer()
