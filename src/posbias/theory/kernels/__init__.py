"""Attention kernels as operators that pull rows and push columns."""

from posbias.theory.kernels.base import AbsoluteKernel, Kernel, SumKernel, dense_heads, masked_softmax
from posbias.theory.kernels.distance import DistanceKernel, rises_too_far
from posbias.theory.kernels.interval import IntervalKernel
from posbias.theory.kernels.keys import KeyKernel
from posbias.theory.kernels.linear import LinearKernel
