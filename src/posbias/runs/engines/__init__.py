"""Engines that do a run's work: in this process, in worker processes, or on a Ray cluster; equal bits from each."""

from posbias.runs.engines.engine import ENGINES, Arrays, Engine, Workload, collect
from posbias.runs.engines.local import Local
from posbias.runs.engines.ray_cluster import Ray

__all__ = ["ENGINES", "Arrays", "Engine", "Local", "Ray", "Workload", "collect"]
