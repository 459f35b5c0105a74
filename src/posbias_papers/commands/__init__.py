"""The commands of published work, which `posbias.cli.app` finds by name."""

from posbias_papers.commands import reproduce, verify

__all__ = ["reproduce", "verify"]
