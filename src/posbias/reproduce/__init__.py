"""Published experiments on position bias, run again: what the papers report, what comes out, and what survives."""

from posbias.reproduce.papers import PAPERS, reproduce

__all__ = ["PAPERS", "reproduce"]
