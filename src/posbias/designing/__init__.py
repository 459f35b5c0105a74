"""Design: the architecture, or the key bias of a model, whose profile is the one that is asked for."""

from posbias.designing.design import DesignOptions, design
from posbias.designing.initialisation import measure_design
from posbias.designing.result import TARGETS, Design, MeasuredNetworks, Target, distance_apart, resolve_target
