"""`measure`: influence profiles and mixing of a model over many prompts, one prompt at a time."""

from collections.abc import Sequence

from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.measurement import DEFAULT_KINDS, Measurement, MeasureOptions, check_seed, combine
from posbias.measurement.prompt import check_prompts, measure_prompt
from posbias.models.model import Model
from posbias.progress import track
from posbias.prompts.prompts import Prompts


def measure(
    model: Model,
    prompts: Prompts,
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: int = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Measure how much every input position influences the last one, and how strongly each layer mixes.

    Per prompt: one forward pass without gradients (mixing), one with, and one backward pass for every covector (4 for
    the default `jacobian`, 1 for `probability`), each 2 P N flops for P weights outside the embedding table. Memory
    beyond the weights is one prompt's saved activations, of order L N d numbers, whatever the number of prompts;
    nothing of size N x vocabulary is formed.

    Args:
        model: What `posbias.load_model` returns.
        prompts: Equally long prompts, at least 1.
        kinds: Kinds of influence, objects or literals such as `"jacobian(probes=8)"`, each at most once.
        seed: Of the random probes and the bootstrap, >= 0.
        options: Averaging, intervals, memory.

    Returns:
        Profiles by kind name, raw norms per prompt, mixing; `left_out` says what the model does not allow.

    Raises:
        UsageError: an unknown kind, or prompts the model cannot take.
        RunError: a gradient is not finite, or a prompt has no influence at all.
    """
    resolved = resolve_kinds(kinds)
    check_seed(seed)
    check_prompts(model, prompts)
    options = options or MeasureOptions()
    measured = [
        measure_prompt(model, token_ids, kinds=resolved, key=(seed, index), options=options.passes)
        for index, token_ids in enumerate(track(prompts.token_ids, "measuring prompts"))
    ]
    return combine(measured, kinds=resolved, seed=seed, options=options)
