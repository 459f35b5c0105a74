"""The command line: each verb loads, calls one library function, saves and prints; nothing is computed here."""

from posbias.cli.app import main

__all__ = ["main"]
