"""What subjects, kinds, theories, metrics and statistics are called, and what tells one of several curves apart.

A curve's settings are plain values by name, such as {"theory": "rollout", "encoding": "alibi", "mixing": [0.1, 0.1]}:
of several predictions or measurements, each is named by what differs, by one function wherever several are drawn
together, in one run or of several.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SUBJECTS = {"trained": "as trained", "initialised": "at initialisation"}

KINDS = {
    "jacobian": "Jacobian",
    "probability": "probability gradient",
    "logprob": "log-probability gradient",
    "logit": "logit gradient",
    "integrated_gradients": "integrated gradients",
    "perturbation": "perturbation",
}

THEORIES = {
    "attention_only": "attention-only rollout",
    "rollout": "published residual rollout",
    "attention_rollout": "rollout of its own attention",
    "rollout_content": "residual rollout with content",
    "continuous": "continuous limit",
    "closed_form": "closed form",
    "power_rollout": "power rollout",
    "mean_field": "mean-field theory",
    "flat": "flat line",
}

ATTENTION_ROLLOUTS = {
    "rollout": "rollout, measured mixing",
    "attention_only": "attention only",
    "norm_weighted": "norm-weighted",
}

MIXINGS = {
    "frobenius": "Frobenius (paper)",
    "token_mean": "token mean (code)",
}

METRICS = {
    "wasserstein": "W1",
    "spearman": "rank correlation",
    "total_variation": "total variation",
    "symmetric_kl": "symmetric KL",
    "log_error": "log error",
    "minimum_shift": "minimum shift",
}

STATISTICS = {
    "first_tenth": "first tenth",
    "middle_tenth": "middle tenth",
    "last_tenth": "last tenth",
    "first_token": "first position",
    "last_token": "last position",
    "interior_recency": "last tenth without last position",
    "first_over_middle": "first minus middle tenth",
    "last_over_middle": "last (its last position left out) minus middle tenth",
    "mean_position": "mean position",
    "minimum_position": "minimum at",
}

Settings = Mapping[str, Any]
"""What one curve was computed or measured for; a list is a value per layer."""

BARE = ("curve", "model", "theory", "kind", "state", "mask", "encoding", "prompts")
"""Settings whose value says what it is of; every other stands with its name, as in "mixing 0.1"."""
WRITTEN_OUT = 4
"""Values of a list that a name writes out; of a longer one the ends."""


def label(names: dict[str, str], name: str) -> str:
    """The report's word for a name; the name itself with spaces if there is none."""
    return names.get(name, name.replace("_", " "))


def setting_text(value: Any) -> str:
    """A value in few characters: a number by four digits, a list of equal values as one of them, no value as "none"."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, list | tuple):
        return "none" if value is None else str(value)
    texts = [setting_text(entry) for entry in value]
    if len(set(texts)) == 1:
        return texts[0]
    if len(texts) > WRITTEN_OUT:
        texts = [*texts[: WRITTEN_OUT - 1], "...", texts[-1]]
    return f"[{', '.join(texts)}]"


def differing(settings: Sequence[Settings]) -> list[str]:
    """The names of the settings in which some of the curves that have them differ, in their first order.

    Those with which curves begin come first, and all of them differ if curves begin with different ones, as a theory's
    and a measurement's.
    """
    firsts = [name for curve in settings for name in [*curve][:1]]
    names = dict.fromkeys([*firsts, *(name for curve in settings for name in curve)])
    texts = {name: {setting_text(curve[name]) for curve in settings if name in curve} for name in names}
    apart = firsts if len(set(firsts)) > 1 else ()
    return [name for name in names if name in apart or len(texts[name]) > 1]


def curve_names(settings: Sequence[Settings]) -> list[str]:
    """Each curve by the settings in which it differs from the others; those that differ in none are numbered.

    Args:
        settings: Of every curve; one alone, and one that has none of the differing settings, goes by the first of its
            own.

    Returns:
        As many names, each once.
    """
    differing_names = differing(settings)
    names = [", ".join(_said(name, curve[name]) for name in differing_names if name in curve) for curve in settings]
    firsts = [next((_said(name, value) for name, value in curve.items()), "") for curve in settings]
    names = [name or first for name, first in zip(names, firsts, strict=True)]
    return numbered(names)


def names_beside(settings: Sequence[Settings]) -> list[str]:
    """The names of curves that are all drawn together, with theories, kinds and states in words."""
    return curve_names([worded(curve) for curve in settings])


def worded(settings: Settings) -> Settings:
    """Theories, kinds and states in words."""
    words = {"theory": THEORIES, "kind": KINDS, "state": SUBJECTS}
    return {name: label(words[name], value) if name in words else value for name, value in settings.items()}


def numbered(names: Sequence[str]) -> list[str]:
    """Number every name that occurs more than once: "alibi (1)", "alibi (2)"."""
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def _said(name: str, value: Any) -> str:
    text = setting_text(value)
    if name in BARE:
        return text
    return f"{text} {name}" if name == "positions" else f"{name.replace('_', ' ')} {text}"
