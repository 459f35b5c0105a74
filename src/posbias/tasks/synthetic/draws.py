"""Raw random draws for a stack of members: each member has its own stream, so alone or stacked it sees the same bits.

A stream is (task name, seed, purpose, index). The purpose takes its own bits of the generator's seed, so training
steps, evaluation sets and a member's fixed tables never share a stream; within a purpose, different indices below
2^30 never do either. Everything after these draws is arithmetic on the whole stack, with small tables that differ from
member to member looked up for all at once.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from posbias.errors import UsageError

INDEX_BITS = 30
"""Bits of an index; with 2 bits of purpose they fill the 32 bits of a seed that torch's CPU generator uses."""
DRAWS_FOR_THREADS = 200_000
"""Draws of a whole stack (about a millisecond) from which on starting threads costs less than it saves."""
STRIDE = 0x9E3779B1
"""Odd, so that index -> index * STRIDE is one to one modulo 2^30; neighbouring steps get distant seeds."""


class Purpose(IntEnum):
    """What a stream is for."""

    FIXED = 0
    """Tables that a member keeps: class centres, labels."""
    TRAINING = 1
    EVALUATION = 2


@dataclass(frozen=True)
class Draws:
    """The streams of a stack of members."""

    bases: tuple[int, ...]
    """One 63-bit number per member, from its task's name and its seed."""
    device: torch.device

    @classmethod
    def of(cls, task_name: str, seeds: Sequence[int], device: torch.device) -> "Draws":
        """Streams of members that do the same task, one seed each."""
        return cls(tuple(_base(task_name, seed) for seed in seeds), device)

    def integers(self, purpose: Purpose, index: int, shape: tuple[int, ...]) -> Int64[Tensor, "member ..."]:
        """Uniform whole numbers in [0, 2^63), to be reduced modulo small counts (bias below count / 2^63)."""
        return self.mixed(purpose, index, integers=shape, normals=())[0]

    def mixed(
        self, purpose: Purpose, index: int, *, integers: tuple[int, ...], normals: tuple[int, ...]
    ) -> tuple[Int64[Tensor, "member ..."], Float32[Tensor, "member ..."]]:
        """Whole numbers first, then standard normals, both per member and from one stream.

        Args:
            purpose: What the stream is for.
            index: Which stream: the step, or the number of the evaluation batch (0 ... 2^30 - 1).
            integers: Shape per member of the whole numbers.
            normals: Shape per member of the normals; () draws none of them.
        """
        whole = torch.empty(len(self.bases), *integers, dtype=torch.int64, device=self.device)
        normal = torch.empty(len(self.bases), *(normals or (0,)), dtype=torch.float32, device=self.device)

        def fill(members: range) -> None:
            generator = torch.Generator(self.device)
            for member in members:
                generator.manual_seed(_stream(self.bases[member], purpose, index))
                whole[member].random_(generator=generator)
                if normals:
                    normal[member].normal_(generator=generator)

        self._share(fill, whole.numel() + normal.numel())
        return whole, normal

    def _share(self, fill: Callable[[range], None], draws: int) -> None:
        """Members over torch's threads, where that pays: its generator fills a tensor with one thread only."""
        members = len(self.bases)
        threads = min(torch.get_num_threads(), members)
        if self.device.type != "cpu" or threads < 2 or draws < DRAWS_FOR_THREADS:
            return fill(range(members))
        ends = [members * thread // threads for thread in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, map(range, ends[:-1], ends[1:])))
        return None


def ranks(raw: Int64[Tensor, "*batch place"]) -> Int64[Tensor, "*batch place"]:
    """Uniform random permutations from raw draws: the rank of each among its own (ties, of chance 2^-63, by place)."""
    later = torch.ones(raw.shape[-1], raw.shape[-1], dtype=torch.bool, device=raw.device).tril(-1)
    above = (raw[..., :, None] > raw[..., None, :]) | ((raw[..., :, None] == raw[..., None, :]) & later)
    return above.sum(-1)


def distinct(raw: Int64[Tensor, "*batch chosen"], among: int) -> Int64[Tensor, "*batch chosen"]:
    """Uniform draws without replacement from 0 ... among - 1, in order of drawing.

    The i-th is drawn from the among - i left over and stepped past the ones taken.
    """
    taken: list[Tensor] = []
    for position in range(raw.shape[-1]):
        value = raw[..., position] % (among - position)
        if taken:
            for earlier in torch.stack(taken).sort(dim=0).values:
                value = value + (value >= earlier)
        taken.append(value)
    return torch.stack(taken, dim=-1)


def _base(task_name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"{task_name}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _stream(base: int, purpose: Purpose, index: int) -> int:
    if not 0 <= index < 1 << INDEX_BITS:
        raise UsageError(f"stream index must lie in 0 ... {(1 << INDEX_BITS) - 1}, got {index}")
    low = (base + index * STRIDE) & ((1 << INDEX_BITS) - 1)
    return (base >> 32 << 32) | (purpose << INDEX_BITS) | low


def per_member(values: Sequence[float], device: torch.device) -> Float32[Tensor, "member one two"]:
    """A number per member, to multiply [member, ., .] with."""
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def rows_of(table: Tensor, index: Int64[Tensor, "member *batch"]) -> Tensor:
    """table[member, index[member, ...]] for all members at once: [member, *batch, feature]."""
    offsets = torch.arange(len(table), device=table.device) * table.shape[1]
    flat = (index + offsets.view(-1, *[1] * (index.dim() - 1))).flatten()
    return table.reshape(-1, table.shape[2]).index_select(0, flat).view(*index.shape, table.shape[2])
