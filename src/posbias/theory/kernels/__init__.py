"""Attention kernels as operators: pulls, pushes, and the dense matrices they are checked against."""

from posbias.theory.kernels.base import AbsoluteKernel, Kernel, SumKernel, dense_group, dense_heads, masked_softmax
from posbias.theory.kernels.build import group_kernel, layer_kernels
from posbias.theory.kernels.distance import DistanceKernel
from posbias.theory.kernels.interval import IntervalKernel
from posbias.theory.kernels.linear import LinearKernel

__all__ = [
    "AbsoluteKernel",
    "DistanceKernel",
    "IntervalKernel",
    "Kernel",
    "LinearKernel",
    "SumKernel",
    "dense_group",
    "dense_heads",
    "group_kernel",
    "layer_kernels",
    "masked_softmax",
]
