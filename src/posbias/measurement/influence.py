"""Influence of every input position of a prompt on an output, by vector-Jacobian products (theory, section 6).

One forward pass from the embeddings x to the outputs that are read, then one backward pass to x for each covector of
each kind; the weights are not differentiated. Squares are summed in float64 whatever the model's precision.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.measurement.blocks import WIDER, block_outputs, first_in_forward
from posbias.measurement.kinds import Experiment, Jacobian, Kind, Pullback
from posbias.measurement.outputs import ALL_LAYERS, Influence, Key, PassOptions, Question
from posbias.models.attention import named_blocks
from posbias.models.devices import in_float64
from posbias.models.model import Model, Outputs

Pulled = tuple[str, Float64[Tensor, "prompts outputs _"]]
"""A covector of every prompt to pull back: where it lives ("hidden", "logits", a layer), its part at every output."""


def influence_of_positions(
    model: Model,
    token_ids: Int64[np.ndarray, "prompts n_positions"],
    *,
    kinds: Sequence[Kind],
    keys: Sequence[Key],
    options: PassOptions,
) -> list[dict[str, Influence]]:
    """Every kind of influence of every position of each of some prompts, and that on the chosen layers, by name.

    Covectors of all prompts share passes, in one batch. Cost: with P weights outside the embedding table and N
    positions, 2 P N flops per prompt for the forward and as many for every covector (plus attention, about 2 L N^2 d
    each); memory is the forward's saved activations, of order L N d numbers, times prompts and `rows`. The vocabulary
    enters once per output that is read. Kinds with passes of their own state their cost themselves. Random covectors
    depend on a prompt's key, (seed, index), and the kind's name alone.
    """
    output = options.read_output
    for kind in kinds:
        kind.check_output(output)
    questions = [
        Question(model, output.read(model, tokens), key, options.rows)
        for tokens, key in zip(token_ids, keys, strict=True)
    ]
    pulled: list[tuple[str, Pullback, int | None]] = [
        (kind.name, kind, None) for kind in kinds if isinstance(kind, Pullback)
    ]
    if options.layers is not None:
        if output.targeted:
            raise UsageError(
                f"layers: a hidden state looks at no given tokens, so output {output} cannot be read by depth"
            )
        probes = next((kind for kind in kinds if isinstance(kind, Jacobian)), Jacobian())
        pulled += [(of_layer(layer), probes, layer) for layer in chosen_layers(model, options.layers)]
    results = _pull_back_all(questions, pulled) if pulled else [{} for _ in questions]
    for kind in kinds:
        if isinstance(kind, Experiment):
            for question, result in zip(questions, results, strict=True):
                result[kind.name] = kind.measure(question)
    return [{name: result[name] for name in [*(kind.name for kind in kinds), *result]} for result in results]


def of_layer(layer: int) -> str:
    """The name of the influence on the stream after a layer."""
    return f"layer {layer}"


def chosen_layers(model: Model, layers: str | Sequence[int]) -> tuple[int, ...]:
    """The chosen layer indices, after a check that the network has them."""
    count = len(named_blocks(model.network))
    if not count:
        raise UsageError(f"layers need blocks in an nn.ModuleList; {type(model.network).__name__} has none")
    if layers == ALL_LAYERS:
        return tuple(range(count))
    chosen = tuple(int(layer) for layer in layers)
    if max(chosen) >= count:
        raise UsageError(f"layer {max(chosen)} is not in the network; layers are 0 to {count - 1}")
    return chosen


def _pull_back_all(
    questions: Sequence[Question], pulled: Sequence[tuple[str, Pullback, int | None]]
) -> list[dict[str, Influence]]:
    """All covectors of all kinds, prompts and layers (None: the output), by name, from one forward pass."""
    model, reading = questions[0].model, questions[0].reading
    rows = min(questions[0].rows, sum(kind.passes(model.width) for _, kind, _ in pulled))
    tokens = model.token_tensor([question.reading.token_ids.tolist() for question in questions])
    # Copies of a prompt stand one below another.
    inputs = model.embed(tokens).detach().repeat_interleave(rows, dim=0).requires_grad_()
    watched: AbstractContextManager[list[Tensor]] = nullcontext([])
    if any(layer is not None for _, _, layer in pulled):
        watched = block_outputs(model.network)
    with watched as streams:
        output = questions[0].outputs(inputs)
    finite = (output.hidden.isfinite().flatten(1).all(dim=1) & output.logits.isfinite().flatten(1).all(dim=1)).tolist()
    if not all(finite):
        names, row = ", ".join(name for name, _, layer in pulled if layer is None) or "layers", finite.index(False)
        where = first_in_forward(model, inputs[row : row + 1])
        raise RunError(f"{names}: the output on prompt {questions[row // rows].key[1]} is not finite{where}")
    sources: dict[str, Tensor] = {"hidden": output.hidden, "logits": output.logits}
    vectors: list[Pulled] = []
    counts = []
    for name, kind, layer in pulled:
        site, hidden = kind.site if layer is None else name, output.hidden
        if layer is not None:  # the same probes at every layer: differences between layers are not those of probes
            sources[name] = hidden = streams[layer][:, list(reading.positions)]
        seen = Outputs(hidden[::rows].detach(), output.logits[::rows].detach())
        covectors = kind.covectors(seen, reading, [question.generator(kind.name) for question in questions])
        vectors += [(site, vector) for vector in covectors.unbind(1)]
        counts.append(covectors.shape[1])
    squares = pull_back(sources, inputs, vectors)[..., : reading.n_positions] * reading.share**2
    results: list[dict[str, Influence]] = [{} for _ in questions]
    for (name, kind, _), section in zip(pulled, np.split(squares, np.cumsum(counts)[:-1], axis=1), strict=True):
        for question, result, of_prompt in zip(questions, results, section, strict=True):
            if not np.all(np.isfinite(of_prompt)):
                raise RunError(f"{name}: the gradient on prompt {question.key[1]} is not finite{WIDER}")
            result[name] = from_squares(of_prompt, sampled=kind.sampled)
    return results


def pull_back(
    sources: Mapping[str, Float[Tensor, "batch outputs _"]],
    inputs: Float[Tensor, "batch position feature"],
    covectors: Sequence[Pulled],
) -> Float64[np.ndarray, "prompts passes n_inputs"]:
    """||c' d(source)/dx_j||^2 for every covector c of every prompt.

    Prompts have equally many rows of the batch each, one below another, and as many covectors per backward pass. The
    sources, by the covectors' site, are differentiated by the inputs.
    """
    prompts = len(covectors[0][1])
    rows = len(inputs) // prompts
    squares = []
    for start in range(0, len(covectors), rows):
        chunk = covectors[start : start + rows]
        # Unit covectors go through the network and their lengths, down to 1e-150, come back in float64: the
        # probability of a sure prediction has a gradient that half and single precision would flush to zero.
        lengths = torch.stack([vector.flatten(1).norm(dim=1) for _, vector in chunk], dim=1)
        lengths[lengths == 0] = 1.0
        cotangents: dict[str, Tensor] = {}
        for row, (site, vector) in enumerate(chunk):
            if site not in cotangents:
                cotangents[site] = torch.zeros_like(sources[site])
            cotangents[site][row::rows] = (vector / lengths[:, row, None, None]).to(cotangents[site])
        gradient = torch.autograd.grad(
            [sources[site] for site in cotangents],
            inputs,
            list(cotangents.values()),
            retain_graph=start + rows < len(covectors),
        )[0]
        of_units = in_float64(gradient).square().sum(dim=2).view(prompts, rows, -1)[:, : len(chunk)]
        squares.append(of_units.cpu().numpy() * np.square(lengths.cpu().numpy())[..., None])
        del gradient, cotangents, of_units  # else they lie beside those of the next backward pass
    return np.concatenate(squares, axis=1)


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
