"""Design: the architecture, or the key bias of a model, whose profile is the one that is asked for."""

from posbias.designing.design import design
from posbias.designing.measured import MeasuredDesign, design_record, measure_design
from posbias.designing.options import DesignOptions
from posbias.designing.result import Design, MeasuredNetworks, TriedDesign, distance_apart
from posbias.designing.targets import TARGETS, Target, resolve_target

__all__ = [
    "TARGETS",
    "Design",
    "DesignOptions",
    "MeasuredDesign",
    "MeasuredNetworks",
    "Target",
    "TriedDesign",
    "design",
    "design_record",
    "distance_apart",
    "measure_design",
    "resolve_target",
]
