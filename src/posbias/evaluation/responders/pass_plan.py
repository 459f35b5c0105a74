"""A plan of which sequences a model runs together, and which continue a beginning that another has run: arithmetic.

Sequences form a tree of beginnings. In every subtree one sequence is run whole, and those that branch off continue its
keys and values; of the branches at a place the one with the most sequences goes on with the same, so that few passes
have to follow one another. All sequences of a pass run as many tokens at their end as the one that has the most to run:
whoever has fewer runs some of its beginning again, and whoever is shorter than that is padded on the left. Whether that
is cheaper than another pass is a matter of tokens: a pass costs as much as so many tokens whatever is in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int64

TokenIds = Int64[np.ndarray, "_"]
UNBOUNDED = 1 << 62
"""More tokens than there are."""
LEAST_SHARED = (1, 64, 256, 1024, UNBOUNDED)
"""Fewest shared tokens for which a beginning is kept and continued, in the plans that are compared."""


@dataclass(frozen=True, eq=False)
class Reading:
    """Tokens that a model is to read, and what is wanted of them."""

    request: int
    """Number of the request that they belong to."""
    token_ids: TokenIds
    rows: int = 1
    """The last tokens, >= 1, whose logits are wanted."""
    scored: bool = False
    """They end with an answer whose tokens are scored, its last one left out."""
    kept: int = 0
    """First tokens whose keys and values are wanted; 0: none."""
    alike: int = UNBOUNDED
    """First tokens that read the same in every sequence that begins with them."""
    angles: tuple[int, int] = (0, 0)
    """Name of the rotary angles of a pass of this length: sequences under other ones share neither pass nor keys."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class PassLimits:
    """Limits that decide how sequences are run together."""

    fixed: int
    """Tokens that cost as much as a pass does whatever it runs, >= 0."""
    tokens: int
    """Most tokens, padding included, of a pass with more than one sequence, >= 1."""
    rows: int
    """Most sequences of a pass, >= 1."""
    pads: bool = True
    """Sequences of a pass may differ in length."""
    shares: bool = True
    """Keys and values may be continued."""


@dataclass(frozen=True)
class Pass:
    """Sequences whose last tokens are run together."""

    members: tuple[int, ...]
    columns: int
    """Tokens that are run of each, at its end; whoever has fewer is padded on the left."""


@dataclass(frozen=True)
class Plan:
    """Passes in order, and the sequence, run in an earlier one, whose beginning each sequence continues."""

    passes: list[Pass]
    origins: list[int | None]

    def cost(self, fixed: int) -> int:
        """Tokens of all passes, with those that a pass costs anyway."""
        return sum(fixed + len(each.members) * each.columns for each in self.passes)


def shared_length(first: TokenIds, second: TokenIds) -> int:
    """Number of tokens that two sequences share before they first differ."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def visiting_order(prompts: Sequence[TokenIds]) -> list[int]:
    """Indices in lexicographic order of the tokens; equal ones keep their order."""
    # Big-endian bytes of non-negative numbers compare as the numbers do.
    return sorted(range(len(prompts)), key=lambda index: prompts[index].astype(">i8").tobytes())


def count_tokens(prompts: Sequence[TokenIds]) -> tuple[int, int]:
    """Tokens of all prompts, each run whole; and with every distinct beginning run once.

    A prompt that repeats another, or is the beginning of one, still runs its last token, whose output is wanted.
    """
    floor, previous = 0, np.zeros(0, dtype=np.int64)
    for index in visiting_order(prompts):
        floor += len(prompts[index]) - min(shared_length(previous, prompts[index]), len(prompts[index]) - 1)
        previous = prompts[index]
    return sum(map(len, prompts)), floor


def plan_passes(readings: Sequence[Reading], limits: PassLimits) -> Plan:
    """The cheapest of a few plans for sequences in visiting order, in which more or less of their beginnings is shared.

    Every sequence is in one pass; what it continues is in an earlier one.
    """
    links = _branches(readings) if limits.shares else [(None, 0)] * len(readings)
    least = LEAST_SHARED if any(shared for _, shared in links) else LEAST_SHARED[-1:]
    plans = [_plan(readings, [link if link[1] >= few else (None, 0) for link in links], limits) for few in least]
    return min(plans, key=lambda plan: plan.cost(limits.fixed))


def _branches(readings: Sequence[Reading]) -> list[tuple[int | None, int]]:
    """The sequence that each one branches off from, and how many tokens the two share."""
    neighbours = [shared_length(one.token_ids, other.token_ids) for one, other in pairwise(readings)]
    links: list[tuple[int | None, int]] = [(None, 0)] * len(readings)
    waiting: list[tuple[int, int, int | None]] = [(0, len(readings), None)]
    while waiting:
        first, last, trunk = waiting.pop()
        aside: list[tuple[int, int]] = []
        while last - first > 1:  # at every fork, on with the largest part
            least = min(neighbours[first : last - 1])
            forks = [place + 1 for place in range(first, last - 1) if neighbours[place] == least]
            parts = sorted(pairwise([first, *forks, last]), key=lambda part: part[1] - part[0])
            first, last = parts.pop()
            aside += parts
        if trunk is not None:
            one, other = readings[first], readings[trunk]
            shared = min(shared_length(one.token_ids, other.token_ids), one.alike, other.alike, one.length - one.rows)
            links[first] = (trunk, shared if one.angles == other.angles else 0)
        waiting += [(begin, end, first) for begin, end in aside]
    return links


def _plan(readings: Sequence[Reading], links: Sequence[tuple[int | None, int]], limits: PassLimits) -> Plan:
    """Passes in the order of levels: what continues nothing, what continues that, and so on."""
    origins = [origin if shared else None for origin, shared in links]
    levels: dict[int, int] = {}

    def level_of(index: int) -> int:
        path = [index]
        while path[-1] not in levels and (origin := origins[path[-1]]) is not None:
            path.append(origin)
        for below in reversed(path):
            origin = origins[below]
            levels.setdefault(below, 0 if origin is None else levels[origin] + 1)
        return levels[index]

    by_level: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for index, (reading, (_, shared)) in enumerate(zip(readings, links, strict=True)):
        alike = (0 if limits.pads else reading.length, *reading.angles)
        by_level.setdefault((level_of(index), *alike), []).append((reading.length - shared, index))
    return Plan([each for key in sorted(by_level) for each in _grouped(by_level[key], limits)], origins)


def _grouped(members: list[tuple[int, int]], limits: PassLimits) -> Iterator[Pass]:
    """The passes that take the fewest tokens for sequences that have so many to run."""
    members = sorted(members, reverse=True)
    least, cuts = [0] * (len(members) + 1), [0] * len(members)
    for start in reversed(range(len(members))):
        columns = members[start][0]
        most = min(limits.rows, max(1, limits.tokens // columns), len(members) - start)
        costs = [limits.fixed + rows * columns + least[start + rows] for rows in range(1, most + 1)]
        cuts[start] = 1 + int(np.argmin(costs))
        least[start] = costs[cuts[start] - 1]
    start = 0
    while start < len(members):
        group = members[start : start + cuts[start]]
        yield Pass(tuple(index for _, index in group), group[0][0])
        start += len(group)


def in_portions(readings: Sequence[Reading], rooms: Sequence[int], *, rows: int, slots: int) -> Iterator[list[Reading]]:
    """Sequences in order, so many at a time that each may take the largest of their rooms out of `slots`."""
    portion: list[Reading] = []
    largest = 0
    for reading, room in zip(readings, rooms, strict=True):
        if portion and (len(portion) >= rows or (len(portion) + 1) * max(largest, room) > slots):
            yield portion
            portion, largest = [], 0
        portion.append(reading)
        largest = max(largest, room)
    if portion:
        yield portion
