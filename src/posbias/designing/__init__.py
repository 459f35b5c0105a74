"""Design: the architecture, or the key bias of a model, whose profile is the one that is asked for."""

from posbias.designing.design import design
from posbias.designing.initialisation import measure_design
from posbias.designing.options import DesignOptions
from posbias.designing.result import Design, MeasuredNetworks, distance_apart
from posbias.designing.targets import TARGETS, Target, resolve_target
