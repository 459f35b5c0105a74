"""Design: the architecture, or the key bias of a model, whose profile is the one that is asked for."""

from posbias.designing.design import Design, design, distance_apart
from posbias.designing.targets import TARGETS, Target, resolve_target

__all__ = ["TARGETS", "Design", "Target", "design", "distance_apart", "resolve_target"]
