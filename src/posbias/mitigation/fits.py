"""The fits of single methods, each registered under the name of its method.

By gradient (`descent.py`): `adapter`, with A drawn at random and B 0, so that nothing changes at first; `key_bias`,
splines of ln(1 + j), a few numbers per head and layer; `context_bias`, one number for all keys before the question. By
the log-probability of right answers under every candidate: `temperature` and `positional_channel`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from posbias.architecture import LogSpline
from posbias.architecture.keys import log_spline_basis
from posbias.errors import UsageError
from posbias.interventions.keys import KeyLogits, biased
from posbias.measurement.outputs import checkpointed
from posbias.mitigation.descent import fit_by_gradient
from posbias.mitigation.fitting import FITS, Calibration, FitOptions, Windows, answer_logprob, best_of
from posbias.mitigation.methods.adapter import SIDES, Adapter, target_projections, tensors_hash, tuned
from posbias.mitigation.methods.base import Method, Mitigation
from posbias.mitigation.methods.context_bias import ContextBias
from posbias.mitigation.methods.key_bias import BEFORE, KeyBiasMethod
from posbias.mitigation.methods.positional_channel import PositionalChannel
from posbias.mitigation.methods.temperature import Temperature
from posbias.models.hugging_face import HuggingFaceModel
from posbias.tasks.language import Example

ADAPTER: Mapping[str, Any] = {"steps": 60, "rate": 0.002, "batch": 4, "held_out": 0.2}
"""Settings of this fit where nothing else is asked for."""


class AdapterNumbers:
    """A and B of every target projection."""

    def __init__(self, template: Adapter, model: HuggingFaceModel, options: FitOptions) -> None:
        self.template, self.options = template, options
        generator = np.random.default_rng([options.seed, template.rank])
        dtype = torch.promote_types(model.dtype, torch.float32)
        self._updates: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.count = 0
        for projection in target_projections(model, template):
            made, read = projection.shape
            # As torch draws a linear map: uniform, of variance 1 / (3 x features read).
            drawn = generator.uniform(-(read**-0.5), read**-0.5, (template.rank, read))
            down, up = (
                nn.Parameter(torch.tensor(numbers, dtype=dtype, device=model.device))
                for numbers in (drawn, np.zeros((made, template.rank)))
            )
            rows, targets = torch.cat(list(projection.rows.values())), torch.zeros_like(up[:, :1])
            targets[rows] = 1.0
            self.count += template.rank * (read + len(rows))
            up.register_hook(targets.mul)  # type: ignore[no-untyped-call] # other rows stay 0
            self._updates[projection.path] = down, up

    @property
    def free(self) -> list[Tensor]:
        """All A and B."""
        return [numbers for sides in self._updates.values() for numbers in sides]

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these updates, from the first token on."""
        recomputed = checkpointed(model.network, enabled=self.options.checkpointing)
        with tuned(model.network, self._updates), recomputed:
            yield

    def method(self) -> Adapter:
        """The adapter with these numbers, in float32."""
        tensors = {
            f"{path}.{side}": np.ascontiguousarray(numbers.detach().float().cpu().numpy())
            for path, sides in self._updates.items()
            for side, numbers in zip(SIDES, sides, strict=True)
        }
        return replace(self.template, weights=tensors_hash(tensors), updates=tensors)


@FITS.register(Adapter.name)
def fit_adapter(
    calibration: Calibration, options: FitOptions, *, template: Adapter | None = None
) -> tuple[Method, dict[str, Any]]:
    """Updates under which a model gives the right answers wherever they stand, and reads ordinary text as before.

    The template says rank, targets and strength. They act on all tokens, and have neither knots nor scales.
    """
    numbers = partial(AdapterNumbers, template or Adapter())
    return fit_by_gradient(numbers, calibration, options.settled(ADAPTER, knots=(), from_question=False, scales=False))


BIAS: Mapping[str, Any] = {"steps": 300, "rate": 0.05, "batch": 1, "held_out": 0.0}
"""Settings of these fits where nothing else is asked for."""
SCALE_RATE = 0.4
"""Rate of the logarithm of a head's scale, as a share of the rate of biases."""


class BiasNumbers:
    """The numbers that are fitted: biases at all knots but the last, which is 0; or of the context, with scales."""

    def __init__(self, model: HuggingFaceModel, options: FitOptions) -> None:
        self.options = options
        heads, depth = model.sizes.get("heads", 0), model.sizes.get("layers", 0)
        shape = depth, heads, max(1, len(options.knots) - 1) + options.scales
        self._numbers = torch.zeros(shape, dtype=torch.float64, requires_grad=True)  # 0 for no change
        self.free, self.count = [self._numbers], self._numbers.numel()
        self._basis = cache(lambda n_positions: torch.tensor(log_spline_basis(options.knots, n_positions)[:, :-1]))

    @contextmanager
    def applied(self, model: HuggingFaceModel, begin: int) -> Iterator[None]:
        """The model with these numbers, for prompts of which the question begins at that token."""

        def logits(layer: int, n_positions: int) -> Float[Tensor, "heads n"]:
            basis = self._basis(n_positions) if self.options.knots else BEFORE[:, None]
            return self._numbers[layer][:, : basis.shape[1]] @ basis.T

        def scales(layer: int) -> Float[Tensor, "heads"]:
            return (SCALE_RATE * self._numbers[layer][:, -1]).exp()

        added = KeyLogits(logits, scales if self.options.scales else None, by_side=not self.options.knots)
        recomputed = self.options.checkpointing and not self.options.from_question
        with (
            biased(model, "fit", added, first_query=begin),
            checkpointed(model.network, enabled=recomputed),
        ):
            yield

    def method(self) -> Mitigation:
        """The method with these numbers, to six digits."""
        scales = _rounded((SCALE_RATE * self._numbers[..., -1]).exp()) if self.options.scales else None
        if not self.options.knots:
            return ContextBias(_rounded(self._numbers[..., 0]), scales)
        by_layer = [
            [[*head, 0.0] for head in layer] for layer in _rounded(self._numbers[..., : len(self.options.knots) - 1])
        ]
        biases = [str(LogSpline(values=heads, knots=self.options.knots)) for heads in by_layer]
        return KeyBiasMethod(biases, from_question=self.options.from_question, scales=scales)


def _rounded(numbers: Tensor) -> Any:
    """Nested lists of numbers to six digits."""
    return np.vectorize(lambda value: float(f"{value:.6g}"))(numbers.detach().numpy()).tolist()


@FITS.register(KeyBiasMethod.name)
def fit_key_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Splines over positions, for all queries, with a penalty, or from the question on, with scales."""
    if not options.knots:
        raise UsageError(f"fit: {KeyBiasMethod.name} needs knots; allowed without any is {ContextBias.name}")
    fixed: dict[str, Any] = {"penalty": 0.0} if options.from_question else {"scales": False}
    return fit_by_gradient(BiasNumbers, calibration, options.settled(BIAS, **fixed))


@FITS.register(ContextBias.name)
def fit_context_bias(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """One number for every head and layer, for all keys before the question, and a scale."""
    options = options.settled(BIAS, knots=(), from_question=True, penalty=0.0)
    return fit_by_gradient(BiasNumbers, calibration, options)


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


SCALES = (0.12, 0.14, 0.16, 0.18, 0.2, 0.25)
"""Scales that are tried."""


@FITS.register(Temperature.name)
def fit_temperature(calibration: Calibration, options: FitOptions) -> tuple[Method, dict[str, Any]]:
    """Score the answers under all scales, one after another."""
    best, scores = best_of([Temperature(scale) for scale in SCALES], calibration.model, calibration.examples)
    return best, {"candidates": scores}
