"""Attention kernels as operators that pull rows."""

from posbias.theory.kernels.base import AbsoluteKernel, Kernel, dense_heads, masked_softmax
from posbias.theory.kernels.distance import DistanceKernel
from posbias.theory.kernels.keys import KeyKernel
