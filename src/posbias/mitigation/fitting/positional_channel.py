"""The search for the hidden channel that carries position, and for its factor, on text and calibration samples.

First the means over windows of text, per layer and position, name the channels that are smooth and monotone in
position; then every one of them, with every factor, is judged by the log-probability of the right answers: on one
prompt of each calibration sample, and the best few on all prompts.
Source: arXiv 2406.02536 and its released code (`experiments/search_dimension`), whose skipped beginnings are shares of
the window here, and which searches with factor 0 alone.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from posbias.errors import UsageError
from posbias.mitigation.fitting.base import FITS, Calibration, FitOptions, Windows
from posbias.mitigation.fitting.calibration import answer_logprob, best_of
from posbias.mitigation.methods.base import Method
from posbias.mitigation.methods.positional_channel import PositionalChannel
from posbias.models.hugging_face import HuggingFaceModel
from posbias.tasks.language import Example

LEAST_POSITIONS = 40
"""Tokens of a window of text below which smoothness cannot be judged."""
SKIPPED_MONOTONE, SKIPPED_SMOOTH = 0.3, 0.2
"""Shares of a window whose first positions do not count: 300 and 200 of 1000 in the released code."""
SMOOTHING = (10, 3)
"""Width and order of the Savitzky-Golay filter under the second differences."""
FACTORS = (0.5, 0.0, -0.5, -1.0)
"""Factors that are tried."""
CHANNELS = 10
"""Monotone channels that are tried, the smoothest first."""
FINALISTS = 4
"""Candidates that are judged on all calibration prompts."""


@FITS.register(PositionalChannel.name)
def fit_positional_channel(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """The channel and the factor under which right answers are most probable, even if the unchanged model does better.

    It tells the log-probability per token of the answers, in nats, mean over examples, of every candidate on one prompt
    of each sample, and of the best few and unchanged on all.

    Raises:
        UsageError: short windows, a family that does not allow it, or no channel that is monotone in position.
        RunError: no calibration prompt fits into the model.
    """
    network, examples = calibration.model, calibration.examples
    means = mean_states(network, calibration.text)
    channels = positional_channels(means, CHANNELS)
    if not channels:
        raise UsageError(f"fit: no channel is monotone in position in more than {len(means) // 4} layers")
    candidates = [
        PositionalChannel(channel, factor, from_question=options.from_question)
        for channel in channels
        for factor in FACTORS
    ]
    samples: dict[str, list[Example]] = {}
    for example in examples:
        samples.setdefault(example.sample, []).append(example)
    _, first = best_of(candidates, network, [of[n % len(of)] for n, of in enumerate(samples.values())])
    ranked = sorted(candidates, key=lambda candidate: -first[str(candidate)])
    best, scores = best_of(ranked[:FINALISTS], network, examples)
    how = {
        "factors": list(FACTORS),
        "from_question": options.from_question,
        "found": channels,
        "unchanged": answer_logprob(network, None, examples),
        "one_prompt_each": first,
        "candidates": scores,
        "windows": len(calibration.text),
        "window_tokens": means.shape[1],
    }
    return best, how


@torch.no_grad()
def mean_states(model: HuggingFaceModel, text: Windows) -> Float64[np.ndarray, "layer position channel"]:
    """The residual stream behind every block, by position, mean over windows."""
    length = len(text[0]) if len(text) else 0
    if length < LEAST_POSITIONS:
        raise UsageError(f"fit: positional_channel needs windows of {LEAST_POSITIONS} or more tokens, got {length}")
    total: Any = 0.0
    for window in text:
        states = model.network(model.token_tensor([window.tolist()]), output_hidden_states=True, use_cache=False)
        total = total + torch.stack([layer[0].cpu() for layer in states.hidden_states[1:]]).double().numpy()
    return np.asarray(total / len(text))


def positional_channels(means: Float64[np.ndarray, "layer position channel"], most: int) -> list[int]:
    """Channels whose cubic fit is monotone, one way, in more than a quarter of the layers; the smoothest first.

    Smoothness is the sum of squared second differences of the curve, scaled to [0, 1] and filtered, in the smoothest
    of those layers. The first two layers and the last are left out.
    """
    from scipy.signal import savgol_filter

    depth, n_positions, _ = means.shape
    if depth < 4:
        return []
    inner = means[2 : depth - 1]
    begin = int(SKIPPED_MONOTONE * n_positions)
    place = np.linspace(-1, 1, n_positions - begin)
    powers = np.vander(place, 4)
    curves = inner[:, begin:]
    steps = np.diff(powers @ (np.linalg.pinv(powers) @ curves), axis=1)
    varies = np.ptp(curves, axis=1) > 0
    rising, falling = ((steps * sign >= 0).all(axis=1) & varies for sign in (1, -1))
    monotone = np.where(rising.sum(axis=0) > falling.sum(axis=0), rising, falling)
    smooth = inner[:, int(SKIPPED_SMOOTH * n_positions) :]
    spread = np.ptp(smooth, axis=1, keepdims=True)
    filtered = savgol_filter(
        (smooth - smooth.min(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1), *SMOOTHING, axis=1
    )
    roughness = np.where(monotone, np.square(np.diff(filtered, n=2, axis=1)).sum(axis=1), np.inf).min(
        axis=0, initial=np.inf
    )
    enough = np.flatnonzero(monotone.sum(axis=0) > depth // 4)
    return [int(channel) for channel in enough[np.argsort(roughness[enough], kind="stable")][:most]]
