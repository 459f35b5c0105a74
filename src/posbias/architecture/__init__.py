"""Masks and encodings of transformers, and the `Architecture` that joins them."""

from posbias.architecture.encodings import (
    ENCODINGS,
    Alibi,
    Decay,
    Encoding,
    NoEncoding,
    Rope,
    Sinusoidal,
    published_alibi_slopes,
)
from posbias.architecture.keys import GammaKey, KeyBias, KeyEncoding, LogSpline
from posbias.architecture.masks import MASKS, Causal, Full, Mask, Prefix, SlidingWindow
from posbias.architecture.spec import Architecture, HeadGroup
