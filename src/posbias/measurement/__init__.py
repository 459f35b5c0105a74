"""Influence, mixing and attention, measured on models; importing this package registers all kinds in `KINDS`."""

from posbias.measurement import integrated, perturbation
