"""`fit`: a method with the parameters that suit one model, from calibration samples alone (`fits.py`)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from posbias.checks import checked
from posbias.errors import UsageError
from posbias.mitigation.fits import FITS, Calibration, Fit, Windows
from posbias.mitigation.methods.adapter import Adapter
from posbias.mitigation.methods.base import MITIGATIONS, Method
from posbias.mitigation.methods.recipe import identity
from posbias.mitigation.options import FitOptions
from posbias.models.hugging_face import HuggingFaceModel
from posbias.prompts.loading import load_prompts
from posbias.tasks.language import Example


@dataclass(frozen=True)
class Fitted:
    """A fitted method and how it came about."""

    method: Method
    how: dict[str, Any] = field(repr=False)
    """Options, calibration samples and what the fit saw of them, as plain values for a recipe or record; `samples` are
    `contents` of these, by which a run refuses to judge the recipe on them."""


def fit_of(spelling: str) -> Fit | None:
    """The fit of a method, by its name or the spelling of an unfitted adapter; None if it has no parameters to find."""
    name = spelling.partition("(")[0].strip()
    MITIGATIONS[name]  # refused if unknown
    if name not in FITS or name == spelling.strip():
        return FITS.get(name)
    spelled = MITIGATIONS.parse(spelling)
    return partial(FITS[name], template=spelled) if isinstance(spelled, Adapter) and not spelled.weights else None


DISTINCT = 32
"""Characters from which on a passage is taken to belong to one sample alone."""
LEAST_SAMPLES = 4
"""Calibration samples below which a fit is refused: it would learn them by heart."""
FIT_WINDOWS, WINDOW = 32, 256
"""Windows of ordinary text that a fit may read, and their tokens."""
JUDGED_TEXT = "default#jargon_file,us_founding_documents"
"""Files of the default corpus that judge, unless another text is asked for."""
FITTED_TEXT = "default#austen,king_james_bible,milton_shakespeare"
"""Its other files, which fits read."""


def fitting_text(model: HuggingFaceModel, *, length: int = WINDOW, seed: int) -> Windows:
    """Windows of ordinary text for fits."""
    length = min(length, model.max_positions or length)
    return list(load_prompts(FITTED_TEXT, model=model, n_positions=length, seed=seed, count=FIT_WINDOWS).token_ids)


def contents(examples: Sequence[Example]) -> set[str]:
    """Hashes by which samples are known again in other prompts, as text or as a conversation.

    An answer, and a question, is hashed beside all passages, in whatever order and wherever the question stands, and
    beside its own passage if that is long enough to be nobody else's.
    """
    hashes = set()
    for example in examples:
        passages = [example.text[begin:end].strip() for begin, end in example.passages] or [example.text]
        begin, end = example.gold or (0, 0)  # by its span: with `depths` a position is no index of a passage
        gold = next((example.text[slice(*each)].strip() for each in example.passages if begin <= each[0] < end), "")
        for texts in (sorted(passages), [gold] if len(gold) >= DISTINCT else []):
            for asked in filter(None, [f" {example.target.strip()}", example.question] if texts else []):
                hashes.add(hashlib.sha256("\0".join([asked, *texts]).encode()).hexdigest()[:16])
    return hashes


@checked
def fit(
    method: str,
    model: HuggingFaceModel,
    calibration: Sequence[Example],
    *,
    text: Windows | None = None,
    options: FitOptions | None = None,
) -> Fitted:
    """Fit a method's parameters to a model, from calibration samples alone.

    Args:
        method: "adapter", "adapter(rank=2)", "key_bias", "context_bias", or "temperature", of which the candidate with
            the most probable right answers is chosen (per token, averaged over samples and positions).
        model: What `load_model` returns.
        calibration: Examples with their answers, of at least 4 samples; all positions that matter among them.
        text: Token ids of windows of ordinary text, for fits that read some; None: windows of the default corpus, from
            files on which `mitigate` does not judge.
        options: Settings of a fit by gradient.

    Raises:
        UsageError: a method without parameters to fit, or too few samples.
    """
    how = fit_of(method)
    if how is None:
        raise UsageError(f"{method} has no parameters to fit; allowed: {', '.join(FITS)}")
    options = options or FitOptions()
    given = partial(fitting_text, model, seed=options.seed) if text is None else lambda: text
    return run_fit(how, Calibration(model, calibration, given), options=options)


def run_fit(how: Fit, calibration: Calibration, *, options: FitOptions) -> Fitted:
    """The method of a fit, with the samples that it has seen."""
    examples = calibration.examples
    samples = len({example.sample for example in examples})
    if samples < LEAST_SAMPLES:
        raise UsageError(f"fit: {samples} calibration samples given; at least {LEAST_SAMPLES} are needed")
    method, found = how(calibration, options)
    facts = {
        **found,
        "calibration_samples": samples,
        "calibration_prompts": len(examples),
        "samples": sorted(contents(examples)),
    }
    return Fitted(replace(method, fitted_to=identity(calibration.model)), facts)
