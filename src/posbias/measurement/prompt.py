"""Everything measured on one prompt, as arrays: what is stored, resumed from and resampled.

It depends on the model, the prompt's tokens, the kinds, the options and (seed, index) alone, so prompts may be
measured in any order, on any day, and combined afterwards; prompts that share a batch change one another's rounding
and nothing else. Influence of every input position is by vector-Jacobian products (theory, section 6): one forward pass
from the embeddings x to the outputs that are read, then one backward pass to x for each covector of each kind; the
weights are not differentiated. Beside it: the mixing, and the influence on the stream after each layer.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posbias.errors import RunError, UsageError
from posbias.measurement.kinds import Experiment, Jacobian, Kind, Pullback
from posbias.measurement.options import ALL_LAYERS, PassOptions
from posbias.measurement.outputs import (
    WIDER,
    Influence,
    Key,
    Question,
    TokenIds,
    block_outputs,
    checkpointed,
    first_in_forward,
    over_draws,
)
from posbias.models.attention import BranchWatch, named_blocks, watch_branches
from posbias.models.devices import in_float64
from posbias.models.hugging_face import HuggingFaceModel
from posbias.models.model import BranchNorms, Model, Outputs
from posbias.prompts import Prompts

Pulled = tuple[str, Float64[Tensor, "prompts outputs _"]]
"""A covector of every prompt to pull back: where it lives ("hidden", "logits", a layer), its part at every output."""


def chosen_layers(model: Model, layers: str | Sequence[int]) -> tuple[int, ...]:
    """The chosen layer indices, after a check that the network has them."""
    count = len(named_blocks(model.network))
    if not count:
        raise UsageError(f"layers need blocks in an nn.ModuleList; {type(model.network).__name__} has none")
    chosen = tuple(range(count) if layers == ALL_LAYERS else map(int, layers))
    if max(chosen) >= count:
        raise UsageError(f"layer {max(chosen)} is not in the network; layers are 0 to {count - 1}")
    return chosen


def _pull_back_all(
    questions: Sequence[Question], pulled: Mapping[str, tuple[Pullback, int | None]]
) -> list[dict[str, Influence]]:
    """The influence of every kind on the output, or on the stream after its layer, from one forward pass, by name.

    Covectors of all prompts share passes. Cost: with P weights outside the embedding table and N positions, 2 P N flops
    per prompt for the forward pass and as many for every covector (plus attention, about 2 L N^2 d each); memory is the
    forward pass's saved activations, of order L N d numbers, times prompts. The vocabulary enters once per output that
    is read. Random covectors depend on a prompt's key, (seed, index), and the kind's name alone.
    """
    if not pulled:
        return [{} for _ in questions]
    model, reading = questions[0].model, questions[0].reading
    tokens = model.token_tensor([question.reading.token_ids.tolist() for question in questions])
    inputs = model.embed(tokens).detach().requires_grad_()
    layered = any(layer is not None for _, layer in pulled.values())
    watched: AbstractContextManager[list[Tensor]] = block_outputs(model.network) if layered else nullcontext([])
    with watched as streams:
        output = questions[0].outputs(inputs)
    finite = (output.hidden.isfinite().flatten(1).all(dim=1) & output.logits.isfinite().flatten(1).all(dim=1)).tolist()
    if not all(finite):
        names, row = ", ".join(name for name, (_, layer) in pulled.items() if layer is None), finite.index(False)
        where = first_in_forward(model, inputs[row : row + 1])
        raise RunError(f"{names or 'layers'}: the output on prompt {questions[row].key[1]} is not finite{where}")
    sources = {"hidden": output.hidden, "logits": output.logits}
    vectors: list[Pulled] = []
    counts = []
    for name, (kind, layer) in pulled.items():
        site, hidden = kind.site if layer is None else name, output.hidden
        if layer is not None:  # the same probes at every layer: differences between layers are not those of probes
            sources[name] = hidden = streams[layer][:, list(reading.positions)]
        seen = Outputs(hidden.detach(), output.logits.detach())
        covectors = kind.covectors(seen, reading, [question.generator(kind.name) for question in questions])
        vectors += [(site, vector) for vector in covectors.unbind(1)]
        counts.append(covectors.shape[1])
    squares = pull_back(sources, inputs, vectors)[..., : reading.n_positions] * reading.share**2
    results: list[dict[str, Influence]] = [{} for _ in questions]
    for (name, (kind, _)), section in zip(pulled.items(), np.split(squares, np.cumsum(counts)[:-1], 1), strict=True):
        for question, result, of_prompt in zip(questions, results, section, strict=True):
            if not np.all(np.isfinite(of_prompt)):
                raise RunError(f"{name}: the gradient on prompt {question.key[1]} is not finite{WIDER}")
            # The root of the sum over covectors, or of the mean over random ones.
            result[name] = (
                over_draws(of_prompt, root=True) if kind.sampled else Influence(np.sqrt(of_prompt.sum(axis=0)), None)
            )
    return results


def pull_back(
    sources: Mapping[str, Float[Tensor, "prompts outputs _"]],
    inputs: Float[Tensor, "prompts position feature"],
    covectors: Sequence[Pulled],
) -> Float64[np.ndarray, "prompts passes n_inputs"]:
    """||c' d(source)/dx_j||^2 for every covector c of every prompt; all prompts share a backward pass.

    The sources, by the covectors' site, are differentiated by the inputs.
    """
    squares = []
    for number, (site, vector) in enumerate(covectors, 1):
        # Unit covectors go through the network and their lengths, down to 1e-150, come back in float64: the
        # probability of a sure prediction has a gradient that half and single precision would flush to zero.
        lengths = vector.flatten(1).norm(dim=1)
        lengths[lengths == 0] = 1.0
        unit = (vector / lengths[:, None, None]).to(sources[site])
        gradient = torch.autograd.grad(sources[site], inputs, unit, retain_graph=number < len(covectors))[0]
        of_units = in_float64(gradient).square().sum(dim=2)
        squares.append(of_units.cpu().numpy() * np.square(lengths.cpu().numpy())[:, None])
        del gradient, of_units  # else they lie beside those of the next backward pass
    return np.stack(squares, axis=1)


def mixing_from_norms(norms: BranchNorms, *, prompt: int) -> dict[str, Float64[np.ndarray, "layers"]]:
    """Size of every layer's attention branch a beside the stream x it is added to, on a single prompt, in [0, 1].

    Two definitions are in use (arXiv 2602.16837), that of the code and that of the paper: `token_mean`, the mean over
    tokens of |a| / (|x| + |a|), and `frobenius`, ||a||_F / (||x||_F + ||a||_F). a is what the branch really adds, after
    any post-norm. The prompt's index is for messages.
    """
    share = norms.share(f" on prompt {prompt}")
    stream, branch = (
        np.linalg.norm(in_float64(values[:, 0]).numpy(force=True), axis=1) for values in (norms.stream, norms.branch)
    )
    return {"token_mean": share.mean(axis=1), "frobenius": branch / (stream + branch)}


@dataclass(frozen=True, eq=False)
class PromptMeasurement:
    """Everything measured on one prompt."""

    norms: dict[str, Float64[np.ndarray, "n_positions"]]
    """Influence of every position by kind name, not normalised."""
    standard_errors: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """Errors of the norms, for sampled kinds only."""
    mixing: dict[str, Float64[np.ndarray, "layers"]] = field(default_factory=dict)
    """As `mixing_from_norms` defines it twice; none if blocks add no branches of attention."""
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    layers: Sequence[int] = ()
    """The layers whose own output's influence was measured, too."""
    depth: Float64[np.ndarray, "chosen n_positions"] | None = None
    """Influence ||dh_l/dx_j||_F on the stream after each of them, not normalised."""
    left_out: Sequence[str] = ()
    """Limits of the numbers, and what the model does not allow."""
    theories: dict[str, Float64[np.ndarray, "n_positions"]] = field(default_factory=dict)
    """Profiles that theories predict of the prompt, if they were asked for (`posbias.measurement.theories`)."""
    networks: Float64[np.ndarray, "network n_positions"] | None = None
    """The profiles that mean field averages: one, or one for each network whose heads it draws."""


def measure_prompt(
    model: Model, token_ids: TokenIds, *, kinds: Sequence[Kind], key: Key, options: PassOptions | None = None
) -> PromptMeasurement:
    """Measure one prompt: every kind of influence, and the mixing where blocks add branches of attention.

    Kinds are distinct, as `resolve_kinds` returns them; the key is all that random probes depend on, both numbers >= 0.

    Raises:
        RunError: a value is not finite.
        UsageError: a network without blocks for checkpointing or layers, or an output that a kind does not take.
    """
    (measured,) = measure_together(model, token_ids[None], kinds=kinds, keys=[key], options=options)
    return measured


def measure_together(
    model: Model,
    token_ids: Int64[np.ndarray, "prompts n_positions"],
    *,
    kinds: Sequence[Kind],
    keys: Sequence[Key],
    options: PassOptions | None = None,
) -> list[PromptMeasurement]:
    """Measure prompts in one batch, each as `measure_prompt` does; only covectors share passes."""
    options = options or PassOptions()
    output = options.read_output
    for kind in kinds:
        kind.check_output(output)
    questions = [Question(model, output.read(model, tokens), key) for tokens, key in zip(token_ids, keys, strict=True)]
    pulled: dict[str, tuple[Pullback, int | None]] = {
        kind.name: (kind, None) for kind in kinds if isinstance(kind, Pullback)
    }
    layers = () if options.layers is None else chosen_layers(model, options.layers)
    if layers and output.targeted:
        raise UsageError(f"layers: a hidden state looks at no given tokens, so output {output} cannot be read by depth")
    probes = next((kind for kind in kinds if isinstance(kind, Jacobian)), Jacobian())
    pulled |= {f"layer {layer}": (probes, layer) for layer in layers}
    watching: AbstractContextManager[BranchWatch | None] = nullcontext()
    if isinstance(model, HuggingFaceModel):  # the first pass gives the mixing, too
        watching = watch_branches(model.network)
    with watching as watch, checkpointed(model.network, enabled=options.checkpointing):
        found = _pull_back_all(questions, pulled)
        for kind in kinds:
            if isinstance(kind, Experiment):
                for question, result in zip(questions, found, strict=True):
                    result[kind.name] = kind.measure(question)
    mixings: list[dict[str, np.ndarray]] = [{} for _ in keys]
    with suppress(UsageError):  # blocks that add no branches of attention
        norms = watch.norms() if watch is not None and watch.seen else None
        if norms is None or norms.stream.shape[1:] != token_ids.shape:  # a target stood behind them, or other prompts
            norms = model.branch_norms(model.token_tensor(token_ids.tolist()))
        rows = (torch.split(values, 1, dim=1) for values in (norms.stream, norms.branch))
        of_prompts = map(BranchNorms, *rows)
        mixings = [mixing_from_norms(each, prompt=key[1]) for each, key in zip(of_prompts, keys, strict=True)]
    measured = []
    for result, mixing in zip(found, mixings, strict=True):
        by_kind = {kind.name: result[kind.name] for kind in kinds}
        errors = {name: each.standard_errors for name, each in by_kind.items()}
        measured.append(
            PromptMeasurement(
                norms={name: each.norms for name, each in by_kind.items()},
                standard_errors={name: values for name, values in errors.items() if values is not None},
                mixing=mixing,
                details={name: each.details for name, each in by_kind.items() if each.details},
                layers=layers,
                depth=np.stack([result[f"layer {layer}"].norms for layer in layers]) if layers else None,
                left_out=[limit for each in result.values() for limit in each.left_out],
            )
        )
    return measured


def shares_passes(kinds: Sequence[Kind]) -> bool:
    """Tell whether prompts of a batch share passes: those of covectors, not those of kinds with passes of their own."""
    return any(isinstance(kind, Pullback) for kind in kinds)


def check_prompts(model: Model, prompts: Prompts) -> None:
    """Refuse prompts that the model cannot take."""
    if model.max_positions is not None and prompts.n_positions > model.max_positions:
        raise UsageError(f"prompts have {prompts.n_positions} positions; the model takes at most {model.max_positions}")
    largest = int(prompts.token_ids.max())
    if largest >= model.vocabulary_size:
        raise UsageError(
            f"token id {largest} in the prompts; the model's vocabulary is 0 to {model.vocabulary_size - 1}"
        )
