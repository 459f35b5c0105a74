"""`measure`: influence profiles and mixing of a model over many prompts, one prompt at a time."""

from collections.abc import Sequence
from dataclasses import replace

from posbias.checks import check_seed, checked
from posbias.measurement.kinds import Kind, resolve_kinds
from posbias.measurement.measurement import DEFAULT_KINDS, Measurement, MeasureOptions, combine
from posbias.measurement.prompt import check_prompts
from posbias.measurement.running import measure_prompts
from posbias.models.model import Model
from posbias.prompts.prompts import Prompts


@checked
def measure(
    model: Model,
    prompts: Prompts,
    *,
    kinds: Sequence[str | Kind] | str | Kind = DEFAULT_KINDS,
    seed: int = 0,
    options: MeasureOptions | None = None,
) -> Measurement:
    """Measure how much every input position influences the output, and how strongly each layer mixes.

    Per prompt: one forward pass without gradients (mixing), one with, and one backward pass for every covector (4 for
    the default `jacobian`, 1 for `probability`), each 2 P N flops for P weights outside the embedding table. Memory
    beyond the weights is one prompt's saved activations, of order L N d numbers, whatever the number of prompts;
    nothing of size N x vocabulary is formed.

    Args:
        model: What `posbias.load_model` returns.
        prompts: Equally long prompts, at least 1.
        kinds: Kinds of influence, objects or literals such as `"jacobian(probes=8)"`, each at most once.
        seed: Of the random probes, >= 0.
        options: Averaging, intervals; in `options.passes`, the output (the last position's by default), layers, the
            precision check, memory; in `options.run`, the engine and where finished prompts are kept.

    Returns:
        Profiles by kind name, raw norms per prompt, mixing; `left_out` says what the model does not allow.

    Raises:
        UsageError: an unknown kind, one that cannot be measured on the output, or prompts the model cannot take.
        RunError: a gradient is not finite, or a prompt has no influence at all.
    """
    resolved = resolve_kinds(kinds)
    check_seed(seed)
    check_prompts(model, prompts)
    options = options or MeasureOptions()
    for kind in resolved:
        kind.check_output(options.passes.read_output)
    measured = measure_prompts(model, prompts, kinds=resolved, seed=seed, options=options)
    measurement = combine(measured.prompts, kinds=resolved, seed=seed, options=options)
    return replace(measurement, model=measured.model)
