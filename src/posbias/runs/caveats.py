"""Bounds of the trust in a result, and why parts of it are missing, as facts: a name and numbers.

Records keep the facts; sentences are made when they are shown, so that an old run is told in today's words. A refusal
that a run survives is kept as its message.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from posbias.errors import RunError, UsageError

SENTENCES = {
    "bloom_rounds_alibi": (
        "BLOOM adds ALiBi in {dtype}: past position {exact} biases, and the logits they are added to, are rounded to "
        "whole steps; recomputed attention follows the rounding of the biases alone"
    ),
    "mpt_settings_ignored": (
        "transformers ignores this MPT's {settings}: its layers are causal, with ALiBi of maximum 8 and no other "
        "positions or norms"
    ),
    "falcon_alibi_twice": "Falcon's eager attention adds ALiBi twice; its sdpa attention adds it once",
    "falcon_alibi_slopes": (
        "Falcon divides its ALiBi slopes by sqrt(head_dim) = {root:g}: they are not the published ones"
    ),
    "falcon_alibi_bfloat16": (
        "Falcon builds ALiBi in bfloat16 whatever the weights: slopes keep 8 bits, and past position 256 the bias is a "
        "staircase"
    ),
    "yarn_positions": (
        "the configuration names {named:,} positions; YaRN stretches them to {stretched:,} (factor times original "
        "length), which are allowed"
    ),
    "linear_layers_not_counted": (
        "layers stand here for those with attention, in order: {counted} (from 0) of {depth}; linear layers, beside "
        "attention or in its place, and layers that mix no positions are not counted"
    ),
    "default_mixing": (
        "Mixing {mixing:g} in every layer is the default (--mixing): attention carries a tenth of each layer's update "
        "and the residual stream nine tenths; five published models have 0.06 to 0.14 on average."
    ),
    "rope_without_content": (
        "RoPE only turns content, and a rollout has none: the curve of {encoding} assumes queries and keys at an angle "
        "of {angle:g} radians (0: they point the same way) in every pair of features, with logit {logit:g} "
        "(rope(logit=..., angle=...)). Without content RoPE is the same as none; a model's own content differs by head "
        "and token."
    ),
    "bare_decays": (
        "linear layers enter by their decays at bare gates: what a token writes, and the layer's own input beside its "
        "state, are left out (power_rollout has them)"
    ),
    "large_logits": (
        "mean field: attention logits are large at this initialisation, and a network has few heads: a single one lies "
        "at least W1 {one:.3f} from the mean of all, the mean of {count} about {mean:.3f}, a flat line {flat:.3f}; a "
        "distance no larger than that is chance"
    ),
    # Parts of a result that are missing, or are to be read with care.
    "message": "{text}",
    "theory_left_out": "{theory}: {because}",
    "architecture_without_description": "theories of the architecture: the model's family has no description",
    "mixing_without_description": "mixing: the model's family has no description",
    "precision_not_checked": "precision check: {because}",
    "weights_quantised": "the weights are quantised",
    "weights_spread": "the weights are spread over devices",
    "path_not_converged": (
        "{kind}: on some prompts the path did not converge; do not use the profile where path_error is large"
    ),
    "mean_kernel_in_cells": "monotonicity of the mean kernel: it needs kernel_cells={kernel_cells}",
    "mean_content_not_kept": (
        "similarity of the mean content logits: they are kept up to a size, or with mean_content=True"
    ),
    "rollouts_beyond_attention": (
        "rollouts of attention: in some layers linear layers mix positions too, or nothing does"
    ),
    "power_of_normalised_stream": "power: the model normalises the stream itself, after adding to it",
}
"""By the name of a caveat, with places for its numbers."""

Caveat = Mapping[str, Any] | str
"""`caveat`, its name, and its numbers by the names that its sentence has for them; a number may be a caveat itself.
Records of earlier versions hold sentences, which stand for themselves."""


def caveat_text(caveat: Caveat) -> str:
    """The sentence of a caveat; the entries themselves if this version does not know it."""
    if isinstance(caveat, str):
        return caveat
    try:
        numbers = {name: caveat_text(value) if isinstance(value, Mapping) else value for name, value in caveat.items()}
        return SENTENCES[caveat["caveat"]].format(**numbers)
    except (KeyError, TypeError, ValueError):
        return str(caveat)


def distinct(caveats: Iterable[Caveat]) -> list[Caveat]:
    """Caveats without repetition, in their order."""
    return list({caveat_text(caveat): caveat for caveat in caveats}.values())


def caveat_facts(caveats: Iterable[Caveat]) -> dict[str, str]:
    """Sentences of caveats by the names they have in a notebook, such as "caveat 1"."""
    return {f"caveat {number}": caveat_text(caveat) for number, caveat in enumerate(caveats, 1)}


def fact_of(error: UsageError | RunError) -> Caveat:
    """The fact of a refusal that a run survives, for a record: its message."""
    return {"caveat": "message", "text": str(error)}
