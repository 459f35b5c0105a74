"""Most bytes, nodes, items, cells and seconds that one input may take.

With them a hostile file or a slip of the keyboard ends at once; each limit is raised by an environment variable that
its message names.
"""

import os
from dataclasses import dataclass

from posbias.errors import UsageError


@dataclass(frozen=True)
class Limit:
    """A number that an input must not exceed."""

    variable: str
    """The environment variable that replaces the default."""
    default: int
    unit: str
    """Plural name of the things counted, for messages."""

    @property
    def most(self) -> int:
        """The largest number allowed."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 1 <= number < 2**63:
            raise UsageError(f"{self.variable} must be a number of {self.unit} in [1, 2^63), got {text!r}")
        return int(number)

    def check(self, subject: str, number: int) -> None:
        """Refuse more than the limit; the message says how to raise it."""
        if number > self.most:
            digits = f"{number:,}" if number < 10**15 else f"10^{len(str(number)) - 1} or more"
            raise self.exceeded(f"{subject} {'takes' if self.unit == 'cells' else 'is'} {digits} {self.unit}")

    def exceeded(self, complaint: str) -> UsageError:
        """The refusal of an input that is too much, by an unknown amount."""
        return UsageError(
            f"{complaint}; at most {self.most:,} {self.unit} are allowed "
            f"(set {self.variable}=NUMBER in the environment for more)"
        )


READ_BYTES = Limit("POSBIAS_MAX_READ_BYTES", 1 << 25, "bytes")
"""A line, or a file that is read whole: as Python objects it can take twenty times as much memory."""
NUMBERS_BYTES = Limit("POSBIAS_MAX_NUMBERS_BYTES", 1 << 32, "bytes")
"""The numbers of a fitted method; an adapter of rank 64 to all projections of a model of 70 billion takes 3.3 GB."""
BLANK_LINES = Limit("POSBIAS_MAX_BLANK_LINES", 100_000, "blank lines")
"""Blank lines before the next record of a file; 10 GB of line ends fit into 10 MB of gzip."""
PARQUET_BYTES = Limit("POSBIAS_MAX_PARQUET_BYTES", 1 << 27, "bytes")
"""Records of one batch of a Parquet file, decoded: 1 MB of text stored once can stand for a million records."""
YAML_BYTES = Limit("POSBIAS_MAX_YAML_BYTES", 1_000_000, "bytes")
"""A YAML document; it is read at about 2 MB a second."""
ITEMS = Limit("POSBIAS_MAX_ITEMS", 100_000, "items")
"""Items in one prompt of a task: 10^5 key-value pairs are 8 MB of text, some four million tokens."""
EXAMPLES = Limit("POSBIAS_MAX_EXAMPLES", 1_000_000, "examples")
"""Examples of a task: samples times positions."""
TOKENS = Limit("POSBIAS_MAX_PROMPT_TOKENS", 10_000_000, "tokens")
"""Tokens of one prompt that is made, or of one answer."""
REPEATS = Limit("POSBIAS_MAX_REPEATS", 100_000, "repeats")
"""Probes, draws, re-initialisations, starts, rounds, retries and steps of a path."""
UPDATES = Limit("POSBIAS_MAX_UPDATES", 10_000_000, "updates")
"""Updates of one training or fit; the longest published one here has 100,000."""
AT_ONCE = Limit("POSBIAS_MAX_AT_ONCE", 100_000, "at a time")
"""Prompts, samples, members and rows that are worked on together."""
HEADS = Limit("POSBIAS_MAX_HEADS", 30_000, "heads")
"""Heads in all layers of an architecture, each resolved by itself; the largest models have 16,000."""
CELLS = Limit("POSBIAS_MAX_CELLS", 5 * 10**7, "cells")
"""Numbers that one array holds, 0.4 GB in double precision; several stand beside each other."""
STEPS = Limit("POSBIAS_MAX_STEPS", 10**10, "steps")
"""Steps of a theory: layers times heads times positions, at 10^8 to 10^9 a second."""
TEMPLATE_SECONDS = Limit("POSBIAS_MAX_TEMPLATE_SECONDS", 2, "seconds")
"""Processor time that a chat template may take for one conversation."""
TEMPLATE_BYTES = Limit("POSBIAS_MAX_TEMPLATE_BYTES", 1 << 28, "bytes")
"""Memory that a chat template may take for one conversation."""
