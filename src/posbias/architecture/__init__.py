"""Masks, encodings and mixing schedules of transformers, and the `Architecture` that joins them."""

from posbias.architecture.encodings import (
    ENCODINGS,
    AbsoluteEncoding,
    Alibi,
    Decay,
    Encoding,
    Learned,
    NoEncoding,
    Recurrent,
    Rope,
    Sinusoidal,
    published_alibi_slopes,
)
from posbias.architecture.keys import GammaKey, KeyBias, KeyEncoding, LogSpline
from posbias.architecture.masks import MASKS, Causal, Full, Mask, Prefix, SlidingWindow
from posbias.architecture.spec import SCHEDULES, Architecture, Constant, HeadGroup, PowerDecay, Schedule
